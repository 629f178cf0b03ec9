"""Jobs that things go wrong in, each in a process of its own that may be killed."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import counts
import fault_job
import places
import pyspark
import pytest
from processes import Processes

from ackcore.spark.inspect.table_reading import first_rows, read_table

HERE = Path(__file__).parent

#: Longer than any of these jobs takes, on a machine that does other things too.
TIMEOUT_S = 900


@dataclass
class Ended:
    """How a job's process ended: by a signal (negative), or with what it says of itself."""

    code: int
    said: dict = field(default_factory=dict)
    log: str = ""

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def error(self) -> str | None:
        """``Type: message`` of what the query ended with."""
        assert self.said, f"exit code {self.code}: {self.log[-5000:]}"
        return self.said["error"]


class Driver(Processes):
    """A job's process, and those that it starts."""

    def __init__(self, command, log, environment, result, **more):
        super().__init__(command, log, environment, **more)
        self._log, self._result = log, result

    def ended(self) -> Ended:
        """Wait until it has ended or died."""
        try:
            code = self.driver.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        said = json.loads(self._result.read_text()) if self._result.exists() else {}
        return Ended(code, said, self._log.read_text(errors="replace"))


def _obey_modes() -> None:
    """Root writes where it may not; take that right from the process to be."""
    drop_from_bounding_set, dac_override = 24, 1
    ctypes.CDLL(None).prctl(drop_from_bounding_set, dac_override, 0, 0, 0)


class Job:
    """A topology with its source, checkpoint and sink in one directory."""

    def __init__(self, directory, records, *, files=2, place=None, **config):
        self.directory = directory
        self.records = records
        self.place = place or places.Disk(directory)
        self.config = {
            "directory": str(directory),
            "checkpoint": self.place.checkpoint,
            "sink_path": self.place.sink,
            **self.place.more,
            **config,
        }
        for name in ("in", "marks", "tmp"):
            directory.joinpath(name).mkdir(parents=True)
        staged = list(records.values())
        fault_job.stage(directory / "in", staged, files, copies="state" in config)
        self.seen = None
        self._starts = 0

    def run_here(self, spark, **more) -> str | None:
        """Run it in this process; return ``Type: message`` of what it ended with."""
        told = spark.sparkContext.environment  # of workers that are started from here on
        before = dict(told)
        told.update(self.place.environment)
        try:
            return fault_job.run_job(spark, {**self.config, **more})["error"]
        finally:
            told.clear()
            told.update(before)

    def start(self, *, failpoints="", master="local[2,4]", obey=False, **more) -> Driver:
        """Start it in a process of its own; ``obey`` modes of files."""
        self._starts += 1
        config = self.directory / f"config-{self._starts}.json"
        result = self.directory / f"result-{self._starts}.json"
        described = {**self.config, "master": master, "result": str(result), **more}
        config.write_text(json.dumps(described))
        its_own = {
            **os.environ,
            # What a killed driver leaves behind goes with the test's directory.
            "TMPDIR": str(self.directory / "tmp"),
            "ACKCORE_FAILPOINTS": failpoints,
        }
        its_own.pop("SPARK_LOCAL_DIRS", None)
        if not master.startswith("local["):
            its_own["SPARK_LOCAL_IP"] = "127.0.0.1"
        if master.startswith("local-cluster"):
            its_own["SPARK_HOME"] = self._spark_home()
        return Driver(
            [sys.executable, str(HERE / "fault_job.py"), str(config)],
            self.directory / "log.txt",
            its_own,
            result,
            preexec_fn=_obey_modes if obey else None,
        )

    def run(self, **how) -> Ended:
        """Run it in a process of its own, as `start` says, until it ends or dies."""
        return self.start(**how).ended()

    def _spark_home(self) -> str:
        """A cluster writes its logs into Spark's home: give it one to throw away."""
        home = self.directory / "spark"
        if not home.exists():
            home.mkdir()
            for part in Path(pyspark.__file__).parent.iterdir():
                (home / part.name).symlink_to(part)
        return str(home)

    def marks(self, pattern="*") -> list[str]:
        """Return the notes of bolts and sinks."""
        return sorted(path.name for path in (self.directory / "marks").glob(pattern))

    def found(self):
        """Read what is on the disk; the decisions that were there before must be there still."""
        here = self.place.fetched()
        found = counts.read(
            here / "checkpoint", here / "sink", dead_letters=self.config.get("dead_letters")
        )
        if self.seen is not None:
            assert counts.check_since(self.seen, found) == []
        self.seen = found
        return found

    def check(self, dead=None, *, finished=True, alive=None):
        """Compare the counts with the model.

        ``dead``: the keys of the records that must be dead, or a predicate of keys. ``alive``: a
        predicate of the keys that must be ACKED; by default all others, if ``dead`` is given.
        Without both, each record may be either.
        """
        stamped = self.config.get("message_id") is None
        is_dead = dead if callable(dead) or dead is None else set(dead).__contains__
        if is_dead is not None:
            alive = alive or (lambda key: not is_dead(key))
        expected = {"dead": is_dead, "alive": alive}
        arguments = {
            "rows": fault_job.rows_of,
            "tag": "run",
            "message_id": None if stamped else str,
            "max_attempts": self.config.get("settings", {}).get("max_attempts", 5),
            **{name: each for name, each in expected.items() if each is not None},
        }
        found = self.found()
        problems = []
        if "state" in self.config:
            arguments["copies"] = fault_job.copies_of
            problems = self.problems_of_state(found)
            # The model has no other columns.
            names = {"id", "at", "word", "run"}
            written = {
                number: [{name: row[name] for name in names} for row in rows]
                for number, rows in found.written.items()
            }
            found = replace(found, written=written)
        it = counts.Expected(self.records, **arguments)
        assert problems + counts.check(found, it, finished=finished) == []
        return found

    def problems_of_state(self, found):
        """Compare the tables with the rows of the sink."""
        tables = {"words": [], "times": []}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.place.environment.items():
                patch.setenv(name, value)
            for name in tables if found.done else ():
                tables[name] = read_table(
                    self.place.checkpoint, name, lambda table: first_rows(table, 1 << 20)
                ).to_pylist()
        closed = counts.written(self.place.fetched() / "sink-closed")
        return counts.check_state(found, tables, closed, fault_job.WINDOW_S)


@pytest.fixture
def two_hosts(request, tmp_path):
    """A master of Spark and two workers, which take themselves for two machines.

    A copy of a task is never run on the machine that runs the task, so that ``local-cluster``, all
    of it one machine, does not speculate.
    """
    if request.node.callspec.params.get("place") == "bucket":
        request.getfixturevalue("s3")  # its executors have the environment that they start in
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-class")]
    deploy = "org.apache.spark.deploy"
    environment = {**os.environ, "SPARK_NO_DAEMONIZE": "1", "SPARK_LOCAL_DIRS": str(tmp_path)}
    environment["SPARK_WORKER_DIR"] = str(tmp_path / "work")
    log = tmp_path / "cluster.log"
    started = []

    def launch(*arguments):
        with open(log, "ab") as sink:
            started.append(
                subprocess.Popen([*command, *arguments], env=environment, stdout=sink, stderr=sink)
            )

    def said(text, times=1):
        until = time.monotonic() + TIMEOUT_S
        while log.read_text(errors="replace").count(text) < times:
            assert time.monotonic() < until, log.read_text(errors="replace")
            time.sleep(0.1)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    try:
        here = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
        launch(f"{deploy}.master.Master", *here)
        said("I have been elected leader")
        for host in ("127.0.0.2", "127.0.0.3"):
            size = ["--cores", "1", "--memory", "1g", "--webui-port", "0"]
            launch(f"{deploy}.worker.Worker", "--host", host, *size, url)
        said("Successfully registered with master", 2)
        yield url
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(TIMEOUT_S)


@pytest.fixture
def job(request, tmp_path):
    """``job(records, place="disk", **config)`` puts a job into a directory or a bucket of its own.

    The bucket is of either S3 server; what a driver hears of it goes through the fixture `s3`, or
    `second_s3` of "s3proxy".  "hdfs" and "own_hdfs" are a real HDFS.  A place that is no name
    is used as it is.
    """

    def job(records, name="job", place="disk", **config):
        where = None
        if not isinstance(place, str):
            where = place
        elif "hdfs" in place:
            where = places.Hdfs(request.getfixturevalue(place).new_place(), tmp_path / name)
        elif place != "disk":
            proxy = request.getfixturevalue(places.PROXIES[place])
            where = places.Bucket.before(proxy, tmp_path / name)
        return Job(tmp_path / name, records, place=where, **config)

    return job
