"""`to_kafka` in tests: sinks that are closed in the end, and what is in their topics then."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack, contextmanager

from accepted_rows import release_all

from ackcore.spark import to_kafka
from ackcore.spark.sinks import kafka

QUICK = {"reconnect.backoff.ms": 20, "retry.backoff.ms": 10, "log_level": 0}


@contextmanager
def kafka_sinks():
    """``sink(kafka, topic, ...)``; closed in the end."""
    with ExitStack() as made:

        def sink(server, topic, **arguments):
            options = {**QUICK, **arguments.pop("options", {})}
            one = to_kafka(topic, server.bootstrap_servers, options=options, **arguments)
            made.callback(release_all, one)
            return one

        yield sink


def spark_that_sends(request, monkeypatch):
    """The session, whose tasks send rows from the second on, and not the driver."""
    monkeypatch.setattr(kafka, "_DRIVER_ROWS", 1)
    return request.getfixturevalue("spark")


def messages(server, topic, partitions=1, **options):
    found = [server.consume(topic, partition=n, **options) for n in range(partitions)]
    return [message for some in found for message in some]


def words(server, topic, **options):
    found = messages(server, topic, **options)
    return Counter(json.loads(message.value())["word"] for message in found)
