"""A planned source of the rows that are appended to a Delta table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ackcore._columns import as_count
from ackcore.spark.base.errors import one_line
from ackcore.spark.planned.file_reading import read_files
from ackcore.spark.planned.planned_source import PlannedSource, SourceError
from ackcore.spark.stores.opening import place_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

#: Operations that rewrite files and change no row.
_REWRITES = ("OPTIMIZE", "REORG")


class DeltaSpout(PlannedSource):
    """The rows that are appended to a Delta table, version by version.

    Needs ``ackcore[delta]`` on the driver. The columns are those of the table when the object is
    created. Tasks read the table's Parquet files, with the credentials of their environment.

    Parameters
    ----------
    path : path
        The table: a directory that driver and workers share, or the URL of a place in a bucket
        (``s3://bucket/place``).
    starting_version : int, default 0
        The first version whose rows are read.
    skip_changes : bool, default False
        Whether to skip versions that delete or update rows (DELETE, UPDATE, MERGE, an overwrite),
        with the rows that they add. Otherwise such a version ends the query with `SourceError`,
        which names it. Compaction (OPTIMIZE) changes no row and is always skipped.
    max_files_per_batch : int, optional
        The number of files after which a micro-batch takes no further version. A version is never
        divided.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; it names the argument.
    ImportError
        If deltalake is not installed.
    SourceError
        If the table cannot be opened.
    """

    source_kind: ClassVar[str] = "delta"
    repeatable = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        starting_version: int = 0,
        skip_changes: bool = False,
        max_files_per_batch: int | None = None,
    ) -> None:
        self._root = place_of(path, "path")
        self._first = as_count(starting_version, "starting_version", 0)
        if not isinstance(skip_changes, bool):
            raise TypeError(f"skip_changes must be True or False, got {skip_changes!r}")
        self._skips = skip_changes
        self._most = (
            None
            if max_files_per_batch is None
            else as_count(max_files_per_batch, "max_files_per_batch", 1)
        )
        self.schema = pa.schema(self._table.schema().to_arrow())

    def __repr__(self) -> str:
        return f"DeltaSpout({self._root!r})"

    @cached_property
    def _table(self) -> DeltaTable:
        try:
            import deltalake  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise ImportError(
                "DeltaSpout needs deltalake, which is not installed: pip install 'ackcore[delta]'"
            ) from error
        try:
            return deltalake.DeltaTable(self._root)
        except Exception as error:  # deltalake has many
            raise SourceError(f"{self!r} cannot be opened: {one_line(error)}") from error

    def plan(self, previous: Any) -> Any:
        """See `PlannedSource.plan`."""
        first = self._first if previous is None else previous["to"] + 1
        try:
            self._table.update_incremental()
        except Exception as error:
            raise OSError(f"{self!r} cannot be read: {one_line(error)}") from error
        last = self._table.version()
        if first > last:
            return None
        files: list[list[Any]] = []
        taken = first - 1
        before = self._files(first - 1) if first else {}
        while taken < last and (self._most is None or len(files) < self._most):
            taken += 1
            now = self._files(taken)
            if before.keys() <= now.keys():
                files += [[path, *now[path]] for path in sorted(now.keys() - before.keys())]
            elif not self._is_left_out(taken):
                raise SourceError(
                    f"{self!r}: version {taken} ({self._operation(taken)}) deletes or updates rows "
                    "that were read, and a topology cannot take rows back. Set skip_changes=True "
                    "to leave out such versions with the rows that they add, or begin a new "
                    f"checkpoint with starting_version={taken + 1}"
                )
            before = now
        return {"from": first, "to": taken, "files": files}

    def _is_left_out(self, version: int) -> bool:
        return self._skips or self._operation(version).startswith(_REWRITES)

    def _operation(self, version: int) -> str:
        for one in self._table.history():
            if one.get("version") == version:
                return str(one.get("operation", "unknown"))
        return "unknown"

    def _files(self, version: int) -> Mapping[str, tuple[int, dict[str, str | None]]]:
        """Return the files of a version by path, with sizes and the texts of partition values."""
        import deltalake  # noqa: PLC0415 - an extra

        try:
            table = deltalake.DeltaTable(self._root, version=version)
            adds = pa.table(table.get_add_actions(flatten=True))
        except Exception as error:
            raise SourceError(
                f"{self!r}: version {version} cannot be read any more: {one_line(error)}. If the "
                "table's log was cleaned up, begin a new checkpoint with a later starting_version"
            ) from error
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

    def divided(self, plan: Any, tasks: int) -> Any:
        """See `PlannedSource.divided`."""
        return {**plan, "tasks": tasks}

    def read(self, spark: SparkSession, plan: Any) -> DataFrame:
        """See `PlannedSource.read`."""
        files = [(path, size) for path, size, _ in plan["files"]]
        constants = {path: values for path, _, values in plan["files"] if values}
        return read_files(
            spark, self._root, files, "parquet", self.schema, plan["tasks"], constants
        )
