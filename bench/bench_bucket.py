"""A micro-batch whose checkpoint and sink are in a bucket 30 ms away, against the same on disk.

The bucket is moto's, a real S3 server here, behind a proxy that waits so long before each
request (`tests/s3_server.py`).  A moto that shares two cores with Spark takes its own time for
each request beside that: what a bucket costs elsewhere is the requests times their time.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import pytest

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import FileSpout, start, to_parquet
from ackcore.topology import TopologyBuilder
from bench import topologies
from bench.compiled import Unavailable
from bench.topologies import Split

ROWS = 10_000
TRIP_S = 0.03


@pytest.fixture(scope="module")
def s3():
    """The module of the S3 server, the server, and a proxy that is 30 ms away."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    try:
        import s3_server  # noqa: PLC0415

        server = s3_server.S3Server()
    except (ImportError, RuntimeError) as error:
        raise Unavailable(str(error)) from error
    finally:
        sys.path.pop(0)
    proxy = s3_server.FaultProxy(server)
    proxy.before = lambda request: time.sleep(TRIP_S)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment(proxy.endpoint).items():
            patch.setenv(name, value)
        yield server, proxy
    proxy.close()
    server.close()


@pytest.fixture(scope="module")
def spark(s3):
    """Two cores; its workers have the environment that leads to the proxy."""
    with spark_session("local[2]") as (session, _):
        yield session


def bench_micro_batch_in_a_bucket(spark, s3, quick, tmp_path, report_ratio):
    """The extra time of a micro-batch in a bucket, and the number of its requests."""
    server, proxy = s3
    batches = 4 if quick else 14
    lines = tmp_path / "lines"
    lines.mkdir()
    topologies.write_lines(lines, [ROWS] * (batches + 2))
    numbers = itertools.count()

    def seconds(place: str, local: Path) -> float:
        """Return the median of the micro-batches behind the first two."""
        reader = spark.readStream.schema("id bigint, line string").option("maxFilesPerTrigger", 1)
        builder = TopologyBuilder()
        builder.spout("lines", reader.parquet(str(lines)))
        builder.bolt("split", Split()).shuffle("lines")
        builder.sink("split", to_parquet(f"{place}/words"))
        query = start(
            builder.build(),
            spark,
            f"{place}/checkpoint",
            spark_checkpoint=local / "spark",
            trigger={"availableNow": True},
        )
        query.await_termination()
        taken = [each.duration_s for each in query.recent_progress]
        assert len(taken) == batches + 2
        assert query.counts.acked == ROWS * (batches + 2)
        return statistics.median(taken[2:])

    pairs = []
    requests = []
    for _ in range(1 if quick else 5):
        local = tmp_path / str(next(numbers))
        disk = seconds(str(local), local / "local")
        place = f"s3://{server.new_bucket()}/place"
        proxy.requests.clear()
        pairs.append((seconds(place, tmp_path / str(next(numbers))), disk))
        requests.append(len(proxy.requests) / (batches + 2))
    taken = " - ".join(f"{statistics.median(side):.2f}" for side in zip(*pairs, strict=True))
    report_ratio(
        f"micro-batch of {ROWS:,} rows, a trip of 30 ms: bucket - disk ({taken} s)",
        [more - less for more, less in pairs],
        0.5,
        at_most=True,
        unit="s",
    )
    name = "requests of all its processes a micro-batch, the first and the last ones' too"
    report_ratio(name, requests, 12, at_most=True, unit="")


def bench_file_plan_in_a_bucket(s3, quick, rounds, report_ratio):
    """The plan of 100 new files among 10,000.

    The proxy repeats moto's answers: a list takes moto a second, which is no property of a bucket.
    """
    obstore = pytest.importorskip("obstore")
    import s3_server  # noqa: PLC0415 - imported by the fixture

    server, proxy = s3
    bucket, files = server.new_bucket(), 1000 if quick else 10_000
    store = s3_server.store_of(server.endpoint, bucket)
    spout = FileSpout(f"s3://{bucket}/in", "text")
    for n in range(files):
        obstore.put(store, f"in/{n:05}", b"line")
    plan = json.loads(json.dumps(spout.plan(None)))
    for n in range(100):
        obstore.put(store, f"in/new-{n}", b"line")
    spout.plan(plan)
    proxy.lagging, seconds = True, []
    for _ in range(rounds):
        began = time.perf_counter()
        assert len(spout.plan(plan)["files"]) == 100
        seconds.append(time.perf_counter() - began)
    proxy.lagging = False
    title = f"plan of 100 new files among {files:,}, a trip of 30 ms"
    report_ratio(title, seconds, 1, at_most=True, unit="s")
