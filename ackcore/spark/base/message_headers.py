"""Headers by which a message in Kafka is told from all others, whoever sent it: a sink, or letters.

``ackcore-batch`` is ``deployment/sink or spout/number of the micro-batch``, ``ackcore-row`` the
place in it.  Both are the same when it is sent again.
"""

from __future__ import annotations

#: The names of all that are ackcore's begin so.
PREFIX = "ackcore-"
BATCH, ROW, MESSAGE_ID = f"{PREFIX}batch", f"{PREFIX}row", f"{PREFIX}message-id"
