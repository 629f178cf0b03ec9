"""A planned source of files: the new files of a directory or bucket, each exactly once."""

from __future__ import annotations

import copy
import fnmatch
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ackcore._columns import count_or_none
from ackcore._error_hints import as_seconds, naming_arguments
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.paths import below, is_hidden
from ackcore.spark.base.schemas import CORRUPT_REASON, CORRUPT_RECORD, with_corrupt
from ackcore.spark.checkpoint.skips import shown
from ackcore.spark.planned.file_reading import FORMATS, LINE_FORMATS, check_types, read_files
from ackcore.spark.planned.planned_source import DividedSource, SourceError
from ackcore.spark.stores.hdfs import HdfsStore
from ackcore.spark.stores.objects import ObjectStore
from ackcore.spark.stores.opening import is_bucket, place_of, store_at

_TEXT = pa.schema([pa.field("value", pa.string())])
#: The most files that an error names.
_NAMED = 100


class _File(NamedTuple):
    """A file: its time in nanoseconds since 1970, its path below the root, its size and version."""

    time: int
    name: str
    size: int
    version: str


class FileSpout(DividedSource):
    """The files of a directory, a bucket or HDFS, as a source for `TopologyBuilder.spout`.

    Each file is read once, in the order of time and name. A plan names the files of a micro-batch
    with their sizes and versions. The checkpoint keeps digests of the files that are at most
    `lateness_s` older than the newest planned one; older files count as read.

    A file must be complete when it gets its name: write it under a name that begins with a dot or
    an underscore, which is ignored, and rename it, or use ``hdfs dfs -put``. A planned file
    that grew, disappeared or was replaced ends the query with `SourceError`, which names it.

    Parameters
    ----------
    path : path
        A directory that driver and workers share, or the URL of a place in a bucket
        (``s3://bucket/place``) or in HDFS (``hdfs://host:8020/place``). Subdirectories are read,
        too, so the checkpoint, the dead letters and sinks must be elsewhere, or below a name that
        begins with an underscore, unless ``glob`` leaves out their files.
    format : {"text", "json", "csv", "parquet"}
        The format: lines of text, a JSON object in each line, CSV with a header, or Parquet. Text
        formats may be compressed, shown by the suffix ``.gz``, ``.bz2``, ``.zst``, ``.lz4`` or
        ``.br``, or, except for Brotli, by the first bytes. A line of JSON or CSV that cannot be
        read becomes a dead letter of type ``CorruptRecord``, with the text of the line in the
        column ``_corrupt_record``. A file that cannot be read ends the query; see `skip_planned`.
    schema : pyarrow.Schema, optional
        The columns, found by name; those that a file lacks are null. A CSV file whose header
        lacks a column and has one that is not in the schema cannot be read, because a column may be
        misnamed. Required except for text, which has one column, ``value`` (string).
    glob : str, default "*"
        A pattern for file names; with a slash, for paths below `path`.
    max_files_per_batch : int, optional
        The maximum number of files in a micro-batch.
    lateness_s : float, default 3600
        A file whose modification time is older than that of the newest planned file by more than
        this is not read. A time in the future counts as the driver's time. Set it longer than the
        longest upload, because some stores date a file from the beginning of its upload.
    """

    source_kind: ClassVar[str] = "files"

    @naming_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str,
        schema: pa.Schema | None = None,
        *,
        glob: str = "*",
        max_files_per_batch: int | None = None,
        lateness_s: float = 3600.0,
    ) -> None:
        self._root = place_of(path, "path")
        self._bucket = store_at(self._root) if is_bucket(self._root) else None
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        self._format = format
        if (schema is None) != (format == "text"):
            raise ValueError(
                "schema must not be given for text, which has one column, value (string)"
                if format == "text"
                else f"schema must be given for {format}: a pyarrow.Schema of the columns to read"
            )
        if schema is not None and not isinstance(schema, pa.Schema):
            raise TypeError(
                f"schema must be a pyarrow.Schema, got {type(schema).__name__} {schema!r:.200}; "
                'pa.schema([("id", pa.int64())]) is one'
            )
        self._own = _TEXT if schema is None else schema
        for name in (CORRUPT_REASON, *([CORRUPT_RECORD] if format in LINE_FORMATS else [])):
            if name in self._own.names:
                raise ValueError(
                    f"schema must not have the column {name}: ackcore uses it for lines of JSON "
                    "and CSV that cannot be read, which become dead letters. Leave it out"
                )
        self.schema = self._own
        if format in LINE_FORMATS:
            check_types(format, self._own)
            self.schema = with_corrupt(self._own)
        if not isinstance(glob, str) or not glob:
            raise ValueError(f"glob must be a pattern such as '*.json', got {glob!r}")
        self._matches = re.compile(fnmatch.translate(glob)).match
        self._by_path = "/" in glob
        self._most = count_or_none(max_files_per_batch, "max_files_per_batch", 1)
        self._lateness = round(as_seconds(lateness_s, "lateness_s", 0, 1e9) * 1_000_000_000)
        #: Whether later files are left out, and the names at the first plan.
        self._ends = False
        self._first: set[str] | None = None

    def __repr__(self) -> str:
        return f"FileSpout({self._root!r}, {self._format!r})"

    @property
    def emits(self) -> pa.Schema:
        """The columns of the emitted tuples: those of the files."""
        return self._own

    def bounded(self) -> FileSpout:
        """Return a copy whose `plan` leaves out files that do not exist at its first call."""
        found = copy.copy(self)
        found._ends, found._first = True, None
        return found

    def plan(self, previous: Any) -> Any:
        """Return a plan with the next new files; None if there are none.

        Raises OSError if the files cannot be listed at present. Raises SourceError if a file has
        changed since it was read, or a query that ends finds no directory.
        """
        newest, oldest, seen = -1, -1, {}
        if previous is not None:
            newest, seen = previous["newest"], previous["seen"]
            # The files before are not in `seen`, even if the lateness is longer now.
            oldest = max(previous["oldest"], newest - self._lateness)
        if self._ends and self._bucket is None and not os.path.isdir(self._root):
            raise SourceError(
                f"{self!r}: there is no directory {self._root}. Create it, or correct the path"
            )
        new, listed = [], [*self._listed()]
        if previous is not None and previous.get("root", self._root) != self._root:
            self._refuse_skipped(listed, previous["root"], seen, oldest)
        if self._ends and self._first is None:
            self._first = {one.name for one in listed}
        for one in listed:
            if one.time < oldest or (self._first is not None and one.name not in self._first):
                continue
            known = seen.get(_digest(one.name))
            if known is None:
                new.append(one)
            elif known[0] != _digest(one.version):
                raise SourceError(
                    f"{self!r}: the file {shown(one.name)} was changed after it was read, so "
                    f"its rows would be lost or read twice; it has {one.size} bytes now. Restore "
                    "its content and its time of modification, or give the new content another "
                    "name, and start again"
                )
        if not new:
            return None
        taken = sorted(new)[: self._most]
        # A file of the future must not make all others count as read.
        newest = max(newest, min(taken[-1].time, time.time_ns()))
        oldest = max(oldest, newest - self._lateness)
        kept = {digest: about for digest, about in seen.items() if about[1] >= oldest}
        kept |= {
            _digest(one.name): [_digest(one.version), one.time]
            for one in taken
            if one.time >= oldest
        }
        files = [[*one] for one in taken]
        times = {"newest": newest, "oldest": oldest}
        return {"root": self._root, "files": files, **times, "seen": kept}

    def _refuse_skipped(
        self, listed: Iterable[_File], root: str, seen: Mapping[str, Any], oldest: int
    ) -> None:
        """Raise `SourceError` if files of another directory than ``root`` would not be read.

        Raise nothing if the directory has a file in ``seen``: then the former directory was moved.

        ``listed``: the files in the present directory. ``root``: the directory of the last plan.
        ``seen``: the digests of files that were read, as in the plan.
        ``oldest``: the time before which files count as read.
        """
        known = {name: version for name, (version, _) in seen.items()}
        if any(known.get(_digest(one.name)) == _digest(one.version) for one in listed):
            return
        for one in listed:
            if one.time < oldest:
                raise SourceError(
                    f"{self!r}: the files of {root} were read before. The file {shown(one.name)} "
                    "is older than the newest of them by more than lateness_s, so it would count "
                    "as read. Give the spout the former path, or begin a new checkpoint. If "
                    "no file here was read under the former path, you may renew their times "
                    "(touch); then they are read"
                )

    def check(self, plan: Any) -> None:
        """Raise `SourceError` with the names of the planned files that have changed, if any.

        Raises OSError if the files cannot be looked up at present.
        """
        planned = [_File(*one) for one in plan["files"]]
        found = {one.name: one for one in self._now(planned)}
        changed = []
        for one in planned:
            now = found.get(one.name)
            if now is not None and now.version == one.version:
                continue
            what = "was replaced"
            if now is None:
                what = "disappeared"
            elif now.size > one.size:
                what = f"grew from {one.size} to {now.size} bytes"
            changed.append(f"the file {shown(one.name)} {what}")
        if changed:
            more = len(changed) - _NAMED
            named = ", ".join(changed[:_NAMED])
            named += f", and {more:,} more files changed" if more > 0 else ""
            named += ", each" if len(changed) > 1 else ""
            raise SourceError(
                f"{self!r}: {named} after it was planned and before its rows were decided. Restore "
                "the content and the time of modification, and start again on the same "
                "checkpoint; or leave the file out, and give its new content another name and a "
                "new time. Write files under a name that begins with a dot, and rename them when "
                "they are complete"
            )

    def read(self, spark: SparkSession, plan: Any) -> DataFrame:
        """Return a DataFrame whose tasks read the files of a plan, each time that it is used."""
        files = [(one.name, one.size) for one in (_File(*each) for each in plan["files"])]
        return read_files(spark, self._root, files, self._format, self._own, plan["tasks"])

    def _listed(self) -> Iterator[_File]:
        """Yield the files that match the glob, but no temporary ones: ``.x _x x._COPYING_``."""
        if self._bucket is not None:
            found: Iterable[_File] = self._objects(self._bucket)
        else:
            found = _walked(self._root, "", frozenset())
        for one in found:
            if self._takes(one.name):
                yield one

    def _takes(self, name: str) -> bool:
        # `hdfs dfs -put` writes a file with this suffix, and then renames it.
        if is_hidden(name) or name.endswith("._COPYING_"):
            return False
        return self._matches(name if self._by_path else name.rpartition("/")[2]) is not None

    def reads_in(self, place: str, names: Iterable[str]) -> bool:
        """Return whether the spout would read a file with one of these names in a place.

        ``place``: an absolute path or a URL.
        """
        inner = below(place, self._root)
        return inner is not None and any(
            self._takes(f"{inner}/{name}".lstrip("/")) for name in names
        )

    def _objects(self, bucket: ObjectStore | HdfsStore) -> Iterator[_File]:
        try:
            for key, size, version, time_ns in bucket.list_versions():
                if size:  # an empty object has no rows, or stands for a directory
                    yield _File(time_ns, key, size, version)
        except StateError as error:  # may pass
            raise ConnectionError(str(error)) from None

    def _now(self, planned: Iterable[_File]) -> Iterator[_File]:
        """Yield the planned files that still exist, as they are now; in a bucket all objects."""
        if self._bucket is not None:
            yield from self._objects(self._bucket)
            return
        for one in planned:
            try:
                yield _stated(one.name, os.stat(f"{self._root}/{one.name}"))
            except FileNotFoundError:
                continue


def _walked(root: str, below: str, above: frozenset[tuple[int, int]]) -> Iterator[_File]:
    """Yield the files in ``<root>/<below>``, at any depth, but no names that begin with . or _.

    ``above``: device and inode of the directories above, to which links are skipped.
    """
    here = os.stat(f"{root}/{below}")
    if (here.st_dev, here.st_ino) in above:
        return
    above |= {(here.st_dev, here.st_ino)}
    with os.scandir(f"{root}/{below}") as entries:
        for entry in entries:
            if entry.name[0] in "._":
                continue
            try:
                if entry.is_dir():
                    yield from _walked(root, f"{below}{entry.name}/", above)
                elif entry.is_file():
                    yield _stated(f"{below}{entry.name}", entry.stat())
            except FileNotFoundError:
                continue  # it was removed just now


def _stated(name: str, found: os.stat_result) -> _File:
    return _File(found.st_mtime_ns, name, found.st_size, f"{found.st_size} {found.st_mtime_ns}")


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
