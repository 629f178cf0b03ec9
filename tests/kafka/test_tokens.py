"""Clients that log in with tokens, which the user's ``oauth_cb`` gets."""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from confluent_kafka import KafkaError

from ackcore.kafka import Consumer, ConsumerError
from ackcore.kafka.client_settings import ClientSettings, Tokens
from ackcore.kafka.cluster import Cluster, ClusterFailed
from ackcore.kafka.kafka_errors import NoToken
from ackcore.kafka.producing import Deliveries, DeliveryError, Transactions
from ackcore.kafka.range_reader import RangeReader
from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.truncations import truncated_at
from ackcore.offsets import Commit

OAUTH = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}
SECRET = "client=hunter2"


def settings_of(servers, oauth_cb, **options):
    return ClientSettings(servers, {**OAUTH, "oauth_cb": oauth_cb, "log_level": 0, **options})


def token(_config):
    now = time.time()
    parts = {"alg": "none"}, {"sub": "user", "iat": now - 60, "exp": now + 3600}
    coded = (base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    return b".".join([*coded, b""]).decode(), now + 3600


@pytest.mark.broker
def test_every_client_logs_in_with_a_token(kafka_broker):
    topic, out = kafka_broker.new_topic(), kafka_broker.new_topic()
    settings = settings_of(kafka_broker.token_servers, token)
    deliveries = Deliveries(settings)
    deliveries.send(topic, b"1")
    deliveries.flush()
    deliveries.close()
    with Cluster(settings) as cluster:
        assert cluster.bounds_of(topic) == {(topic, 0): (0, 1)}
        kept = {(topic, 0): Commit(1, "kept")}
        assert cluster.commit("g", kept).found == kept
        assert cluster.committed("g", [(topic, 0)]).found == kept
    with RangeReader(settings) as reader:
        (batch,) = reader.read(OffsetRange(topic, 0, 0, 1))
    assert batch.column("value").to_pylist() == [b"1"]
    transactions = Transactions(settings, "tokens", out)
    assert transactions.last is None
    transactions.close()
    assert truncated_at(settings, (topic, 0), 0, 1, 0) is None
    consumer = Consumer(
        topic,
        bootstrap_servers=kafka_broker.token_servers,
        group_id="of-tokens",
        start="earliest",
        options=settings.options,
    )
    with consumer:
        record = next(iter(consumer))
        assert consumer.ack(record)
    assert record.value == b"1"


@pytest.mark.broker
def test_a_consumer_whose_login_fails_on_and_on_logs_one_error_a_minute(kafka_broker, caplog):
    options = {**OAUTH, "oauth_cb": lambda _: ("x.y.z", time.time() + 3600)}
    options |= {"reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 10}
    caplog.set_level(logging.DEBUG, "ackcore")
    consumer = Consumer(
        "t", bootstrap_servers=kafka_broker.token_servers, group_id="refused", options=options
    )

    def failures():
        return [one.levelname for one in caplog.records if "invalid_token" in one.getMessage()]

    deadline = time.monotonic() + 60
    while len(failures()) < 5:
        assert time.monotonic() < deadline
        consumer.poll(1, 0.2)
    consumer.close(drain_s=0)
    assert Counter(failures())["ERROR"] == 1


def test_a_client_without_a_token_says_why():
    def oauth_cb(config):
        raise RuntimeError(f"503 for {config}")

    settings = settings_of("127.0.0.1:1", oauth_cb, **{"sasl.oauthbearer.config": SECRET})
    good = Cluster(ClientSettings("127.0.0.1:1", {"log_level": 0}))
    good._settings = settings

    def consumer():
        Consumer("t", bootstrap_servers="127.0.0.1:1", group_id="g", options=settings.options)

    made = {
        ClusterFailed: lambda: Cluster(settings),
        NoToken: lambda: RangeReader(settings),
        DeliveryError: lambda: Deliveries(settings),
        ConsumerError: consumer,
        ConnectionError: lambda: truncated_at(settings, ("t", 0), 0, 1, 0),
    }
    with ThreadPoolExecutor(7) as pool:
        raised = {kind: pool.submit(make) for kind, make in made.items()}
        asked = pool.submit(good.committed, "g", [("t", 0)])
        committed = pool.submit(good._commit, "g", [[("t", 0)]], {("t", 0): Commit(1, "")}, 1.0)
    said = "oauth_cb gave no token within 10 s: RuntimeError: 503 for [redacted]"
    for kind, future in raised.items():
        assert type(future.exception()) is kind
        assert str(future.exception()) == said
    (failure,) = asked.result().failed.values()
    assert failure == ("_AUTHENTICATION", f"{said} (_AUTHENTICATION)")
    ((error, _),) = committed.result()
    assert (error.code(), error.str()) == (KafkaError._AUTHENTICATION, said)


@pytest.mark.parametrize(
    ("oauth_cb", "said"),
    [
        (lambda: ("token", 1e12), "TypeError: .*positional argument.*"),
        (lambda _: None, r"TypeError: .*a tuple \(token, expiry\), .* got NoneType"),
        (lambda _: "token", "TypeError: .* got str"),
        (lambda _: (b"token", 1e12), "TypeError: .* got a tuple of bytes, float"),
        (lambda _: ("token",), "TypeError: .* got a tuple of str"),
        (lambda _: ("token", 5.0), "ValueError: .*an expiry in the future, .* got 5.0.*"),
        (lambda _: ("token", 1.8e12), "ValueError: .*, got 1800000000000.0; divide .*"),
        (lambda _: ("token", math.nan), "ValueError: .* a finite number up to .*, got nan; .*"),
        (lambda _: ("token", math.inf), "ValueError: .* a finite number up to .*, got inf; .*"),
    ],
)
def test_a_wrong_result_is_refused_and_logged(oauth_cb, said, caplog):
    tokens = settings_of("h:1", oauth_cb).client_config({})["oauth_cb"]
    assert isinstance(tokens, Tokens)
    with pytest.raises((TypeError, ValueError)):
        tokens("")
    (record,) = caplog.records
    assert record.getMessage().endswith(f"is called again in 10 s: {tokens.failure}")
    assert re.fullmatch(said, tokens.failure)


def test_a_token_may_expire_as_late_as_a_datetime():
    latest = datetime.max.replace(tzinfo=UTC).timestamp()
    tokens = settings_of("h:1", lambda _: ("token", latest)).client_config({})["oauth_cb"]
    assert tokens("") == ("token", latest)
