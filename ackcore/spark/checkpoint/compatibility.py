"""Checks that a topology can continue from a checkpoint, for `start` and `run_batch`.

meta.json describes the topology that used the checkpoint last. A difference raises
CheckpointForeign, unless it is one that `accept_changes` allows.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ackcore
from ackcore._error_hints import counted
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.errors import CheckpointForeign, corrupt
from ackcore.spark.base.paths import numbered
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.records import META, Records
from ackcore.spark.checkpoint.requests import spout_of_request
from ackcore.spark.checkpoint.table_records import TableState
from ackcore.spark.checkpoint.waiting import Waiting
from ackcore.tables.table_shape import recorded
from ackcore.tables.time_windows import END
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.parts import DEDUP, Parts
from ackcore.topology.structure_changes import changes, shown_aggregate, shown_window
from ackcore.topology.table_views import CHANGES, CLOSED, ClosedWindows

_KINDS = {"stream": "start()", "batch": "run_batch()"}
_SOURCES = {None: "a DataFrame", "kafka": "Kafka", "planned": "a PlannedSource"}

#: The ways out for a value or a table of the user, and for the keys of a spout with ``dedup``.
_OTHER_NAME = (
    "give the {0} another name, so that it starts empty, with accept_changes=True, which deletes "
    "the content of the old one; or run a micro-batch without the {0}, then add it again, each "
    "time with accept_changes=True; or give this topology another checkpoint"
)
_OTHER_DEDUP = (
    "run a micro-batch without dedup, which forgets the ids, then add it again, each time with "
    "accept_changes=True; or give this topology another checkpoint"
)
#: The end of the way out for rows whose sink was removed.
_NO_SINK = "a sink, which may be a function that does nothing if the rows are not wanted"
#: The end of the way out for a table whose fold fails at each start.
_WITHOUT = (
    ". If it cannot finish, because a {0} fails, run it without that {0}, with accept_changes=True"
)


def claim(
    records: Records,
    topology: Parts,
    kind: str,
    log: Path | None,
    clock_ms: int | None,
    new_key: int | None = None,
) -> dict[str, Any]:
    """Return the content of meta.json; write it if it is missing, or of a topology that never ran.

    A new meta.json is put at once, and makes this driver the owner; a changed one is put with the
    next record. Raises CheckpointForeign if `start` made the checkpoint and ``kind`` is "batch", or
    the reverse. Also raises it if a spout is new or reads another source, or if a stream lacks one
    of its spouts. `check_accepted` checks other changes. Raises CheckpointCorrupt if meta.json is
    missing, though the checkpoint or Spark's log has other files.

    ``log``: Spark's offset log; None without one. ``clock_ms``, ``new_key``: the creation time and
    the deployment key of a new checkpoint; by default the system's time and a random key.
    """
    path = records.place("")
    meta = records.read_meta()
    if meta is None:
        _check_empty(records, log)
        if new_key is None:
            new_key = int.from_bytes(os.urandom(8), "little") >> 1
        meta = {
            "fingerprint": topology.fingerprint,
            "kind": kind,
            "deployment_key": f"{new_key:016x}",
            "created_ms": wall_clock_ms() if clock_ms is None else clock_ms,
            "ackcore": ackcore.__version__,
            "begun": False,
            **about(topology),
        }
        # With a second key, all records of the first one would be foreign.
        records.write_meta(meta, once=True)
    # The first plan is recorded shortly before "begun".
    begun = bool(meta["begun"] or records.numbers(".plan") or (log is not None and numbered(log)))
    if not begun and (meta["kind"], meta["fingerprint"]) != (kind, topology.fingerprint):
        # No run yet, and Spark has read nothing: another topology may have the checkpoint.
        meta = meta | {"kind": kind, **about(topology)}
        # Not before all checks: the first write ends a query that runs on the checkpoint.
        records.write_meta(meta, with_next=True)
    if meta["kind"] != kind:
        raise CheckpointForeign(
            f"{path}: the checkpoint was made by {_KINDS[meta['kind']]}, and {_KINDS[kind]} "
            f"cannot continue it; give {_KINDS[kind]} another checkpoint"
        )
    if begun:
        _refuse_other_spouts(path, meta, topology, kind)
    return meta


def about(topology: Parts, known: Sequence[str] = ()) -> dict[str, Any]:
    """Return the entries of meta.json that describe a topology.

    ``known``: the spouts of the checkpoint, which keep their order: Spark identifies its sources by
    number, and the number of a partition is part of its records' root ids.
    """
    order = [name for name in known if name in topology.spouts]
    return {
        "fingerprint": topology.fingerprint,
        "structure": topology.structure,
        "spout_order": order + [name for name in topology.spouts if name not in order],
        # Other processes read the tables with their shapes.
        "tables": {name: recorded(table.shape) for name, table in topology.tables.items()},
    }


def _refuse_other_spouts(path: str, meta: dict[str, Any], topology: Parts, kind: str) -> None:
    """Raise CheckpointForeign if a spout is new, reads another source, or is gone from a stream.

    Spouts that read the closed windows of a table may come and go.
    """
    known = meta["spout_order"]
    before, after = meta["structure"]["spouts"], topology.structure["spouts"]
    for name in known:
        sources = [spouts.get(name, {}).get("source") for spouts in (before, after)]
        if name in topology.spouts and sources[0] != sources[1]:
            was, now = (_SOURCES.get(source, source) for source in sources)
            raise CheckpointForeign(
                f"{path}: spout {name!r} read {was}, and reads {now} now: a position in the old "
                "source is not valid in the new one. Give this topology another checkpoint"
            )
    # The rows of closed windows have no source outside of the checkpoint.
    closed = {
        name
        for name, spout in (before | after).items()
        if spout.get("source") == ClosedWindows.source_kind
    }
    added = topology.spouts.keys() - {*known} - closed
    new = [f"spout {name!r} is new" for name in topology.spouts if name in added]
    gone = [f"spout {name!r} is gone" for name in known if name not in {*topology.spouts, *closed}]
    if kind == "stream" and (new or gone):
        why = "Spark continues the sources of a stream by their numbers, which would change"
    elif new:
        why = "run_batch() reads its sources once, and has read them: it would not read a new one"
        gone = []
    else:
        return
    raise CheckpointForeign(
        f"{path}: the checkpoint belongs to another topology: {'; '.join(new + gone)}: {why}. "
        "Declare the spouts that the checkpoint was made "
        f"with ({', '.join(name for name in known if name not in closed)}), or give this topology "
        "another checkpoint"
    )


def _check_empty(records: Records, log: Path | None) -> None:
    """Raise CheckpointCorrupt if a checkpoint without meta.json has other files or offsets."""
    left = records.first_content()
    if left is not None:
        raise corrupt(
            records.entry(META), f"is missing, though {left} exists beside it: it was removed"
        )
    if log is not None and numbered(log):
        raise corrupt(
            records.entry(META),
            f"is missing, though {log} shows that a stream ran on this checkpoint: ackcore's part "
            "of the checkpoint was removed, or the stream did not use ackcore",
        )


def check_waiting(root: str, topology: Parts, waiting: Waiting, requests: Iterable[str]) -> None:
    """Raise CheckpointForeign if records wait whose spout the topology lacks or does not track.

    ``root``: the ackcore part of the checkpoint, for the message. ``waiting``: records that wait
    for a retry. ``requests``: names of requests to replay dead letters.
    """
    waits = [(counted(waiting.rows(spout), "record"), spout) for spout in waiting]
    waits += [
        (f"the replayed dead letters (request {name.partition('.')[0]})", spout_of_request(name))
        for name in requests
    ]
    tracked = {name for name, spout in topology.spouts.items() if spout.tracked}
    for what, spout in waits:
        if spout not in tracked:
            raise CheckpointForeign(
                f"{root}: a retry is planned for {what} of spout {spout!r}, and the topology "
                f"has no tracked spout {spout!r}. Run the former topology until no record waits, "
                "then change it; or give this one another checkpoint"
            )


def check_tables(
    root: str,
    recorded: Mapping[str, TableState],
    structures: tuple[Mapping[str, Any], Mapping[str, Any]],
    decided: int | None,
    folded: bool,
) -> None:
    """Raise CheckpointForeign if tables changed in a way that `accept_changes` does not allow.

    Values and tables may be added, which start empty, and removed. The error is raised

    - for a changed key, window or type of a value, and for a ttl that was added or removed;
    - if nothing reads the rows of closed windows any more, and some of them wait;
    - while a micro-batch is decided and not done, for any change of a table or of the bolt that it
      reads, and for a removed sink of the table's rows. Even then a table may be removed, and a
      value whose rows are not folded yet: their folds may fail at each start.

    ``root``: the ackcore part of the checkpoint, for the message. ``recorded``: the tables of the
    checkpoint. ``structures``: the structures of the recorded topology, and of the one that is to
    run. ``decided``: the number of the decided micro-batch, if there is one. ``folded``: whether
    the tables have its rows already.
    """
    before, after = (structure.get("tables", {}) for structure in structures)
    for name in sorted(recorded.keys() & after.keys()):
        was, now, subject = recorded[name].structure, after[name], f"{root}: table {name!r}"
        # Another name of the table, or none, is refused as long as these rows wait.
        first = [] if decided is None else [f"it has finished micro-batch {decided}"]
        other_value = _way_out(first, _OTHER_NAME.format("value"))
        if f"{name}{CLOSED}" in structures[0]["spouts"]:
            first.append(f"no record of '{name}{CLOSED}' waits")
        is_dedup = now["from"][0] == name
        way_out = _way_out(first, _OTHER_DEDUP if is_dedup else _OTHER_NAME.format("table"))
        if is_dedup and was["key"] != now["key"]:
            columns = [", ".join(column for column, _ in each["key"]) for each in (was, now)]
            raise CheckpointForeign(
                f"{root}: spout {name.removesuffix(DEDUP)!r} had dedup by {columns[0]}, and has it "
                f"by {columns[1]} now: the stored ids are values of the old columns. {way_out}"
            )
        if was["key"] != now["key"]:
            raise CheckpointForeign(
                f"{subject} had the key {_typed(was['key'])}, and has {_typed(now['key'])} now: "
                f"its rows cannot be converted. {way_out}"
            )
        if (was["ttl_s"] is None) != (now["ttl_s"] is None):
            raise CheckpointForeign(
                f"{subject} had ttl_s={was['ttl_s']}, and has {now['ttl_s']} now: rows that "
                f"were stored without ttl_s cannot get one later, and the reverse. {way_out}"
            )
        if was.get("window") != now.get("window"):
            old, new = (shown_window(each.get("window")) for each in (was, now))
            raise CheckpointForeign(
                f"{subject} had window={old}, and has {new} now: its rows cannot be converted. "
                f"{way_out}"
            )
        for value, what in now["aggregates"].items():
            stored = was["aggregates"].get(value, what)
            if stored != what:
                raise CheckpointForeign(
                    f"{subject}: its value {value!r} was {shown_aggregate(stored)}, and is "
                    f"{shown_aggregate(what)} now: its states cannot be converted. "
                    f"{other_value}"
                )
    for name, table in recorded.items():
        spout = f"{name}{CLOSED}"
        read = [spout in structure["spouts"] for structure in structures]
        if table.closed and read == [True, False]:
            rows = counted(sum(one.rows for one in table.closed), "row")
            raise CheckpointForeign(
                f"{root}: the next micro-batch has to read {rows} of closed windows of table "
                f"{name!r}, and no bolt or table of the topology "
                f"reads {spout!r}. Run the former topology until it has read them, then change "
                "it; or give this one another checkpoint"
            )
    if decided is None:
        return
    for name, now in sorted(after.items()):
        was = before.get(name)
        if was is not None and not folded:
            values = was["aggregates"]
            kept = {value: values[value] for value in now["aggregates"] if value in values}
            was = {**was, "aggregates": kept}
        bolts = (structure["bolts"] for structure in structures)
        feeds = [
            (table, table and bolt.get(table["from"][0], {}).get("streams", {}))
            for table, bolt in zip((was, now), bolts, strict=True)
        ]
        if feeds[0] != feeds[1]:
            what = "table" if folded else "table or value"
            is_dedup = name.endswith(DEDUP)
            subject = f"table {name!r} or the bolt that it reads"
            if is_dedup:
                subject = f"dedup of spout {name.removesuffix(DEDUP)!r}"
            raise CheckpointForeign(
                f"{root}: {subject} has changed, and micro-batch {decided} was decided before and "
                "is not finished. Run the former topology until it has finished the micro-batch, "
                "then change it" + ("" if is_dedup else _WITHOUT.format(what))
            )
    had, has = (Counter(map(tuple, each["sinks"].values())) for each in structures)
    views = {f"{name}{view}" for name in before.keys() & after for view in (CHANGES, CLOSED)}
    for component, stream in sorted(had - has):
        if component in views:
            raise CheckpointForeign(
                f"{root}: a sink of {component!r}, stream {stream!r}, was removed, and "
                f"micro-batch {decided} was decided before and is not finished: its rows would be "
                "lost. Run the former topology until it has finished the micro-batch, then change "
                "it"
            )
    _refuse_moved_sinks(root, decided, structures, lambda reads: reads[0] in views)


def check_sinks(
    root: str, decision: BatchDecision, structures: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> None:
    """Raise CheckpointForeign if a decided micro-batch has rows for a sink that was removed since.

    Also raised if a sink has changed its stream, and rows of the old or the new stream are left.
    Not raised once all sinks have answered, or if a sink only got another name. Rows for a table
    that was removed are ignored, because the content of the table is deleted.

    ``root``: the ackcore part of the checkpoint, for the message. ``decision``: the decision, which
    is not done. ``structures``: those of the recorded topology, and of the one that is to run.
    """
    had, has = (Counter(map(tuple, each["sinks"].values())) for each in structures)
    left = Counter[tuple[str, str]]()
    for file in () if decision.sinks_done else decision.files:
        left[file.component, file.stream] += file.rows
    for (component, stream), rows in (+left).items():
        if (component, stream) not in had - has:
            continue
        name = _stream_title(component, stream)
        sinks = "all its sinks" if has[component, stream] else "a sink"
        is_there = component in structures[1]["bolts"] | structures[1]["spouts"]
        raise CheckpointForeign(
            f"{root}: micro-batch {decision.number} has not written {counted(rows, 'row')} of "
            f"{name} yet, and the topology no longer has {sinks} for them. Run the former topology "
            "until it has finished the micro-batch, then change it"
            + (f"; or give {name} {_NO_SINK}" if is_there else "")
        )
    _refuse_moved_sinks(root, decision.number, structures, lambda reads: left[reads] > 0)


def _refuse_moved_sinks(
    root: str,
    number: int,
    structures: tuple[Mapping[str, Any], Mapping[str, Any]],
    has_rows: Callable[[tuple[str, str]], bool],
) -> None:
    """Raise CheckpointForeign if a sink has changed its stream, and rows of either are left.

    The target of a sink would lack rows, or would get rows that were decided for another target.

    ``number``: the decided micro-batch. ``has_rows``: returns whether it has rows of a stream.
    """
    before, after = (each["sinks"] for each in structures)
    for name in sorted(before.keys() & after):
        was, now = tuple(before[name]), tuple(after[name])
        if was != now and (has_rows(was) or has_rows(now)):
            raise CheckpointForeign(
                f"{root}: sink {name!r} read {_stream_title(*was)} before, and reads "
                f"{_stream_title(*now)} now. "
                f"Micro-batch {number} was decided before and is not finished, and its rows would "
                "go to the wrong sink. Run the former topology until it has finished the "
                "micro-batch, then change it"
            )


def _stream_title(component: str, stream: str) -> str:
    """Return a stream's name for messages: its component, and the stream unless it is default."""
    # With dedup, the sinks of a spout read its hidden bolt.
    name = f"{component.removesuffix(DEDUP)!r}"
    return name if stream == DEFAULT_STREAM else f"{name}, stream {stream!r}"


def _way_out(conditions: Sequence[str], text: str) -> str:
    """Return the advice ``text``, which starts with running the former topology if necessary.

    ``conditions``: what the former topology must reach first.
    """
    if not conditions:
        return text[0].upper() + text[1:]
    return f"Run the former topology until {' and '.join(conditions)}. Then {text}"


def losses(recorded: Mapping[str, TableState], tables: Mapping[str, Any]) -> list[str]:
    """Return texts on the tables and values with rows that a changed topology deletes or resets.

    ``recorded``: the tables of the checkpoint. ``tables``: the structures of the changed topology's
    tables.
    """
    found = []
    for name, table in recorded.items():
        if not table.rows:
            continue
        was, now = table.structure["aggregates"], tables.get(name, {}).get("aggregates")
        rows = counted(table.rows, "row")
        if table.structure["ttl_s"] is not None:
            rows = f"at most {rows}"  # expired ones may still count
        gone = ", ".join(repr(value) for value in was if value not in (now or (END,)))
        new = ", ".join(repr(value) for value in now or () if value not in was)
        if now is None and name.endswith(DEDUP):
            found.append(f"ids of spout {name.removesuffix(DEDUP)!r} deleted ({rows})")
        elif now is None:
            found.append(f"table {name!r} deleted ({rows} with {gone})")
        elif gone:
            found.append(f"{gone} of table {name!r} deleted ({rows})")
        if new:
            found.append(f"{new} of table {name!r} empty ({rows})")
    return found


def _typed(key: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in key)


def check_accepted(
    root: str,
    structures: tuple[Mapping[str, Any], Mapping[str, Any]],
    recorded: Mapping[str, TableState],
    accept_changes: bool,
) -> str:
    """Raise CheckpointForeign for a changed topology if ``accept_changes`` is false.

    Call this after the other checks, so that they do not refuse the start that the error advises.

    ``root``: the ackcore part of the checkpoint, for the message. ``structures``: the structures of
    the recorded topology, and of the one that is to run. ``recorded``: the tables of the
    checkpoint.

    Returns the texts of `losses`, joined; "" if the change deletes and resets nothing.
    """
    lost = "; ".join(losses(recorded, structures[1].get("tables", {})))
    if not accept_changes:
        raise CheckpointForeign(
            f"{root}: the checkpoint belongs to another topology: "
            f"{'; '.join(changes(*structures))}. Start that topology, or give this one another "
            "checkpoint. If you have changed the topology, start with accept_changes=True: "
            "records that wait for a retry then run through the changed one"
            + (f". The next micro-batch then changes stored rows: {lost}" if lost else "")
        )
    return lost


def check_offsets(log: Path, root: str, ours: int | None) -> None:
    """Raise CheckpointCorrupt if Spark's offset log or ackcore's records are missing or too old.

    Spark logs micro-batch N before ackcore plans it, and N + 1 after ackcore has marked N as done.

    ``log``: Spark's offset log. ``root``: the ackcore part of the checkpoint, for the message.
    ``ours``: the last micro-batch that ackcore planned; None before the first.
    """
    sparks = max(numbered(log), default=None)
    following = 0 if ours is None else ours + 1
    if sparks in (ours, following):
        return
    raise corrupt(
        log,
        "(Spark's part of the checkpoint) "
        + ("is missing or empty" if sparks is None else f"ends with micro-batch {sparks}")
        + f", and {root} (ackcore's part) "
        + ("has no micro-batch" if ours is None else f"ends with micro-batch {ours}")
        + ": one of the two was removed, or is older than the other",
    )
