"""A planned source of the rows that are appended to a Delta table."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ackcore._columns import as_count, count_or_none
from ackcore._error_hints import naming_arguments, naming_extra
from ackcore.spark.base.errors import StateError, one_line
from ackcore.spark.planned.file_reading import read_files
from ackcore.spark.planned.planned_source import DividedSource, SourceError
from ackcore.spark.stores.opening import check_delta_url, is_bucket, open_store, place_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

#: The most versions in a plan: each one is opened, and a stop waits for the plan.
_VERSIONS = 100


class DeltaSpout(DividedSource):
    """The rows that are appended to a Delta table, version by version.

    Needs ``ackcore[delta]`` on the driver. The columns are those of the table when the object is
    created. Tasks read the table's Parquet files, with the credentials of their environment.

    Parameters
    ----------
    path : path
        The table: a directory that driver and workers share, or the URL of a place in a bucket
        (``s3://bucket/place``).
    starting_version : int, default 0
        The first version whose rows are read. A checkpoint that has read fewer versions skips those
        before it.
    skip_changes : bool, default False
        Whether to skip versions that delete, update or restore rows (DELETE, UPDATE, MERGE,
        RESTORE, an overwrite), with the rows that they add. Otherwise such a version ends the query
        with `SourceError`, which names it. Compaction (OPTIMIZE, or a write with ``dataChange``
        false) changes no row and is always skipped.
    max_files_per_batch : int, optional
        The number of files after which a micro-batch takes no further version. A version is never
        divided. A micro-batch takes at most 100 versions.

    Raises
    ------
    TypeError
        If an argument has another type.
    ValueError
        If ``path`` is empty or of an unsupported store, or its URL has characters that deltalake
        takes for others; if ``starting_version`` is negative or ``max_files_per_batch`` below 1.
    ImportError
        If deltalake is not installed.
    SourceError
        If the table cannot be opened, has column mapping, or is partitioned by a binary column.
    """

    source_kind: ClassVar[str] = "delta"

    @naming_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        starting_version: int = 0,
        skip_changes: bool = False,
        max_files_per_batch: int | None = None,
    ) -> None:
        self._root = place_of(path, "path")
        check_delta_url(self._root)
        self._first = as_count(starting_version, "starting_version", 0)
        if not isinstance(skip_changes, bool):
            raise TypeError(f"skip_changes must be True or False, got {skip_changes!r}")
        self._skips = skip_changes
        self._most = count_or_none(max_files_per_batch, "max_files_per_batch", 1)
        #: Whether later versions are left out, and the newest version at the first plan.
        self._ends = False
        self._last: int | None = None
        try:
            table = self._table
        except OSError as error:
            raise SourceError(str(error)) from error
        self.schema = pa.schema(table.schema().to_arrow())
        for name in table.metadata().partition_columns:
            if pa.types.is_binary(self.schema.field(name).type):
                raise SourceError(
                    f"{self!r}: its partition column {name} is binary, which is not supported; "
                    "read the table with Spark, as a streaming DataFrame"
                )

    def __repr__(self) -> str:
        return f"DeltaSpout({self._root!r})"

    @cached_property
    def _table(self) -> DeltaTable:
        """The table, opened at its newest version; each call of `plan` brings it up to date."""
        return self._opened()

    def _opened(self, version: int | None = None) -> DeltaTable:
        """Return the table at a version; by default, at the newest one.

        Raises OSError if the store does not answer. Raises SourceError if the version does not
        exist, or the table has features that are not supported. Raises ImportError if deltalake
        is not installed.
        """
        with naming_extra("DeltaSpout", "deltalake", "delta"):
            import deltalake  # noqa: PLC0415 - an extra
        try:
            table = deltalake.DeltaTable(self._root, version=version)
            about = table.metadata()
        except OSError as error:
            raise OSError(f"{self!r} cannot be opened: {one_line(error)}") from error
        except Exception as error:  # deltalake has many
            at = hint = ""
            if version is not None:
                at = f" at version {version}"
                hint = ". If the table's log was cleaned up, set a later starting_version, which "
                hint += "leaves out the versions before"
            raise SourceError(f"{self!r} cannot be opened{at}: {one_line(error)}{hint}") from error
        if about.configuration.get("delta.columnMapping.mode", "none") != "none":
            raise SourceError(
                f"{self!r} has column mapping (delta.columnMapping.mode), so its files have other "
                "names of columns; read it with Spark, as a streaming DataFrame"
            )
        return table

    def bounded(self) -> DeltaSpout:
        """Return a copy whose `plan` ends with the newest version at its first call."""
        found = copy.copy(self)
        found._ends, found._last = True, None
        return found

    def plan(self, previous: Any) -> Any:
        """Return a plan with the files that the next versions added; None without a new version.

        Raises OSError if the table cannot be read at present. Raises SourceError if the table was
        created anew, the log lacks a version, or, without ``skip_changes``, one deletes, updates or
        restores rows.
        """
        first = self._first if previous is None else max(previous["to"] + 1, self._first)
        try:
            self._table.update_incremental()
        except Exception as error:
            raise OSError(f"{self!r} cannot be read: {one_line(error)}") from error
        if previous is not None:
            self._refuse_other_table(previous)
        last = self._table.version()
        if self._ends:
            last = self._last = last if self._last is None else min(last, self._last)
        if first > last:
            return None
        last = min(last, first + _VERSIONS - 1)
        files: list[list[Any]] = []
        taken = first - 1
        before = self._files(first - 1) if first else {}
        while taken < last and (self._most is None or len(files) < self._most):
            taken += 1
            now = self._files(taken)
            new = sorted(now.keys() - before.keys())
            if before.keys() <= now.keys() and not self._changes_rows(taken, bool(new)):
                files += [[path, *now[path]] for path in new]
            elif not (self._skips or self._only_rewrites(taken)):
                raise SourceError(
                    f"{self!r}: version {taken} {self._change(taken)}, and a topology cannot take "
                    "rows back. Set skip_changes=True to leave out such versions with the rows "
                    f"that they add, or starting_version={taken + 1} to leave out all up to {taken}"
                )
            before = now
        return {"from": first, "to": taken, "files": files, "commit": _digest(self._commit(taken))}

    def _refuse_other_table(self, previous: Any) -> None:
        """Raise `SourceError` if the table was seen to be created anew since the last plan."""
        commit = self._commit(previous["to"])
        if commit is None:  # the log was cleaned up, or is another one
            self._table = self._opened()
            same = self._table.version() >= previous["to"]
        else:
            same = previous["commit"] in (None, _digest(commit))
        if not same:
            raise SourceError(
                f"{self!r} is another table than the one that was read up to version "
                f"{previous['to']}: it was deleted and created again. Begin a new checkpoint"
            )

    def _changes_rows(self, version: int, has_new_files: bool) -> bool:
        """Return whether a version that removes no file changes rows nevertheless.

        It may delete rows of files that stay (deletion vectors), or bring back files whose rows
        were read before they were deleted (RESTORE). Raises SourceError if its log was cleaned up.
        """
        has_vectors = "deletionVectors" in (self._table.protocol().reader_features or ())
        if not (has_vectors or has_new_files):
            return False
        commit = self._commit(version)
        if commit is None and (version or has_vectors):
            raise SourceError(
                f"{self!r}: the log of version {version} was cleaned up, so it is unknown whether "
                "the version appends rows, or deletes or restores rows that were read. Set "
                f"starting_version={version + 1}, which leaves out the versions before"
            )
        return any(
            (one.get("add") or {}).get("deletionVector")
            or (one.get("commitInfo") or {}).get("operation") == "RESTORE"
            for one in _actions(commit)
        )

    def _only_rewrites(self, version: int) -> bool:
        """Return whether a version has the same rows in other files, as a compaction does.

        Its writer marks each of these files as such (``dataChange``). If the log of the version was
        cleaned up, the result is False.
        """
        actions = _actions(self._commit(version))
        files = [file for one in actions if (file := one.get("add") or one.get("remove"))]
        return bool(files) and not any(file.get("dataChange", True) for file in files)

    def _commit(self, version: int) -> bytes | None:
        """Return a version's file in the log, None if it does not exist; OSError if unreachable."""
        name = f"_delta_log/{version:020}.json"
        if not is_bucket(self._root):
            path = Path(self._root, name)
            return path.read_bytes() if path.exists() else None
        try:
            found = open_store(self._root, "path").read(name)
        except StateError as error:
            raise OSError(str(error)) from None
        return None if found is None else found.to_pybytes()

    def _change(self, version: int) -> str:
        """Return the part of an error that describes a version which may take rows back."""
        # Not by `DeltaTable.history`, which takes a commit that arrives meanwhile for the newest.
        commit = self._commit(version)
        if commit is None:
            return "removes files, perhaps with rows that were read (its log was cleaned up)"
        found = [one["commitInfo"] for one in _actions(commit) if "commitInfo" in one]
        operation = found[0].get("operation", "unknown") if found else "unknown"
        return f"({operation}) deletes, updates or restores rows that were read"

    def _files(self, version: int) -> Mapping[str, tuple[int, dict[str, str | None]]]:
        """Return the files of a version by path, with sizes and the texts of partition values.

        A null has the text None. Raises the errors of `_opened`.
        """
        adds = pa.table(self._opened(version).get_add_actions(flatten=True))
        keys = [name for name in adds.column_names if name.startswith("partition.")]
        values = [adds[name].cast(pa.string()).to_pylist() for name in keys]
        names = [name.removeprefix("partition.") for name in keys]
        rows = zip(*values, strict=True) if keys else ((),) * len(adds)
        return {
            unquote(path): (size, dict(zip(names, row, strict=True)))
            for path, size, row in zip(
                adds["path"].to_pylist(), adds["size_bytes"].to_pylist(), rows, strict=True
            )
        }

    def read(self, spark: SparkSession, plan: Any) -> DataFrame:
        """Return a DataFrame whose tasks read a plan's files and add the partition columns.

        The files are read when the DataFrame is used, each time anew.
        """
        files = [(path, size) for path, size, _ in plan["files"]]
        constants = {path: values for path, _, values in plan["files"] if values}
        return read_files(
            spark, self._root, files, "parquet", self.schema, plan["tasks"], constants
        )


def _actions(commit: bytes | None) -> list[dict[str, Any]]:
    """Return the actions in a version's file of the log."""
    return [json.loads(line) for line in (commit or b"").splitlines() if line.strip()]


def _digest(commit: bytes | None) -> str | None:
    return None if commit is None else blake2b(commit, digest_size=8).hexdigest()
