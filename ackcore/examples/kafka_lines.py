"""Read lines from Kafka in a topology that fails, is killed and restarted, and check the result.

The lines are sent to a new topic. Some cannot be parsed, some fail once, some always. The driver is
killed by kill -9 and started again. At the end each line is in the rows or in the dead letters,
none of them twice, and the group's committed offset is the end of each partition.

    python -m ackcore.examples.kafka_lines --bootstrap-servers localhost:9092
    make demo-kafka                                         # with its own broker
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from ackcore.examples.killed_runs import run_killed
from ackcore.examples.quiet_spark import SparkError, spark_session
from ackcore.kafka import KafkaSpout
from ackcore.spark import dead_letters, start, to_parquet
from ackcore.topology import BasicBolt, BasicCollector, Topology, TopologyBuilder, Tuple

GROUP, PARTITIONS, TIMEOUT_S = "kafka-lines", 4, 60.0
LINE = pa.struct([("id", pa.int64()), ("text", pa.string())])
#: One in this many lines is not JSON, one fails once, one always fails.
NO_JSON, FLAKY, HOPELESS = 97, 41, 211


def line(n: int) -> bytes:
    """Return the message of line n."""
    return b"{damaged" if n % NO_JSON == 0 else json.dumps({"id": n, "text": f"line {n}"}).encode()


def dies(n: int) -> bool:
    """Return whether line n must become a dead letter."""
    return n % NO_JSON == 0 or n % HOPELESS == 0


class Check(BasicBolt):
    """A bolt that emits its lines; some fail once, some always."""

    outputs = pa.schema([("id", pa.int64()), ("text", pa.string())])

    def execute(self, tuple: Tuple, collector: BasicCollector) -> None:
        """Emit the line, or raise ValueError if it is one that fails."""
        found = tuple["value"]
        if found["id"] % HOPELESS == 0 or (found["id"] % FLAKY == 0 and tuple.attempt == 0):
            raise ValueError(f"line {found['id']} is refused")
        collector.emit((found["id"], found["text"]))


def topology(servers: str, topic: str, rows: Path) -> Topology:
    """Return the topology that reads the lines; ``rows``: the directory of its sink."""
    builder = TopologyBuilder()
    spout = KafkaSpout(
        topic,
        bootstrap_servers=servers,
        group_id=GROUP,
        deserializer=json.loads,
        value_type=LINE,
        max_records=4_000,
    )
    builder.spout("lines", spout)
    builder.bolt("check", Check()).shuffle("lines")
    builder.sink("check", to_parquet(rows))
    return builder.build(max_attempts=3, backoff_s=0.05)


def run(servers: str, topic: str, directory: Path) -> int:
    """Run the topology until all lines are done, print each micro-batch, and write ``dead.json``.

    Return the exit status.
    """
    with spark_session("local[2]") as (spark, _):
        it = topology(servers, topic, directory / "rows")
        on = start(it, spark, directory / "checkpoint", trigger={"availableNow": True})
        told = -1
        while not on.await_termination(0.05):
            for progress in on.recent_progress:
                if progress.batch_id > told:
                    told = progress.batch_id
                    print(progress, flush=True)
        counts = on.counts
        print(
            f"counts: {counts.records} records = {counts.acked} acked + {counts.dead} dead, "
            f"lag {sum(on.progress.lag.values()) if on.progress else 0}",
            flush=True,
        )
        dead = dead_letters(directory / "checkpoint", spark).select("message_id").collect()
        (directory / "dead.json").write_text(json.dumps([row[0] for row in dead]))
        return 0 if counts.balanced and not counts.waiting else 1


def send(servers: str, topic: str, lines: int) -> dict[str, int]:
    """Create the topic and send the lines; return the line numbers by message id."""
    admin = AdminClient({"bootstrap.servers": servers})
    for made in admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values():
        made.result(TIMEOUT_S)
    ids: dict[str, int] = {}
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    for n in range(lines):

        def sent(error: object, message: object, n: int = n) -> None:
            if error is not None:
                raise RuntimeError(f"line {n} was not sent: {error}")
            ids[json.dumps([topic, message.partition(), message.offset()])] = n  # type: ignore[attr-defined]

        producer.produce(topic, line(n), partition=n % PARTITIONS, on_delivery=sent)
        producer.poll(0)
    unsent = producer.flush(TIMEOUT_S)
    if unsent:
        raise RuntimeError(f"{unsent} of {lines} lines were not sent within {TIMEOUT_S:.0f} s")
    return ids


class Found(NamedTuple):
    """The counts of lines by outcome, and the group's lag.

    ``missing``: neither a row nor dead. ``twice``: rows and dead letters beyond a line's first.
    ``wrong``: dead, but should be a row; or the other way round.
    """

    rows: int
    dead: int
    missing: int
    twice: int
    wrong: int
    lag: int


def look(servers: str, topic: str, directory: Path, ids: dict[str, int]) -> Found:
    """Count the lines in the rows and the dead letters; ``ids``: line numbers by message id."""
    table = ds.dataset(directory / "rows", format="parquet").to_table(columns=["id"])
    rows = Counter(table["id"].to_pylist())
    dead = Counter(ids[message] for message in json.loads((directory / "dead.json").read_text()))
    ended = rows + dead
    group = Consumer({"bootstrap.servers": servers, "group.id": GROUP})
    parts = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    lag = 0
    for one in group.committed(parts, timeout=TIMEOUT_S):
        _, end = group.get_watermark_offsets(one, timeout=TIMEOUT_S)
        lag += end - max(0, one.offset)
    group.close()
    return Found(
        rows=rows.total(),
        dead=dead.total(),
        missing=sum(1 for n in ids.values() if not ended[n]),
        twice=sum(n - 1 for n in ended.values()),
        wrong=sum(1 for n in dead if not dies(n)) + sum(1 for n in rows if dies(n)),
        lag=lag,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--topic", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    servers = given.bootstrap_servers
    try:
        if given.topic:
            return run(servers, given.topic, given.directory)
        with tempfile.TemporaryDirectory(prefix="ackcore-", ignore_cleanup_errors=True) as place:
            topic = f"lines-{secrets.token_hex(4)}"
            ids = send(servers, topic, given.lines)
            print(f"{len(ids)} lines sent to {topic}")
            command = [sys.executable, "-m", "ackcore.examples.kafka_lines", "--topic", topic]
            command += ["--bootstrap-servers", servers, "--directory", place]
            status = run_killed(command, Path(place), given.kills)
            if status:
                return status
            found = look(servers, topic, Path(place), ids)
    except SparkError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{len(ids)} lines sent: {found.rows} rows and {found.dead} dead letters, {found.missing} "
        f"missing, {found.twice} twice, {found.wrong} wrong; committed up to {found.lag} before "
        "the end"
    )
    return int(found.missing or found.twice or found.wrong or found.lag)


if __name__ == "__main__":
    sys.exit(main())
