"""Checks of a topology before anything is written; errors name the unsupported part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from ackcore._arrow.hashing import hash_columns
from ackcore._error_hints import nearest, refuse_uncalled
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.paths import below, is_hidden
from ackcore.spark.base.schemas import unfit_for_parquet
from ackcore.spark.base.session import (
    is_case_sensitive,
    refuse_connect,
    refuse_frame,
    refuse_mixed,
    refuse_session,
)
from ackcore.spark.base.sources import emitted_schema, reads_kafka, source_schema, streams_in
from ackcore.spark.base.versions import from_arrow_schema, lost_in_arrow, to_arrow_schema
from ackcore.spark.base.workers import check_workers, refuse_unpicklable
from ackcore.spark.dead_letters.topic import DeadLetterTopic, Place
from ackcore.spark.sinks.delta import DeltaSink
from ackcore.spark.sinks.sink import as_sink, check_sink
from ackcore.spark.stores.opening import place_of
from ackcore.topology.builder import Topology
from ackcore.topology.parts import Spout

if TYPE_CHECKING:
    from ackcore.kafka.client_settings import ClientSettings

TRIGGERS = (
    'a processing time such as "1 second", {"processingTime": "1 second"}, {"availableNow": True}, '
    "or None for micro-batches as soon as there is something new"
)


_INSTEAD = (
    "use a planned source (KafkaSpout, or a PlannedSource), or run_batch() with a bounded "
    "DataFrame and a new checkpoint for each run, or call start() with a classic session "
    "(SparkSession.builder.master(...)), for example in a job on the cluster. attempt() works on "
    "streams of Spark Connect, too"
)
#: The units of a processing time, in seconds. Spark refuses months and years, too.
_UNITS = {
    "microsecond": 1e-6,
    "millisecond": 1e-3,
    "second": 1.0,
    "minute": 60.0,
    "hour": 3600.0,
    "day": 86400.0,
    "week": 604800.0,
}
#: Spark's parser wants white space before a unit; only seconds may have a fraction.
_PART = rf"(?:\d+\s+(?:{'|'.join(_UNITS)})|(?:\d+\.\d{{0,9}}|\.\d{{1,9}})\s+second)s?"
_DURATION = re.compile(rf"\s*(?:interval\s+)?{_PART}(?:\s+{_PART})*\s*", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"([\d.]+)\s+([a-z]+?)s?\b")
#: Spark counts a processing time in microseconds, with 64 bits.
_LONGEST_S = 2**63 // 10**6


def read_trigger(trigger: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keywords for Spark's ``trigger()``: a processing time, availableNow, or none.

    ``trigger``: the argument of `start`. Raises ValueError for any other trigger.
    """
    if trigger is None:
        return {}
    options = {"processingTime": trigger} if isinstance(trigger, str) else trigger
    match options:
        case {"processingTime": str()} | {"availableNow": True} if len(options) == 1:
            return dict(options)
    known = ("processingTime", "availableNow")
    near = [nearest(str(name), known) for name in options] if isinstance(options, Mapping) else []
    hint = f"; did you mean {near[0]!r}?" if near and near[0] not in (None, *options) else ""
    raise ValueError(f"trigger must be {TRIGGERS}; got {trigger!r}{hint}")


def interval_s(options: Mapping[str, Any]) -> float:
    """Return the interval of a trigger in seconds, or 0 if it has no processing time.

    ``options`` is the result of `read_trigger`. Raises ValueError if the processing time is no
    duration.
    """
    text = options.get("processingTime", "0 seconds")
    if _DURATION.fullmatch(text):
        parts = _NUMBER.findall(text.lower())
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        if seconds < _LONGEST_S:
            return seconds
    raise ValueError(
        f"trigger must be {TRIGGERS}; got {text!r}, which is no processing time for Spark: whole "
        f"numbers of {', '.join(f'{unit}s' for unit in _UNITS)}, with a space before each unit. "
        "Only seconds may have a fraction"
    )


def check_options(dead_letters: Place, accept_changes: bool, clock: Callable[[], int]) -> None:
    """Check these arguments of `start`.

    Raises TypeError or ValueError unless ``dead_letters`` is a path, a URL, a topic or None,
    ``accept_changes`` is a bool, and ``clock`` is callable.
    """
    refuse_uncalled(dead_letters, "dead_letters")
    if dead_letters is not None and not isinstance(dead_letters, DeadLetterTopic):
        place_of(dead_letters, "dead_letters")
    if not isinstance(accept_changes, bool):
        raise TypeError(
            f"accept_changes must be True or False, got {type(accept_changes).__name__} "
            f"{accept_changes!r}"
        )
    check_callable("clock", clock)


def check_callable(name: str, function: Callable[..., object]) -> None:
    """Raise TypeError unless an argument is callable."""
    if not callable(function):
        raise TypeError(f"{name} must be callable, got {type(function).__name__} {function!r}")


def check_dead_topic(topology: Topology, dead_letters: Place) -> None:
    """Raise ValueError if a Kafka spout reads the topic to which dead letters are sent.

    The topic must have the same name, and one of the bootstrap servers must be the same.
    """
    if not isinstance(dead_letters, DeadLetterTopic):
        return
    topic, servers = dead_letters.topic, _servers(dead_letters.settings)
    for name, spout in topology.spouts.items():
        source = spout.source
        if spout.kind == "kafka" and source.reads(topic) and servers & _servers(source.client):
            raise ValueError(
                f"dead_letters must not be a topic that is read, got {topic!r}: spout {name!r}, "
                f"{source!r}, would read the dead letters as records. Name another topic, or give "
                "the spout a pattern that does not match it"
            )


_TAKEN = "{} would take its files for rows"


def check_places(topology: Topology, places: Mapping[str, str | None]) -> None:
    """Raise ValueError if a place lies where a sink writes for readers, or where a spout reads.

    ``places``: by argument, the places of the checkpoint and the dead letters. The directories of
    sinks, also of `to_delta`, are checked, too. Names that begin with . or _ are allowed: no reader
    takes their files.
    """
    own = {
        f"path of sink {name!r}": (sink.writer, place)
        for name, sink in topology.sinks.items()
        if (place := _directory_of(sink.writer)) is not None
    }
    written = {**places, **{argument: place for argument, (_, place) in own.items()}}
    for argument, place in written.items():
        if place is None:
            continue
        for other, (writer, outer) in own.items():
            inner = below(place, outer)
            if other == argument or inner is None or is_hidden(inner):
                continue
            if inner or argument in places:  # several sinks may write to one table
                of_delta = isinstance(writer, DeltaSink)
                why = "VACUUM would delete its files" if of_delta else _TAKEN.format("readers")
                raise _misplaced(argument, place, writer, why)
        at = places.get("checkpoint")
        if at is not None and argument in own and below(place, f"{at}/ackcore") is not None:
            raise ValueError(
                f"{argument} must not lie among the files of the checkpoint {at}, got {place!r}; "
                "choose a place beside it"
            )
        for name, spout in topology.spouts.items():
            names = _names_in(argument, place)
            if spout.kind == "files" and spout.source.reads_in(place, names):
                raise _misplaced(argument, place, spout.source, _TAKEN.format(f"spout {name!r}"))


def _directory_of(writer: Any) -> str | None:
    """Return the absolute path or the URL of the directory of a sink's table; None for others."""
    if not isinstance(writer, DeltaSink):
        place = getattr(writer, "own_place", None)
        return place if isinstance(place, str) else None
    try:
        return place_of(writer.path, "path")
    except ValueError:  # a URL of another kind
        return None


def _names_in(argument: str, place: str) -> Sequence[str]:
    """Return examples of the names that files have in a place, of all kinds of files."""
    if argument.startswith("path of sink"):
        return ("part-0.parquet",)
    if argument == "spark_checkpoint":
        return ("0", "metadata")
    in_bucket = "://" in place and not place.startswith("hdfs:")
    records = ["head.json", "index.json"] if in_bucket else ["lock", "000000000001.version"]
    if argument == "checkpoint" and "://" not in place:
        records.append("progress.jsonl")
    return (*records, "0.arrow", "0.parquet")


def _misplaced(argument: str, place: str, outer: object, why: str) -> ValueError:
    hidden = "" if argument.startswith("path of") else ", or one whose name begins with _"
    return ValueError(
        f"{argument} must not lie in {outer!r}, got {place!r}: {why}; choose a place "
        f"outside{hidden}"
    )


def _servers(settings: ClientSettings) -> set[str]:
    return {server.strip() for server in settings.bootstrap_servers.split(",")}


def check(topology: Topology, spark: SparkSession, streaming: bool) -> None:
    """Raise an error if a topology cannot run. Writes nothing; may run the job of `check_workers`.

    Raises TypeError if a type is not supported, a bolt cannot be pickled, or a sink cannot take its
    stream. In a session of Spark Connect also if a stream's source is a DataFrame, or a sink needs
    a JVM.
    Raises ValueError if a DataFrame is a stream instead of bounded, or the reverse, Spark takes two
    columns for one, the session was stopped, or there is no spout. Raises WorkerPythonError
    if the workers' Python cannot run ackcore.

    ``topology``: the argument of `start` or `run_batch`. ``spark``: the session to run it in.
    ``streaming``: whether its DataFrames must be streams; otherwise they must be bounded.
    """
    if not isinstance(topology, Topology):
        raise TypeError(
            f"topology must be a Topology, got {type(topology).__name__}; "
            "TopologyBuilder.build() makes one"
        )
    refuse_session(spark)
    if not topology.spouts:
        raise ValueError("topology must have a spout, and has none; declare one before build()")
    schemas = {}
    for name, spout in topology.spouts.items():
        if spout.kind is None:
            if streaming:
                refuse_connect(
                    spark,
                    f"start() needs a classic session for spout {name!r}, whose source is a "
                    "DataFrame, as its JVM calls this process for each micro-batch",
                    _INSTEAD,
                )
            _check_source(spout, spark, streaming)
            _check_group(spout, streaming)
            kept = kept_schema(spout.source.schema, f"the source of spout {name!r}")
        else:
            kept = source_schema(spout)
            spark_schema(kept, f"the source of spout {name!r}")
        if spout.kind == "kafka":
            refuse_unpicklable(f"the KafkaSpout of spout {name!r}", spout.source, "prepare()")
        schemas[name] = kept if spout.kind is None else emitted_schema(spout)
        session = spark if spout.kind is not None else spout.source.sparkSession
        _check_names(f"the source of spout {name!r}", schemas[name], is_case_sensitive(session))
        _check_payload(name, kept, spout.tracked)
        _check_keys(f"message_id of spout {name!r}", spout.message_id, kept)
        schemas[spout.emitter] = schemas[name]
    for name, bolt in topology.bolts.items():
        for stream, outputs in bolt.schemas.items():
            what = f"the stream {stream!r} of bolt {name!r}"
            _check_names(what, outputs, sensitive=True)
        for each in bolt.inputs:
            if each.component in schemas:
                what = f"grouping of bolt {name!r}"
                _check_keys(what, each.grouping.keys, schemas[each.component])
        refuse_unpicklable(f"bolt {name!r}", bolt.component, "prepare()")
    for (name, _), checks in topology.checks.items():
        refuse_unpicklable(f"expect of {name!r}", checks, "the function")
    for sink in topology.sinks.values():
        if as_sink(sink.writer).needs_jvm:
            refuse_connect(
                spark,
                f"sink {sink.name!r}, {sink.writer!r}, needs the JVM of a classic session",
                "use to_postgres(), to_kafka(), to_parquet() or a function of (DataFrame, id)",
            )
        found = topology.sink_schema(sink)
        if found is None:
            found = schemas[sink.component]
        check_sink(
            sink.name, sink.writer, found, is_case_sensitive(spark), isolated=bool(sink.isolate)
        )
    check_workers(spark)


def _check_source(spout: Spout, spark: SparkSession, streaming: bool) -> None:
    name = f"the source of spout {spout.name!r}"
    refuse_frame(spout.source, name)
    refuse_mixed(spout.source, name, spark, "spark")
    if spout.source.isStreaming and not streaming:
        raise ValueError(
            f"the source of spout {spout.name!r} is a stream, which never ends; use start(), with "
            f"trigger={{'availableNow': True}} to end after the present data"
        )
    if streaming and not spout.source.isStreaming:
        raise ValueError(
            f"the source of spout {spout.name!r} is a bounded DataFrame; use run_batch(), or "
            "read it with spark.readStream"
        )


def _check_group(spout: Spout, streaming: bool) -> None:
    if spout.group is None:
        return
    if not streaming:
        raise ValueError(
            f"spout {spout.name!r} has a commit_group, which only works with streams; leave it "
            "out, or read the source with spark.readStream and use start(), with "
            "trigger={'availableNow': True} to end after the present data"
        )
    streams = streams_in(spout.source)
    if len(streams) != 1 or not reads_kafka(streams[0]):
        named = ", ".join(node.nodeName() for node in streams)
        raise ValueError(
            f"spout {spout.name!r} has a commit_group, so its source must read one stream, "
            f"spark.readStream.format('kafka'); it reads {len(streams)}: {named}"
        )


def _check_names(what: str, schema: pa.Schema, sensitive: bool) -> None:
    """Raise ValueError if two columns, or two fields of a struct, have equal names for Spark.

    ``what``: the subject of the message. ``sensitive``: whether Spark distinguishes case; then only
    identical names are refused.
    """
    for inside, one, other in _alike(schema, ()):
        where = f" in {'.'.join(inside)!r}" if inside else ""
        if one == other:
            raise ValueError(
                f"{what} has two columns {one!r}{where}, which Python could not distinguish; "
                "rename one of them"
            )
        if not sensitive:
            raise ValueError(
                f"{what} has columns {one!r} and {other!r}{where}, which differ in case only, so "
                "that Spark does not distinguish them; rename one of them, or set "
                "spark.sql.caseSensitive to true"
            )


def _alike(
    fields: Iterable[pa.Field], inside: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield pairs of names that are equal or differ only in case, with the path of their struct."""
    seen: dict[str, list[str]] = {}
    for field in fields:
        before = seen.setdefault(field.name.lower(), [])
        if before:
            yield inside, field.name if field.name in before else before[0], field.name
        before.append(field.name)
        parts = (field.type.field(i) for i in range(field.type.num_fields))
        yield from _alike(parts, (*inside, field.name))


def _check_payload(name: str, schema: pa.Schema, tracked: bool) -> None:
    for field, why in unfit_for_parquet(schema) if tracked else ():
        raise TypeError(
            f"the source of spout {name!r} has a column {field.name!r} of {field.type}, which "
            f"Parquet, the form of dead letters, cannot hold ({why}); drop it or cast it to "
            "another type"
        )


def _check_keys(what: str, keys: Sequence[str], schema: pa.Schema) -> None:
    for key in keys:
        kind = schema.field(key).type
        try:
            hash_columns([pa.array([], kind)], 0)
        except TypeError as error:
            raise TypeError(
                f"{what} must be columns that can be hashed, got {key!r} of {kind} ({error}); "
                "use another column, or cast it"
            ) from None


def spark_schema(schema: pa.Schema, what: str) -> StructType:
    """Return an Arrow schema as a Spark schema.

    Raises TypeError for a column of a type that Spark does not have. ``what`` is the owner of the
    columns, for the message.
    """
    for field in schema:
        try:
            from_arrow_schema(pa.schema([field]))
        except (PySparkException, ValueError, TypeError) as error:
            raise TypeError(
                f"{what} has a column {field.name!r} of {field.type}, for which Spark has no type "
                f"({one_line(error)}); use another type"
            ) from None
    return from_arrow_schema(schema)


def arrow_schema(schema: StructType, what: str) -> pa.Schema:
    """Return a Spark schema as an Arrow schema.

    Raises TypeError for a column of a type that Spark does not pass to Python. ``what`` is the
    owner of the columns, for the message.
    """
    for field in schema.fields:
        try:
            to_arrow_schema(StructType([field]))
        except (PySparkException, ValueError, TypeError) as error:
            raise TypeError(
                f"{what} has a column {field.name!r} of {field.dataType.simpleString()}, which "
                f"Spark does not pass to Python ({one_line(error)}); drop it or cast it to another "
                "type"
            ) from None
    return to_arrow_schema(schema)


def kept_schema(schema: StructType, what: str) -> pa.Schema:
    """Return a Spark schema as an Arrow schema.

    Raises TypeError for a type that Spark does not pass to Python, or files do not preserve.
    """
    kept = arrow_schema(schema, what)
    for field in schema.fields:
        lost = lost_in_arrow(field.dataType)
        if lost is not None:
            raise TypeError(
                f"{what} has a column {field.name!r} of {field.dataType.simpleString()}, and "
                f"ackcore does not keep the type {lost} in sinks and dead letters; convert it to a "
                "string or binary, for example by cast(), to_json() or ST_AsBinary(), or drop it"
            )
    return kept
