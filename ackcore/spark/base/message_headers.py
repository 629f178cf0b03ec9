"""Names of headers of the Kafka messages that ackcore sends: rows of sinks, and dead letters.

The value of ``ackcore-batch`` is ``<deployment>/<sink or spout>/<number of the micro-batch>``. The
value of ``ackcore-row`` is the position in the micro-batch, the same if a message is sent again.
``ackcore-message-id`` has the message id of a dead letter's record, or of a sink's row.
"""

from __future__ import annotations

#: The prefix of the names of ackcore's headers.
PREFIX = "ackcore-"
BATCH, ROW, MESSAGE_ID = f"{PREFIX}batch", f"{PREFIX}row", f"{PREFIX}message-id"
