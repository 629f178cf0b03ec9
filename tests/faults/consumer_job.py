"""A member of a group in a process of its own, which dies where it is told to.

Its argument is JSON of servers, topic, group, dead_topic, effects, poison (each so-manieth record
fails), and optionally ``die``, a point of `POINTS`, and ``after``, how often it passes there before
it dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "kafka"))

from consumer_books import Effects, work

from ackcore.kafka import Consumer, commits, dead_letters

#: Where a process can be told to die: what is called there.
POINTS = {
    "after the effect, before the ack": (Consumer, "ack", "before"),
    "after the dead letter is kept, before it is known": (
        dead_letters.DeadLetters,
        "_report",
        "before",
    ),
    "after the commit is sent, before its answer": (commits.Commits, "answered", "before"),
    "in the revocation, before the commit": (commits.Commits, "send_last", "before"),
    "in the revocation, after the commit": (commits.Commits, "send_last", "after"),
}


def plant(point: str, after: int) -> None:
    """Have the process killed at a point, the so-manieth time that it passes there."""
    owner, name, when = POINTS[point]
    function = getattr(owner, name)
    passed = iter(range(10**9))

    def dying(*arguments):
        dies = next(passed) >= after
        if dies and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = function(*arguments)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, dying)


def main() -> None:
    job = json.loads(sys.argv[1])
    if job.get("die"):
        plant(job["die"], job["after"])
    effects = Effects(job["effects"])

    def may_fail(record):
        return None if int(record.value) % job["poison"] else ValueError("poison")

    consumer = Consumer(
        job["topic"],
        bootstrap_servers=job["servers"],
        group_id=job["group"],
        dead_letters=job["dead_topic"],
        backoff_ms=20,
        max_backoff_ms=50,
        commit_interval_s=0.1,
        max_in_flight=100,
        drain_s=5.0,
        options={"session.timeout.ms": 1000, "heartbeat.interval.ms": 100, "fetch.wait.max.ms": 20},
    )
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    print("ready", flush=True)
    threads = [
        threading.Thread(target=work, args=(consumer, effects, may_fail), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while not consumer.stopped:
        signal.sigtimedwait([], 0.05)
    consumer.close()
    counts = consumer.stats().counts
    print(json.dumps({"acked": counts.acked, "stale": counts.stale, "rejected": counts.rejected}))


if __name__ == "__main__":
    main()
