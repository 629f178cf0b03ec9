"""Drawings, whole: what a reader sees must be what runs."""

from __future__ import annotations

import textwrap
from typing import ClassVar

import pyarrow as pa
import pytest

from ackcore.calls import RateLimit
from ackcore.tables import collect, count, latest, session, sum_of, tumbling
from ackcore.topology import AsyncBolt, BasicBolt, BatchBolt, Bolt, TopologyBuilder, expect

USERS = pa.schema([("user", pa.string()), ("n", pa.int64())])
KAFKA = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


class Parse(Bolt):
    outputs: ClassVar = {
        "default": pa.schema([("user", pa.string()), ("price", pa.decimal128(10, 2))]),
        "errors": pa.schema([("line", pa.string()), ("why", pa.string())]),
    }

    def execute(self, tuple):
        """Never called: nothing here runs."""


class Add(BatchBolt):
    outputs = USERS

    def process(self, batch, out):
        """Never called: nothing here runs."""


class Multiply(Add):
    pass


class Join(BasicBolt):
    outputs = USERS

    def execute(self, tuple, collector):
        """Never called: nothing here runs."""


class Alert(Bolt):
    """Emits nothing."""

    def execute(self, tuple):
        """Never called: nothing here runs."""


class Named:
    """A writer whose repr is what a test says."""

    def __init__(self, shown):
        self.shown = shown

    def write(self, frame, batch_id):
        """Stand in for a sink's writer."""

    def __repr__(self):
        return self.shown()


class ToTable:
    def write(self, frame, batch_id):
        """Stand in for a sink's writer."""


@pytest.fixture
def builder():
    return TopologyBuilder()


def drawn(builder, **settings):
    """The drawing without its first line's fingerprint."""
    topology = builder.build(**settings)
    text = topology.explain()
    head = f"topology {topology.fingerprint[:12]}: "
    assert text.startswith(head)
    return text.removeprefix(head)


def expected(text):
    return textwrap.dedent(text).strip()


def test_a_diamond(builder, make):
    builder.spout("events", make.frame(*KAFKA))
    builder.bolt("parse", Parse()).shuffle("events")
    builder.bolt("add", Add()).fields("parse", "user")
    builder.bolt("multiply", Multiply()).partial_key("parse", "user")
    builder.bolt("join", Join(), parallelism=4).fields("add", "user").fields("multiply", "user")
    builder.sink("join", ToTable())
    assert drawn(builder) == expected(
        """
        1 spout, 4 bolts, 1 sink, 3 stages, 2 shuffles
        settings: max_attempts=5, backoff_s=1.0, max_backoff_s=300.0

        stage 1, reads the source
          spout events: message id (topic, partition, offset), unique
          └─ default (key, value, topic, partition, offset, timestamp, timestampType)
             └──▶ parse: shuffle, in the same task

          bolt parse: Parse
          ├─ default (user: string, price: decimal128(10, 2))
          │  ├══▶ add: fields(user), to stage 2
          │  └══▶ multiply: partial_key(user), to stage 2
          └─ errors (line: string, why: string)
             └─ not read

        ══ shuffle ═══════════════════════════════════════════════════════════════════
          parse ══▶ add: fields(user)
          parse ══▶ multiply: partial_key(user)

        stage 2
          bolt add: Add
          └─ default (user: string, n: int64)
             └══▶ join: fields(user), to stage 3

          bolt multiply: Multiply
          └─ default (user: string, n: int64)
             └══▶ join: fields(user), to stage 3

        ══ shuffle ═══════════════════════════════════════════════════════════════════
          add      ══▶ join: fields(user)
          multiply ══▶ join: fields(user)

        stage 3
          bolt join: Join, parallelism 4
          └─ default (user: string, n: int64)
             └──▶ sink join: ToTable

        ══ settle ════════════════════════════════════════════════════════════════════
          every tracked record ends ACKED, waiting for its retry, or in the dead letters
        """
    )


def test_a_stream_that_skips_a_level(builder, make):
    builder.spout("events", make.frame("user", "line"), message_id="line")
    builder.bolt("add", Add()).fields("events", "user")
    builder.bolt("total", Multiply()).global_("add").all("events").local_or_shuffle("watch")
    builder.bolt("watch", Add()).local_or_shuffle("events")
    assert drawn(builder) == expected(
        """
        1 spout, 3 bolts, no sinks, 3 stages, 2 shuffles
        settings: max_attempts=5, backoff_s=1.0, max_backoff_s=300.0

        stage 1, reads the source
          spout events: message id (line), checked to be unique
          └─ default (user, line)
             ├══▶ add: fields(user), to stage 2
             ├══▶ total: all, to stage 3
             └──▶ watch: local_or_shuffle, in the same task

          bolt watch: Add
          └─ default (user: string, n: int64)
             └══▶ total: local_or_shuffle, to stage 3, partition by partition

        ══ shuffle ═══════════════════════════════════════════════════════════════════
          events ══▶ add: fields(user)
          events ══▶ total: all, undecoded until stage 3
          watch  ══▶ total: local_or_shuffle, partition by partition, undecoded until stage 3

        stage 2
          bolt add: Add
          └─ default (user: string, n: int64)
             └══▶ total: global, to stage 3

        ══ shuffle ═══════════════════════════════════════════════════════════════════
          add    ══▶ total: global
          events ══▶ total: all, undecoded since stage 1
          watch  ══▶ total: local_or_shuffle, partition by partition, undecoded since stage 1

        stage 3
          bolt total: Multiply
          └─ default (user: string, n: int64)
             └─ not read

        ══ settle ════════════════════════════════════════════════════════════════════
          every tracked record ends ACKED, waiting for its retry, or in the dead letters
          message ids are checked: a duplicate in a micro-batch is an error
        """
    )


def test_named_streams_with_their_errors_to_a_sink_and_no_shuffle_at_all(builder, make):
    builder.spout("events", make.frame("line"), tracked=False)
    builder.bolt("parse", Parse()).shuffle("events")
    builder.bolt("alert", Alert()).local_or_shuffle("parse", stream="errors")
    builder.sink("parse", make.write)
    builder.sink("parse", ToTable(), stream="errors", name="errors")
    assert drawn(builder) == expected(
        """
        1 spout, 2 bolts, 2 sinks, 1 stage, no shuffles
        settings: max_attempts=5, backoff_s=1.0, max_backoff_s=300.0

        stage 1, reads the source
          spout events: untracked: a record that fails is not retried
          └─ default (line)
             └──▶ parse: shuffle, in the same task

          bolt parse: Parse
          ├─ default (user: string, price: decimal128(10, 2))
          │  └──▶ sink parse: write
          └─ errors (line: string, why: string)
             ├──▶ alert: local_or_shuffle, in the same task
             └──▶ sink errors: ToTable

          bolt alert: Alert

        ══ no shuffle ════════════════════════════════════════════════════════════════
          each task settles its own records
        """
    )


@pytest.mark.parametrize(
    ("shown", "drawn_as"),
    [
        (lambda: "to_parquet('/data/counts')", "to_parquet('/data/counts')"),
        (lambda: "x" * 72, "x" * 72),
        (lambda: "x" * 73, "Named"),
        (lambda: "two\nlines", "Named"),
        (lambda: "", "Named"),
        (lambda: "<Named with <function write at 0x7f00aa>>", "Named"),
        (lambda: 1 / 0, "Named"),
        (lambda: 5, "Named"),
    ],
)
def test_a_writer_is_called_what_it_calls_itself_if_that_is_short(make, shown, drawn_as):
    builder = make.word_count()
    builder.sink("split", Named(shown))
    assert f"──▶ sink split: {drawn_as}\n" in drawn(builder)


def test_settings_that_are_not_the_defaults_are_shown(make):
    _, line, *_ = drawn(make.word_count(), max_attempts=3, chunk_rows=7).splitlines()
    assert line == ("settings: max_attempts=3, backoff_s=1.0, max_backoff_s=300.0, chunk_rows=7")
    lines = drawn(
        make.word_count(),
        parallelism=4,
        reject=[ValueError, "json.JSONDecodeError"],
        careful_after=3,
        max_sink_attempts=2,
    ).splitlines()
    assert lines[1:4] == [
        "settings: max_attempts=5, backoff_s=1.0, max_backoff_s=300.0, parallelism=4, "
        "reject=[ValueError,",
        "  JSONDecodeError], max_sink_attempts=2, careful_after=3",
        "",
    ]


def test_what_does_not_fit_in_a_line_is_counted(builder, make):
    builder.spout("wide", make.frame(*(f"column_{n}" for n in range(40))))
    builder.sink("wide", make.write)
    (line,) = [line for line in drawn(builder).splitlines() if "default" in line]
    assert line == (
        "  └─ default (column_0, column_1, column_2, column_3, column_4, column_5, column_6, "
        "and 33 more)"
    )


def test_one_field_is_shown_however_long(builder, make):
    builder.spout("wide", make.frame("x" * 200, "y"))
    builder.sink("wide", make.write)
    assert f"default ({'x' * 200}, and 1 more)" in drawn(builder)


class Call(AsyncBolt):
    outputs = USERS
    limit = RateLimit(per="user", calls_per_s=5, tokens_per_min=1e6, cost_per_run=2.5)
    max_concurrency = 16
    timeout_s = 1
    journal = True
    max_batch = 64

    async def execute_many(self, tuples, collectors):
        """Never called: nothing here runs."""


def test_the_limits_of_calls_are_shown(builder, make):
    builder.spout("events", make.frame("user"))
    builder.bolt("call", Call()).fields("events", "user")
    builder.bolt("thread", type("Thread", (Join,), {"threads": 4})()).shuffle("call")
    builder.sink("thread", ToTable())
    text = drawn(builder)
    assert (
        "  bolt call: Call\n"
        "    calls: limit(per=user, calls_per_s=5, tokens_per_min=1000000, cost_per_run=2.5),\n"
        "      max_concurrency=16, timeout_s=1, max_batch=64, journal=True\n"
    ) in text
    assert "  bolt thread: Thread\n    calls: threads=4\n" in text
    assert text.count("calls: ") == 2


def test_a_drawing_has_what_users_declared_and_nothing_of_its_carrying_out(builder, make):
    frame = make.frame("id", "user", "n", "at")
    frame.schema = pa.schema([("id", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us"))])
    times = pa.schema([*USERS, ("at", pa.timestamp("us"))])
    given = {"dedup": "id", "within_s": 86_400, "within_keys": 9, "event_time": "at"}
    checked = expect(lambda batch: batch["n"], on_fail="fail")
    builder.spout("events", frame, message_id="id", **given, expect=checked)
    builder.spout("users", make.frame("user"), ordered_by="user")
    add = type("Add", (Add,), {"outputs": {"default": times, "rest": USERS}, "uses": ["visits"]})()
    positive = expect("n > 0", "n < 9", on_fail="drop", stream="rest")
    builder.bolt("add", add, expect=[positive, expect("at IS NOT NULL")]).shuffle("events")
    builder.bolt("join", Join()).shuffle("users")
    value = {"n": sum_of("n"), "all": collect("n", 5), "last": latest("at", "n")}
    window = tumbling(3600, "at", late_s=600, idle_s=60)
    builder.table("hours", from_="add", key="user", value=value, window=window)
    builder.table("visits", from_="add", key=["user", "at"], value=value, window=session(0.5, "at"))
    builder.table("last", from_="join", key="user", value={"rows": count()}, ttl_s=60)
    builder.sink("hours.closed", make.write)
    builder.sink("add", make.write, stream="rest")
    assert drawn(builder).partition("settings: ")[0] == (
        "2 spouts, 2 bolts, 2 sinks, 3 tables, 2 stages, 1 shuffle\n"
    )
    assert drawn(builder).partition("300.0\n\n")[2] == expected(
        """
        stage 1, reads the source
          spout events: message id (id), duplicates allowed
            dedup: id, within_s=86400, within_keys=9, event_time=at
            expect: <lambda>; on_fail=fail
          └─ default (id, user, n, at)
             └══▶ events.dedup: fields(id), to stage 2

          spout users: ackcore assigns the message ids
            ordered_by: user
          └─ default (user)
             └──▶ join: shuffle, in the same task

          bolt join: Join
          └─ default (user: string, n: int64)
             └──▶ table last

        ══ shuffle ═══════════════════════════════════════════════════════════════════
          events ══▶ events.dedup: fields(id)

        stage 2
          events.dedup: leaves out the duplicates of spout events
          └─ default (id, user, n, at)
             └──▶ add: shuffle, in the same task

          bolt add: Add
            uses: visits
            expect of rest: n > 0, n < 9; on_fail=drop
            expect: at IS NOT NULL; on_fail=dead_letter
          ├─ default (user: string, n: int64, at: timestamp[us])
          │  ├──▶ table hours
          │  ├──▶ sink hours.closed: write, of closed windows of hours
          │  └──▶ table visits
          └─ rest (user: string, n: int64)
             └──▶ sink add.rest: write

        ══ tables ════════════════════════════════════════════════════════════════════
          table hours: key (user), window=tumbling(3600, 'at', late_s=600, idle_s=60), n=sum_of(n),
            all=collect(n, 5), last=latest(at, n)
          table visits: key (user, at), window=session(0.5, 'at'), n=sum_of(n), all=collect(n, 5),
            last=latest(at, n)
          table last: key (user), ttl_s=60, rows=count()

        ══ settle ════════════════════════════════════════════════════════════════════
          every tracked record ends ACKED, waiting for its retry, or in the dead letters
        """
    )
    assert " _ackcore" not in drawn(builder)
