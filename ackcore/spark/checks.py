"""What cannot run on Spark is refused by name, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from ackcore.arrow import hash_columns
from ackcore.spark.errors import one_line
from ackcore.spark.events import refuse_frame
from ackcore.spark.files import unfit_for_parquet
from ackcore.spark.run import source_schema
from ackcore.spark.sinks import check_sink
from ackcore.topology.builder import Topology
from ackcore.topology.components import Component
from ackcore.topology.parts import BoltSpec, Input, Spout

TRIGGERS = (
    'a processing time such as "1 second", {"processingTime": "1 second"}, {"availableNow": True}, '
    "or None for micro-batches as soon as there is something new"
)


def check_trigger(topology: Topology, options: Mapping[str, Any]) -> None:
    """Raise ValueError if Spark does not take a trigger."""
    source = next(iter(topology.spouts.values())).source
    try:
        if options:
            source.writeStream.trigger(**options)
    except PySparkException as error:
        raise ValueError(f"trigger must be {TRIGGERS}; got {options}: {one_line(error)}") from error


def check(topology: Topology, spark: SparkSession, streaming: bool) -> None:
    """Refuse a topology that cannot run.

    Parameters
    ----------
    topology : Topology
        As `start` and `run_batch` get it.
    spark : SparkSession
        Where it is to run.
    streaming : bool
        Whether its sources must be streams, or must not.

    Raises
    ------
    TypeError
        If the session or a source is Spark Connect's, a type will not do, a bolt cannot be sent to
        the workers, or a sink cannot take its stream.
    ValueError
        If a source is of the other kind, or there is no spout.
    """
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise TypeError(
            "spark is a session of Spark Connect, whose workers and files are out of reach; "
            "use a classic session (SparkSession.builder.master(...))"
        )
    if not isinstance(topology, Topology):
        raise TypeError(
            f"topology must be a Topology, got {type(topology).__name__}; "
            "TopologyBuilder.build() makes one"
        )
    if not topology.spouts:
        raise ValueError("topology must have a spout, and has none; declare one before build()")
    schemas = {}
    for name, spout in topology.spouts.items():
        _check_source(spout, streaming)
        schemas[name] = _arrow_schema(spout)
        _check_payload(name, schemas[name], spout.tracked)
        _check_keys(f"message_id of spout {name!r}", spout.message_id, schemas[name])
    for name, bolt in topology.bolts.items():
        for each in bolt.inputs:
            if each.component in schemas:
                _check_input(bolt, each, schemas[each.component])
        _check_travels(name, bolt.component)
    for sink in topology.sinks.values():
        found = schemas.get(sink.component)
        if found is None:
            found = topology.bolts[sink.component].schemas[sink.stream]
        check_sink(sink.name, sink.writer, found)


def _check_source(spout: Spout, streaming: bool) -> None:
    refuse_frame(spout.source, f"the source of spout {spout.name!r}")
    if spout.source.isStreaming and not streaming:
        raise ValueError(
            f"the source of spout {spout.name!r} is a stream, which never ends; "
            "use start(), with trigger={'availableNow': True} to end with what there is"
        )
    if streaming and not spout.source.isStreaming:
        raise ValueError(
            f"the source of spout {spout.name!r} is a bounded DataFrame; use run_batch(), or "
            "read it with spark.readStream"
        )


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
                f"{what} must be of columns that can be hashed, got {key!r} of {kind} ({error}); "
                "take another column, or cast it"
            ) from None


def _arrow_schema(spout: Spout) -> pa.Schema:
    """Return the columns of a source as Arrow has them, or refuse the one that it has not."""
    for field in spout.source.schema.fields:
        try:
            source_schema(StructType([field]))
        except (PySparkException, ValueError, TypeError) as error:
            raise TypeError(
                f"the source of spout {spout.name!r} has a column {field.name!r} of "
                f"{field.dataType.simpleString()}, which Spark does not hand to Python "
                f"({one_line(error)}); drop it or cast it to another type"
            ) from None
    return source_schema(spout.source.schema)


def _check_input(bolt: BoltSpec, each: Input, schema: pa.Schema) -> None:
    """Hold what a bolt asks of a spout to its source, whose types are known only here."""
    _check_keys(f"grouping of bolt {bolt.name!r}", each.grouping.keys, schema)
    wanted = {field.name: field.type for field in bolt.component.inputs or ()}
    for field in schema:
        asked = wanted.get(field.name, field.type)
        if asked != field.type:
            raise TypeError(
                f"inputs of bolt {bolt.name!r} ask for '{field.name}: {asked}', and the source of "
                f"spout {each.component!r} has '{field.name}: {field.type}'; change the one, or "
                "cast the other"
            )


def _pickle(value: object) -> None:
    cloudpickle.dumps(value)  # type: ignore[no-untyped-call]


def _check_travels(name: str, component: Component) -> None:
    """Refuse a bolt that cannot be sent to the workers, by what of it cannot."""
    try:
        _pickle(component)
    except Exception as error:
        found = f"{type(error).__name__}: {one_line(error)}"
        for attribute, value in vars(component).items():
            try:
                _pickle(value)
            except Exception:
                raise TypeError(
                    f"bolt {name!r} is sent to the workers, and its attribute {attribute!r}, a "
                    f"{type(value).__name__}, cannot be pickled ({found}); make it in prepare()"
                ) from error
        raise TypeError(
            f"bolt {name!r} is sent to the workers and cannot be pickled ({found}); make what "
            "cannot travel in prepare()"
        ) from error


def read_trigger(trigger: str | Mapping[str, Any] | None) -> tuple[bool, dict[str, Any]]:
    """Whether the query ends with what there is, and the keywords for Spark's trigger()."""
    if trigger is None:
        return False, {}
    if isinstance(trigger, str):
        return False, {"processingTime": trigger}
    if isinstance(trigger, Mapping) and len(trigger) == 1:
        ((name, value),) = trigger.items()
        if name == "processingTime" and isinstance(value, str):
            return False, {name: value}
        if name == "availableNow" and value is True:
            return True, {name: value}
    raise ValueError(f"trigger must be {TRIGGERS}; got {trigger!r}")
