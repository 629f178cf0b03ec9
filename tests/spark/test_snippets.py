"""The documentation's code that is no session runs as it stands, but for its addresses."""

from __future__ import annotations

import gzip
import http.server
import logging
import re
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pyarrow as pa
import pytest
from streams import LINE, word_count

from ackcore.spark import run_batch, start
from ackcore.topology import TopologyBuilder

ROOT = Path(__file__).parents[2]
#: Where each stands: its page, and a line of it that no other has.
WRITE = "docs/spark.md", "def write(frame, batch_id):"
SPOUT = "docs/sources.md", "from ackcore.kafka import KafkaSpout"
SERVED = "docs/monitoring.md", "start_http_server("
LISTENERS = "docs/monitoring.md", "OTLPMetricExporter("
BUCKET = "docs/buckets.md", '"s3://bucket/live"'  # in test_bucket_runs.py
PLANNED = "docs/sources.md", "class Orders(PlannedSource)"
FILES = "docs/sources.md", "from ackcore.spark import FileSpout"
REMOTE = "docs/spark-connect.md", "SparkSession.builder.remote("
CLASSIFY = "docs/recipes.md", "class Classify(AsyncBolt)"  # both in test_recipes.py
ENRICH = "docs/recipes.md", "class Enrich(AsyncBolt)"


def snippets():
    return [
        (str(page.relative_to(ROOT)), fence)
        for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
        for fence in re.findall(
            r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        )
        if ">>>" not in fence
    ]


def run(snippet, names, instead=()):
    """Run one with these names; ``instead`` has an address that is here for each in it."""
    page, line = snippet
    (code,) = (fence for where, fence in snippets() if where == page and line in fence)
    for address, here in dict(instead).items():
        assert address in code
        code = code.replace(address, here)
    exec(compile(code, page, "exec"), names)
    return SimpleNamespace(**names)


def test_each_snippet_is_known():
    known = [WRITE, SPOUT, SERVED, LISTENERS, BUCKET, REMOTE, PLANNED, FILES, CLASSIFY, ENRICH]
    of_each = [
        [snippet for snippet in known if snippet[0] == page and snippet[1] in fence]
        for page, fence in snippets()
    ]
    assert sorted(map(len, of_each)) == [1] * len(known)


@pytest.fixture
def lines(spark, tmp_path):
    """A directory of text files that a stream reads: two lines come through, one is rejected."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.txt").write_text("a b\nflaky\nno\n")
    return tmp_path / "in"


@pytest.fixture
def names(spark, lines, tmp_path):
    source = spark.readStream.schema(LINE).text(str(lines))
    return {
        "topology": word_count(source, lambda frame, number: frame.collect()),
        "spark": spark,
        "checkpoint": tmp_path / "checkpoint",
    }


def test_what_foreach_batch_swallows(spark, caplog):
    called = []

    def call_service(row):
        called.append(row.n)
        if row.n == 1:
            raise OSError("out")

    log = logging.getLogger("test_snippets")
    found = run(WRITE, {"call_service": call_service, "log": log})
    found.write(spark.range(3).withColumnRenamed("id", "n"), 0)
    assert called == [0, 1, 2]
    assert caplog.text.count("lost: ") == 1


def test_a_kafka_spout():
    pytest.importorskip("confluent_kafka")
    builder = TopologyBuilder()
    run(SPOUT, {"builder": builder})
    builder.sink("lines", lambda frame, number: None)
    assert list(builder.build().spouts) == ["lines"]


def test_a_source_of_ones_own(spark, tmp_path):
    builder = TopologyBuilder()

    def orders_between(session, first, last):
        return session.range(first, last).selectExpr("id", "'c' AS customer", "1 AS more")

    run(PLANNED, {"builder": builder, "newest_id": lambda: 6, "orders_between": orders_between})
    builder.sink("orders", lambda frame, number: None)
    assert run_batch(builder.build(), spark, tmp_path / "checkpoint").acked == 7


def test_files_of_a_directory(spark, tmp_path):
    builder = TopologyBuilder()
    instead = {"/data/visits": str(tmp_path / "in")}
    run(FILES, {"builder": builder, "pa": pa}, instead=instead)
    (tmp_path / "in").mkdir()
    with gzip.open(tmp_path / "in/0.json.gz", "wt") as file:
        file.write('{"user": "a", "page": "/"}\n')
    builder.sink("visits", lambda frame, number: None)
    assert run_batch(builder.build(), spark, tmp_path / "checkpoint").acked == 1


def test_metrics_are_served(names):
    found = run(SERVED, {"start": start, **names}, instead={"(9400,": "(0,"})
    found.query.process_all_available()
    port = found.server.server_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b'ackcore_acked_total{ackcore_query="orders"' in answer.read()
    found.query.stop()
    found.server.shutdown()
    found.server.server_close()


def test_listeners(names):
    received = threading.Event()

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            received.set()

        def log_message(self, *about):
            pass

    names["REGISTRY"] = prometheus_client.CollectorRegistry()
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever).start()
        here = f"http://127.0.0.1:{server.server_port}/"
        found = run(LISTENERS, {"start": start, **names}, instead={"http://collector:4318/": here})
        found.query.process_all_available()
        found.query.stop()
        found.provider.shutdown()
        server.shutdown()
    assert received.is_set()
    exposed = prometheus_client.generate_latest(found.REGISTRY)
    assert b'ackcore_dead_total{ackcore_query="orders"' in exposed


def test_spark_connect(connect, live_spark, tmp_path):
    topology = word_count(connect.createDataFrame([("a b",)], LINE), lambda frame, number: None)
    given = {"topology": topology, "run_batch": run_batch, "SparkSession": type(connect)}
    instead = {"sc://host": live_spark.connect_url, "/shared": str(tmp_path)}
    assert run(REMOTE, given, instead=instead).counts.acked == 1
