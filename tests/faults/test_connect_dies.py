"""Spark Connect's server or its client is killed in the midst of a run: the counts hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import connect_client
import pytest
from connect_server import ConnectServer
from processes import eventually

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("needs_connect")]

WHOLE = {"counts": [200, 180, 20, 25, True], "rows": True, "state": True, "dead": True}
REST = {
    "settle": ["ACKED", "OPEN"],
    "combine": ["ACKED", "OPEN"],
    "settle_parquet": ["ACKED", "OPEN"],
    "attempt": ["ZeroDivisionError", None, None],
    "guard": [3, 3],
    "functions": 3,
    "replay": {"numbers": 1},
}


def begin(server, directory, python=sys.executable, place=()):
    return subprocess.Popen(
        [python, connect_client.__file__, server.url, str(directory), *place],
        stdout=subprocess.PIPE,
        text=True,
    )


def answer_of(client):
    said, _ = client.communicate(timeout=600)
    assert client.returncode == 0
    return json.loads(said.splitlines()[-1])


def await_work(directory):
    until = time.monotonic() + 120
    while not (directory / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def whole(answer, python_is_thin=False):
    assert {name: answer[name] for name in WHOLE} == WHOLE
    assert {name: answer[name] for name in REST} == REST
    assert answer["is_thin"] is python_is_thin


@pytest.fixture(params=["run_batch", "start"])
def work(request, tmp_path):
    """Return the client's directory, which says whether it runs a batch or a stream."""
    directory = tmp_path / "work"
    directory.mkdir()
    if request.param == "start":
        (directory / "stream").touch()
    return directory


@pytest.fixture(params=["disk", "bucket"])
def place(request):
    """Return the client's arguments for checkpoint and sink; the process it starts has the rest."""
    return [] if request.param == "disk" else [request.getfixturevalue("bucket")]


def test_a_thin_client_runs_all_that_another_does(tmp_path, work, place):
    """PySpark's pyspark-client, without a JVM and without Py4J: `make test-thin-client`."""
    python = os.environ.get("ACKCORE_THIN_CLIENT")
    if python is None:
        pytest.skip("ACKCORE_THIN_CLIENT names no Python that has pyspark-client")
    with ConnectServer(tmp_path / "server") as server:
        whole(answer_of(begin(server, work, python, place)), python_is_thin=True)


def was_cut_off(answer):
    assert answer["shut_down"], answer
    assert "has ended, or its server does not answer" in answer["cancelled"]


def test_a_server_that_is_killed_ends_the_run_and_another_goes_on(tmp_path, work, place):
    (work / "slow").touch()
    with ConnectServer(tmp_path / "first") as server:
        client = begin(server, work, place=place)
        await_work(work)
        server.kill()
    with ConnectServer(tmp_path / "second", port=server.port) as again:
        was_cut_off(answer_of(client))
        (work / "slow").unlink()
        whole(answer_of(begin(again, work, place=place)))


#: A server that ends sessions of which it has heard nothing for a while.
IMPATIENT = {
    "spark.connect.session.manager.defaultSessionTimeout": "5s",
    "spark.connect.session.manager.maintenanceInterval": "200ms",
}


def test_a_session_that_expires_between_two_micro_batches_ends_the_run(tmp_path, work):
    """Some records wait for their retry then; another session goes on with them."""
    (work / "idle").touch()
    with ConnectServer(tmp_path / "server", conf=IMPATIENT) as server:
        client = begin(server, work)
        eventually(server.ended_sessions)
        (work / "idle").unlink()
        was_cut_off(answer_of(client))
        whole(answer_of(begin(server, work)))


def test_a_client_that_is_killed_loses_nothing(tmp_path, work):
    """Its job runs on for a while: what that writes is of a run that counts no more."""
    (work / "slow").touch()
    with ConnectServer(tmp_path / "server") as server:
        client = begin(server, work)
        await_work(work)
        client.kill()
        client.communicate()
        (work / "slow").unlink()
        whole(answer_of(begin(server, work)))
