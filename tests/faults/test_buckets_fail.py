"""Checkpoint and sink in a bucket: whatever S3 answers, and whoever dies, the counts balance.

Workers and executors die in `test_workers_die`, and drivers stand still in `test_stopped_worlds`,
on disk and in a bucket alike.
"""

from __future__ import annotations

import itertools
import threading
import time

import fault_job
import pytest
from places import PROXIES
from s3_server import DENIED, ERROR, ERROR_AFTER, LOST, REFUSED, SLOW_DOWN
from separately import run_threads
from test_driver_dies import DEAD, RULES, STEPS

pytestmark = pytest.mark.faults

MODES = pytest.mark.parametrize("mode", ["batch", "stream"])


@pytest.fixture
def bucket_job(job):
    """``bucket_job(mode)`` is a job of which some records fail once, or thrice, or for good."""

    def bucket_job(mode, place="bucket", records=50, files=4, **more):
        given = {"message_id": "id", "rules": RULES, "settings": {"max_attempts": 5}, **more}
        given["state"] = files
        return job(fault_job.lines(records), files=files, place=place, mode=mode, **given)

    return bucket_job


@MODES
@pytest.mark.parametrize("place", ["bucket", "hdfs"])
def test_a_driver_that_is_killed_at_every_step(bucket_job, mode, place):
    it = bucket_job(mode, place)
    # A stream dies in its second micro-batch, too: what waits is of the first one then.
    steps = STEPS if mode == "batch" else [*STEPS, *(f"{step}:1" for step in STEPS)]
    for step in steps:
        ended = it.run(failpoints=step)
        assert ended.killed or (step.endswith(":1") and ended.error is None), (step, ended.said)
        it.check(finished=False)
    assert it.run().error is None
    it.check(DEAD)


def test_the_name_node_restarts_all_the_time(bucket_job, own_hdfs):
    """It is killed and started again while a stream runs, and answers for a while in between."""
    it, over = bucket_job("stream", "own_hdfs"), threading.Event()

    def restarts():
        while not over.wait(5):
            own_hdfs.restart("NameNode")
            own_hdfs.wait_until_it_answers()
            times.append(1)

    times, restarting = [], threading.Thread(target=restarts)
    restarting.start()
    try:
        ended = it.run()
    finally:
        over.set()
        restarting.join()
    assert ended.error is None
    assert len(times) >= 1
    it.check(DEAD)


#: What every fifth request meets.
OFTEN = [LOST, REFUSED, SLOW_DOWN, ERROR, ERROR_AFTER]


@pytest.mark.parametrize(
    ("place", "mode"), [("bucket", "batch"), ("bucket", "stream"), ("s3proxy", "stream")]
)
@pytest.mark.parametrize("how", OFTEN)
def test_a_store_that_fails_every_few_requests(request, bucket_job, how, place, mode):
    s3 = request.getfixturevalue(PROXIES[place])
    it, met, numbers = bucket_job(mode, place), [], itertools.count()

    def fails(request):
        if next(numbers) % 5 == 2:
            met.append(request)
            s3.fail(how, lambda one: one is request)

    s3.before = fails
    assert it.run().error is None
    s3.before = None
    assert len(met) > 10
    it.check(DEAD)


@MODES
def test_lists_lag_and_answers_are_slow(bucket_job, s3, mode):
    it = bucket_job(mode)
    s3.lagging = True
    s3.before = lambda request: time.sleep(0.05)
    for step in ("decided", "in-sink", "marked"):
        assert it.run(failpoints=step).killed
    assert it.run().error is None
    s3.lagging, s3.before = False, None
    it.check(DEAD)


@MODES
@pytest.mark.parametrize("what", ["head", "list"])
def test_a_store_that_does_not_answer_in_time(bucket_job, s3, mode, what):
    """Longer than a client waits, which then asks again, though what it asked for was done."""
    it, held, done = bucket_job(mode), [], threading.Event()

    def hangs(request):
        is_head = request.method == "PUT" and request.path.endswith("head.json")
        late = is_head and len(s3.requests) > 10
        if (request.is_list if what == "list" else late) and not held:
            held.extend([request, len(s3.requests)])
            done.wait(45)

    s3.before = hangs
    try:
        assert it.run().error is None
    finally:
        done.set()
    request, before = held
    assert request in s3.requests[before:]  # it was asked again in the meantime
    it.check(DEAD)


@MODES
def test_a_store_that_is_away_ends_the_query_and_it_goes_on_when_it_is_back(bucket_job, s3, mode):
    it = bucket_job(mode)
    s3.before = lambda request: (
        s3.fail(SLOW_DOWN, lambda one: one is request) if len(s3.requests) > 12 else None
    )
    ended = it.run()
    assert "StoreUnavailable: " in ended.error or "503" in ended.error, ended.error
    s3.before = None
    it.check(finished=False)
    assert it.run().error is None
    it.check(DEAD)


@MODES
def test_two_drivers_at_once(bucket_job, mode):
    """Each takes over from the other, and is started again when it has lost: one comes through."""
    it = bucket_job(mode, slow_source=1, files=6)
    errors = []

    def insist():
        for _ in range(8):
            errors.append(it.run().error)
            if errors[-1] is None:
                return

    run_threads(insist, insist)
    lost = [error for error in errors if error is not None]
    assert lost
    assert len(errors) - len(lost) == 2, errors
    assert all(error.startswith("CheckpointInUse: ") for error in lost), errors
    it.check(DEAD)


#: The name of a key, which a refusal repeats, and what goes with it.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAACKCORETEST",
    "AWS_SECRET_ACCESS_KEY": "a-secret-like-no-other",
    "AWS_SESSION_TOKEN": "a-token-like-no-other",
}


def test_no_credential_is_in_a_plan_a_log_an_error_or_an_object(bucket_job, s3, monkeypatch):
    """The processes of a running query and of refused ones: the driver, a task, a reader."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    it = bucket_job("stream", settings={"max_runs": 1, "max_sink_attempts": 1})
    jvm_log, events = it.directory / "jvm.log", it.directory / "events"
    events.mkdir()
    conf = {
        "spark.log.level": "INFO",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": events.as_uri(),
    }

    def ended_with(method, part):
        s3.before = lambda request: (
            s3.fail(DENIED, lambda one: one is request)
            if request.method == method and part in request.path
            else None
        )
        ended = it.run(jvm_log=str(jvm_log), conf=conf)
        s3.before = None
        return ended.error

    for method, part in (("PUT", "/head.json"), ("PUT", "/work/"), ("GET", "/work/")):
        assert "403 AccessDenied" in ended_with(method, part), (method, part)
        it.check(finished=False)
    assert ended_with("none", "") is None
    it.check(DEAD)
    it.place.fetched()
    written = {path: path.read_bytes() for path in it.directory.rglob("*") if path.is_file()}
    assert b"403 AccessDenied" in written[jvm_log]
    plans = b"".join(data for path, data in written.items() if path.is_relative_to(events))
    assert b"MapInArrow" in plans
    for value in CREDENTIALS.values():
        assert [path for path, data in written.items() if value.encode() in data] == []
