"""A Delta table in a bucket: each micro-batch once, errors that name its server and no secret."""

from __future__ import annotations

import importlib
import traceback

import pytest

pytest.importorskip("deltalake")

from accepted_rows import WORDS, accepted
from deltalake.exceptions import CommitFailedError
from test_delta_sink import rows, started

from ackcore.spark import SinkUnavailable, to_delta
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.sinks.sink import check_sink
from ackcore.spark.sinks.unavailable import bare, redacted


@pytest.fixture
def lake(s3_server):
    """A place for a table in a bucket, and what reaches it.

    By the server itself: deltalake holds the GIL while it waits, so that no proxy in this process
    could answer.
    """
    module = importlib.import_module("s3_server")
    path = f"s3://{s3_server.new_bucket()}/lake/orders"
    return path, module.environment(s3_server.endpoint)


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_table_in_a_bucket_has_each_micro_batch_once(lake, files, keys):
    path, options = lake
    for number in (0, 0, 1):
        sink = started(path, keys=keys, storage_options=options)
        sink.write(accepted(files, number))
    first = [("a", 1), ("a", 5), ("c", 3), ("d", 4)]
    assert rows(path, options) == ([("a", 5), ("c", 3), ("d", 4)] if keys else sorted(2 * first))
    said = rf"{path}.* has micro-batch 1 .* is at micro-batch 0"
    with pytest.raises(CheckpointForeign, match=said):
        sink.write(accepted(files))


def test_of_two_drivers_one_commits_to_a_table_in_a_bucket(lake, files):
    path, options = lake
    first, second = (started(path, storage_options=options) for _ in range(2))
    fences = []

    def take_over():
        if not fences:
            fences.append(None)
            second.write(accepted(files))

    with fenced(take_over), pytest.raises(CommitFailedError):
        first.write(accepted(files))
    first.write(accepted(files))
    assert len(rows(path, options)) == 4


@pytest.mark.parametrize(
    ("path", "options", "shown"),
    [
        (
            "s3://bucket/orders",
            {"AWS_ENDPOINT_URL": "http://login:hidden1@127.0.0.1:1/", "AWS_REGION": "eu-west-1"},
            r"s3://bucket/orders at http://127.0.0.1:1/: OSError: .*\]@127.0.0.1:1/",
        ),
        (
            "s3://login:hidden1@bucket/orders",
            {"aws_endpoint": "http://eu-west-1.localhost:1", "region": "eu-west-1"},
            "s3://bucket/orders at http://eu-west-1.localhost:1: .* http://eu-west-1.localhost:1/",
        ),
        (
            "az://box/orders",
            {
                "azure_storage_account_name": "account",
                "azure_storage_sas_token": "sv=1&sig=hidden1",
                "azure_storage_endpoint": "http://127.0.0.1:1/account",
            },
            "az://box/orders at http://127.0.0.1:1/account: OSError: ",
        ),
        (
            "abfss://box@account.dfs.core.windows.net/orders",
            {"endpoint": "http://127.0.0.1:1", "azure_storage_account_key": "aGlkZGVuMQ=="},
            "abfss://box@account.dfs.core.windows.net/orders at http://127.0.0.1:1: OSError: ",
        ),
    ],
    ids=["login in the endpoint", "login in the path", "azure's sas", "azure's key"],
)
def test_a_server_that_is_away_is_named_without_secrets(path, options, shown):
    """The error names the address that did not answer, and no secret."""
    hidden = {"AWS_ACCESS_KEY_ID": "AKIAhidden2", "AWS_SECRET_ACCESS_KEY": "hidden3/x+y"}
    hidden |= {"aws_session_token": "hidden4"} if path.startswith("s3") else {}
    sink = to_delta(
        path, storage_options={**hidden, **options, "allow_http": "true", "max_retries": "0"}
    )
    with pytest.raises(SinkUnavailable, match=f"sink 'count', Delta table {shown}") as told:
        check_sink("count", sink, WORDS)
    everything = "".join(traceback.format_exception(told.value)) + repr(sink)
    for secret in ("hidden1", "hidden2", "hidden3", "hidden4", "login:", "AKIA", "aGlkZGVuMQ=="):
        assert secret not in everything


def test_what_a_server_says_of_a_request_it_refuses_is_shown_without_how_it_was_signed():
    said = (
        "GET https://host/bucket?X-Amz-Signature=hidden1&b=2 in 3ms: <Code>SignatureDoesNotMatch"
        "</Code><AWSAccessKeyId>AKIAhidden2</AWSAccessKeyId><StringToSign>hidden3\nhidden4"
        "</StringToSign><SignatureProvided>hidden5</SignatureProvided><HostId>h</HostId>"
        "<CanonicalRequest>cut of"
    )
    assert redacted(said, []) == (
        "GET https://host/bucket?[redacted] in 3ms: <Code>SignatureDoesNotMatch"
        "</Code><AWSAccessKeyId>[redacted]</AWSAccessKeyId><StringToSign>[redacted]"
        "</StringToSign><SignatureProvided>[redacted]</SignatureProvided><HostId>h</HostId>"
        "<CanonicalRequest>[redacted]"
    )
    # A short secret is a value, and no part of a word; "true" and "0" are no secrets.
    said = "some messages: it is true that pw=me is no login of me@127.0.0.1"
    told = "some messages: it is true that pw=* is no login of *@127.0.0.1"
    assert redacted(said, ["me", "true", "0", "", "messenger"]) == told.replace("*", "[redacted]")


def test_a_bucket_that_is_not_there_is_named_without_secrets(lake):
    path, options = lake
    sink = to_delta(f"{path}x".replace("bucket-", "none-"), storage_options=options)
    with pytest.raises(SinkUnavailable, match="sink 'count', Delta table s3://none-") as told:
        check_sink("count", sink, WORDS)
    assert "NoSuchBucket" in str(told.value)
    assert f" at {options['AWS_ENDPOINT_URL']}: " in str(told.value)
    assert "a-secret" not in f"{told.value} {sink!r}"
    assert str(told.value).isprintable(), repr(str(told.value))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("/lake/12:30@noon?/orders", "/lake/12:30@noon?/orders"),
        ("s3://login:hidden1@bucket/orders?signature=hidden2", "s3://bucket/orders"),
        ("abfss://container@account/orders", "abfss://container@account/orders"),
    ],
)
def test_an_address_is_shown_without_what_is_secret(address, shown):
    assert bare(address) == shown
