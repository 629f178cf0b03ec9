"""The time limit of bolts that have several inputs out at once."""

from __future__ import annotations

import faulthandler
import os

import pytest

from ackcore.spark.tasks import time_limit
from ackcore.spark.tasks.time_limit import TimeLimit, read_time_out

HEAD = "fetch\nTimeout (0:00:05)!\n"
WAITS = """Thread 0x01 (most recent call first):
  File "/lib/python3.11/selectors.py", line 468 in select
  File "/lib/python3.11/asyncio/base_events.py", line 607 in run_forever
  File "/site/ackcore/calls/call_workers.py", line 146 in outcomes
  File "/site/ackcore/calls/calls.py", line 113 in run
  File "/site/ackcore/topology/call_executor.py", line 140 in _run_all
"""
IDLE = """Thread 0x02 (most recent call first):
  File "/site/ackcore/calls/threads.py", line 60 in _work
  File "/lib/python3.11/threading.py", line 982 in run
"""
HANGS = """Thread 0x03 (most recent call first):
  File "/lib/python3.11/socket.py", line 706 in readinto
  File "/job/bolts.py", line 12 in ask
  File "/job/bolts.py", line 20 in execute
  File "/site/ackcore/topology/call_executor.py", line 180 in _execute_in_thread
  File "/site/ackcore/calls/threads.py", line 65 in _work
"""


@pytest.mark.parametrize(
    ("trace", "where"),
    [
        (WAITS, ""),
        (IDLE + WAITS, ""),
        (IDLE + HANGS + WAITS, ': File "/job/bolts.py", line 12 in ask'),
        (HANGS, ': File "/job/bolts.py", line 12 in ask'),
    ],
)
def test_a_time_out_names_the_bolts_own_line_and_not_what_waits_for_it(trace, where, tmp_path):
    path = tmp_path / "time-out"
    path.write_text(HEAD + trace.replace("/", os.sep))
    reason = read_time_out(str(path))
    assert reason.message == f"timed out in fetch{where.replace('/', os.sep)}"
    assert reason.final


def test_the_limit_begins_anew_with_each_input_that_is_done(monkeypatch, tmp_path):
    """And costs little: it is set again once in a quarter of a second at most."""
    now_s, log = 0.0, []
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda limit_s, **_: log.append((now_s, limit_s))
    )
    limit = TimeLimit(5, str(tmp_path / "time-out"))
    with limit.on("fetch"):
        for _ in range(1000):
            now_s += 0.01
            limit.progressed()
    assert 30 <= len(log) <= 40
    assert log[-1][0] >= 9.7
    assert {seconds for _, seconds in log} == {5}
    limit.end()
    TimeLimit(None, "").progressed()
