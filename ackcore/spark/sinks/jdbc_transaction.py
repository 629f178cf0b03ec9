"""The transaction that writes a micro-batch into a table of a JDBC database.

1. The driver locks the sink's row in the marker table, writes the name of a new staging table into
   it, and drops the staging table that was named there before.
2. Tasks fill the staging table. Each row has a unique number, so a task that runs again after its
   commit violates the unique index, and the attempt fails.
3. One transaction locks the sink's row and checks that it still names this staging table; if not,
   another driver has begun. The transaction moves the rows into the table and writes the
   micro-batch's number.

The statements are UPDATE with subqueries and INSERT from a query. They keep columns that the
stream does not have, and they delete no row to which a foreign key refers.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import LongType, TimestampType

from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.base.versions import JOB_ERRORS
from ackcore.spark.sinks.columns import refuse_misfits, require_columns
from ackcore.spark.sinks.jdbc_connection import JdbcConnection, JdbcError
from ackcore.spark.sinks.rejects import OF_OTHERS, check_refused
from ackcore.spark.sinks.sink import Written
from ackcore.spark.sinks.sink_batch import SinkBatch

_log = logging.getLogger("ackcore")

_ROW = "ackcore_row"
#: The condition for a sink's row of the marker table.
OF_SINK = " WHERE deployment = ? AND sink = ? AND target = ?"
#: A number above those of all rows.
_LAST = 1 << 62
#: The SQLSTATE class of values that do not fit; the number of failed parts, or of rows for which
#: triggers raised errors, after which the search ends if no row was written.
_UNFIT, _HOPELESS = "22", 40
#: SQLSTATEs of a null in a NOT NULL column; some databases have one for all violated constraints.
_OF_NULL = ("23502", "23000")
_PART = r"""(?:"[^"]+"|`[^`]+`|\[[^\]]+\]|[^\s."`\[\];,()']+)"""
_NAME = re.compile(rf"((?:{_PART}\.)*){_PART}")
#: Statements of different databases that create an empty table with some columns of another.
_COPIES = (
    "CREATE TABLE {0} AS SELECT {1} FROM {2} WITH NO DATA",
    "CREATE TABLE {0} AS (SELECT {1} FROM {2}) WITH NO DATA",
    "CREATE TABLE {0} AS SELECT {1} FROM {2} WHERE 1 = 0",
    "SELECT {1} INTO {0} FROM {2} WHERE 1 = 0",
)


class Names(NamedTuple):
    """The names of a sink's table, of its marker table and of the schema of both, in SQL."""

    table: str  # the table to write
    marker: str  # the marker table
    schema: str  # the prefix of both: the schema with its dot, or ""


def table_names(table: str, marker: str) -> Names:
    """Return the names of a sink's tables for the arguments ``table`` and ``marker``.

    The marker table gets the schema of ``table``, unless ``marker`` names one. Raises ValueError if
    an argument is not a table's name.
    """
    found = _NAME.fullmatch(table)
    for argument, value in (("table", table), ("marker", marker)):
        if not _NAME.fullmatch(value):
            raise ValueError(
                f"{argument} must be the name of a table, such as 'orders' or 'shop.orders', got "
                f"{value!r}; put parts with other characters in the database's quotes"
            )
    assert found is not None
    return Names(table, marker if "." in marker else found[1] + marker, found[1])


def match_columns(
    what: str, table: str, names: Sequence[str], columns: Sequence[str]
) -> dict[str, str]:
    """Return for each of the stream's columns the name of the table's column.

    If no column has the exact name, one that differs only in case is taken, if it is the only one.
    Raises ValueError if the table lacks a column. ``names``, ``columns``: the columns of the stream
    and of the table.
    """
    found = {}
    for name in names:
        same = [column for column in columns if column.lower() == name.lower()]
        if name in columns or len(same) == 1:
            found[name] = name if name in columns else same[0]
    missing = [name for name in names if name not in found]
    require_columns(what, f"table {table}", missing, columns)
    return found


class JdbcTransaction:
    """The transaction that writes one micro-batch over one connection.

    Call `read_number`, `write_rows` and `mark`, commit the connection and, in any case, `end`.
    """

    def __init__(
        self, connection: JdbcConnection, names: Names, keys: Sequence[str], batch: SinkBatch
    ) -> None:
        self.connection, self._names, self._keys = connection, names, keys
        self._batch = batch
        self._of = (batch.deployment, batch.sink[:128], names.table[:128])
        said = blake2b(repr(self._of).encode(), digest_size=5).hexdigest()
        # At most 30 characters, the limit of older databases.
        self._bare = f"ackcore_{said}_{secrets.token_hex(4)}"
        self._staging = names.schema + connection.quoted(self._bare)
        #: The staging table that the sink's row named when it was last read.
        self._named: str | None = None
        self._is_staging = False  # whether the marker table names the staging table of this attempt
        self._any_moved = False  # whether any row is in the table
        self._aside = 0  # the number of staged rows that `_put_aside` has put aside
        #: The columns that the stream does not have; True if the column is NOT NULL.
        self._others: dict[str, bool] = {}
        where = f"sink {batch.sink!r}, table {names.table},"
        self._check = partial(check_refused, where, batch.batch_id, JdbcError.without_values)

    def write_rows(self) -> None:
        """Fill a staging table, and move its rows to the table without a commit of the move.

        Commits the name and the rows of the staging table, and drops the staging table of an
        earlier attempt. With keys, rows of the table with the same key are updated, and of several
        rows with one key the last one counts. Raises SinkRejects for rows that do not fit or that
        the database refuses, and TooManyRefused if they are too many. Raises CheckpointInUse if
        another driver has begun to write, and ValueError if the table lacks a column. Raises
        JdbcError for other errors of the database.
        """
        columns = self.connection.columns(self._names.table)
        what = f"sink {self._batch.sink!r}"
        own = match_columns(what, self._names.table, self._batch.schema().names, list(columns))
        self._others = {
            name: needed for name, needed in columns.items() if name not in own.values()
        }
        self.mark("staging = ?", self._bare)
        self.connection.commit()
        self._is_staging = True
        if self._named is not None:
            self._drop(self._names.schema + self.connection.quoted(self._named))
        self._move(self._fill(own))

    def end(self) -> None:
        """Roll back, drop the staging table, and delete its name from the marker table.

        Does nothing if this attempt has named no staging table. An error is logged.
        """
        if not self._is_staging:
            return
        try:
            self.connection.rollback()
            self._drop(self._staging)
            self.connection.execute(
                f"UPDATE {self._names.marker} SET staging = NULL{OF_SINK} AND staging = ?",
                *self._of,
                self._bare,
            )
            self.connection.commit()
        except JdbcError as error:
            _log.warning(
                "staging table %s could not be dropped now: %s. The next micro-batch drops it",
                self._staging, error,
            )  # fmt: skip

    def read_number(self) -> Written:
        """Lock the sink's row of the marker table; return its number, -1 at first, and content.

        Also reads the name of the staging table in it. Raises JdbcError if the row was deleted.
        """
        self.mark("sink = sink")
        found = self.connection.row(
            f"SELECT batch_id, content, staging FROM {self._names.marker}{OF_SINK}", *self._of
        )
        if found is None:
            raise JdbcError(
                f"the row of sink {self._batch.sink!r} in {self._names.marker} was deleted while "
                "the query ran; start the query again, which inserts the row"
            )
        self._named = found[2]
        return Written(int(found[0] or 0), found[1] or "")

    def mark(self, sets: str, *values: str | int) -> None:
        """Update the sink's row of the marker table. Nothing happens if the row was deleted.

        ``sets``: assignments in SQL, with one ``?`` for each of ``values``.
        """
        self.connection.execute(
            f"UPDATE {self._names.marker} SET {sets}{OF_SINK}", *values, *self._of
        )

    def _fill(self, own: dict[str, str]) -> dict[str, str]:
        """Fill the staging table; return the table's quoted column for each of the stream's.

        Raises SinkRejects for rows with text that is not UTF-8, in which Java would replace
        characters, and for rows with a value that does not fit its column. ``own``: the table's
        column for each of the stream's.
        """
        columns = [field.with_nullable(True) for field in self._batch.schema()]
        refuse_misfits(self._batch, pa.schema(columns), lambda kind: False)
        wanted = {name: self.connection.quoted(column) for name, column in own.items()}
        self._make_staging(list(wanted.values()))
        rows, skipped = _in_jvms_zone(self._batch.frame(_ROW).toDF(*own.values(), _ROW))
        try:
            error = self._try_fill(rows)
        except JdbcError as failed:
            if not failed.sqlstate:
                # If the search fails too, the first error describes the outage.
                with contextlib.suppress(*JOB_ERRORS):
                    self._refuse_skipped(skipped)
            raise
        if error is not None:
            self._refuse_skipped(skipped)
            self._refuse_unfit(rows, error)
        return wanted

    def _refuse_skipped(self, skipped: DataFrame | None) -> None:
        """Raise `SinkRejects` if there are rows in the second frame of `_in_jvms_zone`."""
        found = [] if skipped is None else skipped.collect()
        if found:
            said = (
                f"column {name!r} has a time that the time zone of Spark's JVM, {zone}, skips; run "
                "the JVM of driver and executors with -Duser.timezone=UTC"
                for _, name, zone in found
            )
            raise self._batch.refuse([row[0] for row in found], list(said))

    def _try_fill(self, rows: DataFrame) -> JdbcError | None:
        """Fill the staging table; return None, or the error if a value does not fit its column.

        Other errors are raised.
        """
        try:
            self.connection.fill(self._staging, rows)
        except JdbcError as error:
            if not error.sqlstate.startswith(_UNFIT):
                raise
            return error
        return None

    def _refuse_unfit(self, rows: DataFrame, error: JdbcError) -> None:
        """Fill the staging table with ever smaller parts, and raise `SinkRejects`.

        It names the rows that do not fit alone. ``error``: the error of all rows together. It is
        raised if the first 40 parts all fail, or if no single row fails.
        """
        numbers = self._batch.all_numbers()
        refused: dict[int, JdbcError] = {}
        tried, any_written = 0, False
        parts = [(0, len(numbers), error)]
        while parts:
            low, high, why = parts.pop()
            if high - low == 1:
                refused[int(numbers[low])] = why
                self._check(refused, 0)
                continue
            middle = (low + high) // 2
            for start, stop in ((middle, high), (low, middle)):
                self.connection.execute(f"DELETE FROM {self._staging}")
                self.connection.commit()
                within = sql.col(_ROW).between(*numbers[[start, stop - 1]].tolist())
                found = self._try_fill(rows.where(within))
                if found is not None:
                    parts.append((start, stop, found))
                tried, any_written = tried + 1, any_written or found is None
            if not any_written and tried >= _HOPELESS:
                raise error  # perhaps the column has the wrong type: no row is at fault
        if not refused:
            raise error
        raise self._batch.refuse(list(refused), list(refused.values()))

    def _make_staging(self, columns: list[str]) -> None:
        """Create the staging table with some columns of the table, and a unique row number.

        First rolls back what is not committed, and at the end commits.
        """
        connection, row = self.connection, self.connection.quoted(_ROW)
        connection.rollback()
        for number, copy in enumerate(_COPIES):
            try:
                connection.execute(
                    copy.format(self._staging, ", ".join(columns), self._names.table)
                )
                break
            except JdbcError:
                connection.rollback()
                if number + 1 == len(_COPIES):
                    raise
        connection.execute(
            f"ALTER TABLE {self._staging} ADD {row} {connection.type_of(LongType())}"
        )
        index = connection.quoted(f"{self._bare[:-1]}r")
        connection.execute(f"CREATE UNIQUE INDEX {index} ON {self._staging} ({row})")
        connection.commit()

    def _move(self, wanted: dict[str, str]) -> None:
        """Move the rows from the staging table into the table.

        Raises CheckpointInUse if the marker table names the staging table of another driver.
        """
        number = self._batch.batch_id
        keys = [wanted[key] for key in self._keys]
        if keys:
            self._index(keys)
        self.read_number()
        if self._named != self._bare:
            raise CheckpointInUse(
                f"another driver has begun to write micro-batch {number} of sink "
                f"{self._batch.sink!r} into table {self._names.table}; this one writes nothing. "
                "Let the other driver run, or stop it and start this query again"
            )
        check_fence()
        if keys:
            self._put_aside(keys)
        self._move_all(wanted, keys)

    def _index(self, keys: Sequence[str]) -> None:
        """Create an index on the staged rows' keys, and commit; do nothing if that fails."""
        row = self.connection.quoted(_ROW)
        index = self.connection.quoted(f"{self._bare[:-1]}k")
        # Only for speed: not all types can be indexed.
        try:
            self.connection.execute(
                f"CREATE INDEX {index} ON {self._staging} ({', '.join([*keys, row])})"
            )
            self.connection.commit()
        except JdbcError:
            self.connection.rollback()

    def _put_aside(self, keys: Sequence[str]) -> None:
        """Make the numbers of all staged rows negative, except the last row of each key.

        Row n gets the number -1 - n. Rows with negative numbers are not moved.
        """
        row = self.connection.quoted(_ROW)
        # DISTINCT: otherwise MySQL merges the subquery into the UPDATE and refuses the result.
        self._aside = self.connection.execute(
            f"UPDATE {self._staging} SET {row} = -1 - {row} WHERE {row} IN (SELECT d.{row} FROM"
            f" (SELECT DISTINCT a.{row} FROM {self._staging} a, {self._staging} b"
            f" WHERE {_equal('a', 'b', keys)} AND b.{row} > a.{row}) d)"
        )

    def _earlier(self, number: int, keys: Sequence[str]) -> int | None:
        """Delete a staged row that is refused; return the number of the row in its place.

        That is the last row with its key that was put aside. If there is none, return None and
        delete nothing.
        """
        if not self._aside:
            return None
        row, stage = self.connection.quoted(_ROW), self._staging
        (found,) = self.connection.row(
            f"SELECT MIN(b.{row}) FROM {stage} a, {stage} b WHERE {_equal('a', 'b', keys)}"
            f" AND a.{row} = ? AND b.{row} < 0",
            number,
        ) or [None]
        if found is None:
            return None
        self._aside -= 1
        earlier = -1 - int(found)
        self.connection.execute(f"DELETE FROM {stage} WHERE {row} = ?", number)
        self.connection.execute(
            f"UPDATE {stage} SET {row} = ? WHERE {row} = ?", earlier, int(found)
        )
        return earlier

    def _move_all(self, wanted: dict[str, str], keys: list[str]) -> None:
        """Move the staged rows into the table.

        Raises SinkRejects if the database refuses rows, which are found by bisection. Raises the
        database's error if no row could be moved and one was refused for a null, perhaps in a
        column that the stream lacks, or several for errors that triggers raise, perhaps over all.
        """
        error = self._try_move(wanted, keys, 0, _LAST)
        if error is None:
            return
        numbers = self._batch.all_numbers()
        refused: dict[int, JdbcError] = {}
        raised = 0
        pending: list[tuple[int, int, JdbcError | None]] = [(0, len(numbers), error)]
        of_others: set[int] = set()  # refused rows to try again after others
        alone: set[int] = set()  # refused rows without an earlier row that may take their place
        is_progress = False  # whether a row was moved since `of_others` was tried again

        def try_earlier(number: int) -> None:
            earlier = self._earlier(number, keys)
            if earlier is None:
                alone.add(number)
            else:
                of_others.discard(number)
                at = int(np.searchsorted(numbers, earlier))
                pending.append((at, at + 1, None))

        while pending:
            start, stop, why = pending.pop()
            why = why or self._try_move(wanted, keys, *numbers[[start, stop - 1]].tolist())
            is_progress = is_progress or why is None
            if why is not None and stop - start == 1:
                number = int(numbers[start])
                refused[number] = why
                raised += why.is_raised
                if raised >= _HOPELESS and not self._any_moved:
                    raise error
                if why.sqlstate in OF_OTHERS:
                    of_others.add(number)
                else:
                    try_earlier(number)
                self._check(refused, len(of_others))
            elif why is not None:
                middle = (start + stop) // 2
                pending += [(middle, stop, None), (start, middle, None)]
            if not pending:
                if is_progress:
                    self._move_again(wanted, keys, of_others, refused)
                    is_progress = False
                for number in sorted(of_others - alone):
                    try_earlier(number)
        if not refused:
            return
        self._check(refused, 0)
        of_null = any(why.sqlstate in _OF_NULL for why in refused.values())
        of_null = of_null and any(self._others.values())
        if not self._any_moved and (of_null or (raised and len(refused) > 1)):
            raise error  # perhaps the table is at fault, and no row
        self.connection.rollback()
        raise self._batch.refuse(list(refused), list(refused.values()))

    def _move_again(
        self,
        wanted: dict[str, str],
        keys: list[str],
        of_others: set[int],
        refused: dict[int, JdbcError],
    ) -> None:
        """Move refused rows that may depend on other rows again, as long as one is moved.

        A row may refer to a row behind it, which was not moved when this one was refused.
        ``of_others``: the numbers of the rows to move. Moved rows are removed from it and from
        ``refused``.
        """
        is_progress = True
        while is_progress:
            is_progress = False
            # The last row first: if each row refers to the next one, one pass moves all.
            for number in sorted(of_others, reverse=True):
                if self._try_move(wanted, keys, number, number) is None:
                    of_others.remove(number)
                    del refused[number]
                    is_progress = True

    def _try_move(
        self, wanted: dict[str, str], keys: list[str], first: int, last: int
    ) -> JdbcError | None:
        """Move rows ``first`` to ``last``; if one is refused, move none and return the error.

        Returns None if the rows were moved. Raises other errors, and without savepoints all.
        """
        saved = self.connection.save() if self.connection.can_save else None
        try:
            moved = self._move_some(list(wanted.values()), keys, first, last)
        except JdbcError as error:
            if saved is None or not error.is_of_row:
                raise
            try:
                self.connection.rollback(saved)
            except JdbcError as lost:
                if lost.sqlstate.startswith("08"):  # the connection is lost
                    raise
                # The error has ended the transaction, as SQL Server's THROW in a trigger does.
                raise error from None
            return error
        self._any_moved = self._any_moved or moved > 0
        return None

    def _move_some(self, columns: list[str], keys: list[str], first: int, last: int) -> int:
        """Update the rows with existing keys, and insert the others; return the number of both."""
        table, stage = self._names.table, self._staging
        row = self.connection.quoted(_ROW)
        within = f"s.{row} >= ? AND s.{row} <= ?"
        missing, moved = "", 0
        if keys:
            same = f"{_equal('s', table, keys)} AND s.{row} >= 0"
            sets = [
                f"{column} = (SELECT s.{column} FROM {stage} s WHERE {same})"
                for column in columns
                if column not in keys
            ]
            if sets:
                moved = self.connection.execute(
                    f"UPDATE {table} SET {', '.join(sets)}"
                    f" WHERE EXISTS (SELECT 1 FROM {stage} s WHERE {same} AND {within})",
                    first,
                    last,
                )
            missing = f" AND NOT EXISTS (SELECT 1 FROM {table} WHERE {same})"
        return moved + self.connection.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT"
            f" {', '.join(f's.{column}' for column in columns)} FROM {stage} s"
            f" WHERE {within}{missing}",
            first,
            last,
        )

    def _drop(self, table: str) -> None:
        """Drop a staging table and commit; do nothing if it does not exist.

        Raises JdbcError if the table still exists.
        """
        connection = self.connection
        try:
            connection.execute(f"DROP TABLE {table}")
            connection.commit()
        except JdbcError as error:
            connection.rollback()
            try:
                connection.columns(table)
            except JdbcError:
                connection.rollback()
                return
            raise error  # the table exists; its name must stay recorded


def _equal(one: str, other: str, keys: Sequence[str]) -> str:
    """Return the condition in SQL that the keys of two tables are equal."""
    return " AND ".join(f"{one}.{key} = {other}.{key}" for key in keys)


def _in_jvms_zone(rows: DataFrame) -> tuple[DataFrame, DataFrame | None]:
    """Return rows with instants in place of times without a zone, and the rows without an instant.

    JDBC reads an instant in the time zone of the executor's JVM, and gets the same time. For most
    databases Spark would take a time without a zone for one in UTC.

    A zone skips some times, as at the start of summer. Reading a row with such a time from the
    first frame fails. The second frame has number, column and zone of these rows. It is None if no
    column has times without a zone.
    """
    local = [one.name for one in rows.schema if one.dataType.typeName() == "timestamp_ntz"]
    if not local:
        return rows, None
    # The session's time zone has no part in these functions.
    zone = sql.expr("reflect('java.time.ZoneId', 'systemDefault')")
    columns = {name: sql.col("`" + name.replace("`", "``") + "`") for name in rows.columns}
    why = []
    for name in local:
        in_utc = sql.concat(columns[name].cast("string"), sql.lit("Z")).cast(TimestampType())
        instant = sql.to_utc_timestamp(in_utc, zone)
        is_skipped = sql.from_utc_timestamp(instant, zone) != in_utc
        error = sql.raise_error(sql.lit("the time zone of the JVM skips a time"))
        columns[name] = sql.when(is_skipped, error).otherwise(instant).alias(name)
        why.append(sql.when(is_skipped, sql.lit(name)))
    found = rows.select(_ROW, sql.coalesce(*why).alias("why"), zone.alias("zone"))
    return rows.select(*columns.values()), found.where("why IS NOT NULL")
