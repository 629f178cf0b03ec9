"""A Spark session for command lines that prints nothing and leaves no files behind."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

import ackcore
from ackcore.spark.base.errors import one_line

logger = logging.getLogger(__name__)

# By default a JVM leaves performance data in /tmp, whatever its temporary directory is.
_NO_TRACES = ["-XX:-UsePerfData"]
_CONF = {
    "spark.app.name": "ackcore",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.catalogImplementation": "in-memory",
    # Blobs of ids do not compress, and the disk is local.
    "spark.shuffle.compress": "false",
    # Every exchange has an explicit number of partitions.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}


class SparkError(RuntimeError):
    """Spark cannot run here, or has failed."""


def check_java() -> str:
    """Return the line with the version of the Java that Spark will use.

    Raises SparkError if there is no Java, or one older than 17.
    """
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    way_out = "install a JDK of version 17 or 21 and point JAVA_HOME to it"
    try:
        if java is None:
            raise FileNotFoundError
        said = subprocess.run(
            [java, *_NO_TRACES, "-version"], capture_output=True, text=True, check=True
        ).stderr
    except (OSError, subprocess.CalledProcessError):
        raise SparkError(f"Spark needs Java and {java or 'java'} does not run; {way_out}") from None
    version = re.search(r'^.* version "(\d+).*$', said, re.MULTILINE)
    if version is None or int(version[1]) < 17:
        what = version[0] if version else "of an unknown version"
        raise SparkError(f"Spark needs Java 17 or newer and {java} is {what}; {way_out}")
    return version[0]


def _last_line(log: Path) -> str:
    said = log.read_text(errors="replace").strip().splitlines()
    return said[-1] if said else "its log is empty"


@contextmanager
def spark_session(
    master: str, conf: Mapping[str, str] | None = None, log: str | os.PathLike[str] | None = None
) -> Iterator[tuple[SparkSession, str]]:
    """A context with a Spark session; its end stops the session and the JVM, and removes its files.

    Yields the session and the temporary directory. Raises SparkError if Spark does not start, and
    in place of an error of Spark in the body.

    ``conf``: additional settings of Spark. ``log``: the file for the JVM's output; files of a JVM
    crash are written beside it. By default they are in the temporary directory.
    """
    with tempfile.TemporaryDirectory(prefix="ackcore-", ignore_cleanup_errors=True) as directory:
        said = Path(directory, "spark.log") if log is None else Path(log).absolute()
        # The environment of the JVM and of its workers.
        variables = {
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_DIRS": directory,  # overrides spark.local.dir
            # Read by every JVM; the one that builds Spark's command line takes no options.
            "JAVA_TOOL_OPTIONS": " ".join(
                [
                    os.environ.get("JAVA_TOOL_OPTIONS", ""),
                    *_NO_TRACES,
                    f"'-Djava.io.tmpdir={directory}'",
                    f"'-XX:ErrorFile={said.parent}/hs_err_pid%p.log'",
                ]
            ),
        }
        top = Path(ackcore.__file__).parents[1]
        if str(top) in sys.path and top.name not in ("site-packages", "dist-packages"):
            # The workers must import this package from the same place.
            before = os.environ.get("PYTHONPATH")
            variables["PYTHONPATH"] = f"{top}{os.pathsep}{before}" if before else str(top)
        places = {
            "spark.master": master,
            "spark.local.dir": directory,
            "spark.sql.warehouse.dir": os.path.join(directory, "warehouse"),
        }
        if master.startswith("local"):
            variables["SPARK_LOCAL_IP"] = "127.0.0.1"
            places |= dict.fromkeys(["spark.driver.host", "spark.driver.bindAddress"], "127.0.0.1")
        settings = SparkConf(False).setAll([*(_CONF | places | dict(conf or {})).items()])
        kept = dict(os.environ)
        os.environ.update(variables)
        # The JVM of a session that was stopped is used again, as PySpark does.
        gateway = running = SparkContext._gateway
        try:
            if gateway is None:
                with said.open("ab") as output:
                    gateway = launch_gateway(  # type: ignore[no-untyped-call]
                        settings, {"stdout": output, "stderr": output}
                    )
            SparkContext(conf=settings, gateway=gateway)
            spark = SparkSession.builder.getOrCreate()
        except Exception as error:
            if running is None:
                _end(gateway)
            raise SparkError(
                f"Spark does not start: {one_line(error)} (the JVM's log ends: {_last_line(said)})"
            ) from error
        finally:
            os.environ.clear()
            os.environ.update(kept)
        try:
            yield spark, directory
        # A JVM that died between two calls refuses the connection.
        except (Py4JError, PySparkException, ConnectionError) as error:
            # The text is read now, while the JVM runs.
            raise SparkError(one_line(error)) from None
        finally:
            try:
                with warnings.catch_warnings():
                    # PySpark warns that the JVM does not answer, and then raises anyway.
                    warnings.simplefilter("ignore", RuntimeWarning)
                    spark.stop()
            except (Py4JError, OSError):
                logger.warning("Spark's JVM ended before its session did: %s", _last_line(said))
                spark.sparkContext.stop()  # the first call dropped the JVM; this resets the rest
            _end(gateway)


def _end(gateway: Any) -> None:
    """End a JVM, and wait until it has removed its own directories; after 30 s, kill it."""
    if gateway is None:
        return
    gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(timeout=30)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()
    # Reset, so that the next session starts a new JVM.
    SparkContext._gateway = SparkContext._jvm = None
