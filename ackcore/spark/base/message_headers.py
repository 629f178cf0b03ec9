"""Headers that identify a Kafka message, sent by a sink or as a dead letter.

``ackcore-batch`` is ``deployment/sink or spout/number of the micro-batch``, ``ackcore-row`` the
position in it.  Both are the same when a message is sent again.
"""

from __future__ import annotations

#: The prefix of the names of ackcore's headers.
PREFIX = "ackcore-"
BATCH, ROW, MESSAGE_ID = f"{PREFIX}batch", f"{PREFIX}row", f"{PREFIX}message-id"
