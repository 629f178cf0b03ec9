"""``ackcore run``, ``explain`` and ``doctor``; one process starts a Spark of its own."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pyarrow as pa
import pyspark
import pytest
import typer
from pyspark import cloudpickle
from screens import recorded

from ackcore.cli import doctor_command
from ackcore.cli import run_command as cli_run
from ackcore.cli.explain_command import load_topology
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.paths import file_system
from ackcore.topology.explain import draw


@pytest.fixture
def process(tmp_path, jobs):
    def run(*words, code=0):
        command = [sys.executable, "-m", "ackcore.cli.entry", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    return run


@pytest.fixture
def on_this_spark(ackcore, spark, jobs, tmp_path, monkeypatch):
    """`ackcore` on the Spark of all tests: one of its own takes half a minute, and starts alike."""

    @contextmanager
    def this_session(master, conf=None):
        yield spark, str(tmp_path)

    for module in ("cli.run_command", "examples.quiet_spark"):
        monkeypatch.setattr(f"ackcore.{module}.spark_session", this_session)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    # The workers are not in this directory.
    cloudpickle.register_pickle_by_value(importlib.import_module("jobs"))
    return ackcore


def test_a_batch_is_run_and_too_many_dead_are_told(on_this_spark, tmp_path):
    words = ("--max-dead", "0", "--json")
    done = on_this_spark("run", "jobs:batch", "--checkpoint", tmp_path / "c", *words, code=1)
    (batch,) = map(json.loads, done.stdout.splitlines())
    assert (batch["batch_id"], batch["records"], batch["acked"], batch["dead"]) == (0, 3, 2, 1)
    said = done.stderr.splitlines()[-1]
    assert "1 of 3 records died" in said
    assert f"ackcore.spark.dead_letters('{tmp_path / 'c'}') shows each with its payload" in said
    assert "ackcore.spark.replay() and another run_batch() send them through again" in said
    assert "set a larger max_dead to accept so many dead records" in said
    assert "Traceback" not in done.stderr


def test_a_run_shows_how_far_it_is(on_this_spark, tmp_path, monkeypatch):
    screen = recorded(monkeypatch, cli_run)
    on_this_spark("run", "jobs:batch", "--checkpoint", tmp_path / "c")
    text = screen.file.getvalue()
    assert "starting" in text or "micro-batch 0 runs" in text  # beside the bar
    assert "\x1b[?25l" in text  # no cursor while the bar is there
    assert text.index("micro-batch 0: ") < text.index("counts after 1 micro-batch ")
    assert "dead letters: 1, of which 0 were replayed" in text


def test_a_look_that_fails_ends_nothing(tmp_path, monkeypatch):
    """The run itself reports errors, and the next look may succeed."""
    looks, again = [], threading.Event()

    def read_activity(checkpoint):
        looks.append(checkpoint)
        if len(looks) == 1:
            raise StateError("it changed 100 times while it was being read")
        again.set()

    monkeypatch.setattr(cli_run, "read_activity", read_activity)
    monkeypatch.setattr(cli_run, "_tasks", lambda spark: {"description": "", "total": None})
    monkeypatch.setattr(cli_run, "_LOOK_S", 0.01)
    with cli_run._shown(str(tmp_path), None, as_json=False):
        assert again.wait(30)


def test_a_micro_batch_is_written_to_a_pipe_at_once(tmp_path, monkeypatch):
    """Python writes to a pipe in blocks of 8 KiB, which take many micro-batches."""
    logged = SimpleNamespace(progress=SimpleNamespace(batch_id=0), to_json=lambda: {"batch_id": 0})
    looks = [()]
    monkeypatch.setattr(cli_run, "read_batches", lambda *_: looks.pop() if looks else (logged,))
    monkeypatch.setattr(cli_run, "_LOOK_S", 0.01)
    out, into = os.pipe()
    with open(out, "rb", buffering=0) as reader, open(into, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with cli_run._shown(str(tmp_path), None, as_json=True):
            assert select.select([reader], [], [], 30)[0]
        assert json.loads(reader.read(1000)) == {"batch_id": 0}


def test_a_batch_that_is_terminated_is_interrupted(on_this_spark, tmp_path, monkeypatch):
    """Else the next start would count a crash: of a pod that is evicted, for instance."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli_run, "run_batch", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    on_this_spark("run", "jobs:batch", "--checkpoint", tmp_path / "c", code=130)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.spark
def test_a_stream_ends_its_micro_batch_when_it_is_interrupted(ackcore, jobs, tmp_path):
    command = [sys.executable, "-m", "ackcore.cli.entry", "run", "jobs:stream", "--json"]
    command += ["--checkpoint", str(tmp_path / "c"), "--master", "local[1]"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        said = json.loads(running.stdout.readline())
        assert said["batch_id"] == 0
        found = json.loads(ackcore("status", tmp_path / "c", "--json").stdout)
        assert found["holder"]["holds"]
        running.send_signal(signal.SIGINT)
        *_, last = running.stdout
    assert running.returncode == 0
    assert "counts" in json.loads(last)
    found = json.loads(ackcore("status", tmp_path / "c", "--json").stdout)
    assert found["under_way"] is None
    assert not found["holder"]["holds"]


def test_a_topology_is_explained_and_drawn(on_this_spark, tmp_path):
    svg = tmp_path / "topology.svg"
    done = on_this_spark("explain", "jobs:stream", "--svg", svg, "--json")
    assert list(json.loads(done.stdout)["structure"]["bolts"]) == ["split"]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "split" in on_this_spark("explain", "jobs:stream").stdout


def test_what_is_no_topology_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_jobs.py").write_text("seven = 7\ndef eight(): return 8\n")
    for name, said in [
        ("some_jobs:seven", "must be a Topology or a function that returns one.*got int"),
        ("some_jobs:eight", "got int"),
        ("some_jobs:nine", "some_jobs has no nine"),
        ("some_jobs:sevn", "some_jobs has no sevn; it has seven"),
        ("no_jobs:nine", "no module no_jobs was found"),
    ]:
        with pytest.raises(typer.BadParameter, match=said):
            load_topology(name, None)


def test_what_a_topology_raises_is_told_with_its_name(ackcore, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bad_jobs.py").write_text("def made(): raise OSError('no such path')\n")
    said = ackcore("explain", "bad_jobs:made", code=4).stderr
    assert said == "ackcore: OSError: no such path (raised by bad_jobs:made)\n"
    (tmp_path / "blank_jobs.py").write_text("def made(): raise OSError(' ')\n")
    said = ackcore("explain", "blank_jobs:made", code=4).stderr
    assert said == "ackcore: OSError: OSError (raised by blank_jobs:made)\n"
    for n, error in enumerate(("ValueError('no price')", "FileNotFoundError(2, 'none', 'prices')")):
        # Neither wrong usage nor a missing checkpoint.
        (tmp_path / f"own_jobs_{n}.py").write_text(f"def made(): raise {error}\n")
        said = ackcore("explain", f"own_jobs_{n}:made", code=4).stderr
        assert said.startswith(f"ackcore: {error.partition('(')[0]}: ")
    (tmp_path / "worse_jobs.py").write_text("import no_such_module\n")
    said = ackcore("explain", "worse_jobs:made", code=4).stderr
    assert said.endswith("'no_such_module' (raised by the import of worse_jobs)\n")


def test_what_cannot_be_run_is_refused_at_once(ackcore, tmp_path):
    said = ackcore("run", "jobs", "--checkpoint", tmp_path, code=2).stderr
    assert "must have the form MODULE:NAME" in said
    words = ("run", "jobs:batch", "--checkpoint", tmp_path)
    assert "KEY=VALUE" in ackcore(*words, "--conf", "x", code=2).stderr
    assert "must be a share" in ackcore(*words, "--max-dead-ratio", "few", code=2).stderr
    assert "'many'" in ackcore(*words, "--max-dead", "many", code=2).stderr
    both = ("--trigger", "1 second", "--available-now")
    assert "cannot be combined" in ackcore(*words, *both, code=2).stderr


# the drawing

STRUCTURE = {
    "spouts": {"lines": {"fields": ["line"]}, "<clicks>": {"fields": ["x"]}},
    "bolts": {
        "split & join": {"inputs": [["lines", "default", "shuffle"]], "streams": {}},
        "count": {
            "inputs": [
                ["split & join", "words", "fields", "word", '"n"'],
                ["<clicks>", "default", "local_or_shuffle"],
            ],
            "streams": {},
        },
    },
    "sinks": {"count": ["count", "default"]},
}


def test_a_drawing_has_all_components_and_counts_and_is_well_formed():
    counts = {"split & join": {"words": 12345}, "lines": {"default": 7}}
    drawn = draw(STRUCTURE, counts)
    root = ElementTree.fromstring(drawn)
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for text in ("lines", "<clicks>", "split & join", "count", "12,345", "7"):
        assert text in texts
    assert 'words: fields(word, "n")' in texts
    assert texts.count("count") == 2  # the bolt and its sink
    assert "<clicks>" not in drawn


def test_boxes_are_behind_what_they_read():
    root = ElementTree.fromstring(draw(STRUCTURE))
    left = {}
    for group in root.findall("{http://www.w3.org/2000/svg}g"):
        box = group.find("{http://www.w3.org/2000/svg}rect")
        if box is not None:
            left[group[0].text] = int(box.get("x"))
    assert left["spout lines"] == left["spout <clicks>"]
    assert left["spout lines"] < left["bolt split & join"] < left["bolt count"] < left["sink count"]


def test_no_line_goes_through_a_label():
    """Labels come after all lines, and what is behind them is covered."""
    drawn = draw(STRUCTURE)
    assert drawn.rindex("<path") < drawn.index('<g class="label">')
    assert drawn.count('<g class="label">') == 3
    assert ".label text { paint-order: stroke; stroke: var(--back);" in drawn


def test_nothing_can_be_drawn():
    assert ElementTree.fromstring(draw({"spouts": {}, "bolts": {}})) is not None


# doctor and bench


def test_the_doctor_tells_what_is_here(ackcore, doctor, tmp_path):
    found = doctor(tmp_path / "new")
    assert {"Python", "acker", "pyarrow", "pyspark", "Java", "file operations"} <= found.keys()
    assert all(each["ok"] for each in found.values() if each["what"] != "confluent-kafka")
    assert list(tmp_path.iterdir()) == []
    assert "rename, link, lock" in ackcore("doctor", tmp_path, "--master", "none").stdout


@pytest.mark.parametrize("place", ["", "http://x/y?token=hush", "viewfs://x/y"])
def test_the_doctor_tells_of_a_place_that_can_be_no_checkpoint(doctor, place):
    """A URL was looked for among the files, and an empty text was this directory."""
    told = doctor(place, code=1)
    found = told["checkpoint"]
    assert found["ok"] is False
    assert found["found"].startswith("checkpoint must ")
    assert "directory" in found["mend"]
    assert "hush" not in str(told)


def test_the_doctor_knows_a_file_url(doctor, tmp_path):
    assert doctor(tmp_path.as_uri())["file system"]["found"].startswith(f"{tmp_path}: ")


def test_the_doctor_knows_a_file_system_at_a_path_with_a_space(monkeypatch):
    """The kernel writes a space in /proc/self/mounts as \\040."""
    mounts = "/dev/sda1 / ext4 rw 0 0\nserver:/data /mnt/team\\040data nfs4 rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda *args, **named: mounts)
    assert file_system("/mnt/team data/checkpoint") == "nfs4"
    assert file_system("/mnt/team") == "ext4"


def test_the_doctor_knows_a_pyspark_of_another_distribution(doctor, tmp_path, monkeypatch):
    """Such as pyspark-client's: without it, a bucket was looked for among the files."""

    def version(name):
        if name == "pyspark":
            raise PackageNotFoundError(name)
        return real(name)

    real = doctor_command.version
    monkeypatch.setattr(doctor_command, "version", version)
    found = doctor(tmp_path)["pyspark"]
    assert (found["ok"], found["found"]) == (True, pyspark.__version__)


def test_the_doctor_tells_that_pyarrow_is_missing(without, tmp_path, lines):
    """PySpark does not require it: to look for buckets, the doctor loaded it and failed."""
    done = without(["pyarrow"], "doctor", tmp_path, "--json")
    found = {each["what"]: each for each in lines(done)}
    assert (done.returncode, done.stderr) == (1, "")
    assert found["pyarrow"]["mend"] == "pip install 'ackcore[spark]'"
    assert found["pyspark"]["ok"]
    assert found["file operations"]["ok"]


def test_the_doctor_asks_java_and_the_workers(on_this_spark, tmp_path, lines):
    found = {each["what"]: each for each in lines(on_this_spark("doctor", tmp_path, "--json"))}
    assert ' version "' in found["Java"]["found"]
    said = found["Spark and its workers"]
    assert said["ok"]
    assert said["found"].startswith(f"Spark {pyspark.__version__}; workers: Python ")
    assert f"pyspark {pyspark.__version__}, pyarrow {pa.__version__}" in said["found"]


def test_the_doctor_tells_what_mends_it(ackcore, tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    said = ackcore("doctor", tmp_path, code=1).stdout
    assert "FAIL" in said
    assert "default-jre-headless" in said
