"""Checks that a stream's keys, columns and values fit the columns of a sink's table."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException

from ackcore._arrow.record_batches import cast_column, has_type, is_list, is_text, with_fields
from ackcore._arrow.shown import far_places, invalid_text, unfit_rows
from ackcore._records import Int64s
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.versions import from_arrow_schema, to_arrow_schema
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.sinks.sink_batch import SinkBatch

_ROW = "_ackcore_row"


_Write = TypeVar("_Write", bound=Callable[..., Any])
#: Returns whether a type is of a certain kind.
_IsType = Callable[[pa.DataType], bool]


def named_keys(keys: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return a sink's argument ``keys`` as a tuple of names; an empty tuple for None.

    Raises TypeError if a key is not a str, ValueError if ``keys`` is given but empty.
    """
    named = [keys] if isinstance(keys, str) else list(keys or ())
    if not all(isinstance(key, str) for key in named):
        raise TypeError(f"keys must be names of columns, got {keys!r}")
    if keys is not None and not named:
        raise ValueError("keys must name at least one column; omit it to append all rows")
    return tuple(named)


def texts_by_name(argument: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """Return a mapping of str to str as a new dict, {} for None; raise TypeError for all else."""
    must = f"{argument} must be a mapping of str to str, got"
    if not isinstance(given, Mapping | None):
        raise TypeError(f"{must} {type(given).__name__}")
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"{must} {type(value).__name__} for {name!r} ({type(name).__name__})")
    return dict(given or {})


def check_keys(what: str, keys: Sequence[str], schema: pa.Schema) -> None:
    """Raise ValueError if a key is no column of the stream, TypeError if its type is nested.

    ``what``: the beginning of the message, such as ``sink 'counts'``.
    """
    for key in keys:
        if key not in schema.names:
            raise ValueError(
                f"{what}: keys must be among the stream's columns {', '.join(schema.names)}, got "
                f"{key!r}"
            )
        if pa.types.is_nested(schema.field(key).type):
            raise TypeError(
                f"{what}: the key column {key!r} must not be nested, and it is "
                f"{schema.field(key).type}; have the bolt emit a text or a number"
            )


def require_columns(what: str, table: str, wanted: Sequence[str], has: Sequence[str]) -> None:
    """Raise ValueError if a table lacks one of the stream's columns.

    ``wanted``, ``has``: the names of the stream's columns and of the table's columns; their case
    matters. ``what``, ``table``: the beginning of the message, and the table's name in it.
    """
    for name in wanted:
        if name not in has:
            raise ValueError(
                f"{what}: {table} has no column {name!r}, it has {', '.join(has)}; add it "
                f'(ALTER TABLE ... ADD COLUMN "{name}" ...), or have the bolt emit no such column'
            )


def uncastable(what: str, column: str, table: str, there: object, have: object) -> ValueError:
    """Return the error about a column whose type cannot be cast to that of the table's column.

    ``what``, ``table``: as in `require_columns`. ``there``, ``have``: the table's and the stream's
    type.
    """
    return ValueError(
        f"{what}: column {column!r} of {table} is {there}, and no {have} can be cast to that; have "
        f"the bolt emit {there}, or change the table's column"
    )


def refuse_same_names(
    what: str, kind: pa.DataType, case_sensitive: bool | None = None, within: str = ""
) -> None:
    """Raise TypeError if two fields of one struct have names that are equal apart from their case.

    Structs in its fields, also in lists and maps, are checked, too.

    ``what``: the beginning of the message, which names the sink and its target. ``kind``: the
    stream's columns as a struct. ``case_sensitive``: Spark's setting; with True, nothing is
    checked; None if the target ignores the setting. ``within``: the outer field's name with a dot.
    """
    if case_sensitive:
        return
    seen: dict[str, str] = {}
    for field in (kind.field(at) for at in range(kind.num_fields)):
        other, name = seen.get(field.name.lower()), f"{within}{field.name}"
        if other is not None:
            more = "" if case_sensitive is None else "; or set spark.sql.caseSensitive to true"
            raise TypeError(
                f"{what}, which does not distinguish the {'fields' if within else 'columns'} "
                f"{other!r} and {name!r}; rename one of them in the bolt, or for guard() in the "
                f"frame or in outputs{more}"
            )
        seen[field.name.lower()] = name
        refuse_same_names(what, field.type, case_sensitive, f"{name}.")


def lacking(
    wanted: pa.DataType, has: pa.DataType, within: str = ""
) -> Iterator[tuple[str, pa.Field]]:
    """Yield dotted name and field of each struct field that ``wanted`` has and ``has`` lacks.

    Structs in structs, maps and lists are compared, too. Types of other values are not.
    """
    is_ = pa.types
    if is_.is_struct(wanted) and is_.is_struct(has):
        for field in wanted:
            inner = f"{within}{field.name}"
            at = has.get_field_index(field.name)
            if at < 0:
                yield inner, field
            else:
                yield from lacking(field.type, has.field(at).type, f"{inner}.")
    elif is_.is_map(wanted) and is_.is_map(has):
        yield from lacking(wanted.key_type, has.key_type, f"{within}key.")
        yield from lacking(wanted.item_type, has.item_type, f"{within}value.")
    elif is_list(wanted) and is_list(has):
        yield from lacking(wanted.value_type, has.value_type, f"{within}element.")


def spark_schema(what: str, schema: pa.Schema) -> pa.Schema:
    """Return a stream's schema after conversion to Spark's types and back to Arrow's.

    Raises TypeError if Spark has no type for a column. ``what``: the beginning of the message.
    """
    fields: list[pa.Field] = []
    for field in schema:
        try:
            fields += to_arrow_schema(from_arrow_schema(pa.schema([field])))
        except PySparkException:
            raise TypeError(
                f"{what}: Spark has no type for {field.type} of column {field.name!r}; have the "
                "bolt emit another type"
            ) from None
    return pa.schema(fields)


def last_of_each_key(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the last row of each key, and all rows with a null in a key column, in their order."""
    last = _numbered_keys(rows, keys).group_by(list(keys)).aggregate([(_ROW, "max")])[f"{_ROW}_max"]
    keep = np.zeros(len(rows), np.bool_)
    keep[last.to_numpy()] = True
    for key in keys:
        keep |= rows[key].is_null().to_numpy()
    return rows.filter(pa.array(keep))


def rows_without(rows: pa.Table, keys: pa.Table) -> pa.Array:
    """Return a mask, True for rows whose keys are not among ``keys``. A null equals no value.

    All columns of ``keys`` are key columns, which ``rows`` has, too, perhaps with wider types.
    """
    names = keys.column_names
    rows = rows.select(names)
    those = _numbered_keys(keys.cast(rows.schema), names).select(names)
    others = _numbered_keys(rows, names).join(those, names, join_type="left anti")[_ROW]
    found = np.zeros(len(rows), np.bool_)
    found[others.to_numpy()] = True
    return pa.array(found)


def _numbered_keys(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the key columns, and each row's index as a last column; equal floats get equal bytes.

    Arrow distinguishes -0.0 from 0.0 in keys, and one NaN from another. Databases do not.
    """
    found = rows.select(list(keys))
    for at, field in enumerate(found.schema):
        if pa.types.is_floating(field.type):
            plain = pc.add(found[at], pa.scalar(0.0, field.type))
            nan = pa.scalar(math.nan, field.type)
            found = found.set_column(at, field, pc.if_else(pc.is_nan(plain), nan, plain))
    return found.append_column(_ROW, pa.array(np.arange(len(rows))))


def refuse_misfits(batch: SinkBatch, columns: pa.Schema, is_limited: _IsType) -> None:
    """Raise `SinkRejects` for rows with values that the table's columns cannot take.

    Such values are nulls where the table's column, list or map allows none, and text that is not
    UTF-8. So are values that a cast to the column's type would change; floats may be rounded. Rows
    are read only if a column may have such values.

    ``columns``: the table's columns. Columns that the stream does not have are ignored.
    ``is_limited``: returns True for a type of dates or times whose values the table takes only from
    the years 1 to 9999.
    """
    stream = batch.schema()
    fields = [
        field
        for field in columns
        if field.name in stream.names
        and not (
            field.nullable
            and field.type == stream.field(field.name).type
            and not has_type(field.type, is_text)
            and not has_type(field.type, is_limited)
        )
    ]
    refused: list[npt.NDArray[np.int64]] = []
    reasons: list[pa.Array] = []
    for rows, numbers in batch.numbered() if fields else ():
        why = _misfits(rows, fields, is_limited)
        refused.append(numbers[why.is_valid().to_numpy(False)])
        reasons.append(why.drop_null())
    if sum(map(len, reasons)):
        raise batch.refuse(np.concatenate(refused), pa.chunked_array(reasons, pa.string()))


#: A column with the type to cast to, a function that returns which values are unfit, the reason.
Unfit: TypeAlias = tuple[pa.Field, Callable[[pa.Array], pa.BooleanArray], str]


def refuse_values(batch: SinkBatch, checks: Sequence[Unfit]) -> None:
    """Raise `SinkRejects` for rows of which a value is unfit. Without checks, no row is read."""
    refused: list[Int64s] = []
    reasons: list[str] = []
    for rows, numbers in batch.numbered() if checks else ():
        for field, is_unfit, why in checks:
            column = cast_column(rows.column(field.name), field.type)
            found = is_unfit(column).fill_null(False).to_numpy(False)
            refused.append(numbers[found])
            reasons += [why] * len(refused[-1])
    if reasons:
        raise batch.refuse(np.concatenate(refused), reasons)


def with_long_name(column: pa.Array, most: int, escape: Callable[[Any], str]) -> pa.BooleanArray:
    """Return which values have more than ``most`` bytes in the name of a partition's directory.

    False for nulls.

    ``column``: texts, bytes or floats. ``escape``: returns the text of a value in such a name: at
    most 4 n + 8 bytes for a value of n bytes.
    """
    some = column.drop_null().unique()
    if not pa.types.is_floating(column.type):
        some = some.filter(pc.greater(pc.binary_length(some), most // 4 - 2))
    long = [value for value in some.to_pylist() if len(escape(value)) > most]
    return pc.is_in(column, pa.array(long, column.type))


def longest_name(location: str) -> int:
    """Return the maximum number of bytes in the name of a partition's directory.

    A file system limits each name to 255 bytes. A bucket limits the whole key.

    ``location``: the path or URL of the directory with the partitions.
    """
    scheme, has_scheme, path = location.partition("://")
    if not has_scheme or scheme in ("file", "hdfs", "viewfs"):
        return 255
    # A store limits the whole key; 90 bytes are for the rest: the name of a file, and hashes.
    return 1024 - len(quote(path.partition("/")[2])) - 90


def with_spark_times(kind: pa.DataType) -> pa.DataType:
    """Return a type with dates of 32 bits and times in microseconds, as Spark has, at any depth."""
    is_ = pa.types
    if is_.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if is_.is_duration(kind):
        return pa.duration("us")
    if is_.is_date64(kind):
        return pa.date32()
    return with_fields(kind, lambda field: field.with_type(with_spark_times(field.type)))


def refusing_unfit_times(write: _Write) -> _Write:
    """Decorate a method that casts times to Spark's types; its last argument is a `SinkBatch`.

    If it raises, and the cast would change times of some rows, `SinkRejects` with these rows is
    raised instead. A `StateError` or `SinkRejects` is raised unchanged.
    """

    @functools.wraps(write)
    def checked(*args: Any) -> Any:
        try:
            return write(*args)
        except (StateError, SinkRejects):
            raise
        except Exception:
            fields = [one.with_type(with_spark_times(one.type)) for one in args[-1].schema()]
            fields = [one for one in fields if has_type(one.type, pa.types.is_temporal)]
            refuse_misfits(args[-1], pa.schema(fields), lambda kind: False)
            raise

    return cast(_Write, checked)


def _misfits(
    rows: pa.RecordBatch, fields: Sequence[pa.Field], is_limited: _IsType
) -> pa.StringArray:
    """Return for each row the first reason why it is refused, or null if its values fit.

    ``fields``: the table's columns to check, in the order of the reasons. ``is_limited``: as in
    `refuse_misfits`.
    """

    def is_far(column: pa.Array, kind: pa.DataType) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(column), np.bool_)
        if is_limited(column.type):
            found[far_places(column)[0]] = True
        return found

    why = pa.nulls(len(rows), pa.string())

    def note(which: npt.NDArray[np.bool_] | pa.Array, said: str) -> None:
        nonlocal why
        text = pa.scalar(said, pa.string())
        why = pc.coalesce(why, pc.if_else(pa.array(which), text, pa.scalar(None, pa.string())))

    for field in fields:
        name = f"column {field.name!r}"
        column, wrong = rows.column(field.name), np.zeros(len(rows), np.bool_)
        if (far := has_wrong(column, column.type, is_far)).any():
            note(far, f"{name} cannot store a date or time outside of years 1 to 9999")
        if len(places := invalid_text(column)):
            note(np.isin(np.arange(len(rows)), places), f"the text of {name} is not UTF-8")
        if not field.nullable and column.null_count:
            note(column.is_null(), f"{name} must not be null")
        for at in unfit_rows(column, functools.partial(_is_castable, kind=field.type)):
            wrong[at] = True
        fits = ~wrong
        wrong[fits] = has_wrong(column.filter(pa.array(fits)), field.type, _changed_by_cast)
        if wrong.any():
            note(wrong, f"the value of {name} does not fit into {field.type}")
        inside = has_wrong(column, field.type, None)
        if inside.any():
            note(inside, f"the value of {name} has a null where {field.type} takes none")
    return why


#: Returns which values of a column without nested types are wrong for a type.
_IsWrong = Callable[[pa.Array, pa.DataType], npt.NDArray[np.bool_]]


def has_wrong(
    column: pa.Array, kind: pa.DataType, is_wrong: _IsWrong | None
) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that are wrong, or in which a nested value is wrong.

    ``kind``: the type of the table's column. ``is_wrong``: the test of values that are not nested.
    With None, a value is wrong if a list or map in it has a null that ``kind`` does not allow. A
    null is never wrong itself.
    """
    is_, have = pa.types, column.type
    if is_.is_fixed_size_list(have):
        return has_wrong(column.cast(pa.list_(have.value_field)), kind, is_wrong)
    found = np.zeros(len(column), np.bool_)
    if is_.is_struct(have) and is_.is_struct(kind):
        for field in kind:
            if have.get_field_index(field.name) >= 0:
                part = pc.struct_field(column, field.name)  # null where the struct is
                found |= has_wrong(part, field.type, is_wrong)
    elif is_.is_map(have) and is_.is_map(kind):
        found = _any_has_wrong(column, column.items, kind.item_field, is_wrong)
        found |= _any_has_wrong(column, column.keys, kind.key_field, is_wrong)
    elif is_list(have) and is_list(kind):
        found = _any_has_wrong(column, column.values, kind.value_field, is_wrong)
    else:
        return found if is_wrong is None else is_wrong(column, kind)
    valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(False)
    return found & valid


def _any_has_wrong(
    column: pa.Array, values: pa.Array, field: pa.Field, is_wrong: _IsWrong | None
) -> npt.NDArray[np.bool_]:
    bad = has_wrong(values, field.type, is_wrong)
    if is_wrong is None and not field.nullable:
        bad |= values.is_null().to_numpy(False)
    before = np.concatenate(([0], np.cumsum(bad)))[column.offsets.to_numpy()]
    found: npt.NDArray[np.bool_] = before[1:] > before[:-1]
    return found


def _changed_by_cast(column: pa.Array, kind: pa.DataType) -> npt.NDArray[np.bool_]:
    """Return a mask of the numbers and times that Arrow's cast would change without an error.

    A float may be rounded to fewer bits, but must not become infinite.
    """
    is_, have = pa.types, column.type
    tests = (is_.is_boolean, is_.is_integer, is_.is_floating, is_.is_decimal, is_.is_temporal)
    if have == kind or not all(any(test(each) for test in tests) for each in (have, kind)):
        return np.zeros(len(column), np.bool_)
    try:
        cast = column.cast(kind, safe=False)
        if is_.is_floating(kind):
            infinite = pc.is_inf(column) if is_.is_floating(have) else pa.scalar(False)
            wrong = pc.and_(pc.is_inf(cast), pc.invert(infinite))
        else:
            wrong = pc.not_equal(cast.cast(have, safe=False), column)
    except pa.ArrowNotImplementedError:
        return np.zeros(len(column), np.bool_)  # no row is at fault
    found: npt.NDArray[np.bool_] = wrong.fill_null(False).to_numpy(False)
    return found


def _is_castable(column: pa.Array, kind: pa.DataType) -> bool:
    try:
        cast_column(column, kind)
    except pa.ArrowNotImplementedError:
        return True  # no row is at fault
    except pa.ArrowInvalid:
        return False
    return True
