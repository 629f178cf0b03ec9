"""A sink that is an Iceberg table: each micro-batch once, in a commit with its number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.batches import as_spark_types
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.sinks.columns import (
    check_keys,
    last_of_each_key,
    named_keys,
    spark_schema,
    with_columns,
)
from ackcore.spark.sinks.interface import Accepted, read_accepted

if TYPE_CHECKING:
    from pyiceberg.table import Table


def to_iceberg(
    table: str,
    catalog: str | Mapping[str, str],
    *,
    keys: str | Sequence[str] | None = None,
) -> IcebergSink:
    """Return a sink that writes the rows of ACKED records into an Iceberg table.

    Each micro-batch is one commit, which sets a property of the table to its number: one that is
    repeated finds it there and writes nothing. The driver writes, by pyiceberg; a micro-batch has
    to fit into its memory.

    Parameters
    ----------
    table : str
        With its namespace, ``shop.orders``. It must be there.
    catalog : str or mapping
        The name of one that pyiceberg's own configuration has; or its properties, as pyiceberg
        takes them, and its ``name`` among them unless that is ``default``:
        ``{"type": "rest", "uri": "https://..."}``. They appear in no plan, log or checkpoint.
    keys : str or sequence of str, optional
        Columns that tell rows apart: a row whose keys are there is replaced, and of several in one
        micro-batch the last is kept. The table must have the stream's columns and no others then.
        All rows are appended if not given.

    Returns
    -------
    IcebergSink

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If it is empty.
    ImportError
        If pyiceberg is not installed: it comes with ``ackcore[iceberg]``.

    Notes
    -----
    Somebody else's commit between the look at the table and the sink's own fails the sink, which
    the protocol repeats.
    """
    return IcebergSink(table, catalog, keys=keys)


def _catalogs() -> ModuleType:
    try:
        import pyiceberg.catalog  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(
            "to_iceberg() needs pyiceberg, which is not installed: pip install 'ackcore[iceberg]'"
        ) from error
    return pyiceberg.catalog


class IcebergSink:
    """What `to_iceberg` returns."""

    def __init__(
        self,
        table: str,
        catalog: str | Mapping[str, str],
        *,
        keys: str | Sequence[str] | None = None,
    ) -> None:
        if not isinstance(table, str):
            raise TypeError(f"table must be a str, got {type(table).__name__}")
        if not all(table.partition(".")):
            raise ValueError(f"table must be named with its namespace, shop.orders, got {table!r}")
        if not isinstance(catalog, str | Mapping):
            raise TypeError(
                "catalog must be a name, or a mapping of pyiceberg's properties, got "
                f"{type(catalog).__name__}"
            )
        self.table = table
        self.keys = named_keys(keys)
        self._properties = {"name": catalog} if isinstance(catalog, str) else dict(catalog)
        self._name = self._properties.pop("name", "default")
        _catalogs()

    def __repr__(self) -> str:
        return f"to_iceberg({self.table!r})"

    def check(self, name: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise TypeError or ValueError if the table could not hold the stream's columns."""
        what = f"sink {name!r}"
        check_keys(what, self.keys, schema)
        spark_schema(what, schema)
        with self._opened() as table:
            has = [field.name for field in table.schema().fields]
        with_columns(what, f"table {self.table}", schema.names, has)
        others = [column for column in has if column not in schema.names]
        if self.keys and others:
            raise ValueError(
                f"{what}: table {self.table} has the column {others[0]!r}, which the stream has "
                "not, and by keys whole rows are replaced; have the bolt emit it, or leave keys out"
            )

    def write_accepted(self, accepted: Accepted) -> None:
        """Write the rows of a micro-batch, from the files that its run left.

        Raises
        ------
        pyiceberg.exceptions.CommitFailedException
            If another has committed meanwhile.
        CheckpointForeign
            If a later micro-batch is in the table.
        CheckpointInUse
            If another driver has taken over.
        """
        with self._opened() as table:
            self._write(table, accepted)

    def _write(self, table: Table, accepted: Accepted) -> None:
        number = accepted.batch_id
        mark = f"ackcore.{accepted.deployment}.{accepted.sink}"
        last = int(table.properties.get(mark, -1))
        if last == number:
            return
        if last > number:
            raise CheckpointForeign(
                f"Iceberg table {self.table} has micro-batch {last} of sink {accepted.sink!r}, and "
                f"{number} comes only now: the checkpoint {accepted.checkpoint} is older than what "
                "was written from it, restored from a backup perhaps. Start with a new checkpoint; "
                f"or have micro-batches from {number} on written again, whatever of them is in the "
                f"table: remove its property {mark!r}"
            )
        # pyiceberg would repeat a commit that another has overtaken, without a new look at the
        # property: of two drivers each would add the rows. In memory only; nothing is set there.
        table.metadata.properties["commit.retry.num-retries"] = "0"
        check_fence()
        rows = _rows(accepted)
        if not len(rows):
            return
        about = {"ackcore": f"{accepted.deployment}/{accepted.sink}/{number}"}
        with table.transaction() as transaction:
            self._stage(transaction, rows, about)
            transaction.set_properties({mark: str(number)})
            failpoint("in-transaction", number)

    def _stage(self, transaction: Any, rows: pa.Table, about: dict[str, str]) -> None:
        if self.keys:
            rows = last_of_each_key(rows, self.keys)
            transaction.upsert(rows, join_cols=list(self.keys), snapshot_properties=about)
        else:
            transaction.append(rows, snapshot_properties=about)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Table]:
        catalog = _catalogs().load_catalog(self._name, **self._properties)
        try:
            yield catalog.load_table(self.table)
        finally:
            catalog.close()


def _rows(accepted: Accepted) -> pa.Table:
    schema = spark_schema(f"sink {accepted.sink!r}", accepted.schema())
    batches = (
        as_spark_types(rows, schema)
        for file in accepted.files
        for rows in read_accepted(file, accepted.nonacked)
    )
    return pa.Table.from_batches(batches, schema)
