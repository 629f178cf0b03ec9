"""The workers' Python is looked at before anything is sent there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import ackcore
from ackcore.spark import combine, dead_letters, replay, run_batch, settle, settle_parquet, table
from ackcore.spark.base import workers
from ackcore.spark.base.workers import (
    WorkerPythonError,
    WorkerReport,
    check_workers,
    judge,
    use_drivers_python,
)
from ackcore.tables import count
from ackcore.topology import BasicBolt, Reject, TopologyBuilder

HERE = WorkerReport("/here/python", "3.11.2", ackcore.__version__, None)


class Pass(BasicBolt):
    def execute(self, tuple, collector):
        pass


class Odd(BasicBolt):
    outputs = pa.schema([("id", pa.int64())])

    def execute(self, tuple, collector):
        if tuple["id"] % 2 == 0:
            raise Reject("even")
        collector.emit((tuple["id"],))


@pytest.fixture
def context(spark, monkeypatch):
    """The context of a session, nothing known of its workers."""
    context = spark.sparkContext
    monkeypatch.setattr(context, "pythonExec", context.pythonExec)
    monkeypatch.setattr(workers, "_FIT", {})
    return context


@pytest.fixture
def as_elsewhere(monkeypatch):
    """Have the workers asked, though they are the driver's own."""
    monkeypatch.setattr(workers, "_is_drivers_own", lambda context: False)


@pytest.fixture
def entry_points(spark, context, frame, tmp_path):
    """Every function that sends something to the workers, by name."""
    events = frame([(1, 5, 0), (1, 5, -1)])
    builder = TopologyBuilder()
    builder.spout("numbers", spark.range(3))
    builder.bolt("pass", Pass()).shuffle("numbers")
    events.write.parquet(str(tmp_path / "events"))
    before = TopologyBuilder()
    before.spout("numbers", spark.range(3))
    before.bolt("odd", Odd()).shuffle("numbers")
    before.table("seen", from_="odd", key="id", value={"n": count()})
    run_batch(before.build(), spark, tmp_path / "before", max_dead=None, max_dead_ratio=None)
    return {
        "settle": lambda: settle(events),
        "settle_parquet": lambda: settle_parquet(spark, str(tmp_path / "events")),
        "combine": lambda: combine(events),
        "run_batch": lambda: run_batch(builder.build(), spark, tmp_path / "checkpoint"),
        "dead_letters": lambda: dead_letters(tmp_path / "before", spark),
        "replay": lambda: replay(tmp_path / "before", where="error_type = 'Reject'", spark=spark),
        "table": lambda: table(tmp_path / "before", "seen", spark),
    }


def test_workers_that_are_fit_are_asked_once(spark, context, as_elsewhere, monkeypatch):
    asked = []
    ask = workers.ask
    monkeypatch.setattr(workers, "ask", lambda spark: (asked.append(1), ask(spark))[1])
    check_workers(spark)
    check_workers(spark)
    assert len(asked) == 1
    assert workers._FIT[context] == context.pythonExec


def test_on_a_local_master_workers_run_the_drivers_python(context, monkeypatch):
    context.pythonExec = "python3"
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")
    use_drivers_python(context)
    assert context.pythonExec == "python3"
    monkeypatch.delenv("PYSPARK_PYTHON")
    use_drivers_python(context)
    assert context.pythonExec == sys.executable


def test_what_runs_the_drivers_python_is_not_asked(spark, context, monkeypatch):
    top = ackcore.__file__.removesuffix("/ackcore/__init__.py")
    monkeypatch.setenv("PYTHONPATH", top)
    monkeypatch.delattr(workers, "ask")
    context.pythonExec = sys.executable
    check_workers(spark)
    assert workers._FIT[context] == sys.executable


def test_another_ackcore_on_the_workers_is_refused(
    spark, context, entry_points, as_elsewhere, tmp_path, monkeypatch
):
    package = tmp_path / "other" / "ackcore" / "spark"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").write_text('__version__ = "0.0.7"\n')
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{tmp_path}/other:$PYTHONPATH" exec {sys.executable} -P "$@"\n'
    )
    python.chmod(0o755)
    context.pythonExec = str(python)
    words = rf"workers run .* \(Python 3.* with ackcore 0\.0\.7, .*{ackcore.__version__}: they"
    for name, entry_point in entry_points.items():
        with pytest.raises(WorkerPythonError, match=words) as caught:
            entry_point()
        assert f"as {sys.executable} has here" in str(caught.value), name
    assert not (tmp_path / "checkpoint").exists()


def test_a_python_that_cannot_be_started_is_told(spark, context):
    context.pythonExec = "/no/such/python"
    words = (
        r"cannot run the Python of its workers, /no/such/python: "
        r'Cannot run program "/no/such/python".* PYSPARK_PYTHON'
    )
    with pytest.raises(WorkerPythonError, match=words):
        check_workers(spark)
    assert not workers._FIT


def test_a_python_that_lacks_what_its_daemon_needs_is_told(spark, context, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    context.pythonExec = str(python)
    said = rf"of its workers, {python}: .*No module named .*Set "
    with pytest.raises(WorkerPythonError, match=said):
        check_workers(spark)


def test_an_editable_install_of_the_drivers_own_is_not_asked(spark, context, tmp_path, monkeypatch):
    """Workers of a local master import from the same site, wherever that points to."""
    top = Path(ackcore.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(workers.sysconfig, "get_path", lambda name: str(tmp_path))
    context.pythonExec = sys.executable
    about = tmp_path / "ackcore-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ackcore\nVersion: 0.1.0\n")
    origin = about / "direct_url.json"
    for said, own in [
        (None, False),
        ({"url": top.as_uri(), "archive_info": {}}, False),
        ({"url": top.as_uri(), "dir_info": {}}, False),
        ({"url": "file:///elsewhere", "dir_info": {"editable": True}}, False),
        ({"url": top.as_uri(), "dir_info": {"editable": True}}, True),
    ]:
        if said is not None:
            origin.write_text(json.dumps(said))
        assert workers._is_drivers_own(context) == own, said
    monkeypatch.delattr(workers, "ask")
    check_workers(spark)
    context.pythonExec = "/another/python"
    assert not workers._is_drivers_own(context)


def fails_with_another_error(spark):
    spark.sql("select raise_error('no answer')").collect()


def test_a_failure_of_another_kind_is_left_to_what_runs_next(
    spark, context, as_elsewhere, monkeypatch, caplog
):
    monkeypatch.setattr(workers, "ask", fails_with_another_error)
    check_workers(spark)
    assert not workers._FIT
    (warning,) = caplog.records
    assert "workers was not checked" in warning.getMessage()
    assert "no answer" in warning.getMessage()


def test_workers_are_asked_again_after_a_failure_of_another_kind(
    spark, context, as_elsewhere, monkeypatch, caplog
):
    answers = iter([fails_with_another_error, lambda spark: {HERE._replace(version="0.0.7")}])
    monkeypatch.setattr(workers, "ask", lambda spark: next(answers)(spark))
    with pytest.raises(WorkerPythonError, match=r"with ackcore 0\.0\.7, and the driver"):
        check_workers(spark)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            HERE._replace(version=None, lacks="ModuleNotFoundError: No module named 'ackcore'"),
            r"run /here/python \(Python 3\.11\.2\), which cannot import ackcore\.spark: "
            "ModuleNotFoundError: No module named 'ackcore'. Set PYSPARK_PYTHON",
        ),
        (HERE._replace(version="0.0.7"), r"\(Python 3\.11\.2\) with ackcore 0\.0\.7, and the "),
    ],
)
def test_one_worker_that_is_unfit_is_enough(answer, words):
    judge({HERE, HERE._replace(executable="/there/python")})
    with pytest.raises(WorkerPythonError, match=words):
        judge({HERE, answer})
