"""The Spark of these tests: one whose JVM dies fails one test, and says how it died.

A JVM that dies ten minutes after its shuffle files were lost fails none.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jvm_exits import explain_exit

TESTS = Path(__file__).parents[1]

INNER = """
import glob
import os
import signal

processes = []


def test_dies(spark, conf, tmp_path):
    conf("spark.sql.shuffle.partitions", "7")
    assert spark.conf.get("spark.sql.shuffle.partitions") == "7"

    def die(rows, number):
        os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
        rows.count()

    beats = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    beats.writeStream.foreachBatch(die).start().awaitTermination()


def test_after(spark):
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.range(3).repartition(2).count() == 3


def test_that_loses_shuffle_files(spark, live_spark):
    processes.append(live_spark._process)
    place = spark.conf.get("spark.local.dir")
    rows = spark.sparkContext.parallelize(range(9), 2).keyBy(lambda n: n % 3).groupByKey(2)
    assert rows.count() == 3
    lost = glob.glob(f"{place}/**/shuffle_*", recursive=True)
    assert lost
    for file in lost:
        os.remove(file)
    assert rows.count() == 3
    assert spark._jsc.sc().getExecutorMemoryStatus().size() == 0
    assert not live_spark.is_alive()  # so that the next test gets one that is as good as new


def test_after_that(spark, live_spark):
    assert processes == [live_spark._process]  # it is the same JVM
    assert live_spark.is_alive()
    rows = spark.sparkContext.parallelize([3_000_000] * 2, 2).map(bytes)
    assert list(map(len, rows.collect())) == [3_000_000] * 2  # through the driver's blocks
    assert rows.keyBy(len).groupByKey(2).count() == 1
"""


@pytest.mark.spark
@pytest.mark.faults
def test_a_jvm_that_dies_fails_one_test(tmp_path):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    command += ["-c", str(TESTS.parent / "pyproject.toml"), f"--rootdir={tmp_path}"]
    command += [f"--basetemp={tmp_path / 'temporary'}", str(tmp_path / "test_inner.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    said = ran.stdout + ran.stderr
    assert re.search(r"^1 failed, 3 passed in ", said, re.MULTILINE), said
    assert said.count("FAILED ") == 1
    assert "FAILED test_inner.py::test_dies" in said
    (section,) = re.findall(r"^-+ Spark's JVM -+\n(.*\n.*)", said, re.MULTILINE)
    killed, log = section.splitlines()
    assert re.fullmatch(r"pid \d+ ended: killed by SIGKILL", killed)
    assert "Picked up JAVA_TOOL_OPTIONS" in Path(log.removesuffix(":")).read_text()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "it runs, and does not answer"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (143, "exit status 143, asked to end by SIGTERM"),
        (0, "exit status 0: it was told to, or its standard input was closed"),
        (3, "exit status 3: out of memory, and -XX:+ExitOnOutOfMemoryError"),
        (50, "exit status 50: an uncaught exception"),
        (52, "exit status 52: out of memory"),
        (77, "exit status 77: not one that Spark gives"),
        (999, "exit status 999: not one that Spark gives"),
    ],
)
def test_an_exit_is_told_in_words(code, words):
    assert explain_exit(code) == words
