"""Metrics as Prometheus and OpenTelemetry get them, the alert rules and the dashboard."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest
from streams import ignored, word_count

from ackcore import testing

pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.sdk")

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics._internal import _ProxyMeterProvider
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from ackcore.metrics import OpenTelemetryListener, PrometheusListener, otel
from ackcore.metrics.readings import DURATION, READINGS

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
LINES = pa.schema([("line", pa.string())])


def run(*listeners, lines=("a b", "flaky", "bad", "no", "c")):
    topology = word_count(testing.Source(LINES), ignored)
    return testing.run(topology, {"lines": [(line,) for line in lines]}, listeners=listeners)


def scraped(text):
    """``{name: {labels: value}}`` of what Prometheus would read."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


@pytest.fixture
def filled():
    listener = PrometheusListener("orders")
    return listener, run(listener)


def test_prometheus_has_the_counts(filled):
    listener, ran = filled
    found = scraped(generate_latest(listener.registry).decode())
    spout = (
        ("ackcore_query", "orders"),
        ("messaging_destination_name", "lines"),
        ("messaging_system", "ackcore"),
    )
    received = tuple(sorted((*spout, ("messaging_operation_name", "receive"))))
    query = (("ackcore_query", "orders"),)
    account = ran.counts.spouts["lines"]
    assert found["messaging_client_consumed_messages_total"] == {received: 5}
    assert found["ackcore_acked_total"] == {spout: account.acked} == {spout: 3}
    assert found["ackcore_dead_total"] == {spout: 2}
    assert found["ackcore_retried_total"] == {spout: account.retried}
    assert found["ackcore_waiting"] == {spout: 0}
    assert found["ackcore_batches_total"] == {query: len(ran.progress)}
    assert found["ackcore_active"] == {query: 0}
    assert abs(found["ackcore_batch_end_time_seconds"][query] - time.time()) < 600
    ((_, count),) = found["messaging_process_duration_seconds_count"].items()
    assert count == len(ran.progress)
    buckets = list(found["messaging_process_duration_seconds_bucket"].values())
    assert buckets == sorted(buckets)
    assert buckets[-1] == count


def test_what_waits_and_that_it_runs_are_shown_meanwhile():
    listener, seen = PrometheusListener(), []

    class Scrape:
        def on_progress(self, progress, counts):
            seen.append((progress, scraped(generate_latest(listener.registry).decode())))

    run(listener, Scrape())
    for progress, found in seen:
        assert list(found["ackcore_waiting"].values()) == [progress.waiting]
        assert list(found["ackcore_active"].values()) == [1]
    assert seen[0][0].waiting
    assert seen[-1][1]["ackcore_waiting_oldest_age_seconds"] != {}


def test_what_is_known_at_the_start_is_shown_before_the_first_micro_batch():
    """So that a rise is seen of what dies in that, and that it hangs."""
    listener, seen = PrometheusListener(), []

    class Scrape:
        def on_start(self, counts):
            seen.append(scraped(generate_latest(listener.registry).decode()))

    run(listener, Scrape())
    (found,) = seen
    for name in ("ackcore_dead_total", "ackcore_acked_total", "ackcore_waiting"):
        ((labels, value),) = found[name].items()
        assert dict(labels)["messaging_destination_name"] == "lines"
        assert value == 0
    assert abs(found["ackcore_start_time_seconds"][(("ackcore_query", ""),)] - time.time()) < 600
    assert "ackcore_batch_end_time_seconds" not in found


def test_a_micro_batch_that_runs_is_seen_to():
    listener, name = PrometheusListener(), "ackcore_batch_start_time_seconds"

    def shown():
        return scraped(generate_latest(listener.registry).decode()).get(name)

    progress, counts = _grown()
    progress = dataclasses.replace(progress, breaker_trips=2)
    listener.on_start(counts)
    for done in (
        lambda: listener.on_progress(progress, counts),
        lambda: listener.on_end(None, counts),
        lambda: listener.on_start(counts),
    ):
        assert not shown()
        listener.on_batch_start(7)
        assert abs(shown()[(("ackcore_query", ""),)] - time.time()) < 600
        done()
    assert not shown()
    # Counters continue: after a fall to 0, Prometheus would miss the next events up to the old sum.
    assert next(one for one in READINGS if "trips" in one.name).values(listener._at) == [({}, 2)]


def test_two_queries_share_a_registry():
    registry = CollectorRegistry()
    shared = [PrometheusListener(name, registry) for name in ("one", "two")]
    run(shared[0])
    found = scraped(generate_latest(registry).decode())
    assert found["ackcore_active"] == {
        (("ackcore_query", "one"),): 0,
        (("ackcore_query", "two"),): 1,
    }


def test_what_was_started_last_under_a_name_is_exported_and_each_metric_occurs_once(caplog):
    """A notebook cell may run twice. Prometheus must not export the first listener's values."""
    registry, provider = CollectorRegistry(), MeterProvider([reader := InMemoryMetricReader()])

    def made(name):
        return PrometheusListener(name, registry), OpenTelemetryListener(name, provider)

    def exported(name):
        text = generate_latest(registry).decode()
        heads = [line for line in text.splitlines() if line.startswith("# HELP")]
        assert len(heads) == len(set(heads))  # a second one is an error to most parsers
        (of_resource,) = reader.get_metrics_data().resource_metrics
        metrics = {one.name: one for one in of_resource.scope_metrics[0].metrics}
        points = metrics[name].data.data_points
        found = {dict(one.attributes)["ackcore.query"]: one.value for one in points}
        assert len(found) == len(points)
        in_text = scraped(text)["ackcore_" + name.partition(".")[2]]
        assert {dict(labels)["ackcore_query"]: value for labels, value in in_text.items()} == found
        return found

    progress, counts = _grown()
    for first in made("one"):
        first.on_start(counts)
        first.on_end(None, counts)
    others, again = made("two"), made("one")
    assert exported("ackcore.active") == {"one": 0, "two": 1}  # as long as none is started
    for each in (*others, *again):
        each.on_start(counts)
        each.on_progress(progress, counts)
    assert exported("ackcore.active") == {"one": 1, "two": 1}
    assert not caplog.records
    for each in made("two"):  # while the first one runs
        each.on_start(counts)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "listeners named 'two'" in caplog.text


def test_listeners_made_before_and_after_the_global_provider_is_set_are_exported(monkeypatch):
    proxy, real = _ProxyMeterProvider(), MeterProvider([reader := InMemoryMetricReader()])
    monkeypatch.setattr(otel, "_GLOBAL", {})
    monkeypatch.setattr(otel, "get_meter_provider", lambda: proxy)
    OpenTelemetryListener("one")
    proxy.on_set_meter_provider(real)
    monkeypatch.setattr(otel, "get_meter_provider", lambda: real)
    OpenTelemetryListener("two")
    (of_resource,) = reader.get_metrics_data().resource_metrics
    (active,) = (m for m in of_resource.scope_metrics[0].metrics if m.name == "ackcore.active")
    assert [one.attributes["ackcore.query"] for one in active.data.data_points] == ["one", "two"]


def test_an_unregistered_listener_is_not_exported_and_hides_no_other():
    registry = CollectorRegistry()
    one, _ = PrometheusListener("one", registry), PrometheusListener("two", registry)
    registry.unregister(one)
    found = scraped(generate_latest(registry).decode())["ackcore_active"]
    assert [dict(labels)["ackcore_query"] for labels in found] == ["two"]


def test_opentelemetry_has_the_same():
    reader = InMemoryMetricReader()
    listener = OpenTelemetryListener("orders", MeterProvider([reader]))
    ran = run(listener)
    listener.on_batch_start(7)
    (of_resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = of_resource.scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    values = {name: [*metric.data.data_points] for name, metric in found.items()}
    absent = {"ackcore.lag", "ackcore.latency", "ackcore.expectation.checks"}
    absent |= {"ackcore.table.rows", "ackcore.table.size"}
    absent |= {"ackcore.spent", "ackcore.tokens"}
    assert {one.name for one in READINGS} - set(found) <= absent
    (dead,) = values["ackcore.dead"]
    assert (dead.value, dead.attributes["messaging.destination.name"]) == (2, "lines")
    assert dead.attributes["ackcore.query"] == "orders"
    assert found["ackcore.dead"].data.is_monotonic
    (durations,) = values[DURATION]
    assert durations.count == len(ran.progress)
    assert durations.explicit_bounds[0] == 0.005
    assert found[DURATION].unit == "s"


def test_otlp_takes_it_to_a_collector():
    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *about):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        exporter = OTLPMetricExporter(f"http://127.0.0.1:{server.server_port}/v1/metrics")
        provider = MeterProvider([PeriodicExportingMetricReader(exporter)])
        run(OpenTelemetryListener("orders", provider))
        provider.shutdown()
        server.shutdown()
        thread.join()
    names = {
        metric.name
        for request in received
        for of_resource in request.resource_metrics
        for scope in of_resource.scope_metrics
        for metric in scope.metrics
    }
    assert {"messaging.client.consumed.messages", "ackcore.dead", DURATION} <= names


def test_the_alert_rules_and_the_dashboard_ask_for_what_is_there(filled):
    text = generate_latest(filled[0].registry).decode()
    exposed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    table = re.findall(r"^\| `.*", MONITORING.with_suffix(".md").read_text(), re.M)
    names = {name for row in table for name in re.findall(r"`((?:ackcore|messaging)_\w+)", row)}
    assert names == exposed
    exposed |= {f"{name}_bucket" for name in exposed}
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += re.findall(
        r"expr: ([^\n]+(?:\n {10,}[^\n]+)*)", (MONITORING / "alerts.yml").read_text()
    )
    assert len(asked) > 16
    for expression in asked:
        names = set(re.findall(r"\b(?:ackcore|messaging)_\w+", expression))
        names -= {"ackcore_query", "messaging_destination_name"}
        assert names
        assert names <= exposed, expression


def need(program):
    if shutil.which(program) is None:
        text = f"{program} is not installed (Debian's package prometheus)"
        if os.environ.get("ACKCORE_REQUIRE_PROMETHEUS"):  # CI: what is not there must not pass
            pytest.fail(text)
        pytest.skip(text)


def promtool(*arguments):
    need("promtool")
    done = subprocess.run(
        ["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_their_cases_hold():
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")


def test_prometheus_understands_the_dashboards_queries(tmp_path):
    board = json.loads((MONITORING / "dashboard.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = [
        {
            "record": f"panel:{n}",
            "expr": expression.replace("$query", "a|.*").replace("$__rate_interval", "5m"),
        }
        for n, expression in enumerate(asked)
    ]
    # JSON is YAML as well.
    whole = {"groups": [{"name": "dashboard", "rules": rules}]}
    (tmp_path / "dashboard.yml").write_text(json.dumps(whole))
    promtool("check", "rules", str(tmp_path / "dashboard.yml"))


@pytest.mark.faults
def test_a_real_prometheus_scrapes_it_and_alerts(tmp_path):
    """It finds records that died, and the query ended."""
    need("prometheus")
    listener = PrometheusListener("orders")
    scrapes, _ = start_http_server(0, "127.0.0.1", listener.registry)
    run(listener, lines=["a"])
    rules = (MONITORING / "alerts.yml").read_text().replace("for: 1m", "for: 1s")
    (tmp_path / "alerts.yml").write_text(rules)
    (tmp_path / "prometheus.yml").write_text(
        f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: ackcore
    static_configs: [{{targets: ["127.0.0.1:{scrapes.server_port}"]}}]
"""
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]  # a port that nobody has
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{free}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=log,
    )

    def ask(query):
        asked = urllib.parse.urlencode({"query": query})
        url = f"http://127.0.0.1:{free}/api/v1/query?{asked}"
        try:
            with urllib.request.urlopen(url) as answer:
                return json.load(answer)["data"]["result"]
        except OSError:
            return []

    def until(query):
        end = time.monotonic() + 120
        while not (found := ask(query)):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, f"{query} has no value"
            time.sleep(0.2)
        return found

    try:
        (acked,) = until("ackcore_acked_total")
        assert acked["metric"]["messaging_destination_name"] == "lines"
        assert acked["value"][1] == "1"
        # The counts grow: two records die.
        listener.on_progress(*_grown())
        (firing,) = until('ALERTS{alertname="AckcoreRecordsDie",alertstate="firing"}')
        assert firing["metric"]["ackcore_query"] == "orders"
        (ended,) = until('ALERTS{alertname="AckcoreQueryEnded",alertstate="firing"}')
        assert ended["metric"]["severity"] == "critical"
        # It is started again, and killed.
        listener.on_start(_grown()[1])
        until("ackcore_active == 1")
        scrapes.close()
        (gone,) = until('ALERTS{alertname="AckcoreQueryGone",alertstate="firing"}')
        assert gone["metric"]["ackcore_query"] == "orders"
    finally:
        process.terminate()
        process.wait()
        log.close()
        scrapes.close()


def _grown():
    """Progress and counts after a micro-batch in which records died."""
    told = []

    class Last:
        def on_progress(self, progress, counts):
            told.append((progress, counts))

    run(Last())
    return told[-1]
