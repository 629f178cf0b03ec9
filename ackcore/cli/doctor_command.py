"""``ackcore doctor``: check ackcore's requirements on this machine, and show how to meet them."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import ackcore
from ackcore._files import sync_directory
from ackcore.cli.reporting import cell, console, plain, print_json, table
from ackcore.spark.base import paths


class Finding(NamedTuple):
    """The result of a check: its name, success, details, and the fix ("" if none is needed).

    ``ok`` is None if an optional package is missing.
    """

    what: str
    ok: bool | None
    found: str
    mend: str = ""


def add_to(app: typer.Typer) -> None:
    """Add ``ackcore doctor`` to the app."""
    app.command()(doctor)


def doctor(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHECKPOINT]",
            help="The directory or bucket URL of a checkpoint; by default this directory.",
        ),
    ] = None,
    master: Annotated[
        str, typer.Option(help="Spark's master, to check the workers; 'none' skips them.")
    ] = "local[1]",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object per line.")
    ] = False,
) -> None:
    """Check the requirements: Python, Java, Spark, its workers, Arrow, the file system or bucket.

    Exits with 1 if a check fails.
    """
    shown = table("", "", "check", "found", "fix")
    well = True
    for finding in _findings(os.getcwd() if checkpoint is None else checkpoint, master):
        well &= finding.ok is not False
        if as_json:
            print_json(finding._asdict())
            continue
        sign = {True: "ok", False: "FAIL", None: "-"}[finding.ok]
        shown.add_row(sign, finding.what, cell(finding.found), cell(finding.mend))
    if not as_json:
        console().print(shown)
    if not well:
        raise typer.Exit(1)


def _findings(place: str, master: str) -> Iterator[Finding]:
    running = f"{platform.python_version()}, {sys.executable}, {platform.machine()}"
    yield Finding("Python", True, running)  # ackcore cannot be imported by a version before 3.11
    yield _backend()
    arrow = _package("pyarrow", (18,), "pip install 'ackcore[spark]'")
    spark = _package("pyspark", (3, 5), "pip install 'ackcore[spark]'")
    yield from (arrow, spark)
    yield _package("confluent_kafka", (2, 16), "pip install 'ackcore[kafka]'", needed=False)
    if arrow.ok and import_module("ackcore.spark.stores.opening").is_bucket(place):
        client = (
            _package("hdfs_native", (0, 14), "pip install 'ackcore[hdfs]'")
            if place.lower().startswith("hdfs:")
            else _package("obstore", (0, 12), "pip install 'ackcore[stores]'")
        )
        yield client
        if client.ok:
            yield from _bucket(place)
    elif arrow.ok or "://" not in place:
        try:
            directory = paths.local_path(place, "checkpoint")
        except ValueError as error:
            yield Finding("checkpoint", False, str(error), "name a directory or a bucket's URL")
        else:
            yield from _file_system(directory)
    if spark.ok and arrow.ok:
        java = _tried("Java", _java, "apt-get install default-jre-headless, or set JAVA_HOME")
        yield java
        if java.ok and master != "none":
            yield _tried(
                "Spark and its workers",
                lambda: _workers(master),
                "set PYSPARK_PYTHON to a Python that has ackcore[spark] of this version",
            )


def _backend() -> Finding:
    if ackcore.backend != "native":
        order = os.environ.get("ACKCORE_BACKEND")
        mend = "unset ACKCORE_BACKEND" if order else "pip install --force-reinstall ackcore"
        return Finding("acker", bool(order), f"{ackcore.__version__}, in plain Python", mend)
    native = import_module("ackcore._native")
    return Finding("acker", True, f"{ackcore.__version__}, compiled, SIMD level {native.cpu}")


def _package(module: str, least: tuple[int, ...], mend: str, *, needed: bool = True) -> Finding:
    name = module.replace("_", "-")
    try:
        loaded = import_module(module)
        try:
            found = version(name)
        except PackageNotFoundError:
            # Another distribution may contain it: pyspark-client, or the cluster's own pyspark.
            found = str(getattr(loaded, "__version__", ""))
            if not found:
                raise
    except (ImportError, PackageNotFoundError) as error:
        return Finding(name, False if needed else None, f"not installed: {error}", mend)
    numbers = tuple(int(part) for part in found.split(".")[: len(least)] if part.isdigit())
    wanted = ".".join(map(str, least))
    if numbers < least:
        return Finding(name, False, f"{found}, older than {wanted}", mend)
    return Finding(name, True, found)


def _tried(what: str, look: Callable[[], str], mend: str) -> Finding:
    try:
        return Finding(what, True, look())
    except Exception as error:
        return Finding(what, False, plain(str(error)), mend)


def _java() -> str:
    said = import_module("ackcore.examples.quiet_spark").check_java()
    home = os.environ.get("JAVA_HOME")
    return f"{said}, {f'JAVA_HOME {home}' if home else shutil.which('java')}"


def _workers(master: str) -> str:
    quiet_spark = import_module("ackcore.examples.quiet_spark")
    workers = import_module("ackcore.spark.base.workers")
    with quiet_spark.spark_session(master) as (spark, _):
        answers = workers.ask(spark)
        workers.judge(answers)
        libraries = _libraries(spark)
    told = sorted({f"Python {each.python} with ackcore {each.version}" for each in answers})
    return f"Spark {import_module('pyspark').__version__}; workers: {', '.join(told)}, {libraries}"


def _libraries(spark: Any) -> str:
    """Return the versions of PySpark and pyarrow on the workers."""

    def look(batches: Any) -> Any:
        import pyarrow  # noqa: PLC0415 - the worker's
        import pyspark  # noqa: PLC0415

        for _ in batches:
            pass
        told = f"pyspark {pyspark.__version__}, pyarrow {pyarrow.__version__}"
        yield pyarrow.RecordBatch.from_pydict({"told": [told]})

    tasks = import_module("ackcore.spark.base.session").task_slots(spark)
    rows = spark.range(0, tasks, 1, tasks).mapInArrow(look, "told string").distinct().collect()
    return "; ".join(sorted(row[0] for row in rows))


#: File systems that hosts share.
_SHARED = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p")


def _file_system(place: Path) -> Iterator[Finding]:
    """Check the file system of a checkpoint with temporary files in its directory or above it."""
    directory = next(
        each for each in (place.absolute(), *place.absolute().parents) if each.is_dir()
    )
    if (directory / "ackcore").is_dir():
        directory = directory.parent
    kind = paths.file_system(os.path.realpath(directory)) or "unknown file system"
    free = shutil.disk_usage(directory).free
    shared = kind.startswith(_SHARED) or kind.startswith("fuse")
    promise = (
        "shared: if this host is cut off, another may get its lock, which ackcore detects"
        if shared
        else "local to this host; executors on other hosts cannot read it"
    )
    yield Finding("file system", True, f"{directory}: {kind}, {promise}")
    room = free > 1 << 30
    yield Finding(
        "space", room, f"{free / 1e9:.1f} GB free", "" if room else "free some space there"
    )
    try:
        with tempfile.TemporaryDirectory(prefix=".ackcore-doctor-", dir=directory) as scratch:
            _try_files(Path(scratch))
    except OSError as error:
        mend = "choose a directory, or file system, that the driver and the executors can write to"
        yield Finding("file operations", False, plain(str(error)), mend)
    else:
        found = "rename, link, lock and sync of files and directories work"
        yield Finding("file operations", True, found)


def _bucket(url: str) -> Iterator[Finding]:
    """Check with test objects, which are deleted, that a bucket has the guarantees of a store."""
    trying = import_module("ackcore.spark.stores.trying")
    try:
        for what, ok, found in trying.tried(url):
            yield Finding(what, ok, found, "" if ok else _BUCKET_WAY_OUT)
    except Exception as error:
        what = "bucket"
        mend = (
            "set credentials in the environment of the driver and the workers, and the address of "
            "a server other than the provider's (AWS_ENDPOINT_URL, AWS_REGION)"
        )
        if url.lower().startswith("hdfs:"):
            what = "HDFS"
            mend = (
                "name the NameNode's host and port, or a nameservice of HADOOP_CONF_DIR, and a "
                "directory that HADOOP_USER_NAME or the Kerberos principal may write to"
            )
        yield Finding(what, False, plain(str(error)), mend)


_BUCKET_WAY_OUT = (
    "use a server with this guarantee, such as S3, Google Cloud Storage or Azure, or a shared file "
    "system: without it, two drivers could write to one checkpoint"
)


def _try_files(scratch: Path) -> None:
    one, other = scratch / "one", scratch / "other"
    with open(one, "wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(one, "rb") as again:
            try:
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                raise OSError(
                    "the file system let two handles lock the same file, so two drivers could run "
                    "at once"
                )
    os.link(one, scratch / "linked")
    try:
        os.link(one, scratch / "linked")
    except FileExistsError:
        pass
    else:
        raise OSError("the file system let a new link replace a file, so drivers could lose data")
    other.write_bytes(b"y")
    os.replace(one, other)
    sync_directory(scratch)
    if other.read_bytes() != b"x":
        raise OSError("on the file system, a renamed file did not replace that of its new name")
