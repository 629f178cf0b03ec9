"""The declaration of a topology: `TopologyBuilder` collects its parts and checks them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ackcore._arrow.lossless import short_repr
from ackcore._error_hints import as_seconds, naming_arguments, nearest, numbered, refuse_uncalled
from ackcore.tables.aggregates import MADE_BY, Aggregate
from ackcore.tables.table_shape import MAX_TTL_S, MIN_TTL_S
from ackcore.tables.time_windows import Window
from ackcore.topology import dedup as duplicates
from ackcore.topology import validation
from ackcore.topology.bolt_calls import keep_settings
from ackcore.topology.components import (
    DEFAULT_STREAM,
    AsyncBolt,
    BasicBolt,
    BatchBolt,
    Bolt,
    Component,
    output_streams,
)
from ackcore.topology.expectations import Expectations, StreamCheck, expectations_of
from ackcore.topology.explain import explain
from ackcore.topology.failure_reasons import exception_classes
from ackcore.topology.parts import (
    BoltSpec,
    DeclaredTable,
    Grouping,
    Input,
    Parts,
    SinkSpec,
    Spout,
    kind_of,
    with_closed,
)
from ackcore.topology.settings import Settings, check_keywords

#: The columns that identify a Kafka record, and all columns of Spark's Kafka source.
_KAFKA_ID = validation.KAFKA_ID
_KAFKA = {*_KAFKA_ID, "key", "value", "timestamp", "timestampType"}
_KAFKA_OPTIONAL = {"headers"}

#: Packages whose frames and tables also have ``columns``, but are not Spark's.
_NOT_SPARK = {"pandas", "polars", "pyarrow"}


class TopologyError(ValueError):
    """A topology that cannot be built.

    Parameters
    ----------
    problems : tuple of str
        All problems found.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(numbered(self.problems))

    def __reduce__(self) -> tuple[type[TopologyError], tuple[tuple[str, ...]]]:
        return TopologyError, (self.problems,)


@dataclass(frozen=True, eq=False)
class Topology(Parts):
    """Spouts, bolts, sinks and tables that fit together, and their settings.

    Made by `TopologyBuilder.build`.

    Parameters
    ----------
    spouts, bolts, sinks, tables : mapping from str to Spout, BoltSpec, SinkSpec and TableSpec
        The declared components by name.
    settings : Settings
        The settings.
    checks : mapping from (str, str) to tuple of StreamCheck
        By component and stream, the compiled expectations.
    """

    settings: Settings
    checks: Mapping[tuple[str, str], tuple[StreamCheck, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Topology {self.fingerprint[:12]} of {', '.join([*self.spouts, *self.bolts])}>"

    def in_order(self, spouts: Sequence[str]) -> Topology:
        """Return a copy of the topology, its spouts in the order of ``spouts``, which names all."""
        return replace(self, spouts={name: self.spouts[name] for name in spouts})

    def explain(self) -> str:
        """Return a text that draws the topology: stages, streams, groupings, shuffles, settings."""
        return explain(self, self.settings)


@naming_arguments
@dataclass(repr=False, eq=False)
class BoltDeclarer:
    """The inputs of a bolt. Every method adds one, and returns the declarer for the next call.

    The argument ``component`` of the methods is the name of a spout or a bolt. It may also be
    ``"<table>.closed"``, whose tuples are the rows of windows that the micro-batch before has
    closed. ``stream`` is one of its streams. `TopologyBuilder.build` checks both.
    """

    name: str
    component: Component
    parallelism: int | None
    expect: tuple[Expectations, ...]
    inputs: list[Input] = field(default_factory=list)

    def shuffle(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Read a stream, spread evenly over the bolt's tasks if the bolt has a parallelism.

        Without one, each tuple is processed in the task that emitted it.
        """
        return self._read(component, stream, Grouping("shuffle"))

    def fields(self, component: str, *fields: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Read a stream so that tuples with equal values of the fields reach the same task."""
        return self._read(component, stream, Grouping("fields", _names_of(fields, "fields")))

    def partial_key(
        self, component: str, *fields: str, stream: str = DEFAULT_STREAM
    ) -> BoltDeclarer:
        """Read a stream so that tuples with equal values of the fields reach at most two tasks."""
        keys = _names_of(fields, "partial_key")
        return self._read(component, stream, Grouping("partial_key", keys))

    def all(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Read a stream so that every task of the bolt receives a copy of each tuple."""
        return self._read(component, stream, Grouping("all"))

    def global_(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Read a stream so that all tuples reach the same task."""
        return self._read(component, stream, Grouping("global"))

    def local_or_shuffle(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Read a stream so that each tuple is processed in the task that emitted it."""
        return self._read(component, stream, Grouping("local_or_shuffle"))

    def _read(self, component: str, stream: str, grouping: Grouping) -> BoltDeclarer:
        _check_name(component, "component", "the name of a component")
        _check_name(stream, "stream", "the name of a stream")
        self.inputs.append(Input(component, stream, grouping))
        return self


@naming_arguments
class TopologyBuilder:
    """The declarations of a topology, in any order, from which `build` makes a `Topology`.

    An argument of a wrong type raises at once, and so do the wrong values that a method lists.
    `build` finds all other mistakes together.
    """

    def __init__(self) -> None:
        self._spouts: list[Spout] = []
        self._bolts: list[BoltDeclarer] = []
        self._sinks: list[SinkSpec] = []
        self._tables: list[DeclaredTable] = []

    def spout(
        self,
        name: str,
        source: Any,
        *,
        message_id: str | Sequence[str] | None = None,
        tracked: bool = True,
        unique: bool = False,
        ordered_by: str | Sequence[str] | None = None,
        dedup: str | Sequence[str] | None = None,
        within_s: float | None = None,
        within_keys: int | None = None,
        event_time: str | None = None,
        commit_group: Any = None,
        expect: Expectations | Sequence[Expectations] = (),
    ) -> None:
        """Declare a source of records.

        Parameters
        ----------
        name : str
            The name of the component. Its only stream is ``"default"``.
        source : DataFrame, ackcore.kafka.KafkaSpout or ackcore.spark.PlannedSource
            The records. A stream reads a streaming DataFrame, `run_batch` a bounded one; both can
            read any other source.
        message_id : str or sequence of str, optional
            The columns that identify a record. By default ids are made from positions. For a
            `KafkaSpout`, and for the columns of Spark's Kafka source, the default is ``("topic",
            "partition", "offset")``, which is unique if all columns of that source are there.
        tracked : bool, default True
            Whether its records are tracked and retried.
        unique : bool, default False
            Whether you guarantee that `message_id` is unique. Otherwise each micro-batch is checked
            for duplicates, which are an error; not if ``tracked=False`` or with `dedup`.
        ordered_by : str or sequence of str, optional
            The columns of a key. While a record waits for a retry, later records with the same key
            wait too, and this counts no attempt of theirs. A record whose key has a null waits for
            no other.
        dedup : str or sequence of str, optional
            The columns of a key, as the spout emits them. A record whose key was ACKED within the
            bounds is ACKED without being run. While a record waits for a retry, others with its key
            wait behind it. A record whose key has a null is never a duplicate.
        within_s : float, optional
            The seconds for which `dedup` keeps the key of an ACKED record.
        within_keys : int, optional
            The number of keys that `dedup` keeps; the oldest are forgotten when there are more.
            `dedup` needs one of the two bounds, and can have both.
        event_time : str, optional
            The column with the timestamp that `within_s` counts from. By default it counts from the
            time of the micro-batch.
        commit_group : ackcore.kafka.KafkaGroup, optional
            The consumer group whose offsets are committed after each micro-batch, for a stream of
            Spark's own Kafka source with its columns topic, partition and offset.
        expect : expect(...) or list of them, optional
            Conditions that the records must meet; see `expect`.

        Raises
        ------
        TypeError
            If an argument has another type.
        ValueError
            If a bound of `dedup` is missing, or out of range, or given without `dedup`.
        """
        _check_name(name, "name", "the name of the spout")
        refuse_uncalled(source, f"source of spout {name!r}")
        refuse_uncalled(commit_group, f"commit_group of spout {name!r}")
        _refuse_foreign(source, name)
        fields = _columns_of(source, name)
        for argument, given in (("tracked", tracked), ("unique", unique)):
            if not isinstance(given, bool):
                raise TypeError(
                    f"{argument} of spout {name!r} must be True or False, got "
                    f"{type(given).__name__} {short_repr(given)}"
                )
        ids = _column_names(message_id, f"message_id of spout {name!r}")
        ordered = _column_names(ordered_by, f"ordered_by of spout {name!r}") or ()
        key = _column_names(dedup, f"dedup of spout {name!r}")
        seen = duplicates.dedup_of(name, key, within_s, within_keys, event_time)
        if ids is None:
            ids = ()
            if kind_of(source) == "kafka":
                ids, unique = _KAFKA_ID, True
            elif {*_KAFKA_ID, "value"} <= set(fields):
                # If columns were removed or added, rows may be duplicated (explode): check the ids.
                ids, unique = _KAFKA_ID, unique or set(fields) - _KAFKA_OPTIONAL == _KAFKA
        if commit_group is not None and getattr(type(commit_group), "commits_to", None) is None:
            raise TypeError(
                f"commit_group of spout {name!r} must be an ackcore.kafka.KafkaGroup or None, "
                f"got {type(commit_group).__name__} {commit_group!r}"
            )
        expected = expectations_of(expect, f"spout {name!r}")
        self._spouts.append(
            Spout(name, source, fields, ids, tracked, unique, commit_group, ordered, expected, seen)
        )

    def bolt(
        self,
        name: str,
        bolt: Component,
        *,
        parallelism: int | None = None,
        expect: Expectations | Sequence[Expectations] = (),
    ) -> BoltDeclarer:
        """Declare a bolt.

        Parameters
        ----------
        name : str
            The name of the component.
        bolt : Bolt, BasicBolt, AsyncBolt or BatchBolt
            An instance. It is pickled, and every task has a copy. Do not change it while a query
            runs: micro-batches may have copies from before or after the change.
        parallelism : int, optional
            The number of tasks. By default that of the source, or behind an exchange the setting
            `parallelism`.
        expect : expect(...) or list of them, optional
            Conditions that the emitted tuples must meet; see `expect`.

        Returns
        -------
        BoltDeclarer
            Declares the inputs of the bolt.

        Raises
        ------
        TypeError
            If an argument has another type.
        """
        _check_name(name, "name", "the name of the bolt")
        refuse_uncalled(bolt, f"bolt {name!r}")
        if not isinstance(bolt, Bolt | BasicBolt | AsyncBolt | BatchBolt):
            raise TypeError(
                f"bolt {name!r} must be a Bolt, a BasicBolt, an AsyncBolt or a BatchBolt, "
                f"got {type(bolt).__name__}; derive its class from one of them"
            )
        if parallelism is not None and (
            isinstance(parallelism, bool) or not isinstance(parallelism, int)
        ):
            raise TypeError(
                f"parallelism of bolt {name!r} must be an integer or None, "
                f"got {type(parallelism).__name__} {parallelism!r}"
            )
        expected = expectations_of(expect, f"bolt {name!r}")
        declarer = BoltDeclarer(name, bolt, parallelism, expected)
        self._bolts.append(declarer)
        return declarer

    def sink(
        self,
        component: str,
        writer: Any,
        *,
        stream: str = DEFAULT_STREAM,
        name: str | None = None,
        isolate: bool | Sequence[type[Exception] | str] = False,
    ) -> None:
        """Declare a sink, which writes the rows of a stream.

        Parameters
        ----------
        component : str
            The bolt or spout whose stream is written; or ``"<table>.changes"`` for the rows of a
            table that a micro-batch has changed, each once; or ``"<table>.closed"`` for the rows of
            windows that have closed.
        writer : ackcore.spark.Sink or callable
            A sink, such as ``to_parquet(path)``, or a function of (DataFrame, batch_id).
        stream : str, default "default"
            The stream. The changes of a table have two: the default has the key, the values, and
            the former values as ``old_<name>``; ``"upserts"`` has no former values.
        name : str, optional
            The name of the sink; by default ``component`` or ``component.stream``.
        isolate : bool or list of exception class or str, default False
            Whether rows that the writer cannot write become dead letters. After the second error of
            the writer the batch is bisected: the writer is called with parts of it, all under its
            id, and rows that fail when written alone are refused. At last it is called with all
            other rows. So it must replace or upsert the rows of an id, and not skip a known id.
            A list names the errors that a row can cause. True means any error, but rows are refused
            only if another part of the batch could be written; otherwise the sink counts as
            unavailable. More than 10,000 refused rows of a micro-batch end the query
            (`TooManyRefused`).

        Raises
        ------
        TypeError
            If an argument has another type. `run_batch` and `start` refuse a sink with `isolate`
            that does not replace the rows of an id.
        ValueError
            If `isolate` names no exception.
        """
        _check_name(component, "component", "the name of a component")
        _check_name(stream, "stream", "the name of a stream")
        if name is None:
            name = component if stream == DEFAULT_STREAM else f"{component}.{stream}"
        _check_name(name, "name", "the name of the sink")
        refuse_uncalled(writer, f"writer of sink {name!r}")
        if not callable(writer) and not callable(getattr(writer, "write", None)):
            raise TypeError(
                f"writer of sink {name!r} must be a function of (DataFrame, batch_id) or an "
                f"ackcore.spark.Sink, got {type(writer).__name__}; for example "
                "to_parquet('/data/orders')"
            )
        errors: tuple[type[BaseException], ...] = (BaseException,) if isolate else ()
        if not isinstance(isolate, bool):
            errors = exception_classes(isolate, f"isolate of sink {name!r}")
        alone = not isinstance(isolate, bool)
        self._sinks.append(SinkSpec(name, component, stream, writer, errors, alone))

    def table(
        self,
        name: str,
        *,
        from_: str,
        key: str | Sequence[str],
        value: Mapping[str, Aggregate],
        stream: str = DEFAULT_STREAM,
        ttl_s: float | None = None,
        window: Window | None = None,
    ) -> None:
        """Declare a table, which is kept in the checkpoint: aggregates by key of a stream's rows.

        Each row counts once, after all sinks have written the micro-batch. Only rows of ACKED
        records count.

        Parameters
        ----------
        name : str
            The name of the table. No component may have the same name. It must not end in
            ``.changes`` or ``.closed``.
        from_ : str
            The bolt whose rows are folded; or a spout whose source is a `KafkaSpout` or another
            `PlannedSource`; or ``"<table>.closed"`` for the rows of closed windows.
        key : str or sequence of str
            The columns of the key. A null is a key like any other.
        value : mapping from str to Aggregate
            The aggregates by the names of their columns, such as ``{"euros": sum_of("euros")}``.
        stream : str, default "default"
            The stream of the component.
        ttl_s : float, optional
            The time in seconds after which a row is removed that no record has changed. By default
            rows stay forever.
        window : Window, optional
            Windows of time, from `ackcore.tables.tumbling`, `sliding` or `session`. A row then has
            the key, the columns ``window_start`` and ``window_end``, and the values. It is emitted
            to the sinks of ``"<name>.closed"`` when its window closes, and is then removed. Bolts
            and tables that read ``"<name>.closed"`` get it in the next micro-batch, as a record of
            a spout with this name. A record whose window has closed is a dead letter.

        Raises
        ------
        TypeError
            If an argument has another type.
        ValueError
            If `key` or `value` is empty, or `ttl_s` is not from 0.001 to 10,000,000,000 seconds.
        """
        _check_name(name, "name", "the name of the table")
        _check_name(from_, "from_", "the name of a component")
        _check_name(stream, "stream", "the name of a stream")
        key_way_out = "name the columns by which rows are aggregated"
        keys = _column_names(key, f"key of table {name!r}", key_way_out)
        if keys is None:
            raise TypeError(
                f"key of table {name!r} must be the name of a column or a list of them, got None; "
                f"{key_way_out}"
            )
        _check_value(value, name)
        if ttl_s is not None:
            where = f"ttl_s of table {name!r}"
            ttl_s = as_seconds(ttl_s, where, MIN_TTL_S, MAX_TTL_S, "omit it to keep rows forever")
        if window is not None and not isinstance(window, Window):
            raise TypeError(
                f"window of table {name!r} must be made by tumbling, sliding or session of "
                f"ackcore.tables, got {type(window).__name__} {short_repr(window)}; "
                "write tumbling(3600, 'ts') for hours"
            )
        self._tables.append(DeclaredTable(name, from_, stream, keys, dict(value), ttl_s, window))

    def build(self, settings: Settings | None = None, **keywords: Any) -> Topology:
        """Check all declarations, and return the topology.

        Numbers and limits that are attributes of a bolt's class are copied to the bolt, so that
        later changes of the class do not affect them.

        Parameters
        ----------
        settings : Settings, optional
            The settings; by default ``Settings()``.
        **keywords
            Single settings, which override `settings`.

        Raises
        ------
        TopologyError
            If the declarations do not fit together; it lists all problems.
        TypeError, ValueError
            If a setting is unknown, has another type, or is out of range.
        """
        if settings is None:
            settings = Settings()
        elif not isinstance(settings, Settings):
            raise TypeError(
                f"settings must be Settings, got {type(settings).__name__}; "
                "pass single settings by keyword: build(max_attempts=3)"
            )
        check_keywords(keywords)
        settings = replace(settings, **keywords)
        found: list[str] = []
        broken: set[str] = set()
        bolts: list[BoltSpec] = []
        for declared in self._bolts:
            try:
                schemas = output_streams(declared.component)
            except (TypeError, ValueError) as error:
                found.append(f"bolt {declared.name!r}: {error}")
                broken.add(declared.name)
                schemas = {}
            bolts.append(
                BoltSpec(
                    declared.name,
                    declared.component,
                    schemas,
                    declared.parallelism,
                    tuple(declared.inputs),
                    declared.expect,
                )
            )
        tables, closed, misfits = with_closed(self._tables, self._spouts, bolts)
        parts = validation.Declared(self._spouts, bolts, self._sinks, self._tables)
        found.extend(validation.problems(parts, closed, broken, settings.reject))
        found.extend(misfits)
        checks, wrong = validation.compiled_checks(parts, broken)
        found.extend(wrong)
        try:
            found_again = duplicates.with_dedup(self._spouts, bolts, self._sinks, tables)
        except (TypeError, ValueError) as error:
            raise TopologyError([*found, str(error)]) from None
        bolts, sinks, tables = found_again
        topology = Topology(
            spouts={spout.name: spout for spout in (*self._spouts, *closed)},
            bolts={bolt.name: bolt for bolt in bolts},
            sinks={sink.name: sink for sink in sinks},
            tables={table.name: table for table in tables},
            settings=settings,
            checks=checks,
        )
        for sink in self._sinks:
            read = topology.table_read(sink)
            if read is not None:
                found.extend(validation.change_problems(sink, read.shape))
        found.extend(validation.window_problems(topology))
        if found:
            raise TopologyError(found)
        for declared in self._bolts:
            keep_settings(declared.component)
        return topology


def _check_name(name: Any, argument: str, must_be: str) -> None:
    if not isinstance(name, str):
        hint = "; pass the name under which it is declared" if isinstance(name, Component) else ""
        raise TypeError(
            f"{argument} must be {must_be}, got {type(name).__name__} {short_repr(name)}{hint}"
        )


def _check_value(value: Any, table: str) -> None:
    if not isinstance(value, Mapping):
        got = "an aggregate" if isinstance(value, Aggregate) else short_repr(value)
        raise TypeError(
            f"value of table {table!r} must map names of columns to aggregates, got {got}; "
            "write {'orders': count(), 'euros': sum_of('euros')}"
        )
    if not value:
        raise ValueError(
            f"value of table {table!r} must have at least one aggregate, got none; write "
            "{'orders': count()}"
        )
    for column, aggregate in value.items():
        if not isinstance(column, str):
            raise TypeError(
                f"value of table {table!r} must map names of columns to aggregates, got the name "
                f"{short_repr(column)}; write it as text"
            )
        if not isinstance(aggregate, Aggregate):
            given = aggregate if isinstance(aggregate, str) else getattr(aggregate, "__name__", "")
            near = nearest(given, list(MADE_BY.values()))
            if isinstance(aggregate, type) and issubclass(aggregate, Aggregate):
                near = given
            called = {None: "count() or sum_of('euros')", "count": "count()"}
            raise TypeError(
                f"value[{column!r}] of table {table!r} must be an aggregate of ackcore.tables, "
                f"got {short_repr(aggregate)}; write {called.get(near, f'{near}(...)')}"
            )


def _names_of(fields: Sequence[Any], method: str) -> tuple[str, ...]:
    for name in fields:
        if not isinstance(name, str):
            raise TypeError(
                f"fields must be names, got {type(name).__name__} {name!r}; "
                f"pass them one by one: .{method}(component, 'a', 'b')"
            )
    return tuple(fields)


def _refuse_foreign(source: Any, name: str) -> None:
    for kind in type(source).__mro__:
        if kind.__module__.partition(".")[0] in _NOT_SPARK:
            raise TypeError(
                f"source of spout {name!r} must be a DataFrame of Spark or a planned source, got "
                f"{kind.__module__}.{kind.__qualname__}; pass "
                "spark.createDataFrame(...) of a pandas.DataFrame instead"
            )


def _columns_of(source: Any, spout: str) -> tuple[str, ...]:
    columns: Any = getattr(source, "columns", None)
    named = isinstance(columns, Iterable) and not isinstance(columns, str)
    names = tuple(columns) if named else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"source of spout {spout!r} must be a DataFrame or an instance of a planned source, "
            f"whose .columns are names, got {type(source).__name__}; create a DataFrame with "
            "spark.createDataFrame(...)"
        )
    return names


def _column_names(
    columns: Any, argument: str, way_out: str = "omit the argument instead"
) -> tuple[str, ...] | None:
    if columns is None:
        return None
    names = (columns,) if isinstance(columns, str) else columns
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument} must be the name of a column or a list of them, "
            f"got {type(columns).__name__} {columns!r}"
        )
    if not names:
        raise ValueError(f"{argument} must name at least one column, got none; {way_out}")
    return tuple(names)
