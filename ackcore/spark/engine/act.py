"""The act step: write rows to sinks, find the rows that they refuse, fold tables, write dead
letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import cast_column, offsets_of
from ackcore._arrow.shown import shown_rows
from ackcore._error_hints import counted, text_of_error
from ackcore._records import Int64s
from ackcore.spark.base.errors import CheckpointCorrupt, RowFileDamaged
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.base.reasons import failures
from ackcore.spark.base.root_ids import distinct
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.refusals import REFUSED, Refusal
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checkpoint.table_records import TableState
from ackcore.spark.engine.insist import Failed, SinkCalls
from ackcore.spark.sinks.rejects import MAX_REFUSED, InvalidRejects, SinkRejects, too_many_refused
from ackcore.spark.sinks.sink import Sink, as_sink
from ackcore.spark.sinks.sink_batch import (
    BatchFile,
    SinkBatch,
    files_and_places,
    files_of,
    read_with_roots,
    row_numbers,
)
from ackcore.spark.tables.seen_keys import SeenFold
from ackcore.spark.tables.table_fold import TableFold, WindowFold
from ackcore.spark.tasks.record_ids import key_hashes
from ackcore.spark.tasks.row_files import damage_in
from ackcore.tables.watermarks import EVER, NEVER, WindowWatermarks
from ackcore.topology.builder import Topology
from ackcore.topology.parts import SinkSpec, TableSpec
from ackcore.topology.tuples import Reason

#: Writes the dead records of a micro-batch, given its number and the records by spout; repeatable.
DeadLetterWriter = Callable[[int, Mapping[str, pa.Table]], object]


def write_to_sinks(
    topology: Topology, calls: SinkCalls, state: State, decision: BatchDecision, age_ms: int | None
) -> None:
    """Write the accepted rows to the sinks of spouts and bolts, and record which rows they refuse.

    After a crash all sinks are called again, except those whose recorded refusal was returned with
    the other rows written. ``age_ms`` is the age of a decision that an earlier driver made, else
    None; see `SinkBatch`.

    Raises SinkError if a sink failed as often as the settings allow. Raises CheckpointCorrupt if a
    file with the rows differs from what the run wrote. Raises InvalidRejects if a sink names no
    rows, or rows that it was not given, and TooManyRefused if it names more than `MAX_REFUSED`.
    Raises CheckpointForeign if it is unknown whether a sink has taken the rows. Raises
    CheckpointInUse if another driver has taken over, Stopped if the query is being stopped, and
    RunCancelled if a Spark job of a sink was cancelled from outside.
    """
    number, nonacked, work = decision.number, decision.nonacked, state.runs.of(decision)
    assert isinstance(nonacked, pa.Table)  # as on record
    known = state.refusals.of(number)
    for sink in topology.sinks.values():
        files = files_of(decision.files, work, sink.component, sink.stream)
        if not files or topology.table_read(sink) is not None:
            continue
        roots: Int64s = nonacked["root_id"].to_numpy()
        batch = sink_batch(sink, calls, state, number, files, roots, age_ms)
        writes = _SinkWrites(sink, batch, calls)
        said = [one for one in known if one.sink == sink.name]
        while not any(one.written for one in said):
            refusal = writes.all_but(said)
            if refusal is None:
                break
            state.refusals.add(number, len(known), refusal)
            failpoint("refused", number)
            said.append(refusal)
            known.append(refusal)


def sink_batch(
    sink: SinkSpec,
    calls: SinkCalls,
    state: State,
    number: int,
    files: tuple[BatchFile, ...],
    nonacked: Int64s,
    age_ms: int | None,
) -> SinkBatch:
    """Return the rows of micro-batch ``number`` for a sink, without calling it.

    ``files``: the files with the rows. ``nonacked``: the sorted roots whose rows are left out.
    """
    return SinkBatch(
        spark=calls.spark,  # type: ignore[arg-type] # None if no sink needs one
        sink=sink.name,
        deployment=f"{state.deployment_key:016x}",
        checkpoint=state.url,
        batch_id=number,
        files=files,
        nonacked=nonacked,
        age_ms=age_ms,
    )


def fold_tables(
    topology: Topology, calls: SinkCalls, state: State, decision: BatchDecision
) -> None:
    """Fold the rows of ACKED records into the tables, and record the tables, unless it is done.

    Raises SinkError if the fold of a table failed as often as the settings allow; the message names
    it. Raises CheckpointCorrupt if a file with rows or a segment of a table is missing or damaged.
    Raises CheckpointInUse if another driver has taken over, Stopped if the query is being stopped,
    and RunCancelled if a Spark job was cancelled from outside.
    """
    number, work = decision.number, state.runs.of(decision)
    before = state.tables.of(state.last_done) or {}
    if state.tables.of(number) is not None or not (topology.tables or before):
        return
    assert isinstance(decision.nonacked, pa.Table)  # as on record
    # The records of refused rows are dead, though their run ACKED them.
    refused = [pc.list_flatten(one.rows["roots"]) for one in state.refusals.of(number)]
    roots = [decision.nonacked["root_id"], *refused]
    nonacked = distinct(*(each.to_numpy() for each in roots))
    after: dict[str, TableState] = {}
    for table in topology.tables_in_order:
        name = table.name
        files = files_of(decision.files, work, table.component, table.stream)
        # Event times may be before 1970.
        known = before.get(name) or TableState(table.shape.structure(), NEVER)
        fold = _fold_of(state, topology, table, decision, known, after)
        after[name] = calls.insist(f"table {name!r}", partial(fold.folded, known, files, nonacked))
        failpoint("folded", number)
    state.tables.write(number, after)
    failpoint("tables-recorded", number)


def _fold_of(
    state: State,
    topology: Topology,
    table: TableSpec,
    decision: BatchDecision,
    before: TableState,
    folded: Mapping[str, TableState],
) -> TableFold:
    """Return the fold of the micro-batch of ``decision`` into a table.

    ``before``: the table after the last micro-batch that is done. ``folded``: the tables that are
    folded already, by name, among them all whose closed windows this table reads.
    """
    shape, window = table.shape, table.shape.window
    of = state.segments, shape, decision.number
    behind = decision.behind.get(table.name, {})
    if window is None:
        spout = topology.source_of(table.name)
        if spout is None or spout.dedup is None:
            return TableFold(*of, decision.now_ms)
        return SeenFold(*of, decision.now_ms, spout.dedup, behind)
    spouts = topology.spouts_of(table.component)
    waits = decision.waiting.segments()
    oldest = min((part.oldest_ms for name in spouts for part in waits.get(name, ())), default=None)
    read = [folded[name] for name in topology.tables_before(table)]
    # The last micro-batch of a finite run for this table, as far as is known: all windows of the
    # tables that it reads closed before, so that no closed rows follow.
    ends = (
        state.kind == "batch"
        and not decision.waiting.rows()
        and not state.pending_replays()
        and all(WindowWatermarks.of(t.watermarks).closed == EVER and not t.closed for t in read)
    )
    earlier = WindowWatermarks.of(before.watermarks)
    times = decision.times.get(table.name, {})
    later = earlier.after(window, spouts, decision.now_ms, times, oldest, ends, behind)
    return WindowFold(*of, earlier.closed, later)


def park_dead(
    decision: BatchDecision, write_dead_letters: DeadLetterWriter, calls: SinkCalls
) -> None:
    """Write a micro-batch's dead records, if any, to the dead-letter store; repeat failed calls.

    Raises SinkError if all calls failed, CheckpointInUse if another driver has taken over, and
    Stopped if the query is stopped.
    """
    number, dead = decision.number, decision.all_dead
    if not dead:
        return

    def park() -> None:
        write_dead_letters(number, dead)
        failpoint("in-dead-letters", number)

    calls.insist("the dead-letter store", park)


class _SinkWrites:
    """The calls that write one micro-batch's rows to one sink, which may refuse some of them."""

    def __init__(self, sink: SinkSpec, batch: SinkBatch, calls: SinkCalls) -> None:
        self._sink = sink
        self._batch = batch
        self._calls = calls
        self._writer = as_sink(sink.writer)
        place = self._writer.own_place  # the system's error for a full disk names no file
        self._what = f"sink {sink.name!r}" + (f" at {place}" if place else "")

    def all_but(self, refused: Sequence[Refusal]) -> Refusal | None:
        """Write the rows not in ``refused``; return a new refusal, or None if all were taken.

        Repeats failed calls, and raises SinkError after the last one. If the sink has ``isolate``,
        bisects the batch from the second failure on.
        """
        batch = without_refused(self._batch, refused)

        def bisect(error: BaseException) -> Refusal | None:
            if not is_isolated(self._sink, error):
                return None
            found = isolate(self._sink, batch, error, self._probe)
            return None if found is None else self._refusal(found, batch, written=False)

        return self._calls.insist(
            self._what,
            lambda: self._write(batch),
            bisect if self._sink.isolate else None,
            _way_out(self._sink),
            fenced=self._writer.checks_fence,
        )

    def _write(self, batch: SinkBatch) -> Refusal | None:
        rejects, written = call_sink(self._writer, batch)
        return None if rejects is None else self._refusal(rejects, batch, written)

    def _refusal(self, rejects: SinkRejects, batch: SinkBatch, written: bool) -> Refusal:
        return Refusal(self._sink.name, written, refused_rows(rejects, batch))

    def _probe(self, part: SinkBatch) -> BaseException | None:
        try:
            self._calls.once(
                self._what, lambda: self._writer.write(part), fenced=self._writer.checks_fence
            )
        except Failed as failed:
            return failed.error
        return None


def _way_out(sink: SinkSpec) -> str:
    """Return the end of a sink's error: how it may refuse rows, or that bisection found none.

    It is "" if the sink cannot write parts of a batch again.
    """
    if sink.isolate:
        return (
            ". ackcore bisected the batch, as isolate requests, and found no row that fails "
            "while others are written"
        )
    if not as_sink(sink.writer).replaces:
        return ""
    return (
        ". If rows cause the error, return or raise SinkRejects, which names them, or declare "
        "the sink with isolate=True, so that ackcore bisects the batch to them: their records "
        "then go to the dead letters, and the query continues"
    )


def call_sink(writer: Sink, batch: SinkBatch) -> tuple[SinkRejects | None, bool]:
    """Call a sink; return the rows that it refuses, if any, and whether the others are written.

    Raises InvalidRejects if the sink raises SinkRejects without rows, or returns anything else than
    SinkRejects or None. Raises CheckpointCorrupt if the files of the rows are damaged; after an
    error of the sink all rows are read to find out. Raises any other exception of the sink.
    """
    try:
        rejects = writer.write(batch)
    except SinkRejects as raised:
        if not len(raised):
            raise InvalidRejects(
                "the sink raised SinkRejects without any row; raise it only with refused rows"
            ) from raised
        return raised, False
    except Exception as error:
        damage = damage_in(error)
        if damage is None:
            try:  # the writer's error may not show the damage
                batch.verify()
            except RowFileDamaged as found:
                damage = found
        if damage is not None:
            raise CheckpointCorrupt(str(damage)) from error
        raise
    failpoint("in-sink", batch.batch_id)
    if not isinstance(rejects, SinkRejects | None):
        raise InvalidRejects(f"write must return SinkRejects or None, got {type(rejects).__name__}")
    return rejects, True


# ---------------------------------------------------------------------------------- refused rows

#: The number of consecutive failed calls after which a sink counts as down.
_HOPELESS = 64
#: The number of further failures before a row that failed by itself is refused.
_TRIED_AGAIN = 2


def without_refused(batch: SinkBatch, refusals: Sequence[Refusal]) -> SinkBatch:
    """Return a batch that leaves out just the rows in ``refusals``; the same object if none."""
    if not refusals:
        return batch
    rows = pa.concat_tables([one.rows for one in refusals])
    files, places = rows["file"].to_numpy(), rows["place"].to_numpy()
    return replace(
        batch,
        files=tuple(
            file._replace(refused=np.sort(places[files == i])) for i, file in enumerate(batch.files)
        ),
    )


def refused_rows(rejects: SinkRejects, batch: SinkBatch) -> pa.Table:
    """Find the rows that a sink refuses among those that it was given.

    Raises InvalidRejects if the sink names rows that it was not given: they would be neither
    written nor dead.

    Returns the refused rows, each once, as a table of the schema `REFUSED`.
    """
    by = _by_values if rejects.numbers is None else _by_numbers
    found, at = by(rejects, batch)
    texts = pa.array([_reason(batch.sink, one) for one in rejects.reasons], pa.string())
    reasons = texts.take(pa.array(rejects.reason_of[at]))
    return found.append_column(REFUSED.field("reason"), reasons)


def _reason(sink: str, said: str | BaseException) -> str:
    reason = Reason.of(sink, said, final=True)
    return (reason if isinstance(said, BaseException) else reason._replace(type="Refused")).encode()


def _by_numbers(rejects: SinkRejects, batch: SinkBatch) -> tuple[pa.Table, Int64s]:
    """Find the rows that a sink refuses by their numbers; raise InvalidRejects if one is missing.

    Returns the rows, of the schema `REFUSED` without reasons; and for each row its index in
    ``rejects.numbers``, which is also the index of its reason in ``rejects.reason_of``.
    """
    assert rejects.numbers is not None
    wanted, first = np.unique(rejects.numbers, return_index=True)
    found, reasons = [_NONE], [np.empty(0, np.int64)]
    lost, of = len(wanted), set(files_and_places(wanted)[0].tolist())
    for i, file in enumerate(batch.files):
        for part, there in read_with_roots(file, batch.nonacked) if i in of else ():
            numbers = row_numbers(i, there)
            here = np.isin(numbers, wanted)
            found.append(_rows(i, there[here], part.filter(pa.array(here))))
            reasons.append(first[np.isin(wanted, numbers)])
            lost -= int(here.sum())
    if lost:
        raise InvalidRejects(
            f"SinkRejects names {counted(lost, 'row')} that the sink was not given: their numbers "
            "are not among those of SinkBatch.numbered"
        )
    return pa.concat_tables(found), np.concatenate(reasons)


def _by_values(rejects: SinkRejects, batch: SinkBatch) -> tuple[pa.Table, Int64s]:
    assert rejects.values is not None
    names, schema = rejects.values.column_names, batch.schema()
    if not names or len(set(names)) != len(names) or not set(names) <= set(schema.names):
        raise InvalidRejects(
            "SinkRejects must name rows by columns of the sink's stream, each once: "
            f"{', '.join(schema.names)}, got {', '.join(names) or 'none'}"
        )
    values = _as_in_stream(rejects.values, pa.schema([schema.field(name) for name in names]))
    wanted, first = np.unique(key_hashes(values, names)[0], return_index=True)
    found, reasons = [_NONE], [np.empty(0, np.int64)]
    missing = np.ones(len(wanted), np.bool_)
    for i, file in enumerate(batch.files) if len(wanted) else ():
        for part, there in read_with_roots(file, batch.nonacked):
            hashes, _ = key_hashes(part, names)
            place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
            here = wanted[place] == hashes
            missing[place[here]] = False
            found.append(_rows(i, there[here], part.filter(pa.array(here))))
            reasons.append(first[place[here]])
    if missing.any():
        first_one = shown_rows(values.slice(int(first[missing].min()), 1))[0]
        raise InvalidRejects(
            f"SinkRejects names rows that the sink was not given: {int(missing.sum())} of "
            f"{len(wanted)} values of {', '.join(names)} are in no row, such as "
            f"{first_one!r:.200}; name rows by the values that the sink received in this "
            "micro-batch"
        )
    return pa.concat_tables(found), np.concatenate(reasons)


def _as_in_stream(values: pa.Table, schema: pa.Schema) -> pa.Table:
    for field in schema:
        try:
            cast = cast_column(values[field.name], field.type)
        except pa.ArrowException as error:
            raise InvalidRejects(
                f"column {field.name!r} of SinkRejects must be {field.type}, as in the sink's "
                f"stream, got {values[field.name].type}: {error}"
            ) from error
        values = values.set_column(values.column_names.index(field.name), field, cast)
    return values


def _rows(file: int, places: Int64s, batch: pa.RecordBatch) -> pa.Table:
    """Return rows of a file as refused rows (`REFUSED`), without reasons.

    ``file``: its index in `SinkBatch.files`. ``places``: the indices of the rows in the file.
    ``batch``: the rows, with their roots in the last column.
    """
    roots = batch.column(len(batch.schema) - 1)
    if not pa.types.is_list(roots.type):
        offsets = offsets_of(roots.is_valid().to_numpy(False))
        roots = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), roots.drop_null())
    files = np.full(len(places), file, np.int32)
    return pa.table([pa.array(files), pa.array(places), roots.cast(_ROOTS)], schema=_NONE.schema)


_ROOTS = pa.list_(pa.int64())
_NONE = pa.schema([REFUSED.field(i) for i in range(3)]).empty_table()


def refused_roots(refusals: Sequence[Refusal], spouts: Sequence[str]) -> pa.Table:
    """Return the records of refused rows as failures, one row each, of the schema `FAILED`.

    A record with several refused rows has the reason of the first one. ``spouts``: the tracked
    spouts; with several, the column ``spout`` is null.
    """
    rows = pa.concat_tables([one.rows for one in refusals])
    roots = pc.list_flatten(rows["roots"]).to_numpy()
    at = pc.list_parent_indices(rows["roots"].combine_chunks()).to_numpy()
    roots, first = np.unique(roots, return_index=True)
    return failures(roots, spouts, rows["reason"].combine_chunks().take(pa.array(at[first])))


def unanchored(refusals: Sequence[Refusal]) -> int:
    """Return the number of refused rows without a root, which belong to no record."""
    lengths = [pc.list_value_length(one.rows["roots"]) for one in refusals]
    return sum(pc.sum(pc.equal(each, 0)).as_py() or 0 for each in lengths)


# ------------------------------------------------------------------------------------- isolation

#: Calls a sink; returns its error, or None.  May raise an error that ends the query.
Probe = Callable[[SinkBatch], BaseException | None]


def is_isolated(sink: SinkSpec, error: BaseException) -> bool:
    """Return whether an error is of a class in the sink's ``isolate``: then its batch is bisected.

    An error of a worker arrives as text, which is searched for the name of such a class.
    """
    if isinstance(error, sink.isolate):
        return True
    text = text_of_error(error)
    return any(re.search(rf"\b{kind.__name__}\b", text) for kind in sink.isolate)


def isolate(
    sink: SinkSpec, batch: SinkBatch, error: BaseException, probe: Probe
) -> SinkRejects | None:
    """Bisect a batch for which a sink raises, down to the single rows for which it raises.

    Raises TooManyRefused if more than `MAX_REFUSED` rows fail.

    ``sink``: the sink, with the errors that a row may cause. ``error``: the error that it raised
    for the whole batch. ``probe``: calls it with a part of the batch; returns its error, or None.

    Returns the failing rows by their numbers, each with its error, after two more tries of each.
    Returns None if none is certain to fail: the batch has no rows, the sink is down, or rows fail
    only together or with an error that ``isolate`` does not list. Parts that the sink took stay
    written; the next call with this batch id must replace them.
    """
    numbers = batch.all_numbers()
    if not len(numbers):
        return None
    found: list[int] = []
    first: BaseException | None = None  # the error of the first found row
    failed_in_a_row = 0
    witness: tuple[int, int] | None = None  # the shortest part that the sink took

    def is_up() -> bool:
        return witness is None or probe(_part(batch, numbers, *witness)) is None

    parts = [(0, len(numbers), error)]  # parts that fail, with their errors
    while parts:
        low, high, error = parts.pop()
        if high - low == 1:
            found.append(low)
            first = first or error
        else:
            middle = (low + high) // 2
            bad = []
            for half in ((low, middle), (middle, high)):
                said = probe(_part(batch, numbers, *half))
                if said is None:
                    failed_in_a_row = 0
                    if witness is None or half[1] - half[0] < witness[1] - witness[0]:
                        witness = half
                    continue
                failed_in_a_row += 1
                if not is_isolated(sink, said) or (
                    failed_in_a_row >= _HOPELESS and not sink.isolate_alone
                ):
                    return None
                # Without the traceback, which keeps this part of the batch in memory.
                bad.append((*half, said.with_traceback(None)))
            parts += reversed(bad)
        if len(found) > MAX_REFUSED and (witness is not None or sink.isolate_alone):
            if not is_up():
                return None
            raise too_many_refused(
                f"sink {sink.name!r}",
                batch.batch_id,
                first or error,
                "The next attempt replaces the rows that are written now",
            ) from error
    if witness is None and not sink.isolate_alone:
        return None

    # The network may have caused a row's failure.  So each row is called twice more: two
    # rounds over all rows.  In between and at the end, a part that the sink took must succeed.
    rows = sorted(found)
    for _ in range(_TRIED_AGAIN):
        failing: list[int] = []
        errors = []
        for i, row in enumerate(rows):
            if i % _HOPELESS == 0 and not is_up():
                return None
            said = probe(_part(batch, numbers, row, row + 1))
            if said is None:
                continue
            if not is_isolated(sink, said):
                return None
            failing.append(row)
            errors.append(said.with_traceback(None))  # the traceback keeps this part in memory
        rows = failing
    if not rows or not is_up():
        return None
    return batch.refuse(numbers[rows], errors)


def _part(batch: SinkBatch, numbers: Int64s, low: int, high: int) -> SinkBatch:
    """Return the part of a batch with the rows ``low`` to ``high`` - 1 of `SinkBatch.all_numbers`.

    The part has one range of places per file. A sink may send it to tasks, so it must be small.
    """
    files, places = files_and_places(numbers[low:high])
    kept = []
    for i in np.unique(files).tolist():
        first, last = np.searchsorted(files, [i, i + 1])
        within = int(places[first]), int(places[last - 1]) + 1
        kept.append(batch.files[i]._replace(within=within))
    return replace(batch, files=tuple(kept))
