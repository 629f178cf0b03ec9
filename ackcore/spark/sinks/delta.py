"""A sink that writes each micro-batch into a Delta table once, as one numbered commit."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from hashlib import blake2b
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import cast_column, has_type, is_list, is_text
from ackcore._error_hints import naming_arguments, naming_extra
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.sinks.columns import (
    Unfit,
    check_keys,
    has_wrong,
    lacking,
    last_of_each_key,
    longest_name,
    named_keys,
    refuse_misfits,
    refuse_same_names,
    refuse_values,
    require_columns,
    spark_schema,
    texts_by_name,
    uncastable,
    with_long_name,
)
from ackcore.spark.sinks.sink import ANY_CONTENT, TransactionalSink, Written
from ackcore.spark.sinks.sink_batch import SinkBatch
from ackcore.spark.sinks.unavailable import bare, raise_unavailable, secrets_of
from ackcore.spark.stores.opening import check_delta_url

if TYPE_CHECKING:
    from deltalake import DeltaTable

_WAY_OUT = (
    "Check that the driver can reach and write the storage with these storage_options, that the "
    "storage has free space, and that the table was not moved or deleted"
)

#: Beginnings of deltalake's errors about rows, which have no class of their own. Values of rows
#: follow.
_REFUSAL = re.compile(
    r"Invalid data found: \d+ rows failed validation check|Cast error|Unsupported CAST from [^\n]+"
    r"|Error during planning|[Nn]on-nullable (?:field|StructArray|ListArray|column)"
)

#: Names of storage_options with the endpoint, and of others without secrets.
_ENDPOINT = re.compile(r"(?i)((aws|azure|azure_storage)_)?endpoint(_url)?(_s3)?")
_SHOWN = re.compile(r"(?i)(^|_)(region|bucket(_name)?|container_name|account_name)$")

#: deltalake's error about a table with writer features that deltalake lacks.
_FEATURES = re.compile(r"Unsupported table features required: \[([^]]*)]")
#: Metadata of a field that Delta computes from others if rows do not have it.
_COMPUTED = "delta.generationExpression"
#: Properties of a table with its CHECK constraints begin with this.
_CONSTRAINT = "delta.constraints."
#: The function date_format: its patterns have ``%`` in deltalake, and letters without it in Spark.
_DATE_FORMAT = re.compile(r"(?i)\bdate_format\s*\(")
#: Texts, which stay unchanged, and column names in such an expression. A word is no column before
#: ``(`` (a function), after AS (a type), before FROM (a part of a time), after a point (a field).
_NAMES = re.compile(
    r"'(?:[^']|'')*'"
    r"|(?<![\w.`])(?:`(?P<quoted>(?:[^`]|``)+)`"
    r"|(?<!\b(?i:as)\s)(?P<word>[^\W\d]\w*)\b(?!\s*\(|\s+(?i:from)\b))"
)

#: Set by a user in place of a fingerprint; see `ANY_CONTENT`.
_ANY_CONTENT = 0


@naming_arguments
def to_delta(
    path: str | os.PathLike[str],
    *,
    keys: str | Sequence[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DeltaSink:
    """Return a sink that writes the rows of ACKED records into a Delta table.

    Each micro-batch is one commit with its number, as an application transaction, and a fingerprint
    of its rows. A repeated micro-batch finds them in the table and writes nothing. If the table has
    the number with other rows, for instance after a checkpoint was restored from a backup, the
    query ends with `CheckpointForeign`. The driver writes through deltalake, without Delta's jars,
    so that it works on every Spark.

    Parameters
    ----------
    path : path
        The path of the table, or a URI that deltalake accepts, such as ``s3://bucket/orders``. The
        table is created with the stream's columns if it does not exist when a query starts.
    keys : str or sequence of str, optional
        Columns that identify a row. A row with existing keys replaces the stream's columns of that
        row. The last of several such rows in a micro-batch is kept. A null key equals no other. The
        micro-batch must fit into the driver's memory. Without keys all rows are appended.
    storage_options : mapping, optional
        Options of the storage, secrets included, as deltalake takes them. They appear in no plan,
        log or checkpoint. Errors show only endpoint, region, bucket, container and account name,
        without a login.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or is empty.
    ImportError
        If deltalake is not installed: it comes with ``ackcore[delta]``.

    Notes
    -----
    A row with a null or another value that its column cannot store, with text that is not UTF-8 or
    is too long for ``char(n)``, ``varchar(n)`` or the name of a partition's directory, is refused:
    its record becomes a dead letter, and the other rows are written. If deltalake
    refuses a micro-batch for other reasons, such as a CHECK constraint, the query ends.
    """
    return DeltaSink(path, keys, storage_options)


def _deltalake() -> ModuleType:
    with naming_extra("to_delta()", "deltalake", "delta"):
        import deltalake  # noqa: PLC0415
        import deltalake.exceptions  # noqa: PLC0415
    return deltalake


@dataclass
class DeltaCommit:
    """The commit of a micro-batch, and the open table to which `DeltaSink.commit` writes it."""

    table: DeltaTable
    batch: SinkBatch
    columns: Any = None  # the columns to write
    properties: Any = None  # deltalake's properties of the commit, with the micro-batch's number


class DeltaSink(TransactionalSink[DeltaCommit]):
    """The sink that `to_delta` returns."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        keys: str | Sequence[str] | None,
        storage_options: Mapping[str, str] | None,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path must be a path or a URI, got {type(path).__name__}")
        self.path = os.fspath(path)
        if not self.path:
            raise ValueError("path must not be empty")
        check_delta_url(self.path)
        self.keys = named_keys(keys)
        self._options = texts_by_name("storage_options", storage_options)
        #: The table's name in errors.
        self._shown = f"table {bare(self.path)}"
        #: The schemas of the checked streams, by sink.
        self._schemas: dict[str, pa.Schema] = {}
        _deltalake()

    def __repr__(self) -> str:
        return f"to_delta({bare(self.path)!r})"

    def check(self, sink: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise TypeError if Spark or Delta lacks a type, or a key is nested.

        Also raises TypeError if two names differ only in case. Raises ValueError if the stream
        lacks a key, an existing table lacks a column or a struct field, or the stream lacks a NOT
        NULL field or, without keys, a NOT NULL column. Raises ValueError if a column cannot be cast
        to the table's, or if deltalake cannot write the table or, with keys, update it.
        Raises SinkUnavailable if the storage fails.
        """
        what = f"sink {sink!r}"
        check_keys(what, self.keys, schema)
        refuse_same_names(f"{what} writes into a Delta table", pa.struct(list(schema)))
        self._schemas[sink] = spark_schema(what, schema)
        for field in self._schemas[sink]:
            try:
                _deltalake().Schema.from_arrow(pa.schema([field]))
            except Exception as error:
                raise TypeError(
                    f"{what}: a Delta table has no type for {field.type} of column "
                    f"{field.name!r}; have the bolt emit another type"
                ) from error
        with self._as_unavailable(sink):
            is_there = _deltalake().DeltaTable.is_deltatable(self.path, self._options)
            table = self._open() if is_there else None
        if table is not None:
            self._columns_for(what, table, schema)
            with self._as_unavailable(sink):
                self._refuse_unwritable(what, table, schema)

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:
        """Create the table if it does not exist. Without a `check` of the sink, do nothing.

        Raises ValueError if another sink has created it since `check` with other columns,
        SinkUnavailable if the storage fails.
        """
        schema = self._schemas.get(sink)
        if schema is not None:
            with self._as_unavailable(sink):
                table = _deltalake().DeltaTable.create(
                    self.path, schema=schema, mode="ignore", storage_options=self._options
                )
            self._columns_for(f"sink {sink!r}", table, schema)

    @contextlib.contextmanager
    def begin(self, batch: SinkBatch) -> Iterator[DeltaCommit]:
        """Open the table, and yield a commit, which writes nothing before `commit`.

        Errors of the table's storage are raised as `SinkUnavailable`, also those of later writes.
        """
        with self._as_unavailable(batch.sink):
            yield DeltaCommit(self._open(), batch)

    def read_number(self, transaction: DeltaCommit, batch: SinkBatch) -> Written | None:
        """Return the number in the table's application transactions, or None without one.

        The content is that of ``batch`` if the transactions have its fingerprint, `ANY_CONTENT` if
        a user has set that, else ``"other rows"``.
        """
        application, table = _application(batch), transaction.table
        last = table.transaction_version(application)
        if last is None:
            return None
        fingerprint = table.transaction_version(_content_of(application))
        if fingerprint == _ANY_CONTENT:
            return Written(last, ANY_CONTENT)
        content = batch.content()
        return Written(
            last, content if fingerprint == _fingerprint(last, content) else "other rows"
        )

    def write_rows(self, transaction: DeltaCommit, batch: SinkBatch) -> None:
        """Check the rows, which `commit` will write.

        Raises SinkRejects if rows have nulls or values that the table's columns do not accept,
        ValueError if the table has changed and no longer fits the stream's columns.
        """
        what, table = f"sink {batch.sink!r}", transaction.table
        stream = batch.schema()
        transaction.columns = self._columns_for(what, table, stream)
        # deltalake cannot read statistics of dates outside of these years; of times it can.
        refuse_misfits(batch, transaction.columns, pa.types.is_date32)
        columns = pa.schema([of for of in transaction.columns if of.name in stream.names])
        parts = [of for of in columns if of.name in table.metadata().partition_columns]
        lengths = _length_checks(columns)
        refuse_values(
            batch, [*lengths, *_partition_checks(parts, self.keys, longest_name(self.path))]
        )

    def record(self, transaction: DeltaCommit, batch: SinkBatch, written: Written) -> None:
        """Add the number and the fingerprint to the properties of the commit."""
        application, number = _application(batch), written.number
        lake = _deltalake()
        # Without a time, a table with delta.setTransactionRetentionDuration forgets the number at
        # the next checkpoint of Spark, however long that duration is.
        now_ms = wall_clock_ms()
        content = _fingerprint(number, written.content)
        transaction.properties = lake.CommitProperties(
            custom_metadata={
                "ackcore": f"{application}/{number}",
                "userMetadata": f"ackcore {application}/{number} {written.content}",
            },
            # The fingerprint is a second transaction, because a table keeps transactions, but not
            # the metadata of commits, when its log is cleaned up.
            app_transactions=[
                lake.Transaction(application, number, now_ms),
                lake.Transaction(_content_of(application), content, now_ms),
            ],
        )

    def commit(self, transaction: DeltaCommit) -> None:
        """Write the rows and the number in one commit; none is made with keys and without rows.

        Raises ValueError if deltalake refuses the rows as a whole, for instance because of a CHECK
        constraint. The message does not contain values of rows. Raises
        deltalake.exceptions.CommitFailedError if another driver has set the number since the table
        was opened, or, with keys, if another writer has changed the table.
        """
        batch, columns = transaction.batch, transaction.columns
        with self._without_values(batch):
            if self.keys:
                self._merge(transaction)
            else:
                _deltalake().write_deltalake(
                    transaction.table,
                    pa.RecordBatchReader.from_batches(columns, _rows(batch, columns)),
                    mode="append",
                    commit_properties=transaction.properties,
                    writer_properties=_writer_properties(columns),
                )

    def _columns_for(self, what: str, table: DeltaTable, stream: pa.Schema) -> pa.Schema:
        """Return the table's columns to write; they may include columns that the stream lacks.

        Columns that Delta computes are left out of appended rows. Raises ValueError if the table
        lacks a column or a struct field of the stream, a column of the stream cannot be cast to the
        table's, or the stream lacks a NOT NULL struct field or, without keys, a NOT NULL column.
        ``what``: the beginning of the message.
        """
        columns = pa.schema(table.schema().to_arrow())
        require_columns(what, self._shown, stream.names, columns.names)
        for name, _ in lacking(pa.struct(list(stream)), pa.struct(list(columns))):
            raise ValueError(
                f"{what}: {self._shown} has no field {name!r}; add it (ALTER TABLE ... ADD "
                "COLUMN), or have the bolt emit no such field"
            )
        for field in columns:
            if field.name in stream.names:
                have = stream.field(field.name).type
                try:
                    has_wrong(pa.nulls(0, have), field.type, _cast)
                except pa.ArrowNotImplementedError:
                    raise uncastable(what, field.name, self._shown, field.type, have) from None
        if not self.keys:
            fields = table.schema().fields
            computed = {field.name for field in fields if _COMPUTED in field.metadata}
            computed -= set(stream.names)
            columns = pa.schema([field for field in columns if field.name not in computed])
        for name, field in lacking(pa.struct(list(columns)), pa.struct(list(stream))):
            is_column = name in columns.names and columns.field(name).equals(field)
            if field.nullable or (is_column and self.keys):
                continue  # rows that are there keep their columns
            quoted = _quoted(name) if is_column else name
            raise ValueError(
                f"{what}: column {name!r} of {self._shown} is NOT NULL, and the stream does not "
                "have it; have the bolt emit it, or make it nullable (ALTER TABLE ... ALTER COLUMN "
                f"{quoted} DROP NOT NULL)"
            )
        return columns

    def _refuse_unwritable(self, what: str, table: DeltaTable, stream: pa.Schema) -> None:
        """Raise ValueError if each write, or each update of an existing row, would fail.

        Also raises it if a column of the stream is a nested type with char or varchar in the table,
        or a binary column by which the table is partitioned: deltalake writes its values as
        escapes, and readers take these for the values. ``what``: the beginning of the message.
        """
        columns = pa.schema(table.schema().to_arrow())
        for name in table.metadata().partition_columns:
            if name in stream.names and pa.types.is_binary(columns.field(name).type):
                raise ValueError(
                    f"{what}: {self._shown} is partitioned by the binary column {name!r}, in which "
                    "readers would find other values; write into a table that is partitioned by "
                    "another column"
                )
        # If all columns are keys, new rows are added, and no row is updated.
        updates = bool(self.keys) and not set(stream.names) <= set(self.keys)
        if updates and table.metadata().configuration.get("delta.appendOnly") == "true":
            raise ValueError(
                f"{what}: keys update rows, and {self._shown} is append-only (delta.appendOnly); "
                "leave keys out, or allow updates (ALTER TABLE ... SET TBLPROPERTIES "
                "('delta.appendOnly' = 'false'))"
            )
        said = _error_without_rows(table)
        if needed := _FEATURES.search(said):
            features = ", ".join(sorted(map(_feature_name, needed[1].split(", "))))
            raise ValueError(
                f"{what}: deltalake cannot write {self._shown}, which needs the table features "
                f"{features}; write the table with Spark, in a function as sink, or create a table "
                "without them. Delta can drop some of them (ALTER TABLE ... DROP FEATURE)"
            )
        for field in columns:
            if field.name in stream.names and _spark_type(field) and not _limit(field):
                raise ValueError(
                    f"{what}: column {field.name!r} of {self._shown} is {_spark_type(field)}, and "
                    "ackcore checks lengths of texts only outside of nested types; change char and "
                    "varchar in it to string (ALTER TABLE ... ALTER COLUMN ... TYPE string), or "
                    "write the table with Spark, in a function as sink"
                )
        unknown = re.search(r"Invalid function '(\w+)'", said)
        for use, formula, way_out in _formulas(table):
            # Otherwise deltalake would take the pattern of a date for the date.
            if _DATE_FORMAT.search(formula) and "%" not in formula:
                why = "date_format has other patterns in deltalake than in Spark"
            elif unknown and re.search(rf"(?i)\b{unknown[1]}\s*\(", formula):
                why = f"deltalake has no function {unknown[1]}"
            else:
                continue
            raise ValueError(
                f"{what}: {self._shown} {use} by {formula}, and {why}; write the table with Spark, "
                f"in a function as sink, or {way_out}"
            )

    def _merge(self, commit: DeltaCommit) -> None:
        # Cast here, because deltalake does not cast to nested types with fewer nulls.
        batch = commit.batch
        schema = pa.schema([commit.columns.field(name) for name in batch.schema().names])
        rows = last_of_each_key(pa.Table.from_batches(_rows(batch, schema), schema), self.keys)
        if not len(rows):
            return
        same = " AND ".join(f"{_quoted(key, 't.')} = {_quoted(key, 's.')}" for key in self.keys)
        all_columns = {_quoted(name): _quoted(name, "s.") for name in schema.names}
        keys = {_quoted(key) for key in self.keys}
        others = {name: value for name, value in all_columns.items() if name not in keys}
        others |= _recomputed(commit.table, schema.names, self.keys)
        merger = commit.table.merge(
            *(rows, same, "s", "t"),
            commit_properties=commit.properties,
            writer_properties=_writer_properties(commit.columns),
        )
        if others:
            merger = merger.when_matched_update(others)
        merger.when_not_matched_insert(all_columns).execute()

    @contextlib.contextmanager
    def _without_values(self, batch: SinkBatch) -> Iterator[None]:
        """Raise ValueError, without values of rows, if deltalake refuses rows; pass on the rest."""
        exceptions = _deltalake().exceptions
        try:
            yield
        except (OSError, exceptions.CommitFailedError):
            raise
        except Exception as error:
            of_rows = _REFUSAL.search(str(error))
            if of_rows is None and not isinstance(error, exceptions.SchemaMismatchError):
                raise
            said = " ".join((str(error) if of_rows is None else of_rows[0]).split())
            raise ValueError(
                f"sink {batch.sink!r}: Delta {self._shown} refused micro-batch {batch.batch_id}, "
                f"and none of its rows are written: {said}. Another attempt would send the same "
                "rows, so change the table: drop the constraint that they violate (ALTER TABLE "
                "... DROP CONSTRAINT), or give the column the type of the stream's column and "
                "allow nulls in it"
            ) from None

    @contextlib.contextmanager
    def _as_unavailable(self, sink: str) -> Iterator[None]:
        """Raise errors of the storage as `SinkUnavailable`; pass on conflicts and schema errors."""
        exceptions = _deltalake().exceptions
        try:
            yield
        except (exceptions.CommitFailedError, exceptions.SchemaMismatchError):
            raise
        except (OSError, exceptions.DeltaError) as error:
            endpoints = [of for name, of in self._options.items() if _ENDPOINT.fullmatch(name)]
            where = f"Delta {self._shown}" + "".join(f" at {bare(each)}" for each in endpoints[:1])
            raise_unavailable(sink, where, error, self._secrets(), _WAY_OUT)

    def _secrets(self) -> list[str]:
        """Return the texts that errors must not show.

        They are the values of all options except endpoints and `_SHOWN`, and the logins and
        parameters in addresses.
        """
        seen = {name for name in self._options if _ENDPOINT.fullmatch(name) or _SHOWN.search(name)}
        hidden = [of for name, of in self._options.items() if name not in seen]
        addresses = [self.path, *(self._options[name] for name in seen)]
        return [*hidden, *chain.from_iterable(map(secrets_of, addresses))]

    def advice(self, batch: SinkBatch, last: int) -> str:
        """Return advice: the commit by which a user resets the number, or accepts any rows."""
        application, number = _application(batch), batch.batch_id
        return (
            f"restore the table to the version before micro-batch {number} (RESTORE TABLE); or "
            f"have micro-batches from {number} to {last} written again, in addition to their rows "
            "that are in the table, by a commit without rows: table = deltalake.DeltaTable(path); "
            "deltalake.write_deltalake(table, table.to_pyarrow_table().slice(0, 0), mode='append', "
            "commit_properties=deltalake.CommitProperties(app_transactions=[deltalake.Transaction("
            f"{application!r}, {number - 1})])). To count micro-batch {number} as written, with "
            f"any rows, commit [deltalake.Transaction({application!r}, {number}), "
            f"deltalake.Transaction({_content_of(application)!r}, {_ANY_CONTENT})]"
        )

    def _open(self) -> DeltaTable:
        table: DeltaTable = _deltalake().DeltaTable(self.path, storage_options=self._options)
        return table


def _application(batch: SinkBatch) -> str:
    return f"ackcore-{batch.deployment}-{batch.sink}"


def _feature_name(variant: str) -> str:
    """Return Delta's name of a table feature: ``clustering`` for deltalake's ``ClusteredTable``."""
    if variant == "ClusteredTable":
        return "clustering"
    name = re.sub(r'Unknown\("(.*)"\)', r"\1", variant)
    return name[:1].lower() + name[1:].replace("Preview", "-preview")


def _content_of(application: str) -> str:
    return f"{application}-content"


def _fingerprint(number: int, content: str) -> int:
    """Return a fingerprint of a micro-batch's number and content: 63 bits, never `_ANY_CONTENT`.

    The number is included because another Delta writer may set a number under ackcore's name, and
    leaves the fingerprint of the micro-batch before.
    """
    digest = blake2b(f"{number} {content}".encode(), digest_size=8, person=b"ackcore.delta")
    return (int.from_bytes(digest.digest(), "big") >> 1) or 1


def _writer_properties(columns: pa.Schema) -> Any:
    """Return properties without dictionaries for nested columns, or None if none is needed.

    They are needed for numbers in lists or maps. If all of them in a file are null, deltalake
    writes an empty dictionary, which Spark reads by index. deltalake has no setting for a column
    within a nested one.
    """
    is_ = pa.types
    if not any(
        has_type(kind, lambda one: is_list(one) or is_.is_map(one))
        and has_type(kind, lambda one: is_.is_primitive(one) or is_.is_decimal(one))
        for kind in columns.types
    ):
        return None
    lake = _deltalake()
    off, on = (lake.ColumnProperties(dictionary_enabled=one) for one in (False, True))
    flat = {field.name: on for field in columns if not is_.is_nested(field.type)}
    return lake.WriterProperties(
        compression="SNAPPY", default_column_properties=off, column_properties=flat
    )


def _length_checks(columns: pa.Schema) -> Iterator[Unfit]:
    """Yield a check for each column of char(n) or varchar(n), whose trailing spaces do not count.

    Delta stores such a column as text, and deltalake accepts texts of any length.
    """
    for field in columns:
        if limit := _limit(field):

            def is_longer(column: pa.Array, n: int = int(limit["n"])) -> pa.BooleanArray:
                return pc.greater(pc.utf8_length(pc.utf8_rtrim(column, " ")), n)

            why = f"the text of column {field.name!r} does not fit into {limit[0]}"
            yield field, is_longer, why


def _partition_checks(
    columns: Iterable[pa.Field], keys: Container[str], longest: int
) -> Iterator[Unfit]:
    """Yield the checks for values that the table's partition columns cannot store.

    Readers take an empty text for a null, so it is refused in keys and in columns without nulls.
    deltalake 1.6 commits ``0.-5`` for the decimal -0.05, and then nobody can read the table.
    ``longest``: the maximum number of bytes in the name of a partition's directory.
    """
    for field in columns:
        why = f"partition column {field.name!r} cannot store "
        if pa.types.is_decimal(field.type):
            yield field, _is_negative_fraction, f"{why}a negative decimal with a fraction"
            continue
        if is_text(field.type) and (field.name in keys or not field.nullable):
            yield field, lambda texts: pc.equal(pc.binary_length(texts), 0), f"{why}an empty text"
        if is_text(field.type) or pa.types.is_floating(field.type):
            most = longest - len(f"{field.name}=".encode())
            long = f"{why}a value that has more than {most} bytes in the name of a directory"
            yield field, partial(with_long_name, most=most, escape=_in_a_name), long


def _is_negative_fraction(column: pa.Array) -> pa.BooleanArray:
    # Arrow's floor and comparison with 0 fail for some precisions and scales.
    values = column.unique().drop_null().to_pylist()
    bad = [one for one in values if one < 0 and one != one.to_integral_value()]
    return pc.is_in(column, pa.array(bad, column.type))


def _in_a_name(value: str | float) -> str:
    """Return a value as deltalake has it in the name of a directory; a float with all digits."""
    return quote(value, safe="") if isinstance(value, str) else f"{Decimal(repr(value)):f}"


def _limit(field: pa.Field) -> re.Match[str] | None:
    """Return the parts ``kind`` and ``n`` of Spark's char(n) or varchar(n); None if not either."""
    return re.fullmatch(r"(?i)(?P<kind>(var)?char)\((?P<n>\d+)\)", _spark_type(field))


def _spark_type(field: pa.Field) -> str:
    """Return Spark's type of a column in which a type is char or varchar, else an empty text."""
    return ((field.metadata or {}).get(b"__CHAR_VARCHAR_TYPE_STRING") or b"").decode()


def _quoted(column: str, of: str = "") -> str:
    """Return a column's name, quoted for a Delta expression, after a prefix such as ``"t."``."""
    return f"{of}`{column.replace('`', '``')}`"


def _error_without_rows(table: DeltaTable) -> str:
    """Return deltalake's error about a merge of no rows, which commits nothing; "" without one.

    deltalake checks the table's features and expressions, as before each write.
    """
    rows = pa.schema(table.schema().to_arrow()).empty_table()
    try:
        merger = table.merge(rows, "false", source_alias="s", target_alias="t")
        merger.when_not_matched_insert_all().execute()
    except _deltalake().exceptions.DeltaError as error:
        return str(error)
    return ""


def _formulas(table: DeltaTable) -> Iterator[tuple[str, str, str]]:
    """Yield three texts for an error about each computed column and each constraint.

    They are its use, such as ``checks constraint 'x'``, its expression, and advice to the user.
    """
    for field in table.schema().fields:
        if _COMPUTED in field.metadata:
            use, formula = f"computes column {field.name!r}", str(field.metadata[_COMPUTED])
            yield use, formula, "create a table that does not, and have the bolt emit the column"
    for key, formula in table.metadata().configuration.items():
        if key.startswith(_CONSTRAINT):
            name = key.removeprefix(_CONSTRAINT)
            way_out = f"drop the constraint (ALTER TABLE ... DROP CONSTRAINT {name})"
            yield f"checks constraint {name!r}", formula, way_out


def _recomputed(table: DeltaTable, stream: Container[str], keys: Container[str]) -> dict[str, str]:
    """Return the expressions of computed columns that an update of a row changes, by quoted name.

    deltalake computes such a column for a new row only. If an update left its value, deltalake
    would refuse the row. It checks the new value, too, so that no other value gets into the table.

    ``stream``: the columns of the rows. ``keys``: those that an update does not change.
    """
    fields = table.schema().fields
    of = {field.name: "s." if field.name in stream else "t." for field in fields}
    found = {}
    for field in fields:
        formula = field.metadata.get(_COMPUTED)
        if formula is None or field.name in stream:
            continue
        changed = False

        def qualified(match: re.Match[str]) -> str:
            nonlocal changed
            name = match["word"] or (match["quoted"] or "").replace("``", "`")
            if name not in of:
                return match[0]
            changed |= name in stream and name not in keys
            return _quoted(name, of[name])

        expression = _NAMES.sub(qualified, str(formula))
        if changed:
            found[_quoted(field.name)] = expression
    return found


def _cast(column: pa.Array, kind: pa.DataType) -> npt.NDArray[np.bool_]:
    """Cast a column, as a test for `has_wrong`: raise ArrowNotImplementedError if no value can be.

    Arrow casts empty nested columns without a look at the types within.
    """
    cast_column(column, kind)
    return np.zeros(len(column), np.bool_)


def _rows(batch: SinkBatch, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows with the table's columns; columns that the stream lacks are null."""
    for rows in batch.record_batches():
        arrays = [
            _as_spark(cast_column(rows.column(field.name), field.type), field)
            if field.name in rows.schema.names
            else pa.nulls(len(rows), field.type)
            for field in columns
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=columns)


def _as_spark(column: pa.Array, field: pa.Field) -> pa.Array:
    """Return texts as Spark writes them into a column of char(n) or varchar(n); others unchanged.

    Spark cuts trailing spaces behind the limit, and fills char(n) with spaces.
    """
    limit = _limit(field)
    if limit is None:
        return column
    cut = pc.utf8_slice_codeunits(column, 0, int(limit["n"]))
    return cut if limit["kind"].lower() == "varchar" else pc.utf8_rpad(cut, int(limit["n"]))
