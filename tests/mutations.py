"""Put known bugs in, one by one, and see each caught by the test that is named for it.

    python tests/mutations.py [WORD ...]    only those with one of the words in their name or file

The tree is copied, the tests are seen to pass there, and then each mutation is applied to the copy,
alone, the extension is built again if its sources changed, and the named test must fail.  A
mutation whose text is not found exactly once is an error: the code moved on, so must the list.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: Of what is copied: neither what is built nor what is not ours.
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache"
)
TEST_TIMEOUT_S = 240
PASSED, FAILED_TESTS = 0, 1  # pytest's exit codes; the others say that nothing was tested


class Mutation(NamedTuple):
    """One bug: what it is, where, the text as it is and as it would be, and who must notice."""

    name: str
    file: str
    old: str
    new: str
    test: str


def contract(case: str, backend: str = "_reference") -> str:
    """The test that runs one case of the contract on one backend."""
    return f"tests/test_ledger.py::test_contract[ackcore.{backend}-{case}]"


def native(case: str) -> str:
    """The same on the compiled one."""
    return contract(case, "_native")


COLUMNS = "ackcore/_columns.py"
TWIN, TWIN_ENTRY = "ackcore/_reference/ledger.py", "ackcore/_reference/entry.py"
TABLE, LEDGER, BLOCK, KERNEL, LEDGER_PXI = (
    "pyx/table.h",
    "pyx/ledger.h",
    "pyx/block.h",
    "pyx/kernel.h",
    "pyx/ledger.pxi",
)
MODEL, MEMORY = "tests/test_ledger_model.py", "tests/test_memory.py"
PROMISES = "tests/test_promises.py"
STAGES, BATCH = "tests/spark/test_stages.py", "tests/spark/test_batch.py"
SUSPECTS = "tests/spark/test_suspects.py"
SPARK, PACKING = "tests/spark/test_settle.py", "tests/spark/test_packing.py"

MUTATIONS = [
    # The twin: SEMANTICS 2 and 3.
    Mutation(
        "swallow a FAIL before INIT",
        TWIN_ENTRY,
        "        if task == FAIL:\n            self.flags |= FLAG_FAILED",
        "        if task == FAIL:\n            self.flags |= FLAG_FAILED * (self.task >= 0)",
        contract("fail_before_init"),
    ),
    Mutation(
        "a failed tree of zero is failed",
        TWIN_ENTRY,
        "            if self.val == 0:\n                return ACKED",
        "            if self.val == 0 and not self.flags & FLAG_FAILED:\n"
        "                return ACKED",
        contract("zero_beats_failed"),
    ),
    Mutation(
        "the first task stays",
        TWIN_ENTRY,
        "            self.task = task\n",
        "            self.task = max(self.task, task)\n",
        contract("second_init_of_the_same_value"),
    ),
    Mutation(
        "an ACK refreshes",
        TWIN,
        "if task in (FAIL, RESET) or",
        "if task < 0 or",
        contract("init_and_ack_keep_the_bucket"),
    ),
    Mutation(
        "a FAIL does not refresh",
        TWIN,
        "if task in (FAIL, RESET) or",
        "if task == RESET or",
        contract("fail_and_reset_move_to_the_newest_bucket"),
    ),
    Mutation(
        "expire one bucket early",
        TWIN,
        "if self._turn - entry.turn >= self.buckets",
        "if self._turn - entry.turn >= self.buckets - 1",
        contract("check_lives_of_buckets"),
    ),
    Mutation(
        "a RESET removes",
        TWIN,
        "if kind is not RESET_TIMEOUT:",
        "if kind is not None:",
        contract("reset"),
    ),
    Mutation(
        "what nobody took stays",
        TWIN,
        "            self._left = [self._row(root) for root in left]",
        "            self._left = self._left + [self._row(root) for root in left]",
        contract("what_nobody_took_is_dropped"),
    ),
    Mutation(
        "max_entries is one less",
        TWIN,
        "if len(self._pending) + new > self.max_entries",
        "if len(self._pending) + new >= self.max_entries",
        contract("check_max_entries"),
    ),
    Mutation(
        "copies forget what expired",
        TWIN,
        "    ledger._left = list(left)",
        "    ledger._left = []",
        contract("check_pickles_and_copies"),
    ),
    # The twin: SEMANTICS 4.
    Mutation(
        "decide while folding",
        TWIN,
        "            entry.merge(row)",
        "            entry.merge(row)\n"
        "            if entry.inits and entry.val == 0:\n"
        "                del self._pending[root]",
        contract("check_folding_messages"),
    ),
    Mutation(
        "the oldest age stays",
        TWIN_ENTRY,
        "self.turn = max(self.turn, row.turn)",
        "self.turn = min(self.turn, row.turn)",
        contract("check_merging_two_rows"),
    ),
    Mutation(
        "a second init is forgotten in merging",
        TWIN_ENTRY,
        "self.inits = min(self.inits + row.inits, 2)",
        "self.inits = max(self.inits, row.inits)",
        contract("check_tables_delivered_twice"),
    ),
    Mutation(
        "an anomaly of zero is acked",
        TWIN_ENTRY,
        "        if self.inits > 1 or self.flags & FLAG_TASKS_DIFFER:",
        "        if self.val and (self.inits > 1 or self.flags & FLAG_TASKS_DIFFER):",
        contract("check_settling_table"),
    ),
    Mutation(
        "past the time-out a millisecond early",
        TWIN_ENTRY,
        "self.last_ms < deadline",
        "self.last_ms <= deadline",
        contract("check_settling_far_in_time"),
    ),
    # Columns.
    Mutation(
        "slices of Arrow start at the front",
        COLUMNS,
        "start = column.offset * kind.dtype.itemsize",
        "start = 0",
        "tests/test_columns.py::test_id_columns_go_in_uncopied[arrow slice]",
    ),
    Mutation(
        "nulls are zeros",
        COLUMNS,
        "    if column.null_count:",
        "    if not column:",
        "tests/test_columns.py::test_refused_arrow_and_pandas[ackcore._reference-nulls]",
    ),
    Mutation(
        "foreign byte order is taken for ours",
        COLUMNS,
        " or not dtype.isnative:",
        ":",
        contract("check_refusals"),
    ),
    Mutation(
        "unknown kinds are let in",
        COLUMNS,
        '"tasks", tasks, tasks < RESET,',
        '"tasks", tasks, tasks < RESET - 1,',
        contract("check_refusals"),
    ),
    # The native table.
    Mutation(
        "drop the seed",
        TABLE,
        "uint64_t x = key ^ seed.flip;",
        "uint64_t x = key; seed = seed_from(1);",
        "tests/test_ledger.py::test_each_ledger_has_an_order_of_its_own",
    ),
    Mutation(
        "one round of the hash",
        TABLE,
        "return x * seed.multipliers[1];",
        "return (key ^ seed.flip) * seed.multipliers[1];",
        "tests/test_ledger.py::test_ids_at_even_distances_lie_as_random_ones",
    ),
    Mutation(
        "take the same seed again",
        LEDGER,
        "    l->secret = mix64(l->secret + 1);\n",
        "",
        "tests/test_ledger.py::test_ids_that_share_a_home_under_a_known_seed[1]",
    ),
    Mutation(
        "leave a hole in a chain",
        TABLE,
        "while (UNLIKELY(t->buckets[i].overflow_count != 0)) {",
        "while (0) {",
        f"{MODEL}::test_long_random_traffic[False]",
    ),
    Mutation(
        "a slot keeps the marks of who was there before",
        TABLE,
        "t->buckets[i].stamps[s] & MARKED ? t->marks[i].marks : 0;",
        "t->marks[i].marks;",
        f"{MODEL}::test_long_random_traffic[False]",
    ),
    Mutation(
        "lose the entries of XOR 0 when the table moves",
        LEDGER,
        "                migrate_entry(l, e);\n",
        "                if (e.val) migrate_entry(l, e);\n                else l->used--;\n",
        f"{MODEL}::test_long_random_traffic[False]",
    ),
    Mutation(
        "never sweep",
        LEDGER,
        "    for (; buckets && dropped(l) > 0; buckets--) {",
        "    for (; 0; buckets--) {",
        f"{MEMORY}::test_steady_expiry_takes_no_more_memory",
    ),
    Mutation(
        "never shrink",
        LEDGER,
        "if (l->peak * LOW_WATER < l->limit &&",
        "if (0 &&",
        f"{MEMORY}::test_a_table_whose_load_fell_shrinks",
    ),
    # The native ledger.
    Mutation(
        "swallow a FAIL before INIT, natively",
        BLOCK,
        "    } else if (task == TASK_FAIL)\n        add_mark(at, MARK_FAILED);",
        "    } else if (task == TASK_FAIL)\n"
        "        add_mark(at, b->not_tasks[at.s] < 0 ? MARK_FAILED : 0);",
        native("fail_before_init"),
    ),
    Mutation(
        "expire one bucket early, natively",
        LEDGER,
        "    l->turns = turns;",
        "    l->turns = turns - 1;",
        native("check_lives_of_buckets"),
    ),
    Mutation(
        "decide while folding, natively",
        BLOCK,
        "    if (!decide || b->not_tasks[at.s] >= 0) return 0;",
        "    if (!decide && b->not_tasks[at.s] < 0 && b->vals[at.s] == 0) ledger_erase(l, at);\n"
        "    if (!decide || b->not_tasks[at.s] >= 0) return 0;",
        native("check_folding_messages"),
    ),
    Mutation(
        "decide while merging, natively",
        KERNEL,
        "    add_mark(at, e.mark);\n",
        "    add_mark(at, e.mark);\n"
        "    if (b->not_tasks[at.s] < 0 && b->vals[at.s] == 0) return ledger_erase(l, at);\n",
        native("check_merging_two_rows"),
    ),
    Mutation(
        "outcomes before a row that goes apart are handed out after its own",
        BLOCK,
        "            if (decide) {\n                const size_t more = collect_outcomes(l, &w,",
        "            if (0) {\n                const size_t more = collect_outcomes(l, &w,",
        f"{MODEL}::test_long_random_traffic[False]",
    ),
    Mutation(
        "the outcomes of rows that follow a multiple of 64 are not handed out",
        BLOCK,
        "for (; from < to; from += 64)",
        "for (; from + 64 <= to || from == 0; from += 64)",
        native("check_id_patterns"),
    ),
    Mutation(
        "lose a row where a batch is cut",
        KERNEL,
        "m = block_for(l, in, decide)(l, in, p, rows, n",
        "m = block_for(l, in, decide)(l, in, p, rows - (rows == BLOCK), n",
        native("check_id_patterns"),
    ),
    Mutation(
        "dead entries are found",
        LEDGER,
        "if (UNLIKELY(l->dead != 0)) match &= ~dead_slots(l, &t->buckets[i]);",
        "",
        f"{MODEL}::test_lazy_expiry_is_eager_expiry",
    ),
    Mutation(
        "rows of pending roots count against max_entries",
        KERNEL,
        "*missing += !ledger_find(l, ids[j], &at);",
        "*missing += 1;",
        native("check_max_entries"),
    ),
    Mutation(
        "the greatest task does not stay in folding",
        BLOCK,
        "if (!decide && was < is) is = was;",
        "",
        f"{MODEL}::test_folding_is_merging_rows",
    ),
    Mutation(
        "an anomaly of zero is acked, natively",
        KERNEL,
        "    if (e.mark & MARK_INITS) return STATUS_ANOMALY;\n"
        "    if (e.val == 0) return STATUS_ACKED;",
        "    if (e.val == 0) return STATUS_ACKED;\n"
        "    if (e.mark & MARK_INITS) return STATUS_ANOMALY;",
        native("check_settling_table"),
    ),
    Mutation(
        "batches take no lock",
        LEDGER_PXI,
        "                    m = kernel.run_batch(&self.l, batch, n, out, decide)\n"
        "                lock_release(&self.lock)\n",
        "                    lock_release(&self.lock)\n"
        "                    m = kernel.run_batch(&self.l, batch, n, out, decide)\n"
        "                else:\n"
        "                    lock_release(&self.lock)\n",
        "tests/test_threads.py::test_long_batches_of_four_threads_on_the_same_roots",
    ),
    Mutation(
        "batches keep the GIL",
        LEDGER_PXI,
        "            with nogil:\n"
        "                lock_acquire_nogil(&self.lock)\n"
        "                need = kernel.reserve_needed(\n"
        "                    &self.l, n, self.most, batch",
        "            if True:\n"
        "                lock_acquire_nogil(&self.lock)\n"
        "                need = kernel.reserve_needed(\n"
        "                    &self.l, n, self.most, batch",
        f"{PROMISES}::test_columns_are_taken_without_the_gil[ack_many]",
    ),
    Mutation(
        "grow in one go",
        KERNEL,
        "            ledger_migrate(l, rows * 2); /* two home buckets a row",
        "            ledger_migrate(l, WHOLE); /* two home buckets a row",
        f"{PROMISES}::test_growth_moves_a_few_buckets_with_each_call",
    ),
    Mutation(
        "a bucket that a row just before changes is looked at early",
        BLOCK,
        "w->slots[j] = (hazard - 1) & any;",
        "w->slots[j] = any + 0 * hazard;",
        f"{MODEL}::test_rows_close_together_in_crowded_buckets",
    ),
    Mutation(
        "rows probed early are not probed again after an entry made apart",
        BLOCK,
        "decide, out, m);\n            reprobe(l, &w, j, mode);\n",
        "decide, out, m);\n",
        f"{MODEL}::test_rows_close_together_in_crowded_buckets",
    ),
    Mutation(
        "rows probed early are not probed again after entries that were moved back",
        BLOCK,
        "(unsigned)s);\n                reprobe(l, &w, j, mode);\n",
        "(unsigned)s);\n",
        f"{MODEL}::test_rows_close_together_in_crowded_buckets",
    ),
    Mutation(
        "a bucket beside which a row is at work is looked at early",
        BLOCK,
        "indexes[j] - w->home_indexes[PROBE_AHEAD + j - k] + 1 <= 2;",
        "indexes[j] == w->home_indexes[PROBE_AHEAD + j - k];",
        f"{MODEL}::test_rows_close_together_in_crowded_buckets",
    ),
    Mutation(
        "the last bucket's next is whatever lies there",
        BLOCK,
        "uint32_t hazard = is_last(l, indexes[j]);",
        "uint32_t hazard = 0;",
        f"{MODEL}::test_rows_close_together_in_crowded_buckets",
    ),
    Mutation(
        "an entry that goes past its home bucket is not counted there",
        BLOCK,
        "b[-1].overflow_count += (uint8_t)(((slot & FREE_BITS) != 0) + done);",
        "b[-1].overflow_count += (uint8_t)done;",
        f"{MODEL}::test_long_random_traffic[False]",
    ),
    Mutation(
        "an entry that goes past its home bucket while folding is not counted there",
        BLOCK,
        "if (UNLIKELY(slots & DISPLACED)) b[-1].overflow_count += (slot & FREE_BITS) != 0;",
        "",
        f"{MODEL}::test_rows_close_together_in_crowded_buckets",
    ),
    Mutation(
        "a copy forgets what its table has room for",
        LEDGER,
        "l->min_buckets) : l->limit;",
        "l->min_buckets) : limit_of(l->cur.n, l->min_buckets);",
        f"{MEMORY}::test_a_copy_beyond_its_capacity_grows_as_any_ledger",
    ),
    Mutation(
        "the first of a column of tasks is not looked at",
        KERNEL,
        "for (size_t j = 0; j < n; j++) least = tasks",
        "for (size_t j = 1; j < n; j++) least = tasks",
        native("check_refusals"),
    ),
    Mutation(
        "a large table begins anywhere",
        "pyx/_native.pyx",
        "start = HUGE_PAGE - <uintptr_t>cnp.PyArray_DATA(memory) % HUGE_PAGE",
        "start = 4096",
        f"{MEMORY}::test_a_large_table_begins_with_a_huge_page",
    ),
    Mutation(
        "a refused table is said to be smaller than what was asked for",
        LEDGER_PXI,
        "        self.l.min_buckets = buckets_for(min(self.options.capacity, INT64_MAX))\n"
        "        t = self.new_table(self.l.min_buckets)\n",
        "        t = self.new_table(buckets_for(min(self.options.capacity, INT64_MAX)))\n",
        f"{PROMISES}::test_a_table_that_no_machine_holds_is_refused",
    ),
    Mutation(
        "a table where memory is short has no room beyond what it must",
        LEDGER,
        "entries + entries / 32 + 64",
        "entries",
        f"{PROMISES}::test_a_batch_is_applied_if_memory_suffices_and_else_not_at_all[frugal]",
    ),
    # Spark.
    Mutation(
        "lose flags at open_before",
        "ackcore/arrow.py",
        'numbers["flags"].view(np.uint8),',
        'numbers["flags"].view(np.uint8) * np.uint8(0),',
        f"{SPARK}::test_a_fail_before_its_init_goes_on",
    ),
    Mutation(
        "apply a task's rows twice",
        "ackcore/spark/settle/shards.py",
        "                else:\n                    ledger.merge(rows)\n",
        "                else:\n                    ledger.merge(rows)\n"
        "                    ledger.merge(rows)\n",
        f"{SPARK}::test_random_trees",
    ),
    Mutation(
        "apply a task's rows twice, those that were not folded",
        "ackcore/spark/settle/shards.py",
        "                if isinstance(rows, Events):\n                    fold(ledger, rows)\n",
        "                if isinstance(rows, Events):\n                    fold(ledger, rows)\n"
        "                    fold(ledger, rows)\n",
        f"{SPARK}::test_a_table_delivered_twice_is_no_success",
    ),
    Mutation(
        "rows from a shuffle leave as they came",
        "ackcore/spark/settle/packing.py",
        "order = None if self._fixed_order else np.argsort(entries.root_ids)",
        "order = None",
        f"{PACKING}::test_the_order_of_rows_does_not_show_unless_it_is_fixed",
    ),
    Mutation(
        "lose the last rows of a chunk",
        "ackcore/spark/settle/packing.py",
        "        rows, self._rows = self._rows, 0\n",
        "        rows, self._rows = self._rows - (self._rows > 1), 0\n",
        f"{SPARK}::test_random_trees",
    ),
    Mutation(
        "decided rows go on as if open",
        "ackcore/spark/settle/shards.py",
        '    return batch.filter(pc.equal(_column(batch, "status"), OPEN.name))',
        "    return batch",
        f"{SPARK}::test_decided_rows_are_not_decided_again",
    ),
    # Topologies: a run, its parts, and what is decided of it.
    Mutation(
        "a fail leaves no edge open",
        "ackcore/spark/tasks/task.py",
        "            self._events.append((roots, poison, ACK))\n",
        "",
        f"{STAGES}::test_any_topology_fails_and_keeps_what_the_model_does",
    ),
    Mutation(
        "rows that failed are not counted when they are acked late",
        "ackcore/spark/tasks/task.py",
        "            rows = failure.handles[places] - segment.first\n",
        "            rows = failure.handles[places[:-1]] - segment.first\n",
        f"{STAGES}::test_any_topology_fails_and_keeps_what_the_model_does",
    ),
    Mutation(
        "trailers are not compared",
        "ackcore/spark/run/agreement.py",
        "        if len(found) > 1\n    ]\n    dests",
        "        if len(found) > 9\n    ]\n    dests",
        f"{STAGES}::test_two_runs_of_one_task_are_told_apart",
    ),
    Mutation(
        "nobody minds who was not heard",
        "ackcore/spark/run/agreement.py",
        "            if seen_by[origin_of(level, partition)] != senders\n",
        "            if not seen_by[origin_of(level, partition)] <= senders\n",
        f"{STAGES}::test_a_consumer_that_hears_nothing_at_all_is_noticed",
    ),
    Mutation(
        "a recorded decision is made again",
        "ackcore/spark/protocol/batch.py",
        "        decision = self.state.decision(number)\n        if done",
        "        decision = self.state.decision(number) if done else None\n        if done",
        f"{BATCH}::test_a_decision_is_not_made_again",
    ),
    Mutation(
        "a restarted plan has a new time",
        "ackcore/spark/protocol/batch.py",
        "        if plan is None:\n            most = ",
        "        if True:\n            most = ",
        f"{BATCH}::test_a_plan_is_kept_with_its_time",
    ),
    Mutation(
        "a run in several pieces is accepted",
        "ackcore/spark/protocol/batch.py",
        "        if ran.problems:\n",
        "        if len(ran.problems) > 1:\n",
        f"{BATCH}::test_a_run_that_is_not_of_one_piece_is_run_again",
    ),
    Mutation(
        "suspects outlive their rows",
        "ackcore/spark/protocol/batch.py",
        "                plan = replace(plan, suspects=(), rejected=(), time_outs={})\n",
        "                plan = replace(plan)\n",
        f"{SUSPECTS}::test_suspects_are_forgotten_with_their_rows",
    ),
    Mutation(
        "an interrupt is counted as a death",
        "ackcore/spark/protocol/batch.py",
        "        elif plan.interrupted:\n",
        "        elif False:\n",
        "tests/spark/test_interrupts.py::test_an_interrupt_that_an_error_hides_ends_the_run",
    ),
    Mutation(
        "an attempt that runs elsewhere is taken for dead",
        "ackcore/spark/tasks/markers.py",
        "        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)\n",
        "",
        "tests/spark/test_inflight.py::test_an_attempt_that_runs_elsewhere_says_nothing",
    ),
    Mutation(
        "a record is rejected that was alone in flight once",
        "ackcore/spark/tasks/inflight.py",
        "ALONE_ENOUGH = 2",
        "ALONE_ENOUGH = 0",
        f"{SUSPECTS}::test_a_record_that_kills_its_worker_is_found_and_buried",
    ),
    Mutation(
        "one attempt too many",
        "ackcore/retry.py",
        "        dead |= failed + 1 >= self.max_attempts\n",
        "        dead |= failed >= self.max_attempts\n",
        "tests/test_retry.py::test_columns_are_decided_as_their_rows",
    ),
    Mutation(
        "the shift of the back-off has no end",
        "ackcore/retry.py",
        "base_ms << min(attempt - 1, _DOUBLINGS)",
        "base_ms << (attempt - 1) % 64",
        "tests/test_retry.py::test_the_wait_grows_to_the_cap_and_stays_there",
    ),
    Mutation(
        "who shares a row with a failed record is acked",
        "ackcore/spark/protocol/decide.py",
        "        if len(spread) == len(bad):\n            break\n",
        "        break\n",
        f"{BATCH}::test_who_shares_a_row_with_a_failed_record_fails_with_it",
    ),
    Mutation(
        "a sink gets rows of records that failed",
        "ackcore/spark/tasks/workfiles.py",
        "    return rows.filter(pa.array(~bad)) if bad.any() else rows\n",
        "    return rows\n",
        f"{BATCH}::test_a_failed_record_waits_and_is_tried_again",
    ),
    Mutation(
        "an RDD of Python's is read again for a payload",
        "ackcore/spark/settle/events.py",
        'if name == "LogicalRDD" and not',
        'if name == "" and not',
        "tests/spark/test_run.py::test_python_code_that_answers_otherwise_gives_no_record_anothers"
        "_payload",
    ),
    Mutation(
        "a file is renamed before it is on the disk",
        "ackcore/spark/base/atomic.py",
        "                write(file)\n                file.flush()\n"
        "                os.fsync(file.fileno())\n",
        "                write(file)\n                file.flush()\n",
        "tests/spark/test_state_crash.py",
    ),
    Mutation(
        "a driver that was cut off goes on",
        "ackcore/spark/base/lock.py",
        "        if found != self._held:\n",
        "        if not found:\n",
        "tests/spark/test_take_over.py",
    ),
    Mutation(
        "rows are read that are not those of the run",
        "ackcore/spark/tasks/workfiles.py",
        '    if f"{_sealed(data) & 0xFFFFFFFFFFFFFFFF:016x}" != named[1]:\n',
        "    if not _sealed(data):\n",
        "tests/spark/test_workfiles.py",
    ),
]


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copied tree, on the copied package and nothing else of ours."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",  # a mutation within a second would not be noticed
        "ACKCORE_REQUIRE_NATIVE": "1",
        "ACKCORE_CHECKED": "1",  # compiles in a third of the time
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TEST_TIMEOUT_S,
        check=False,
    )


def build(tree: Path) -> None:
    """Build the extension in place, and see that it can be imported."""
    for command in (
        ("setup.py", "-q", "build_ext", "--inplace"),
        ("-c", "import ackcore._native"),
    ):
        done = run(tree, *command)
        if done.returncode:
            raise SystemExit(f"mutations: the copy cannot be built:\n{done.stdout[-3000:]}")


def run_tests(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests; a run that hangs has failed."""
    try:
        return run(tree, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    except subprocess.TimeoutExpired as hung:
        return subprocess.CompletedProcess(hung.cmd, FAILED_TESTS, "it hung")


def survives(tree: Path, mutation: Mutation) -> str | None:
    """Apply one mutation, run its test, and undo it; returns what is wrong, or None if caught."""
    path = tree / mutation.file
    original = path.read_text(encoding="utf-8")
    found = original.count(mutation.old)
    if found != 1:
        return f"its text is {found} times in {mutation.file}"
    path.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        if mutation.file.startswith("pyx/"):
            build(tree)
        done = run_tests(tree, mutation.test)
    finally:
        path.write_text(original, encoding="utf-8")
    if done.returncode == PASSED:
        return f"{mutation.test} passes all the same"
    # Below zero: a signal ended it, as it may if memory is misused.
    if done.returncode != FAILED_TESTS and done.returncode >= 0:
        return f"{mutation.test} did not run:\n{done.stdout[-2000:]}"
    return None


def main(words: list[str]) -> int:
    """Run all mutations, or those with one of the words in their name or file."""
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not words or any(word in f"{mutation.name} {mutation.file}" for word in words)
    ]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="ackcore-mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_BEHIND)
        build(tree)
        done = run_tests(tree, *dict.fromkeys(mutation.test for mutation in chosen))
        if done.returncode != PASSED:
            print(f"mutations: the tests fail before any:\n{done.stdout[-3000:]}")
            return 1
        was_native = False
        for mutation in chosen:
            is_native = mutation.file.startswith("pyx/")
            if was_native and not is_native:
                build(tree)  # the last mutation was undone in its source only
            was_native = is_native
            began = time.monotonic()
            problem = survives(tree, mutation)
            took = f"{time.monotonic() - began:5.1f} s"
            print(f"{'SURVIVED' if problem else 'caught  '} {took}  {mutation.name}", flush=True)
            if problem:
                survivors.append(mutation)
                print(f"    {problem}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
