"""A sink that writes each micro-batch into an Iceberg table once, as one numbered commit."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import is_text
from ackcore._error_hints import naming_arguments, naming_extra
from ackcore.spark.base.arrow_batches import as_spark_types
from ackcore.spark.sinks.columns import (
    Unfit,
    check_keys,
    lacking,
    last_of_each_key,
    longest_name,
    named_keys,
    refuse_misfits,
    refuse_same_names,
    refuse_values,
    require_columns,
    rows_without,
    spark_schema,
    uncastable,
    with_long_name,
)
from ackcore.spark.sinks.sink import ANY_CONTENT, TransactionalSink, Written
from ackcore.spark.sinks.sink_batch import SinkBatch
from ackcore.spark.sinks.unavailable import bare, raise_unavailable, secrets_of

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

_WAY_OUT = (
    "Check that the catalog and the table's storage can be reached from the driver, that the table "
    "exists, and that this user may write it"
)
#: The properties of a catalog that have no secrets.
_SHOWN = {"type", "uri", "warehouse", "py-io-impl", "py-catalog-impl"}
#: U+D7FF in UTF-8.
_LAST_BEFORE_GAP = re.compile(rb"\xed\x9f\xbf")
#: The codecs that pyiceberg writes, its default first.
_CODECS = ("zstd", "gzip", "snappy", "lz4", "brotli")
#: The number of the table's files whose keys are read in parallel.
_READ_AT_ONCE = 4
#: The largest number of values that pyiceberg compares with the bounds of a file.
_MOST_VALUES = 200
#: The first and the last date and time that Python has.
_ENDS = {date.min, date.max, datetime.min, datetime.max} | {
    end.replace(tzinfo=UTC) for end in (datetime.min, datetime.max)
}


@naming_arguments
def to_iceberg(
    table: str, catalog: str | Mapping[str, str], *, keys: str | Sequence[str] | None = None
) -> IcebergSink:
    """Return a sink that writes the rows of ACKED records into an Iceberg table.

    Each micro-batch is one commit that sets a property of the table to its number and a fingerprint
    of its rows. A repeated micro-batch finds them there and writes nothing. If the table has the
    number with other rows, for instance after a checkpoint was restored from a backup, the query
    ends with `CheckpointForeign`. The driver writes through pyiceberg; its memory must hold a
    micro-batch.

    Parameters
    ----------
    table : str
        The table with its namespace, ``shop.orders``. It must exist.
    catalog : str or mapping
        The name of a catalog in pyiceberg's configuration, or its properties as pyiceberg takes
        them: ``{"type": "rest", "uri": "https://..."}``, with ``name`` unless that is ``default``.
        They appear in no plan, log or checkpoint.
    keys : str or sequence of str, optional
        Columns that identify a row. A row with existing keys is replaced; the last of several such
        rows in a micro-batch is kept. A null key equals no other. The table must then have exactly
        the stream's columns. Without keys all rows are appended.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, or ``table`` has no namespace or is empty.
    ImportError
        If pyiceberg is not installed: it comes with ``ackcore[iceberg]``.

    Notes
    -----
    A row is refused if it has one of these values:

    - a null in a required column;
    - text that is not UTF-8;
    - text that pyiceberg would cut behind the unassigned letter U+D7FF, for the bounds of a file;
    - a date or time outside the years 1 to 9999, or a time with nanoseconds;
    - a value that a partition cannot store.

    Its record becomes a dead letter, and the other rows are written. If another writer commits
    while the sink writes, the sink fails and is called again.
    """
    return IcebergSink(table, catalog, keys)


def _catalogs() -> ModuleType:
    """Import and return ``pyiceberg.catalog``."""
    with naming_extra("to_iceberg()", "pyiceberg", "iceberg"):
        import pyiceberg.catalog  # noqa: PLC0415
    return pyiceberg.catalog


class IcebergSink(TransactionalSink["Transaction"]):
    """The sink that `to_iceberg` returns."""

    def __init__(
        self, table: str, catalog: str | Mapping[str, str], keys: str | Sequence[str] | None
    ) -> None:
        if not isinstance(table, str):
            raise TypeError(f"table must be a str, got {type(table).__name__}")
        if "." not in table or not all(table.split(".")):
            raise ValueError(
                f"table must be a name with its namespace, such as shop.orders, got {table!r}"
            )
        if not isinstance(catalog, str | Mapping):
            raise TypeError(
                "catalog must be the name of a catalog, or a mapping of pyiceberg's properties, "
                f"got {type(catalog).__name__}"
            )
        self.table = table
        self.keys = named_keys(keys)
        self._properties = {"name": catalog} if isinstance(catalog, str) else dict(catalog)
        self._name = self._properties.pop("name", "default")
        _catalogs()

    def __repr__(self) -> str:
        return f"to_iceberg({self.table!r})"

    def check(self, sink: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise TypeError if Spark or Iceberg lacks a type, a key is nested, or names are alike.

        Also raises TypeError if the table lacks a struct field. Names are alike if Spark does not
        distinguish them. Raises ValueError if a key is no column, or the table lacks a column.
        Raises ValueError if the stream lacks a column or field that is required, or by which the
        table is partitioned. With keys, the stream must have all columns of the table. Raises
        ValueError if pyiceberg cannot cast a column to the table's, or cannot write the table's
        format, codec or partitions. Raises SinkUnavailable if the catalog does not answer, or the
        table does not exist. Raises ImportError if the table's partitions need pyiceberg-core,
        which is not installed.
        """
        import pyarrow.parquet as pq  # noqa: PLC0415 - loaded where it is needed
        from pyiceberg.exceptions import NotInstalledError  # noqa: PLC0415
        from pyiceberg.io.pyarrow import pyarrow_to_schema  # noqa: PLC0415
        from pyiceberg.schema import Schema, _check_schema_compatible  # noqa: PLC0415
        from pyiceberg.table.metadata import SUPPORTED_TABLE_FORMAT_VERSION  # noqa: PLC0415

        what = f"sink {sink!r}"
        check_keys(what, self.keys, schema)
        struct = pa.struct(list(schema))
        refuse_same_names(f"{what} writes into Iceberg for Spark", struct, case_sensitive)
        columns = spark_schema(what, schema)
        with self._opened(sink) as table:
            there, version = table.schema(), table.metadata.format_version
        files = table.properties.get("write.format.default", "parquet")
        if version > SUPPORTED_TABLE_FORMAT_VERSION:
            raise ValueError(
                f"{what}: table {self.table} has format version {version}, and pyiceberg writes at "
                f"most {SUPPORTED_TABLE_FORMAT_VERSION}; create a table of that version"
            )
        if files.lower() != "parquet":
            raise ValueError(
                f"{what}: table {self.table} has {files} files (write.format.default), and "
                "pyiceberg writes Parquet; set the table's property to parquet"
            )
        codec = table.properties.get("write.parquet.compression-codec", _CODECS[0])
        try:  # pyarrow has lz4_raw since a later version
            codec_of_arrow = "none" if codec == "uncompressed" else codec
            pq.write_table(
                pa.table({"n": [1]}), pa.BufferOutputStream(), compression=codec_of_arrow
            )
        except (pa.ArrowException, OSError):
            raise ValueError(
                f"{what}: table {self.table} has the codec {codec} (write.parquet.compression-codec"
                f"), and pyiceberg writes {', '.join(_CODECS)} and uncompressed; set the table's "
                "property to one of them"
            ) from None
        self._check_columns(what, schema, there)
        for part in table.spec().fields:
            source = there.find_column_name(part.source_id)
            if source is None:
                raise ValueError(
                    f"{what}: table {self.table} has the partition {part.name!r} of a dropped "
                    "column, which pyiceberg cannot write; create the table anew"
                )
            if not _path(schema, source):
                raise ValueError(
                    f"{what}: table {self.table} is partitioned by {source!r}, which the stream "
                    "does not have; have the bolt emit it, or change the table's partitions"
                )
            try:
                part.transform.pyarrow_transform(there.find_type(part.source_id))
            except NotImplementedError:
                raise ValueError(
                    f"{what}: table {self.table} has the partition {part.name} = {part.transform}, "
                    "which pyiceberg cannot write; change the table's partitions"
                ) from None
            except NotInstalledError:
                raise ImportError(
                    f"{what}: table {self.table} has the partition {part.name} = {part.transform}, "
                    "for which pyiceberg needs pyiceberg-core, which is not installed: pip install "
                    "'pyiceberg[pyiceberg-core]'"
                ) from None
        columns = _as_required(columns, there)
        try:
            stream = pyarrow_to_schema(columns, there.name_mapping, format_version=version)
        except Exception as error:
            raise TypeError(
                f"{what}: table {self.table} cannot store the stream's columns: {error}; have the "
                "bolt emit another type, or change the table"
            ) from error
        for have in stream.fields:
            want = there.find_field(have.field_id)
            try:
                _check_schema_compatible(Schema(want), Schema(have))
            except ValueError:
                raise uncastable(
                    what, have.name, f"table {self.table}", want.field_type, have.field_type
                ) from None

    def _check_columns(self, what: str, schema: pa.Schema, there: Any) -> None:
        """Raise ValueError if the table's columns and the stream's do not fit together.

        ``what``: the beginning of the message. ``there``: the table's schema.
        """
        from pyiceberg.io.pyarrow import schema_to_pyarrow  # noqa: PLC0415

        table, has = f"table {self.table}", [field.name for field in there.fields]
        require_columns(what, table, schema.names, has)
        others = [column for column in has if column not in schema.names]
        if self.keys and others:
            raise ValueError(
                f"{what}: keys replace whole rows of {table}, and the stream lacks its column "
                f"{others[0]!r}; have the bolt emit the column, or leave keys out"
            )
        needed = pa.struct(list(schema_to_pyarrow(there)))
        for name, field in lacking(needed, pa.struct(list(schema))):
            if not field.nullable:
                raise ValueError(
                    f"{what}: column {name!r} of {table} is required, and the stream does not have "
                    "it; have the bolt emit it, or make it optional (ALTER TABLE ... ALTER COLUMN "
                    f"{name} DROP NOT NULL)"
                )

    @contextlib.contextmanager
    def begin(self, batch: SinkBatch) -> Iterator[Transaction]:
        """Open the table and begin a transaction. Without `commit` the table stays unchanged.

        Raises SinkUnavailable if the catalog cannot be reached, or the table was deleted.
        """
        with self._opened(batch.sink) as table:
            # A catalog may report a conflict although the commit is in the table, for instance if
            # a proxy has sent it twice. pyiceberg looks for it before a retry; without a retry it
            # would delete files that the table needs. Set in memory only, not in the table.
            table.metadata.properties["commit.retry.num-retries"] = "1"
            table.metadata.properties["commit.retry.min-wait-ms"] = "0"
            transaction = table.transaction()
            # The retry itself would not look at the number of the micro-batch, and two drivers
            # would both add the rows.
            transaction._rebuild_snapshot_updates = _raise_conflict  # type: ignore[method-assign]
            yield transaction

    def read_number(self, transaction: Transaction, batch: SinkBatch) -> Written | None:
        """Return the number and the content in the table's property; None without the property."""
        found = transaction.table_metadata.properties.get(_mark(batch))
        if found is None:
            return None
        number, _, content = found.partition(" ")
        return Written(int(number), content)

    def write_rows(self, transaction: Transaction, batch: SinkBatch) -> None:
        """Write the rows into files that the commit adds to the table.

        With keys, also write the files that the commit puts in place of those with these keys.
        Raises SinkRejects, before anything is written, if rows have values that the table cannot
        store; `to_iceberg` lists them. Raises ValueError if the table's columns have changed and
        do not fit the stream's.
        """
        there, stream = transaction.table_metadata.schema(), batch.schema()
        self._check_columns(f"sink {batch.sink!r}", stream, there)
        schema = spark_schema(f"sink {batch.sink!r}", stream)
        refuse_misfits(
            batch,
            _as_required(schema, there),
            # pyiceberg converts the values of these types to Python's.
            lambda kind: pa.types.is_date32(kind) or pa.types.is_timestamp(kind),
        )
        partitions = _partition_checks(transaction.table_metadata, schema)
        bounds = _bound_checks(transaction.table_metadata, schema)
        refuse_values(batch, [*bounds, *partitions])
        parts = (as_spark_types(each, schema) for each in batch.record_batches())
        rows = pa.Table.from_batches(parts, schema)
        if len(rows):
            about = {
                "ackcore": f"{batch.deployment}/{batch.sink}/{batch.batch_id}",
                "ackcore.content": batch.content(),
            }
            self._stage(transaction, rows.cast(_as_required(rows.schema, there)), about)

    def record(self, transaction: Transaction, batch: SinkBatch, written: Written) -> None:
        """Set the table's property to number and content. A snapshot's property would expire."""
        transaction.set_properties({_mark(batch): f"{written.number} {written.content}"})

    def commit(self, transaction: Transaction) -> None:
        """Commit the transaction.

        Raises pyiceberg.exceptions.CommitFailedException if another writer has committed meanwhile.
        """
        transaction.commit_transaction()

    def advice(self, batch: SinkBatch, last: int) -> str:
        """Return advice: how a user resets the property, or accepts a micro-batch of any rows."""
        mark, number = _mark(batch), batch.batch_id
        return (
            f"or have micro-batches from {number} to {last} written again, in addition to their "
            f"rows that are in the table: remove its property {mark!r}. To count micro-batch "
            f"{number} as written, with any rows, set it to '{number} {ANY_CONTENT}'"
        )

    def _stage(self, transaction: Any, rows: pa.Table, about: dict[str, str]) -> None:
        """Write rows into files of the transaction; with keys, in place of rows with equal keys.

        ``about``: the properties of the transaction's snapshots.
        """
        if self.keys:
            rows = last_of_each_key(rows, self.keys)
        transaction.append(rows, snapshot_properties=about)  # checks the types, too
        snapshot = transaction.table_metadata.current_snapshot()
        _check_count(len(rows), int(snapshot.summary["added-records"] or 0))
        if self.keys:
            self._remove(transaction, rows, about)

    def _remove(self, transaction: Any, rows: pa.Table, about: dict[str, str]) -> None:
        """Replace the table's files that have keys of ``rows`` by files with their other rows only.

        pyiceberg's upsert is not used: it builds an expression with a term for each row. With
        several key columns, thousands of rows take minutes, and more end the process.
        """
        import pyiceberg.expressions  # noqa: PLC0415
        from pyiceberg.io.pyarrow import ArrowScan, _dataframe_to_data_files  # noqa: PLC0415

        # `table` does not have the files that the transaction has appended.
        table, metadata = transaction._table, transaction.table_metadata
        new = rows.select(list(self.keys)).drop_null()
        if not len(new):
            return
        # The expression selects files only, and may be true for other keys, too. Of more than 200
        # values pyiceberg compares none with a file's bounds, only with its partition; an In of
        # 100,000 values takes seconds. Floats are left out: an expression has no NaN, and
        # pyiceberg 0.12 rounds a double in a partition to 32 bits.
        is_: Any = pyiceberg.expressions
        perhaps, schema = is_.AlwaysTrue(), metadata.schema()
        # By column, the largest number to whose multiples partitions round it; 0 if they do not.
        widths: dict[str, int] = {}
        for part in itertools.chain(*(spec.fields for spec in metadata.partition_specs)):
            name = schema.find_column_name(part.source_id)
            widths[name] = max(getattr(part.transform, "width", 0), widths.get(name, 0))
        for key in self.keys:
            kind, values = new[key].type, new[key].unique()
            if pa.types.is_floating(kind):
                continue
            low, high = pc.min_max(values).as_py().values()
            width = widths.get(key, 0)
            if pa.types.is_integer(kind) and max(-low - 1, high) + width >= 1 << kind.bit_width - 1:
                continue  # a rounded number may have become one of the other end of the type
            # For these ends pyiceberg fails to compute the day before or after.
            if low not in _ENDS:
                perhaps &= is_.GreaterThanOrEqual(key, low)
            if high not in _ENDS:
                perhaps &= is_.LessThanOrEqual(key, high)
            if len(values) <= _MOST_VALUES or key in widths:
                perhaps &= is_.In(key, values.to_pylist())
        key_columns = schema.select(*self.keys)

        def read(task: Any, schema: Any) -> pa.Table:
            return ArrowScan(metadata, table.io, schema, is_.AlwaysTrue()).to_table([task])

        def others_in(task: Any) -> pa.Array:
            return rows_without(read(task, key_columns), new)

        tasks = list(table.scan(row_filter=perhaps).plan_files())
        with ThreadPoolExecutor(_READ_AT_ONCE) as readers:
            others_of = list(readers.map(others_in, tasks))
        written, number = uuid.uuid4(), itertools.count()
        kept: list[tuple[Any, list[Any]]] = []
        for task, others in zip(tasks, others_of, strict=True):
            if pc.all(others).as_py():
                continue
            rest = read(task, schema).filter(others)
            files = _dataframe_to_data_files(metadata, rest, table.io, written, number)
            instead = list(files) if len(rest) else []
            _check_count(len(rest), sum(file.record_count for file in instead))
            kept.append((task.file, instead))
        if kept:
            with transaction.update_snapshot(about).overwrite() as snapshot:
                snapshot.delete_by_predicate(perhaps)
                for file, instead in kept:
                    snapshot.delete_data_file(file)
                    for one in instead:
                        snapshot.append_data_file(one)

    @contextlib.contextmanager
    def _opened(self, sink: str) -> Iterator[Table]:
        """Yield the open table, and close the catalog at the end.

        Raises all errors of the opening as `SinkUnavailable`, and in the block those of the catalog
        and the storage.
        """
        is_open = False
        try:
            catalog = _catalogs().load_catalog(self._name, **self._properties)
            with contextlib.closing(catalog):
                table = catalog.load_table(self.table)
                is_open = True
                yield table
        except Exception as error:
            if is_open and not _is_of_catalog(error):
                raise
            uri = self._properties.get("uri")
            where = f"Iceberg table {self.table} of catalog {self._name!r}"
            where += f" at {bare(uri)}" if uri else ""
            raise_unavailable(sink, where, error, self._secrets(), _WAY_OUT)

    def _secrets(self) -> list[str]:
        """Return the texts that errors must not show.

        They are the values of all properties except `_SHOWN`, and the uri's login and parameters.
        """
        hidden = [of for name, of in self._properties.items() if name not in _SHOWN]
        return [*hidden, *secrets_of(self._properties.get("uri", ""))]


def _check_count(rows: int, written: int) -> None:
    """Raise RuntimeError if pyiceberg has written another number of rows."""
    if rows != written:
        raise RuntimeError(
            f"pyiceberg has written {written:,} rows in place of {rows:,}, probably because a "
            "partition column has different values that are equal, such as 0.0 and -0.0; nothing "
            "is committed. Change the table's partitions"
        )


def _bound_checks(metadata: Any, schema: pa.Schema) -> Iterator[Unfit]:
    """Yield a check for each column of texts that pyiceberg cuts for the bounds of a file.

    pyiceberg adds 1 to the last letter before the cut that is not U+10FFFF. For U+D7FF
    it finds no bound, because U+D7FF plus 1 is a surrogate. ``metadata``, ``schema``: as in
    `_partition_checks`.
    """
    from pyiceberg.io.pyarrow import compute_statistics_plan  # noqa: PLC0415

    there = metadata.schema()
    plan = compute_statistics_plan(there, metadata.properties)
    for field in schema:
        if is_text(field.type):
            at = plan.get(there.find_field(field.name).field_id)
            if at is not None and at.mode.length:
                why = (
                    f"pyiceberg has no bound for the text of column {field.name!r}, which it would "
                    "cut behind U+D7FF"
                )
                yield field, partial(_has_no_bound, letters=at.mode.length), why


def _has_no_bound(column: pa.Array, letters: int) -> pa.BooleanArray:
    """Return which texts are longer than ``letters``, and have no next text of that length."""
    if not any(one is not None and _LAST_BEFORE_GAP.search(one) for one in column.buffers()):
        return pa.repeat(False, len(column))
    begins = pc.utf8_rtrim(pc.utf8_slice_codeunits(column, 0, letters), "\U0010ffff")
    return pc.and_(pc.ends_with(begins, "\ud7ff"), pc.greater(pc.utf8_length(column), letters))


def _partition_checks(metadata: Any, schema: pa.Schema) -> Iterator[Unfit]:
    """Yield checks for values that a partition cannot store, or whose directory name is too long.

    ``metadata``: pyiceberg's metadata of the table. ``schema``: the stream's columns.
    """
    there, properties = metadata.schema(), metadata.properties
    longest = longest_name(properties.get("write.data.path", metadata.location))
    switches = ("enabled", "partitioned-paths")
    layout = [properties.get(f"write.object-storage.{one}") for one in switches]
    for part in metadata.spec().fields:
        name = there.find_column_name(part.source_id)
        if name is None or not (path := _path(schema, name)):
            continue
        field, kind, transform = path[-1], there.find_type(part.source_id), part.transform
        if pa.types.is_decimal(field.type) and hasattr(transform, "width"):
            check = partial(_has_more_digits, kind=kind, truncate=transform.transform(kind))
            why = f"truncated, it does not fit into {kind}"
        elif pa.types.is_floating(field.type) and str(transform) == "identity":
            check, why = partial(_is_nan_or_negative_zero), "NaN or -0.0"
        elif (
            layout != ["true", "false"]
            and (str(transform) == "identity" or hasattr(transform, "width"))
            and (is_text(field.type) or pa.types.is_binary(field.type))
        ):
            most = longest - len(quote_plus(part.name, safe="") + "=")
            check = partial(with_long_name, most=most, escape=_name_of(transform, kind))
            why = f"a directory's name would have more than {most} bytes"
        else:
            continue
        is_unfit = partial(_is_unfit_within, names=[one.name for one in path[1:]], check=check)
        why = f"partition {part.name!r} cannot store the value of column {name!r}: {why}"
        yield path[0], is_unfit, why


def _path(schema: pa.Schema, name: str) -> list[pa.Field]:
    """Return the column with a struct's field, and the fields down to it; [] without such a field.

    ``name``: the name of a column, which may have dots, or names that are joined by dots.
    """
    if name in schema.names:
        return [schema.field(name)]
    path: list[pa.Field] = []
    kind = pa.struct(list(schema))
    for one in name.split("."):
        if not pa.types.is_struct(kind) or kind.get_field_index(one) < 0:
            return []
        path.append(kind.field(one))
        kind = path[-1].type
    return path


def _is_unfit_within(
    column: pa.Array, names: list[str], check: Callable[[pa.Array], pa.BooleanArray]
) -> pa.BooleanArray:
    """Return the check of a field in a struct. ``names``: those of the fields down to it."""
    return check(pc.struct_field(column, names) if names else column)


def _is_nan_or_negative_zero(column: pa.Array) -> pa.BooleanArray:
    """Return which floats are NaN or -0.0. pyiceberg fails for NaN.

    It selects the rows of each partition by ``==``, so it would write -0.0 twice beside 0.0.
    """
    values = column.fill_null(1.0).to_numpy(False)
    return pa.array(np.isnan(values) | ((values == 0) & np.signbit(values)))


def _has_more_digits(
    column: pa.Array, kind: Any, truncate: Callable[[Any], Any]
) -> pa.BooleanArray:
    values = column.unique().drop_null().to_pylist()
    bad = [one for one in values if len(truncate(one).as_tuple().digits) > kind.precision]
    return pc.is_in(column, pa.array(bad, column.type))


def _name_of(transform: Any, kind: Any) -> Callable[[Any], str]:
    """Return a function that returns a value as it is in the name of a partition's directory."""
    of = transform.transform(kind)
    return lambda value: quote_plus(transform.to_human_string(kind, of(value)), safe="")


def _raise_conflict() -> None:
    """Raise the conflict that pyiceberg handles, so that it does not repeat the commit."""
    error = sys.exception()
    assert error is not None
    raise error


def _is_of_catalog(error: Exception) -> bool:
    """Return whether the catalog or the storage raised an error, and not the sink or its rows."""
    from pyiceberg.exceptions import (  # noqa: PLC0415
        NoSuchNamespaceError,
        NoSuchTableError,
        RESTError,
        WaitingForLockException,
    )

    kinds = (RESTError, NoSuchTableError, NoSuchNamespaceError, WaitingForLockException, OSError)
    # For a catalog in a database; sqlalchemy may not be installed.
    return isinstance(error, kinds) or type(error).__module__.startswith("sqlalchemy.")


def _as_required(schema: pa.Schema, there: Any) -> pa.Schema:
    """Return the schema, with each column nullable unless the table, ``there``, requires it."""
    required = {field.name for field in there.fields if field.required}
    return pa.schema([field.with_nullable(field.name not in required) for field in schema])


def _mark(batch: SinkBatch) -> str:
    """Return the name of the property with the number of the last micro-batch."""
    return f"ackcore.{batch.deployment}.{batch.sink}"
