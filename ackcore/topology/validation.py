"""The checks of a topology, which find all problems, so that the user can correct them together.

Functions yield the text of each problem. A consequence of another problem is not reported: for a
reader of an undeclared component, no missing stream is reported.
"""

from __future__ import annotations

import difflib
import graphlib
import inspect
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import pyarrow as pa

from ackcore._arrow.record_batches import has_type
from ackcore._error_hints import listed, near_miss, nearest, refused_call, signature_of
from ackcore.calls import RateLimit, Reject
from ackcore.calls.call_queues import FairQueues
from ackcore.calls.usage import CallCounts
from ackcore.tables.table_shape import TableShape
from ackcore.topology import dedup
from ackcore.topology.bolt_calls import call_settings, journaled
from ackcore.topology.components import (
    DEFAULT_STREAM,
    AsyncBolt,
    BasicBolt,
    BatchBolt,
    Bolt,
    Component,
)
from ackcore.topology.expectations import StreamCheck, checks_of
from ackcore.topology.failure_reasons import exception_classes
from ackcore.topology.parts import BoltSpec, DeclaredTable, Input, Parts, SinkSpec, Spout
from ackcore.topology.settings import MAX_PARALLELISM
from ackcore.topology.sql_conditions import spark_types, supported_type
from ackcore.topology.table_views import (
    CHANGES,
    CLOSED,
    UPSERTS,
    ClosedWindows,
    change_streams,
    closed_streams,
)

#: The prefix of ackcore's own columns.
RESERVED = "_ackcore_"
MAX_NAME = 64
#: The columns that identify a Kafka record.
KAFKA_ID = ("topic", "partition", "offset")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


#: The base classes of bolts, each with the method that a subclass must define. A bolt has the first
#: of these bases that it derives from.
_BASES: tuple[tuple[type[Component], str], ...] = (
    (BatchBolt, "process"),
    (BasicBolt, "execute"),
    (AsyncBolt, "execute"),
    (Bolt, "execute"),
)


class Declared(NamedTuple):
    """The components and tables of a topology as declared; several may have the same name."""

    spouts: Sequence[Spout]
    bolts: Sequence[BoltSpec]
    sinks: Sequence[SinkSpec]
    tables: Sequence[DeclaredTable]


def problems(
    declared: Declared, closed: Sequence[Spout], broken: set[str], reject: Sequence[type[Exception]]
) -> Iterator[str]:
    """Yield the problems of a topology.

    Other functions find those of expectations, of the keys, values and windows of tables, and of
    the sinks of changes and closed windows.

    ``closed``: the spouts of closed windows. ``broken``: the names of the bolts whose ``outputs``
    have a problem, so that their streams are unknown. ``reject``: the setting of this name.
    """
    yield from _names(declared)
    spouts, bolts, sinks, tables = declared
    yield from _directories(sinks)
    names = [table.name for table in tables]
    for bolt in bolts:
        yield from _uses(bolt, names)
        yield from _budget(bolt)
    changes = {f"{name}{end}" for name in names for end in (CHANGES, CLOSED)}
    for name in (*(spout.name for spout in spouts), *(bolt.name for bolt in bolts)):
        if name in changes:
            yield (
                f"component {name!r} must have another name, because rows of table "
                f"{name.rpartition('.')[0]!r} are read under this one; rename it"
            )
    sinks = [sink for sink in sinks if sink.component not in changes]
    for spout in spouts:
        yield from _spout(spout)
        yield from dedup.problems(spout, [*(bolt.name for bolt in bolts), *names])
    for bolt in bolts:
        yield from _bolt(bolt)
        wrong = list(_exception_lists(bolt))
        yield from wrong or (*_contradictions(bolt, reject), *_calls(bolt))
    yield from _shared(bolts)
    times = Counter([*(spout.name for spout in spouts), *(bolt.name for bolt in bolts)])
    broken = broken | {name for name in times if times[name] > 1}
    # The closed windows of a table with a problem that is reported elsewhere.
    unknown = {f"{table.name}{CLOSED}" for table in tables if table.window is not None}
    unknown -= {spout.name for spout in closed}
    find = _finder([*spouts, *closed], bolts, broken | unknown, tables)
    for bolt in bolts:
        for each in bolt.inputs:
            found = find(f"bolt {bolt.name!r}", each.component, each.stream)
            if isinstance(found, str):
                yield found
            yield from _grouping(bolt, each, None if isinstance(found, str) else found)
    readers: list[tuple[str, SinkSpec | DeclaredTable]]
    readers = [*(("sink", sink) for sink in sinks), *(("table", table) for table in tables)]
    for kind, reader in readers:
        found = find(f"{kind} {reader.name!r}", reader.component, reader.stream)
        if isinstance(found, str):
            yield found
    untyped = {spout.name for spout in spouts if spout.kind is None} - broken
    for table in tables:
        if table.component in untyped:
            yield (
                f"table {table.name!r} reads spout {table.component!r}, whose columns have no "
                "declared types, because its source is a DataFrame; let a bolt read the spout, "
                "and the table that bolt"
            )
    yield from _unread(declared._replace(sinks=sinks))
    yield from _cycle([bolt for bolt in bolts if bolt.name not in broken], tables)


#: The fields of a stream, with their types; None for the unknown types of a DataFrame.
_Fields = Mapping[str, pa.DataType | None]


def _names(declared: Declared) -> Iterator[str]:
    spouts, bolts, sinks, tables = declared
    if not spouts:
        yield "the topology has no spout; declare one with .spout(name, source)"
    components = [("spout", spout.name) for spout in spouts]
    components += [("bolt", bolt.name) for bolt in bolts]
    components += [("table", table.name) for table in tables]
    for kind, name in (*components, *(("sink", sink.name) for sink in sinks)):
        yield from _name(kind, name)
    what = "components and tables" if tables else "components"
    for name in (table.name for table in tables if table.name.endswith((CHANGES, CLOSED))):
        yield (
            f"table {name!r} must not end in {CHANGES!r} or {CLOSED!r}: these are the ends of the "
            "names under which the rows of tables are read; rename it"
        )
    yield from _twice(what, components, "rename all but one")
    named = [("sink", sink.name) for sink in sinks]
    yield from _twice("sinks", named, "set another name with name=")
    own = {sink.name for sink in sinks if sink.component != sink.name}
    for name in sorted(own & {table.name for table in tables}):
        yield f"a sink and a table are named {name!r}; set another name of the sink with name="


def _directories(sinks: Sequence[SinkSpec]) -> Iterator[str]:
    """Yield a problem for two sinks that would overwrite each other's files in one directory."""
    first: dict[str, str] = {}
    for sink in sinks:
        path = getattr(sink.writer, "own_place", None)
        if isinstance(path, str) and first.setdefault(path, sink.name) != sink.name:
            yield (
                f"sinks {first[path]!r} and {sink.name!r} must have different directories, got "
                f"{path!r} for both, where each would replace the micro-batches of the other; "
                "give each its own, or let one bolt read both streams and one sink read that bolt"
            )


def _name(what: str, name: str) -> Iterator[str]:
    if name.lower().startswith(RESERVED):
        yield (
            f"{what} {name!r} must not begin with {RESERVED!r}, which is reserved for ackcore; "
            "rename it"
        )
    elif not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        usable = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
        usable = (usable if re.match(r"[A-Za-z_]", usable) else f"_{usable}")[:MAX_NAME]
        got = f"got {len(name)} characters" if len(name) > MAX_NAME else f"got {name!r}"
        yield (
            f"the name of {what} {name!r} must be 1 to {MAX_NAME} letters, digits, '_', '.' or "
            f"'-', the first a letter or '_', since files are named after it; {got}"
            + (f": {usable!r} would do" if name else "")
        )


def _twice(what: str, named: Sequence[tuple[str, str]], way_out: str) -> Iterator[str]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for kind, name in named:
        groups.setdefault(name.lower(), []).append((kind, name))
    for group in groups.values():
        if len(group) == 1:
            continue
        names = sorted({name for _, name in group})
        if len(names) > 1:
            yield (
                f"{what} {' and '.join(map(repr, names))} differ only in case, and Spark's "
                "columns and some file systems ignore case; rename one"
            )
        else:
            kinds = ", ".join(f"a {kind}" for kind, _ in group)
            yield f"{len(group)} {what} are named {names[0]!r} ({kinds}); {way_out}"


def _spout(spout: Spout) -> Iterator[str]:
    subject = f"spout {spout.name!r}"
    yield from _field_names(f"the source of {subject}", spout.fields, "drop or rename one")
    given = {"message_id": spout.message_id, "ordered_by": spout.ordered_by}
    if spout.dedup is not None:
        given["dedup"] = spout.dedup.columns
        given["event_time"] = () if spout.dedup.event_time is None else (spout.dedup.event_time,)
    for argument, columns in given.items():
        if len(set(columns)) < len(columns) and argument != "ordered_by":
            yield f"{argument} of {subject} must name a column once, got {listed(columns)}"
        for column in dict.fromkeys(columns):
            if column not in spout.fields:
                yield (
                    f"{argument} of {subject} names {column!r}, which its source does not have; "
                    f"{near_miss(column, spout.fields, 'columns')}"
                )
    if spout.ordered_by and not spout.tracked:
        yield (
            f"{subject} is ordered_by {listed(spout.ordered_by)} but untracked, and "
            "untracked records never wait for a retry; remove ordered_by or tracked=False"
        )
    if spout.unique and not spout.message_id:
        yield (
            f"unique=True of {subject} applies to message ids, and message_id is not set; "
            "name their columns in message_id, or remove unique"
        )
    if spout.group is None:
        return
    if spout.kind is not None:
        yield (
            f"commit_group of {subject} is for Spark's own Kafka source, got a "
            f"{type(spout.source).__name__}; set the group_id of a KafkaSpout instead"
        )
    elif lacks := [column for column in KAFKA_ID if column not in spout.fields]:
        yield (
            f"commit_group of {subject} needs the offset columns of Spark's Kafka source, "
            f"and its source lacks {listed(lacks)}; keep these columns"
        )
    if not spout.tracked:
        yield (
            f"commit_group of {subject} commits the offsets of tracked records, and the "
            "spout is untracked; remove tracked=False"
        )


def _bolt(bolt: BoltSpec) -> Iterator[str]:
    subject = f"bolt {bolt.name!r}"
    if not bolt.inputs:
        yield (
            f"{subject} reads nothing; give it an input, "
            f"such as .bolt({bolt.name!r}, ...).shuffle(<component>)"
        )
    if bolt.parallelism is not None and not 1 <= bolt.parallelism <= MAX_PARALLELISM:
        yield (
            f"parallelism of {subject} must be in 1..{MAX_PARALLELISM}, got "
            f"{bolt.parallelism}; omit it for the default"
        )
    seen = set()
    for each in bolt.inputs:
        if (each.component, each.stream) in seen:
            yield (
                f"{subject} reads {_stream_title(each.component, each.stream)} twice; a bolt can "
                "read a stream by one grouping only; remove one of them"
            )
        seen.add((each.component, each.stream))
    named = [("stream", stream) for stream in bolt.schemas]
    yield from _twice(f"streams of {subject},", named, "rename all but one")
    for stream, schema in bolt.schemas.items():
        yield from _name(f"stream of {subject},", stream)
        words = _stream_title(bolt.name, stream)
        yield from _field_names(words, schema.names, "rename one in outputs")
        for field in schema:
            wrong = _unsendable(field.type)
            if wrong is not None:
                yield (
                    f"field {field.name!r} of {words} must have a type whose rows can be "
                    f"sent one by one, got {wrong}; declare the type of the values, such as "
                    "string: emitted values are cast to it"
                )
    try:
        if bolt.component.journal is not False:
            journaled(bolt.component)
    except TypeError as error:
        yield f"bolt {bolt.name!r}: {error}"
    yield from _methods(bolt)
    yield from _misspelt(bolt)


def _exception_lists(bolt: BoltSpec) -> Iterator[str]:
    """Yield a problem if a bolt's `reject` or `retry_on` has the wrong type or a wrong item."""
    for name in ("reject", "retry_on"):
        given = getattr(bolt.component, name)
        try:
            if given is not None or name == "reject":
                exception_classes(given, f"{name} of bolt {bolt.name!r}")
        except (TypeError, ValueError) as error:
            yield str(error)


def _contradictions(bolt: BoltSpec, reject: Sequence[type[Exception]]) -> Iterator[str]:
    """Yield a problem for each exception in a bolt's `retry_on` that is never retried."""
    never: list[type[Exception]] = [Reject, *reject]
    never += exception_classes(bolt.component.reject, "reject")
    for kind in exception_classes(bolt.component.retry_on or (), "retry_on"):
        rejected = next((one for one in never if issubclass(kind, one)), None)
        if rejected is not None:
            what = "" if kind is rejected else f" as {rejected.__name__}"
            yield (
                f"retry_on of bolt {bolt.name!r} must not contain rejected exceptions, got "
                f"{kind.__name__}, which reject contains{what}; remove it from one of them"
            )


def _calls(bolt: BoltSpec) -> Iterator[str]:
    """Yield the problem of the settings of a bolt's calls, if there is one."""
    component = bolt.component
    if isinstance(component, BatchBolt):
        return
    try:
        settings = call_settings(component)
        if settings is not None:
            # Check the object that a setting makes here, not in a task.
            FairQueues(settings, 1, time.monotonic_ns, CallCounts(), lambda at_ns: None)
    except (TypeError, ValueError) as error:
        yield f"bolt {bolt.name!r}: {error}"


def _methods(bolt: BoltSpec) -> Iterator[str]:
    """Yield the problems of a bolt's methods.

    A problem is a missing method, one with a wrong signature, or a generator or coroutine function
    by mistake. Such a method would be called in vain or not at all.
    """
    component, made = bolt.component, type(bolt.component).__name__
    base, work = next(one for one in _BASES if isinstance(component, one[0]))
    has_many = isinstance(component, AsyncBolt) and component.max_batch != 1
    if has_many:
        base, work = AsyncBolt, "execute_many"
    kind = f"{'an' if base is AsyncBolt else 'a'} {base.__name__}"
    for method in (work, "flush", "prepare", "cleanup"):
        if not hasattr(base, method):
            continue
        arguments = tuple(signature_of(getattr(base, method)).parameters)[1:]
        function: Any = getattr(component, method)
        own = ("self",) if inspect.ismethod(function) else ()
        function = function.__func__ if own else function
        subject = f"bolt {bolt.name!r}: {made}.{method}"
        if method == work and function is getattr(base, method):
            has = "none"
            other, whose = "process", "a BatchBolt's"
            if base is BatchBolt:
                other, whose = "execute", "a Bolt's or a BasicBolt's"
            if hasattr(component, other):
                has = f"{other}, which is {whose}; rename it or derive from that class"
            elif has_many:
                kind = f"{kind} with max_batch={component.max_batch!r}"  # type: ignore[attr-defined]
                if _defines(component, "execute"):
                    has = "execute, which is for max_batch=1; rename it, or remove max_batch"
            elif _defines(component, "execute_many"):
                has = "execute_many, which is called if max_batch is above 1; set max_batch = 64"
            yield (
                f"bolt {bolt.name!r} must have a method {method}"
                f"({', '.join(('self', *arguments))}), because it is {kind}, and {made} has {has}"
            )
        elif not callable(function):
            yield f"{subject} must be a method, got {type(function).__name__}"
        elif (takes := refused_call(function, (*own, *arguments))) is not None:
            wanted = ", ".join((*own, *arguments))
            yield f"{subject} must take ({wanted}), as in {kind}, got {takes}"
        elif (must_be := _runnable_form(function, base is AsyncBolt)) is not None:
            yield f"{subject} must be {must_be}"
    if isinstance(component, AsyncBolt) and hasattr(component, "flush"):
        yield (
            f"bolt {bolt.name!r}: {made}.flush would never be called, because an input of an "
            "AsyncBolt is done when its execute returns; emit in execute"
        )


def _runnable_form(function: Callable[..., object], is_async: bool) -> str | None:
    """Return None if a call of a bolt's method runs it; otherwise the form that it must have.

    A call of a generator function, or of a coroutine function that nobody awaits, returns at once,
    and the input would be acked unprocessed.
    """
    is_coroutine = inspect.iscoroutinefunction(function)
    if is_async and not is_coroutine:
        return (
            "a coroutine function, because the bolt is an AsyncBolt; write it with 'async def', or "
            "derive from BasicBolt with threads=... for a blocking client"
        )
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if not is_async and (is_coroutine or is_generator):
        return (
            "a plain method, got one with 'yield' or 'async': calling it would do nothing; emit "
            "values instead of 'yield', or derive from AsyncBolt to await"
        )
    return None


def _defines(component: Component, method: str) -> bool:
    """Return whether a component is an `AsyncBolt` that overrides a method of its base class."""
    if not isinstance(component, AsyncBolt):
        return False
    function: Any = getattr(component, method)
    return getattr(function, "__func__", function) is not getattr(AsyncBolt, method)


#: The shortest word of a setting whose misspellings are refused.
_WORD = 6


def _misspelt(bolt: BoltSpec) -> Iterator[str]:
    """Yield an error for each attribute of a bolt that is a misspelt setting.

    Also for a `RateLimit` under another name, if ``limit`` is None. An attribute is the user's own,
    and most names near a setting are meant: ``output``, ``timeout``, ``endpoint``. So only one word
    of six letters or more may differ, by a missing letter or, if it is long, by a wrong one.
    """
    component = bolt.component
    own, known = vars(component), set[str]()
    for one in type(component).__mro__:
        if one.__module__ == Component.__module__:
            known |= inspect.get_annotations(one).keys() - {"collector", "tables"}
        elif one is not object:
            own = {**vars(one), **own}
    for name, value in own.items():
        if name.startswith("_") or name in known or hasattr(type(value), "__get__"):
            continue
        if isinstance(value, RateLimit) and getattr(component, "limit", value) is None:
            yield (
                f"attribute {name!r} of bolt {bolt.name!r} is a RateLimit, and its limit is None, "
                "so nothing is limited; rename the attribute to limit"
            )
        for setting in sorted(known):
            if _near(name.split("_"), setting.split("_")):
                yield (
                    f"attribute {name!r} of bolt {bolt.name!r} has no effect; did you mean "
                    f"{setting!r}? Otherwise rename it"
                )


def _near(words: Sequence[str], known: Sequence[str]) -> bool:
    """Return whether a name's words are a setting's, except for one long word, misspelt."""
    if len(words) != len(known):
        return False
    differing = [(a, b) for a, b in zip(words, known, strict=True) if a != b]
    if len(differing) != 1:
        return False
    ((word, right),) = differing
    if len(right) < _WORD or right.startswith(word) or word.startswith(right):
        return False
    return difflib.SequenceMatcher(None, word, right).ratio() > 0.9


def _field_names(what: str, names: Sequence[str], way_out: str) -> Iterator[str]:
    if not names:
        yield f"{what} has no fields; a tuple has at least one"
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"{what} has {names.count(name)} fields named {name!r}; {way_out}"
        if name.lower().startswith(RESERVED):
            yield (
                f"{what} has a field named {name!r}, and names that begin with {RESERVED!r} "
                "are reserved for ackcore; rename it"
            )


def _shared(bolts: Sequence[BoltSpec]) -> Iterator[str]:
    owners: dict[int, list[str]] = {}
    for bolt in bolts:
        owners.setdefault(id(bolt.component), []).append(bolt.name)
    for bolt in bolts:
        names = owners.pop(id(bolt.component), [])
        if len(names) > 1:
            made = type(bolt.component).__name__
            yield (
                f"bolts {' and '.join(map(repr, names))} are the same object, and a bolt "
                f"object has only one collector; create a {made}(...) for each"
            )


def _finder(
    spouts: Sequence[Spout],
    bolts: Sequence[BoltSpec],
    broken: set[str],
    tables: Sequence[DeclaredTable],
) -> Callable[[str, str, str], _Fields | str | None]:
    """Return a function that looks up a stream by its reader, component and name.

    The reader is a text, such as ``"bolt 'count'"``. The function returns the stream; the text of
    the problem, if there is no such stream; or None if the problem is reported elsewhere.
    """
    streams: dict[str, dict[str, _Fields]] = {}
    for spout in spouts:
        types = spout.source.emits.types if spout.kind == ClosedWindows.source_kind else ()
        streams[spout.name] = {DEFAULT_STREAM: dict(zip_longest(spout.fields, types))}
    for bolt in bolts:
        streams[bolt.name] = {
            # Not by schema.field(), which fails for duplicate names; these are reported elsewhere.
            stream: dict(zip(schema.names, schema.types, strict=True))
            for stream, schema in bolt.schemas.items()
        }

    ends = {f"{table.name}{end}": table for table in tables for end in _ends(table)}

    def find(subject: str, component: str, stream: str) -> _Fields | str | None:
        if component in broken:
            return None
        if component not in streams:
            kind, reads = subject.partition(" ")[0], f"{subject} reads {component!r}, which "
            for table in tables:
                if component == table.name:
                    return f"{reads}is a table, whose rows are no stream; {_advice(kind, table)}"
                if component == f"{table.name}{CLOSED}" and table.window is None:
                    return (
                        f"{subject} reads the closed windows of table {table.name!r}, which has no "
                        "window; declare the table with window=tumbling(...)"
                    )
            if component in ends:
                return f"{reads}a {kind} cannot read; {_advice(kind, ends[component])}"
            names = list(dict.fromkeys([*streams, *ends, *(table.name for table in tables)]))
            names = names if nearest(component, names) else list(streams)
            return f"{reads}is not declared; {near_miss(component, names, 'components')}"
        known = streams[component]
        if stream in known:
            return known[stream]
        missing = f"{subject} reads stream {stream!r} of {component!r}, "
        if any(component == spout.name for spout in spouts):
            return missing + f"which is a spout, and a spout's only stream is {DEFAULT_STREAM!r}"
        if not known:
            return missing + "which declares no outputs; declare the stream in its outputs"
        return missing + f"which does not exist; {near_miss(stream, list(known), 'streams')}"

    return find


def _ends(table: DeclaredTable) -> tuple[str, ...]:
    """Return the suffixes, ``.changes`` or ``.closed``, with which a sink can read a table."""
    if table.window is None:
        return (CHANGES,)
    return (CLOSED,) if table.window.step_ms is None else (CHANGES, CLOSED)


def _advice(kind: str, table: DeclaredTable) -> str:
    """Return the advice of an error for a reader that cannot read a table, or that end of it.

    A bolt is to look up rows, a table to read the same component, and a sink to read one of the
    table's ends. ``kind``: the reader's: bolt, sink or table.
    """
    closed = "" if table.window is None else f"read {table.name + CLOSED!r}, or "
    if kind == "bolt":
        return f"{closed}set uses = [{table.name!r}] in the bolt's class to look up rows"
    if kind == "table":
        return f"{closed}read {table.component!r}"
    return f"read {' or '.join(repr(table.name + end) for end in _ends(table))}"


def _grouping(bolt: BoltSpec, each: Input, found: _Fields | None) -> Iterator[str]:
    keys = each.grouping.keys
    how = f"{each.grouping.name} grouping of bolt {bolt.name!r}"
    words = _stream_title(each.component, each.stream)
    if not keys and each.grouping.name in ("fields", "partial_key"):
        yield f"{how} on {words} names no field; name one, or use .global_() for a single task"
    if len(set(keys)) < len(keys):
        yield f"{how} on {words} must name a field once, got {listed(keys)}"
    if found is None:
        return
    limit = getattr(bolt.component, "limit", None)
    per = limit.per if isinstance(limit, RateLimit) else None
    if isinstance(per, str) and per not in found:
        yield (
            f"limit of bolt {bolt.name!r} has the key {per!r}, which {words} does not have; "
            f"{near_miss(per, list(found), 'fields')}"
        )
    for key in dict.fromkeys(keys):
        if key not in found:
            yield (
                f"{how} names field {key!r}, which {words} does not have; "
                f"{near_miss(key, list(found), 'fields')}"
            )
        elif (type_ := found[key]) is not None and has_type(type_, pa.types.is_map):
            yield (
                f"{how} names field {key!r} of {words}, which is a {type_}; equal maps may list "
                "their entries in any order, so group by another field, or emit a sorted list"
            )


def _budget(bolt: BoltSpec) -> Iterator[str]:
    """Yield the problems of a limit that has no effect, or whose cost_per_run cannot be kept."""
    limit = getattr(bolt.component, "limit", None)
    if not isinstance(limit, RateLimit):
        return
    if not isinstance(bolt.component, AsyncBolt):
        yield (
            f"limit of bolt {bolt.name!r} must belong to an AsyncBolt, whose calls it limits, got "
            f"{type(bolt.component).__name__}, which is none; derive it from AsyncBolt, or rename "
            "its attribute limit"
        )
        return
    if limit.cost_per_run is None:
        return
    needs = f"limit of bolt {bolt.name!r} has cost_per_run={limit.cost_per_run:g}, which needs "
    if bolt.component.journal is not True:
        yield (
            f"{needs}journal = True: without it, the cost of a run that died is unknown, and its "
            "calls are paid again; set journal = True"
        )
    if not any(each.grouping.moves(bolt.parallelism) for each in bolt.inputs):
        yield (
            f"{needs}an exchange before the bolt: each of its tasks may spend an equal share, and "
            f"only after an exchange their number is known; set .bolt({bolt.name!r}, ..., "
            "parallelism=...), or group its input by .fields(...)"
        )


def _uses(bolt: BoltSpec, tables: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the tables in a bolt's ``uses``; ``tables``: all declared ones."""
    uses: Any = bolt.component.uses
    if not isinstance(uses, list | tuple) or not all(isinstance(name, str) for name in uses):
        yield (
            f"uses of bolt {bolt.name!r} must be a list of names of tables, got "
            f"{type(uses).__name__} {uses!r:.200}; write uses = ['totals']"
        )
        return
    for name in dict.fromkeys(uses):
        if name not in tables:
            hint = near_miss(name, tables, "tables")
            yield (
                f"bolt {bolt.name!r} uses table {name!r}, which is not declared; {hint}"
                + ("" if tables else f", declare one with .table({name!r}, from_=...)")
            )


def change_problems(sink: SinkSpec, shape: TableShape) -> Iterator[str]:
    """Yield the problems of a sink that reads the changed or closed rows of a table."""
    table, streams, rows = shape.name, change_streams(shape), "changes"
    if sink.component.endswith(CLOSED):
        streams, rows = closed_streams(shape), "closed windows"
        if shape.window is None:
            yield (
                f"sink {sink.name!r} reads the closed windows of table {table!r}, which has no "
                f"window; declare the table with window=tumbling(...), or read {table}{CHANGES}"
            )
            return
    elif shape.sessions:
        yield (
            f"sink {sink.name!r} reads the changes of table {table!r}, but a session window may "
            f"merge with others, and no change would remove its row; read {table}{CLOSED}"
        )
        return
    if sink.stream not in streams:
        yield (
            f"sink {sink.name!r} reads stream {sink.stream!r} of the {rows} of table {table!r}, "
            f"which does not exist; {near_miss(sink.stream, list(streams), 'streams')}"
        )
        return
    yield from _field_names(
        f"the stream {sink.stream!r} of the {rows} of table {table!r}",
        streams[sink.stream].names,
        f"rename a value of the table, or read stream {UPSERTS!r}, which has no former values",
    )
    if sink.isolate:
        yield (
            f"isolate of sink {sink.name!r} makes the records of refused rows dead letters, and "
            f"the {rows} of table {table!r} belong to no single record; remove isolate"
        )


def window_problems(topology: Parts) -> Iterator[str]:
    """Yield a problem for each table with windows that gets records of an untracked spout."""
    for table in topology.tables.values():
        for name in topology.spouts_of(table.component) if table.shape.window is not None else ():
            if not topology.spouts[name].tracked:
                yield (
                    f"table {table.name!r} has windows, and gets records of spout {name!r}, which "
                    "is not tracked: late records could not be dead letters; remove tracked=False"
                )


def _unsendable(type_: pa.DataType) -> pa.DataType | None:
    """Return the type, or the nested type, whose rows cannot be sent one by one; else None."""
    kind = pa.types
    if (
        kind.is_dictionary(type_)
        or kind.is_run_end_encoded(type_)
        or kind.is_string_view(type_)
        or kind.is_binary_view(type_)
        or kind.is_list_view(type_)
        or kind.is_large_list_view(type_)
        or kind.is_union(type_)
        or isinstance(type_, pa.BaseExtensionType)
    ):
        return type_
    parts = (_unsendable(type_.field(at).type) for at in range(type_.num_fields))
    return next((part for part in parts if part is not None), None)


def _unread(declared: Declared) -> Iterator[str]:
    spouts, bolts, sinks, tables = declared
    read = {each.component for bolt in bolts for each in bolt.inputs}
    read |= {sink.component for sink in sinks} | {table.component for table in tables}
    read -= {f"{table.name}{CLOSED}" for table in tables}
    if read - {spout.name for spout in spouts} - {bolt.name for bolt in bolts}:
        return  # the reader of an undeclared component may have meant any of them
    for name in [spout.name for spout in spouts if spout.name not in read]:
        yield f"no bolt, sink or table reads spout {name!r}; let one read it, or remove it"


def _cycle(bolts: Sequence[BoltSpec], tables: Sequence[DeclaredTable]) -> Iterator[str]:
    inputs = {bolt.name: [each.component for each in bolt.inputs] for bolt in bolts}
    closed = {f"{table.name}{CLOSED}": [table.component] for table in tables}
    known = inputs | closed
    graph = {name: [one for one in read if one in known] for name, read in known.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle: list[str] = error.args[1][:-1]
        # Start at the bolt that was declared first, so that the text is deterministic.
        at = cycle.index(min(cycle, key=list(graph).index))
        shown = " -> ".join([*cycle[at:], *cycle[: at + 1]])
        if closed.keys() & set(cycle):
            yield (
                f"a table gets the rows of its own closed windows: {shown}; its windows would "
                "never all close; remove one of these inputs"
            )
            return
        yield (
            f"bolts read one another in a cycle: {shown}; a tuple tree must end within its "
            "micro-batch; remove one of these inputs, or write the tuples to a sink and read "
            "them with a spout"
        )


def _stream_title(component: str, stream: str) -> str:
    return f"{component!r}" if stream == DEFAULT_STREAM else f"stream {stream!r} of {component!r}"


# ---------------------------------------------------------------------------------- expectations


def compiled_checks(
    declared: Declared, broken: set[str]
) -> tuple[dict[tuple[str, str], tuple[StreamCheck, ...]], list[str]]:
    """Return the compiled expectations by component and stream, and the problems found.

    ``broken``: the bolts whose ``outputs`` have a problem.
    """
    read = {(each.component, each.stream) for bolt in declared.bolts for each in bolt.inputs}
    read |= {(sink.component, sink.stream) for sink in declared.sinks}
    read |= {(table.component, table.stream) for table in declared.tables}
    checks: dict[tuple[str, str], tuple[StreamCheck, ...]] = {}
    wrong: list[str] = []
    emitters: list[tuple[str, Spout | BoltSpec, Mapping[str, Any]]] = []
    for spout in declared.spouts:
        if not spout.expect:
            continue
        source: Any = spout.source
        schema = source.schema if spout.kind is None else source.emits
        emitters.append((f"spout {spout.name!r}", spout, {DEFAULT_STREAM: schema}))
    for bolt in declared.bolts:
        if bolt.name not in broken:
            emitters.append((f"bolt {bolt.name!r}", bolt, bolt.schemas))
    for subject, emitter, schemas in emitters:
        name = emitter.name
        untracked = isinstance(emitter, Spout) and not emitter.tracked
        if untracked and any(one.on_fail == "dead_letter" for one in emitter.expect):
            wrong.append(
                f"expect of {subject} sends records to the dead letters, and untracked records "
                "have none; set on_fail to 'drop' or 'fail', or remove tracked=False"
            )
        for stream in dict.fromkeys(one.stream for one in emitter.expect):
            if stream not in schemas:
                wrong.append(
                    f"{subject} expects conditions of stream {stream!r}, which it does not have; "
                    f"{near_miss(stream, list(schemas), 'streams')}"
                )
                continue
            if (name, stream) not in read:
                wrong.append(
                    f"{subject} expects conditions of {_stream_title(name, stream)}, which no "
                    "bolt, sink or table reads; let one read it, or remove them"
                )
            some = [one for one in emitter.expect if one.stream == stream]
            found = list(checks_of(some, _types_of(schemas[stream])))
            wrong.extend(f"expect of {subject} {one}" for one in found if isinstance(one, str))
            checks[name, stream] = tuple(one for one in found if isinstance(one, StreamCheck))
    return checks, wrong


def _types_of(schema: Any) -> dict[str, pa.DataType | None]:
    """Return the type in which conditions use each column, by name; None if they cannot use it."""
    if not isinstance(schema, pa.Schema):
        return spark_types(schema)
    return {field.name: supported_type(field.type) for field in schema}
