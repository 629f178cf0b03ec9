"""The contents of a run's checkpoint, and the start of the next run."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from in_processes import effects
from scripted import failing, one

from ackcore.dispatch import Dispatcher, RecordDead
from ackcore.dispatch.checkpoint import Checkpoint, CheckpointError
from ackcore.flow import Fixed


def test_the_committed_position_stops_at_what_is_open(tmp_path):
    """1, 3 and 4 done is 1's; 2 moves it to 4's."""
    kept = tmp_path / "rt"
    seen = []

    async def main():
        release = asyncio.Event()

        async def call(record):
            if record == 2:
                await release.wait()
            seen.append(dispatcher.counts().committed)

        dispatcher = Dispatcher(range(20), {"a": call}, limit=lambda: Fixed(4), checkpoint=kept)
        run = asyncio.ensure_future(dispatcher.run_async())
        while len(seen) < 19:
            await asyncio.sleep(0)
        assert dispatcher.counts().committed == 2
        release.set()
        return await run

    assert asyncio.run(main()).committed == 20
    assert max(seen) == 2


def test_a_producer_killed_by_kill_9_goes_on_at_its_commit(tmp_path):
    """Each record is done, and only those beyond the committed position are done twice."""
    program = f"""
import os, signal
from functools import partial
from ackcore.dispatch import Dispatcher, Function, dispatcher
from in_processes import write

dispatcher._COMMIT_S = 1e-6

def kill(position, record):
    if position == 500:
        os.kill(os.getpid(), signal.SIGKILL)

consumers = {{n: Function(partial(write, {str(tmp_path)!r})) for n in range(3)}}
path = {str(tmp_path / "position")!r}
Dispatcher(range(1000), consumers, acked=kill, checkpoint=path).run()
"""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    killed = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    with Checkpoint(tmp_path / "position") as checkpoint:
        committed = checkpoint.committed
    assert 0 < committed <= 500
    program = program.replace("position == 500", "False")
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    done = sorted(effects(tmp_path))
    assert set(done) == set(range(1000))
    assert {n for n in done if done.count(n) > 1} <= set(range(committed, 1000))


def test_without_a_place_for_the_dead_a_run_ends_and_the_next_resumes_there(tmp_path):
    done = []
    kept = tmp_path / "rt"
    with pytest.raises(RecordDead, match=r"record 5 failed 2 times, the last time with ValueError"):
        Dispatcher(
            range(50), {"a": failing({5: 9}, done)}, max_attempts=2, checkpoint=kept, limit=one
        ).run()
    with Checkpoint(kept) as checkpoint:
        assert checkpoint.committed == 5
    again = []
    counts = Dispatcher(range(50), {"a": failing({}, again)}, checkpoint=kept).run()
    assert again == list(range(5, 50))
    assert (counts.start, counts.committed, counts.acked) == (5, 50, 45)
    assert Dispatcher(range(50), {"a": again.append}, checkpoint=kept).run().read == 0


def test_a_commit_that_fails_at_the_end_lets_others_open_the_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "rt"
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "commit", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full") as caught:
            Dispatcher(range(3), {"a": print}, checkpoint=path).run()
    Checkpoint(path).close()
    del caught  # until then its frames kept the lock's file


def test_two_do_not_share_a_checkpoint(tmp_path):
    with (
        Checkpoint(tmp_path / "rt"),
        pytest.raises(CheckpointError, match=r"rt is open in another dispatcher; stop that"),
    ):
        Dispatcher([1], {"a": print}, checkpoint=tmp_path / "rt").run()
