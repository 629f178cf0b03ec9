"""A member of a group in a process of its own, which dies, or stops, where it is told to.

Its argument is JSON of servers, topic, group, dead_topic, effects, poison (each so-manieth record
fails), and optionally of what else `main` looks up: ``at``, a point of `POINTS`, where it gets
``signal`` the so-manieth time, ``after``, that it passes there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "kafka"))

from consumer_counts import Effects, is_committed, work
from servers import wait_until

from ackcore.kafka import Consumer
from ackcore.kafka.consumer import consumer_client, consumer_letters

#: Where a process can be told to die: what is called there, before or after which.
POINTS = {
    "after the effect, before the ack": (Consumer, "ack", "before, with all else committed"),
    "after the dead letter is kept, before it is known": (
        consumer_letters.PendingLetters,
        "_report",
        "before",
    ),
    "before the commit is sent": (consumer_client, "_offsets", "before"),
    "after the commit is sent, before its answer": (consumer_client.Commits, "answered", "before"),
    "in the revocation, before the commit": (consumer_client.Commits, "send_last", "before"),
    "in the revocation, after the commit": (consumer_client.Commits, "send_last", "after"),
}


#: What `answer_late` adds to the answers that are counted as stale.
LATE: list[int] = []


def plant(point: str, after: int, number: int) -> None:
    """Have the process get a signal at a point, the so-manieth time that it passes there."""
    owner, name, when = POINTS[point]
    function = getattr(owner, name)
    passed = iter(range(10**9))

    def dying(*arguments):
        it_is = next(passed) == after
        if it_is and when != "after":
            if when != "before":
                wait_until(lambda: is_committed(arguments[0]), "all that is done is committed")
            os.kill(os.getpid(), number)
        answer = function(*arguments)
        if it_is and when == "after":
            os.kill(os.getpid(), number)
        return answer

    setattr(owner, name, dying)


def answer_late(consumer: Consumer, effects: Effects, may_fail, out: threading.Event) -> None:
    """Process one record, and say so when its partition is here again, in another assignment.

    Or, once the consumer is to end, when it is gone.
    """
    record = next(each for each in consumer if may_fail(each) is None)
    effects(record)
    out.set()

    def it_is_late() -> bool:
        held = {each.partition: each.generation for each in consumer.stats().partitions}
        found = held.get(record.partition)
        return found != record.generation and (found is not None or consumer.stopped)

    wait_until(it_is_late, "its partition is another's", timeout_s=300)
    with consumer._changed:
        stale = consumer.stats().counts.stale
        assert not consumer.ack(record)
        LATE.append(consumer.stats().counts.stale - stale)


def main() -> None:
    job = json.loads(sys.argv[1])
    if job.get("at"):
        plant(job["at"], job.get("after", 0), job.get("signal", signal.SIGKILL))
    effects = Effects(job["effects"])

    def may_fail(record):
        return None if (int(record.value) + 1) % job["poison"] else ValueError("poison")

    protocol = job.get("protocol", "cooperative")
    # KIP-848's session is the broker's.
    classic = {"session.timeout.ms": 1000, "heartbeat.interval.ms": 100}
    session = {} if protocol == "consumer" else classic
    consumer = Consumer(
        job["topic"],
        bootstrap_servers=job["servers"],
        group_id=job["group"],
        protocol=protocol,
        dead_letters=job["dead_topic"],
        backoff_s=0.02,
        max_backoff_s=0.05,
        commit_interval_s=job.get("commit_interval_s", 0.1),
        max_in_flight=100,
        drain_s=job.get("drain_s", 5.0),
        options={**session, "fetch.wait.max.ms": 20},
    )
    effects.note_commits(consumer)
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    print("ready", flush=True)
    arguments = consumer, effects, may_fail
    threads = []
    if job.get("late"):
        out = threading.Event()
        threads.append(threading.Thread(target=answer_late, args=(*arguments, out), daemon=True))
        threads[0].start()
        out.wait()
    for _ in range(job.get("threads", 2)):
        threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        threads[-1].start()
    while not consumer.stopped:
        signal.sigtimedwait([], 0.05)
    print("draining", flush=True)
    consumer.close()
    for thread in threads:
        thread.join()
    counts = consumer.stats().counts
    print(json.dumps({"acked": counts.acked, "stale": LATE, "rejected": counts.rejected}))


if __name__ == "__main__":
    faulthandler.enable()  # a crash of the client shows its threads
    main()
