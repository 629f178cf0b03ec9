"""Errors of ranges of offsets name them; settings show no secret."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys

import pytest

from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.kafka_errors import OffsetsLost, ReadFailed, ReadTimedOut
from ackcore.kafka.ranges import OffsetRange


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OffsetsLost(OffsetRange("t", 0, 5, 9), 7, 20), "t-0 [5, 9) .* below 7 were deleted"),
        (OffsetsLost(OffsetRange("t", 0, 50, 90), 0, 20), "ends at offset 20; .* truncated"),
        (ReadTimedOut(OffsetRange("t", 0, 5, 9), 3.0, "why"), "for 3 s: why; check that the part"),
        (ReadFailed(OffsetRange("t", 0, 5, 9), "CODE", "why"), "cannot be read: why; check the t"),
    ],
)
def test_errors_come_through_pickle_as_they_are(error, says):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)
    with pytest.raises(type(error), match=says.replace("[", r"\[").replace(")", r"\)")):
        raise again


# Settings -----------------------------------------------------------------------------------


def oauth(_config):
    return "token", 0.0


SECRETS = {
    "sasl.password": "hunter2hunter2",
    "ssl.key.pem": "-----BEGIN PRIVATE KEY-----",
    "ssl.key.password": "hunter2",
    "sasl.oauthbearer.config": "principal=hunter4",
    "sasl.oauthbearer.client.secret": "hunter5",
    "sasl.username": "hunter6",  # of some services it is half of the secret
    "some.plugin.token": "hunter7",
}
PLAIN = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "ssl.ca.location": "/ca.pem"}


def test_no_secret_is_shown():
    settings = ClientSettings("host:9092", {**PLAIN, **SECRETS, "oauth_cb": oauth})
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert again.options["oauth_cb"] is oauth
    log = logging.LogRecord("", 0, "", 0, "%s %r", (settings, settings), None).getMessage()
    for text in (repr(settings), str(again), f"{[settings]}", log):
        assert not [secret for secret in SECRETS.values() if secret in text]
        assert "SASL_SSL" in text
        assert "/ca.pem" in text
    assert settings.client_config({}, {})["sasl.password"] == "hunter2hunter2"
    said = settings.redacted(f"librdkafka says {SECRETS}")
    assert not [secret for secret in SECRETS.values() if secret in said]
    # The longer one first: a part of it is left over otherwise.
    assert settings.redacted("hunter2hunter2") == "[redacted]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("some messages of the member me_1", "some messages of the member me_1"),
        ("password=me, user:me@host", "password=*, user:*@host"),
        ("{'sasl.password': 'me'} me", "{'sasl.password': '*'} *"),
        (repr("said\nme\tme\rme"), "'said\\n*\\t*\\r*'"),
        ("me", "*"),
        ("pass.word=$me.p?x me+y", "pass.word=*.p?x *+y"),
        ("longer-me", "*"),
        ("xhunter22 xhunter", "x*2 xhunter"),
        ("$mes", "$mes"),
    ],
)
def test_a_short_secret_is_cut_out_of_no_word(text, told):
    """A longer secret is cut out of words too, as hunter2 is out of xhunter22."""
    secrets = {
        "sasl.password": "me",
        "a.token": "$me",
        "b.token": "longer-me",
        "c.token": "hunter2",
    }
    assert ClientSettings("h:1", secrets).redacted(text) == told.replace("*", "[redacted]")


def test_an_empty_secret_redacts_nothing():
    assert ClientSettings("h:1", {"sasl.password": ""}).redacted("text") == "text"


def test_numbers_are_cut_out_of_no_text():
    times = {
        "sasl.kerberos.min.time.before.relogin": 60000,
        "sasl.oauthbearer.retries": 5,
        "ssl.x": 0.5,
        "ssl.y": True,
    }
    settings = ClientSettings("h:1", {**times, "sasl.password": 12345})
    text = "t-5 [60000, 65000) timed out after 0.5 s: True"
    assert settings.redacted(text) == text
    assert settings.redacted("it is 12345") == "it is [redacted]"  # librdkafka takes it for text


def test_what_the_client_needs_wins_over_options_and_they_over_defaults():
    settings = ClientSettings("h:1", {"fetch.min.bytes": 5, "debug": "none"})
    made = settings.client_config({"debug": "own"}, {"fetch.min.bytes": 1, "linger.ms": 2})
    assert made == {
        "bootstrap.servers": "h:1",
        "fetch.min.bytes": 5,
        "linger.ms": 2,
        "debug": "own",
    }


@pytest.mark.parametrize(
    "name", ["bootstrap.servers", "group.id", "enable.auto.commit", "auto.offset.reset"]
)
def test_settings_that_are_ours_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"options must not have '{name}': .{{10,}}"):
        ClientSettings("h:1", {name: "x"})


@pytest.mark.parametrize(
    ("servers", "options", "error", "says"),
    [
        (["h:1"], None, TypeError, "bootstrap_servers must be a string .* got list"),
        (" ", None, ValueError, "must not be empty"),
        ("h:1", [("a", "b")], TypeError, "options must be a mapping"),
        ("h:1", {1: "b"}, TypeError, "names of options must be strings, got 1"),
        ("h:1", {"sasl.password": b"hunter2"}, TypeError, r"password'\] must be .* got bytes$"),
    ],
)
def test_what_settings_cannot_be(servers, options, error, says):
    with pytest.raises(error, match=says):
        ClientSettings(servers, options)


@pytest.mark.parametrize("adapted", [False, True])
def test_settings_may_have_a_logger(adapted):
    logger = logging.getLogger("kafka")
    found = logging.LoggerAdapter(logger, {}) if adapted else logger
    assert ClientSettings("h:1", {"logger": found}).client_config({})["logger"] is found


def test_without_confluent_kafka_the_error_names_the_extra():
    code = "import sys; sys.modules['confluent_kafka'] = None\nimport ackcore.kafka"
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert "needs confluent_kafka" in ended.stderr.splitlines()[-1]
    assert "pip install 'ackcore[kafka]'" in ended.stderr.splitlines()[-1]
