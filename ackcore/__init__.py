"""Per-record delivery guarantees for PySpark, on Storm's XOR acker compiled for Python.

`Ledger` is the table of pending tuple trees. `Acker` is a ledger in shards with a clock.
`ackcore.ids` derives the ids. `OffsetTracker` holds the done offsets of a Kafka partition, and
`ackcore.offsets` encodes them for commits. ``ackcore.backend`` is the backend that runs:
``"native"`` or ``"python"``. `AckerBackend` is the protocol for a backend of your own, which
`ackcore.testing.check_backend` checks.
"""

from ackcore._backend import AckerBackend, Ledger, OffsetTracker, backend
from ackcore._records import (
    ACK,
    FAIL,
    RESET,
    Entries,
    LedgerFull,
    Outcome,
    Outcomes,
    Settled,
    Stats,
    Status,
)
from ackcore.acker import Acker

__version__ = "0.1.0"

__all__ = [
    "ACK",
    "FAIL",
    "RESET",
    "Acker",
    "AckerBackend",
    "Entries",
    "Ledger",
    "LedgerFull",
    "OffsetTracker",
    "Outcome",
    "Outcomes",
    "Settled",
    "Stats",
    "Status",
    "backend",
]
