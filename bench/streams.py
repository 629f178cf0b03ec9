"""Records of churning trees: what the ledgers and their peers are fed.

Trees of one INIT and four ACKs, in random order inside each tree (the INIT comes first in a fifth
of them) and interleaved over all trees in flight, whose number is steady.  A stream fills a
ledger, ages it by five more records per tree in flight - a table that never erased anything
flatters itself - and goes on with the records that are timed.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ackcore._records import ACKED, Outcomes
from bench.compiled import Unavailable, address, library

CALL = 8192  # rows of one `apply`
RECORDS = 5  # of one tree

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Columns = tuple[Int64s, Int64s, Int32s]


class Batch(NamedTuple):
    """The columns of one call, and what it has to ack, in order."""

    columns: Columns
    acked: Int64s
    spouts: Int32s

    def check(self, outcomes: Outcomes) -> None:
        """Exactly the trees that the batch completed came out, in order, all ACKED."""
        np.testing.assert_array_equal(outcomes.root_ids, self.acked)
        np.testing.assert_array_equal(outcomes.tasks, self.spouts)
        assert (outcomes.kinds == ACKED).all()


@dataclass(eq=False)
class Stream:
    """Columns of records.

    ``done`` is the spout task where a tree completes, -2 where one begins, and else -1. About
    ``in_flight`` trees are pending when it is filled and aged, and never more than ``most``.
    """

    in_flight: int
    most: int
    root_ids: Int64s
    vals: Int64s
    tasks: Int32s
    done: npt.NDArray[np.int8]
    aged: int

    def __len__(self) -> int:
        return len(self.root_ids)

    def columns(self, rows: slice) -> Columns:
        """Some rows, as views."""
        assert rows.stop <= len(self), "the stream is too short"
        return self.root_ids[rows], self.vals[rows], self.tasks[rows]

    def pending(self, at: int) -> int:
        """How many trees have begun before row ``at``, and not completed."""
        done = self.done[:at]
        return int(np.count_nonzero(done == -2) - np.count_nonzero(done >= 0))

    def batch(self, rows: slice) -> Batch:
        """Some rows as the columns of a call, and what completes in them."""
        done = self.done[rows]
        completes = done >= 0
        columns = self.columns(rows)
        return Batch(columns, columns[0][completes], done[completes].astype(np.int32))

    def slices(self, rows: slice, size: int) -> list[slice]:
        """Rows in pieces of ``size``."""
        cuts = range(rows.start, rows.stop, size)
        return [slice(at, min(at + size, rows.stop)) for at in cuts]

    def batches(self, rows: slice, size: int = CALL) -> list[Batch]:
        """Rows as calls of ``size``."""
        return [self.batch(piece) for piece in self.slices(rows, size)]


def tree_stream(
    in_flight: int, timed_rows: int, *, seed: int = 3, stride: int = 0, whole: bool = False
) -> Stream:
    """Records that fill, some that age, and ``timed_rows`` more, all from one seed.

    Each of 1.25 x ``in_flight`` slots holds one tree after the other, and once the ledger is filled
    every record is the next one of a slot drawn at random.  A fifth of the slots are between two
    trees from then on: what has been sized for so many trees in flight never grows, and what grows
    is as large as they make it.  Root ids are random, or multiples of ``stride`` in order of birth.
    ``whole``: the timed records are those of other trees, each from its first record to its last,
    while those in flight stay open.
    """
    slots = in_flight * RECORDS // (RECORDS - 1)
    filled = sum(k * len(range(k, slots, RECORDS)) for k in range(RECORDS))
    aged = -(-(filled + RECORDS * in_flight) // CALL) * CALL
    trees = -(-timed_rows // RECORDS) if whole else 0
    churn = aged - filled + (0 if whole else timed_rows)
    n = filled + churn + trees * RECORDS
    columns = [np.empty(n, dtype) for dtype in (np.int64, np.int64, np.int32, np.int8)]
    sizes = [ctypes.c_int64(size) for size in (slots, churn, trees)]
    make_stream = library("streams.c").make_stream
    make_stream.restype = ctypes.c_int64
    most = make_stream(
        ctypes.c_uint64(seed), *sizes, ctypes.c_uint64(stride), *map(address, columns)
    )
    if most < 0:
        raise MemoryError(f"no memory for {slots} trees in flight")
    return Stream(in_flight, most, *columns, aged)


def ledger_class(backend: str = "_native") -> Any:
    """The Ledger of ``_native`` or ``_reference``."""
    try:
        return importlib.import_module(f"ackcore.{backend}").Ledger
    except (ImportError, AttributeError) as error:
        if os.environ.get("ACKCORE_REQUIRE_NATIVE"):
            raise
        raise Unavailable(f"ackcore.{backend} is not built: {error}") from error


def native_level() -> str:
    """The SIMD level of the native kernel that runs, or "" without one."""
    return str(getattr(sys.modules.get("ackcore._native"), "cpu", ""))


def age(ledger: Any, stream: Stream) -> None:
    """Fill a ledger and age it, checking what comes out."""
    for rows in stream.slices(slice(0, stream.aged), CALL):
        batch = stream.batch(rows)
        batch.check(ledger.apply(*batch.columns))
    assert len(ledger) == stream.pending(stream.aged)
    assert abs(len(ledger) / stream.in_flight - 1) < 0.1
