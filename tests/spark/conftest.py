"""The expected results of settling, in plain Python."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

# `checkpoints`, `streams` and `worlds` are no tests, and tests are no package.
sys.path.insert(0, str(Path(__file__).parent))

import one_run
from accepted_rows import two_files
from checkpoints import OPEN, VALUE, run_one
from s3_server import FaultProxy, environment
from streams import Folder, Store
from worlds import Killed, World, killed

from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine import act, batch, runs
from ackcore.spark.query import start

# What the workers get of this module goes along with the job: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ACK, FAIL, RESET = -1, -2, -3
EVENT = StructType(
    [
        StructField("root_id", LongType()),
        StructField("val", LongType()),
        StructField("task", IntegerType()),
        StructField("ts_ms", LongType()),
        StructField("reason", StringType()),
    ]
)


@pytest.fixture
def world(request, tmp_path):
    """A made-up world around the protocol, its checkpoint on disk, or as `world_anywhere` says."""
    in_bucket = getattr(request, "param", "disk") == "bucket"
    return World(request.getfixturevalue("bucket") if in_bucket else tmp_path)


@pytest.fixture(scope="session")
def s3_socket():
    with socket.create_server(("127.0.0.1", 0)) as listens:
        yield listens


@pytest.fixture
def s3(s3_server, s3_socket, monkeypatch):
    """The proxy before that server, on one port for all tests: Spark's workers are used again."""
    proxy = FaultProxy(s3_server, s3_socket.dup())
    for name, value in environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


@pytest.fixture
def tasks_reach(spark, s3):
    """Workers that are started from here on reach the server by their environment, as we do."""
    told = spark.sparkContext.environment
    azure = {name: value for name, value in os.environ.items() if name.startswith("AZUR")}
    mine = environment(s3.endpoint) | azure
    told.update(mine)
    yield
    for name in mine:
        del told[name]


@pytest.fixture
def checkpoint(tmp_path):
    """Where there is no checkpoint yet."""
    return tmp_path / "checkpoint"


@pytest.fixture(params=["disk", "bucket", pytest.param("hdfs", marks=pytest.mark.faults)])
def place(request):
    """The same on a disk, in a bucket, and in HDFS."""
    fixtures = {"disk": "checkpoint", "bucket": "bucket", "hdfs": "hdfs_place"}
    return request.getfixturevalue(fixtures[request.param])


@pytest.fixture
def files(tmp_path):
    """Two files with words, as sinks get them."""
    return two_files(tmp_path)


@pytest.fixture
def no_syncing(monkeypatch):
    """Durability when a machine stops is the matter of test_state_crash.py."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def dying_at(monkeypatch):
    """``with dying_at(step, times=1):`` the driver dies when it is there the n-th time."""

    @contextmanager
    def dying_at(step, times=1):
        times_there = itertools.count(1)

        def failpoint(name, n=None):
            if name == step and next(times_there) == times:
                raise killed(name)

        with monkeypatch.context() as patch:
            for module in (act, batch, runs):
                patch.setattr(module, "failpoint", failpoint)
            with pytest.raises(Killed):
                yield

    return dying_at


@pytest.fixture
def letters(checkpoint):
    """The store of a checkpoint whose one micro-batch is done; its one spout has a `VALUE`."""
    with OPEN(checkpoint) as state:
        run_one(state, 0)
        return DeadLetters.checked(checkpoint, state.deployment_key, None, {"lines": VALUE})()


@pytest.fixture
def frame(spark):
    """``frame(events, columns=3)`` makes a DataFrame of the first columns of events."""

    def frame(events, columns=3):
        schema = StructType(EVENT.fields[:columns])
        return spark.createDataFrame([tuple(event[:columns]) for event in events], schema)

    return frame


@pytest.fixture
def execute(tmp_path):
    """``execute(topology, **plan)`` runs a micro-batch on Spark and reads all that it left."""
    return one_run.executing_in(tmp_path)


@pytest.fixture
def due(tmp_path):
    """``due(rows)`` makes a file of records that are due: (message id, attempt, id, text)."""
    return one_run.due_in(tmp_path)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def folder(spark, tmp_path):
    return Folder(spark, tmp_path / "in")


@pytest.fixture
def plans_made(spark, monkeypatch):
    """Return Spark's description of the plan of each frame that Python maps."""
    plans = []
    original = type(spark.range(1)).mapInArrow

    def map_in_arrow(frame, *args, **kwargs):
        made = original(frame, *args, **kwargs)
        plans.append(made._jdf.queryExecution().toString())
        return made

    monkeypatch.setattr(type(spark.range(1)), "mapInArrow", map_in_arrow)
    return plans


@pytest.fixture
def running():
    """Queries that are stopped in the end."""
    queries = []
    yield lambda *args, **kwargs: (queries.append(start(*args, **kwargs)), queries[-1])[1]
    for each in queries:
        each.stop()


class Row(NamedTuple):
    """The decision of settling for one root."""

    status: str
    task: int
    val: int
    inits: int
    flags: int
    first_ms: int | None
    last_ms: int | None
    reason: str | None


def plain_settle(events, now_ms=None, timeout_ms=None):
    """Return the outcome of each root, by SEMANTICS 4 word by word: {root id: Row}.

    ``events`` are (root_id, val, task[, ts_ms[, reason]]).
    """
    by_root = defaultdict(list)
    for event in events:
        by_root[event[0]].append((*event, None, None)[:5])
    rows = {}
    for root, messages in by_root.items():
        val = 0
        for _, x, task, *_ in messages:
            if task >= ACK:
                val ^= x
        tasks = [task for _, _, task, *_ in messages if task >= 0]
        failed = any(task == FAIL for _, _, task, *_ in messages)
        times = [ts for *_, ts, _ in messages if ts is not None]
        first, last = (min(times), max(times)) if times else (None, None)
        reasons = sorted((ts or 0, reason) for *_, ts, reason in messages if reason is not None)
        overdue = timeout_ms is not None and now_ms - last > timeout_ms
        differ = len(set(tasks)) > 1
        if not tasks:
            status = "ORPHAN" if overdue else "OPEN"
        elif len(tasks) > 1:
            status = "ANOMALY"
        elif val == 0:
            status = "ACKED"
        elif failed:
            status = "FAILED"
        else:
            status = "EXPIRED" if overdue else "OPEN"
        rows[root] = Row(
            status,
            max(tasks, default=-1),
            val,
            min(2, len(tasks)),
            failed | differ << 1,
            first,
            last,
            reasons[0][1] if reasons else None,
        )
    return rows


@pytest.fixture(scope="session")
def expected():
    return plain_settle


@pytest.fixture(scope="session")
def found():
    """``found(settled)`` collects what `settle` returned as {root id: Row}; roots are unique."""

    def found(settled):
        assert settled.columns == ["root_id", *Row._fields]
        rows = settled.collect()
        by_root = {row.root_id: Row(*(row[name] for name in Row._fields)) for row in rows}
        assert len(by_root) == len(rows)
        return by_root

    return found


_SPECIAL = [0, 1, -1, 2**63 - 1, -(2**63)]
_REASONS = ["ValueError: no", "ValueError: nö", "", "TimeoutError: yes", "Ω", "a\x00b"]


@pytest.fixture(scope="session")
def random_events():
    """``random_events(seed, trees)`` makes trees of all kinds, their messages shuffled.

    Honest trees of a few edges, from which messages are lost, sent twice, failed, reset, or sent
    by a second spout task; values that are small and large; roots 0 and at both ends.
    """

    def random_events(seed, trees):
        rng = np.random.default_rng(seed)
        roots = [*_SPECIAL, *rng.integers(-(2**63), 2**63 - 1, trees - len(_SPECIAL)).tolist()]
        events = []
        for root in roots:
            edges = rng.integers(-(2**63), 2**63 - 1, rng.integers(0, 5)).tolist()
            chain = zip([0, *edges], [*edges, 0], strict=True)
            first, *acks = (a ^ b for a, b in chain)
            tree = [(root, first, int(rng.choice([0, 1, 7, 2**31 - 1])))]
            tree += [(root, ack, ACK) for ack in acks]
            kind = rng.integers(0, 12)
            if kind == 0 and len(tree) > 1:
                tree.pop(rng.integers(1, len(tree)))
            elif kind == 1:
                tree.pop(0)
            elif kind == 2:
                tree += tree
            elif kind == 3:
                tree.append((root, first, int(rng.integers(0, 3))))
            elif kind == 4:
                tree.append((root, int(rng.integers(1, 9)), ACK))
            if rng.random() < 0.2:
                tree += [(root, 12345, FAIL)] * int(rng.integers(1, 4))
                if rng.random() < 0.5:
                    tree.append((root, 1, ACK))
            if rng.random() < 0.1:
                tree.append((root, -7, RESET))
            for message in tree:
                reason = str(rng.choice(_REASONS)) if message[2] == FAIL else None
                if reason is not None and rng.random() < 0.2:
                    reason = None
                events.append((*message, int(rng.integers(0, 1000)), reason))
        return [events[i] for i in rng.permutation(len(events))]

    return random_events
