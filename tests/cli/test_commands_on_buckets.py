"""``ackcore status``, ``dead``, ``doctor`` and ``ui`` on the URL of a bucket."""

from __future__ import annotations

import logging

import pytest
from checkpoints import OPEN, with_dead_letters
from s3_server import DENIED

from ackcore.spark.inspect.status import read_pending
from ackcore.spark.stores.objects import ObjectStore
from ackcore.spark.stores.opening import open_store


@pytest.fixture
def url(bucket):
    """A checkpoint in a bucket, with seven dead letters, and three records that wait."""
    return with_dead_letters(bucket)


@pytest.fixture
def unchanged(url):
    """Sees to it that nothing in the bucket was changed."""
    store = open_store(url, "path")
    before = {entry.key: store.get(entry.key) for entry in store.list()}
    yield
    assert {entry.key: store.get(entry.key) for entry in store.list()} == before


def test_status(ackcore, lines, url, unchanged):
    said = ackcore("status", url).stdout
    assert f"{url}: a batch, not running, last owner pid" in said
    assert "(epoch 1)" in said
    assert "counts after 2 micro-batches " in said
    assert "dead letters: 7, of which 0 were replayed" in said
    assert "waiting: 3, the next is due now" in said
    (found,) = lines(ackcore("status", url, "--json"))
    assert found["epoch"] == 1
    assert found["holder"]["holds"] is False
    assert found["counts"]["balanced"]
    assert found["waiting"]["records"] == 3


def test_a_query_that_runs_is_not_disturbed(ackcore, lines, url, caplog):
    with OPEN(url) as state:
        state.write_plan(state.make_plan(2, 10**9))
        said = ackcore("status", url).stdout
        assert "this host cannot check whether it runs (epoch 2)" in said
        assert "micro-batch 2 runs, planned" in said
        assert len(lines(ackcore("dead", "list", url, "--json"))) == 7
        ackcore("dead", "replay", url, "lines/0/0")
        waits = read_pending(url, "id-20", clock=lambda: 0)
        assert (waits.spout, waits.running_in) == ("lines", 2)
        with caplog.at_level(logging.WARNING, "ackcore"):
            state.check_owner()
            assert len(state.pending_replays()) == 1
        (found,) = lines(ackcore("status", url, "--json"))
        assert (found["epoch"], found["requests"]) == (2, 1)
    assert not caplog.records


def test_letters(ackcore, lines, url):
    found = lines(ackcore("dead", "list", url, "--error", "TimeoutError", "--json"))
    assert len(found) == 5
    assert "line 6" in ackcore("dead", "show", url, "lines/1/2").stdout
    assert "1 dead letter is sent again" in ackcore("dead", "replay", url, "lines/1/2").stdout
    assert (
        "2 dead letters were dropped" in ackcore("dead", "drop", url, "--component", "split").stdout
    )
    assert len(lines(ackcore("dead", "list", url, "--json"))) == 5
    store = f"{url}/ackcore/dead_letters"
    (sent,) = lines(ackcore("dead", "list", store, "--sent", "--json"))
    assert sent["letter"] == "lines/1/2"
    with OPEN(url) as state:
        assert len(state.pending_replays()) == 1


def test_what_is_not_there_is_told(ackcore, bucket):
    for words in (["status"], ["dead", "list"]):
        said = ackcore(*words, bucket, code=3).stderr
        assert bucket in said
        assert "head.json" in said


@pytest.mark.parametrize(
    ("server", "name"),
    [
        ("bucket", "s3://no-such-bucket"),
        pytest.param("azure_container", "az://no-such-container", marks=pytest.mark.faults),
    ],
)
def test_a_bucket_that_is_not_there_is_named(ackcore, request, server, name):
    request.getfixturevalue(server)
    for words in (["status"], ["dead", "list"]):
        said = ackcore(*words, f"{name}/some/place", code=3).stderr
        assert f"there is no bucket {name}: create it, or correct the URL {name}/some" in said
        assert "head.json" not in said


def test_what_may_not_be_read_is_told_without_a_secret(ackcore, url, s3, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-that-is-secret")
    s3.fail(DENIED, "GET", times=5)
    done = ackcore("status", url, code=3)
    assert "cannot be read" in done.stderr
    for secret in ("a-token-that-is-secret", "a-secret-of-the-tests", "AKIA"):
        assert secret not in done.output
    assert done.stderr.count("\n") == 1


def test_the_doctor_tries_what_a_bucket_promises(doctor, bucket):
    found = doctor(bucket)
    conditions = ["put if absent", "replace if unchanged", "one of many at once"]
    for what in ("obstore", "read and write", *conditions):
        assert found[what]["ok"], what
    assert " ms; a micro-batch takes" in found["round trip"]["found"]
    assert "file system" not in found
    assert open_store(bucket, "path").list() == []


@pytest.mark.faults
def test_the_doctor_tries_what_hdfs_promises(doctor, hdfs_place):
    found = doctor(hdfs_place)
    assert found["hdfs-native"]["ok"]
    assert found["one of many at once"]["ok"]
    assert "obstore" not in found


@pytest.mark.parametrize("scheme", ["hdfs", "HDFS"])
def test_the_doctor_names_a_wrong_host(doctor, scheme):
    told = doctor(f"{scheme}://nowhere/a", code=1)
    assert "hdfs-native" in told
    (bad,) = [each for each in told.values() if each["ok"] is False]
    assert "'nowhere' must be the NameNode's host and port" in bad["found"]
    assert "HADOOP_CONF_DIR" in bad["mend"]


def test_the_doctor_finds_a_server_without_conditions(doctor, bucket, monkeypatch):
    whole = ObjectStore._put
    monkeypatch.setattr(
        ObjectStore, "_put", lambda store, key, data, *_: whole(store, key, data, "overwrite", None)
    )
    bad = {what: each for what, each in doctor(bucket, code=1).items() if each["ok"] is False}
    assert {*bad} == {"put if absent", "replace if unchanged", "one of many at once"}
    assert "though the condition did not hold" in bad["put if absent"]["found"]
    assert "two drivers could write" in bad["put if absent"]["mend"]


def test_the_doctor_tells_what_it_may_not_do(ackcore, bucket, s3):
    s3.fail(DENIED, lambda one: True, times=20)
    said = ackcore("doctor", bucket, "--master", "none", code=1).stdout
    assert "AWS_ENDPOINT_URL" in said
    assert "AWS_SECRET_ACCESS_KEY" in said  # its name alone
    for secret in ("a-secret-of-the-tests", "AKIA"):
        assert secret not in said
