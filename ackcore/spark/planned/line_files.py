"""JSON and CSV files in memory: their rows, and the lines that cannot be read, each as a row."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import with_fields
from ackcore.spark.base.schemas import with_corrupt
from ackcore.topology.tuples import MESSAGE_CHARS

#: The most rows of a batch, and the bytes that are parsed at once, unless one record has more.
ROWS, BLOCK_BYTES = 10_000, 1 << 24
#: A place in Arrow's errors. It counts from the first record that was parsed, not from the file's.
_PLACE = re.compile(r" in row \d+|Row #\d+: ")
#: A column in Arrow's errors, by its number.
_COLUMN = re.compile(r"In (?:CSV )?column #?(\d+): (?:Invalid: )?")


@dataclass
class LineFile(ABC):
    """A JSON or CSV file in memory; `rows` also returns the lines that cannot be read."""

    content: pa.Buffer
    name: str  # for messages
    schema: pa.Schema  # the columns to read
    #: Returns a parsed batch in these columns; raises ValueError for a value they do not allow.
    fitted: Callable[[pa.RecordBatch], pa.RecordBatch]

    def __post_init__(self) -> None:
        #: The columns in the order in which Arrow's errors count them.
        self.names: list[str] = self.schema.names
        #: The place of the first record, and a place with the number of its line.
        self._first, self._counted = 0, (0, 1)

    @abstractmethod
    def _parsed(self, records: pa.Buffer, block_bytes: int) -> pa.Table:
        """Return the rows of whole records. Raises ValueError or ArrowInvalid if one is damaged."""

    @abstractmethod
    def _ends(self) -> Iterator[int]:
        """Yield the index of the byte after each record."""

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all records in order, in the columns of `with_corrupt`; damaged ones as text."""
        found = self._batches(self._first, len(self.content))
        if not isinstance(found, Exception):
            yield from found
            return
        places = [self._first, *self._ends()]
        rows = self._divided(places, 0, len(places) - 1)
        for are_damaged, some in groupby(rows, lambda one: isinstance(one, tuple)):
            if not are_damaged:
                yield from some
            while are_damaged and (part := [*islice(some, ROWS)]):
                texts, reasons = zip(*part, strict=True)
                nothing = [pa.nulls(len(part), one.type) for one in self.schema]
                yield self._batch([*nothing, pa.array(texts), pa.array(reasons)])

    def _divided(
        self, places: Sequence[int], low: int, high: int
    ) -> Iterator[pa.RecordBatch | tuple[str, str]]:
        """Yield the rows of the records ``low`` to ``high - 1``; of a damaged one, text and error.

        Record i is between ``places[i]`` and ``places[i + 1]``. Halves the records until each
        damaged one is alone.
        """
        found = self._batches(places[low], places[high], high - low == 1)
        if not isinstance(found, Exception):
            yield from found
        elif high - low > 1:
            middle = (low + high) // 2
            yield from self._divided(places, low, middle)
            yield from self._divided(places, middle, high)
        else:
            text = self._bytes(places[low], places[high]).strip(b"\r\n")
            place, line = self._counted
            line += self._bytes(place, places[low]).count(b"\n")
            self._counted = places[low], line
            said = self._explained(_PLACE.sub("", str(found).partition("\n")[0]), text)
            # Readers of dead letters need valid UTF-8.
            yield (
                text.decode("utf-8", "backslashreplace"),
                f"line {line} of {self.name} cannot be read: {said}"[:MESSAGE_CHARS],
            )

    def _explained(self, said: str, record: bytes) -> str:
        """Return Arrow's error ``said`` about a record, with the column's name for its number."""
        return _COLUMN.sub(lambda found: f"column {self.names[int(found[1])]}: ", said)

    def _batches(
        self, start: int, stop: int, is_one: bool = False
    ) -> list[pa.RecordBatch] | Exception:
        """Return the rows of the records between two places, or the error if any is damaged."""
        if start == stop:
            return []
        records = self.content.slice(start, stop - start)
        try:
            # Arrow allocates a block even for a line.
            block = len(records) if is_one else min(len(records), BLOCK_BYTES)
            table = self._parsed(records, block)
            good = [self.fitted(one) for one in table.to_batches(ROWS)]
            for one in good:
                one.validate(full=True)  # Arrow does not look for UTF-8 in JSON
        except ValueError as error:  # not Arrow's errors about the schema
            return error
        texts = [pa.nulls(len(one), pa.string()) for one in good]
        return [self._batch([*one.columns, no, no]) for one, no in zip(good, texts, strict=True)]

    def _bytes(self, start: int, stop: int) -> bytes:
        return bytes(self.content.slice(start, stop - start))

    def _batch(self, columns: list[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(columns, schema=with_corrupt(self.schema))


def overflows(was: pa.Array, now: pa.Array) -> bool:
    """Return whether a number, perhaps as text, became infinite in another type."""
    infinite = pc.is_inf(now) if pa.types.is_floating(now.type) else None
    if infinite is None or not pc.any(infinite).as_py():
        return False
    texts = was.filter(infinite).cast(pa.string())
    return not pc.all(pc.match_substring(texts, "inf", ignore_case=True)).as_py()


#: Lines that are null, which is no object. Arrow ends the process if such a line is the first of a
#: block (pyarrow 26). Two patterns, because a search is fast if its pattern begins with a literal.
_NULL_AT_FIRST, _NULL = re.compile(rb"(?:\xef\xbb\xbf)?\s*null"), re.compile(rb"\n\s*null")
#: Arrow's errors about a value: one has the column, the other one the column's type and the value.
_OTHER_KIND = re.compile(r"JSON parse error: Column\((?:/(.+))?\) changed from \w+ to (\w+)")
_NOT_CONVERTED = re.compile(r"Failed to convert JSON to (.+?)(?:, couldn't parse:|: )(.+)")
_NOT_PARSED = re.compile(r"Failed to parse string: '(.*)' as a scalar of type (.+)")


class JsonLines(LineFile):
    """A file with a JSON object in each line."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Arrow's error about a null in another column names none: `fitted` finds these nulls. It
        # casts texts to dates: Arrow reads dates in JSON as numbers of days. It casts float64 to
        # float32: Arrow reads a number too large for float32 as infinity.
        kinds = zip(self.schema.names, self.schema.types, strict=True)
        self._nullable = pa.schema([(name, _in_json(name, kind)) for name, kind in kinds])

    def _parsed(self, records: pa.Buffer, block_bytes: int) -> pa.Table:
        from pyarrow import json as arrow_json  # noqa: PLC0415 - loaded where it is needed

        lines = memoryview(records)
        if _NULL_AT_FIRST.match(lines) or _NULL.search(lines):
            raise ValueError("the line must be a JSON object, got null")
        options = arrow_json.ParseOptions(
            explicit_schema=self._nullable, unexpected_field_behavior="ignore"
        )
        block = arrow_json.ReadOptions(block_size=block_bytes)
        return arrow_json.read_json(pa.BufferReader(records), block, options)

    def _explained(self, said: str, record: bytes) -> str:
        """Return an error about a record with column, type and value, or else Arrow's error."""
        kind, value = _OTHER_KIND.fullmatch(said), _NOT_CONVERTED.fullmatch(said)
        if (date := _NOT_PARSED.fullmatch(said)) is not None:
            value = _NOT_CONVERTED.fullmatch(f"Failed to convert JSON to {date[2]}: {date[1]}")
        if kind is not None and kind[1] is None:
            return f"the line must be a JSON object, got {kind[2]}"
        if kind is not None or value is not None:
            try:
                values = json.loads(record)
                for one in self.schema:
                    given = values.get(one.name)
                    if (kind is not None and f"{kind[1]}/".startswith(f"{one.name}/")) or (
                        value is not None and value.groups() == (str(one.type), str(given))
                    ):
                        text = json.dumps(given, ensure_ascii=False)[:200]
                        text = text.encode("utf-8", "backslashreplace").decode()
                        return f"column {one.name} must be {one.type}, got {text}"
            except (ValueError, RecursionError):
                pass  # the record has another error, behind the one that Arrow reports
        return super()._explained(said, record)

    def _ends(self) -> Iterator[int]:
        found = [one.end() for one in re.finditer(rb"\n", memoryview(self.content))]
        yield from found
        if not found or found[-1] < len(self.content):
            yield len(self.content)


def _in_json(name: str, kind: pa.DataType) -> pa.DataType:
    """Return the type to parse: text in place of dates, float64 in place of float32, at any depth.

    Raises NotImplementedError for times of day and maps.
    """
    is_ = pa.types
    if is_.is_time(kind) or is_.is_map(kind):
        raise NotImplementedError(f"column {name!r} has {kind}, which cannot be read from JSON")
    if is_.is_date(kind):
        return pa.string()
    if is_.is_float32(kind):
        return pa.float64()
    return with_fields(kind, lambda field: field.with_type(_in_json(name, field.type)))


#: The empty lines before a header.
_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?[\r\n]+")
_FIELD = rb'(?:"[^"]*(?:""[^"]*)*"?)?[^,\r\n]*'
#: A record of CSV with the end of its line: fields without quotes, or with quotes at their start.
_RECORD = re.compile(_FIELD + rb"(?:," + _FIELD + rb")*(?:\r\n?|\n|\Z)")

#: The text before a quote that is not closed: values in quotes, and other text and quotes.
_CLOSED = re.compile(rb'(?:[^"]++|(?<![^,\r\n])"[^"]*+(?:""[^"]*+)*+"[^,\r\n]*+|(?<=[^,\r\n])")*+')


class CsvFile(LineFile):
    """A CSV file with a header. Values within quotes may have ends of lines.

    The constructor raises ValueError if it finds no header. ``names``: the columns in the header.
    """

    def __post_init__(self) -> None:
        from pyarrow import csv  # noqa: PLC0415 - loaded where it is needed

        super().__post_init__()
        text = memoryview(self.content)
        blank = _BLANK.match(text)
        self._first = 0 if blank is None else blank.end()
        if self._first == len(self.content):
            raise ValueError("the file has no header: its first line must name the columns")
        self._first = next(self._ends())
        header = pa.BufferReader(self._bytes(0, self._first) + b"\n")  # it may be the last line
        self.names = csv.read_csv(header).column_names
        pieces = (text[at : at + BLOCK_BYTES] for at in range(0, len(text), BLOCK_BYTES))
        quotes = sum(np.count_nonzero(np.frombuffer(one, np.uint8) == ord('"')) for one in pieces)
        closed = _CLOSED.match(text) if quotes % 2 else None
        #: The address of a quote that is not closed, or of the end.
        size = len(self.content) if closed is None else closed.end()
        self._open = self.content.address + size

    def _parsed(
        self, records: pa.Buffer, block_bytes: int, columns: pa.Schema | None = None
    ) -> pa.Table:
        from pyarrow import csv  # noqa: PLC0415

        if records.address + len(records) > self._open:
            raise ValueError("a quote is not closed")  # Arrow takes the rest of the file
        columns = columns or self.schema
        table = csv.read_csv(
            pa.BufferReader(records),
            csv.ReadOptions(block_size=block_bytes, column_names=self.names),
            csv.ParseOptions(newlines_in_values=True),
            csv.ConvertOptions(
                column_types=columns,
                include_columns=columns.names,
                include_missing_columns=True,
                null_values=[""],  # not Arrow's list, with NA and null
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        for one, numbers in zip(columns, table.columns, strict=True):
            if pa.types.is_floating(one.type) and pc.any(pc.is_inf(numbers)).as_py():
                text = pa.schema([one.with_type(pa.string())])
                if overflows(self._parsed(records, block_bytes, text)[0], numbers):
                    raise ValueError(f"column {one.name} has a number too large for {one.type}")
        return table

    def _ends(self) -> Iterator[int]:
        place = self._first
        while place < len(self.content):
            found = _RECORD.match(memoryview(self.content), place)
            assert found is not None  # it matches any text
            place = found.end()
            yield place
