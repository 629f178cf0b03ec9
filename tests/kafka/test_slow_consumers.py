"""A consumer whose network is slow, or whose workers are, on librdkafka's mock cluster."""

import os
from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from consumer_counts import Counts, consuming, is_committed, take, workers
from servers import wait_until


def test_a_slow_network_loses_nothing_and_does_nothing_twice(mock_kafka, tmp_path):
    """F11: from here on each answer of all brokers takes half a second."""
    counts = Counts(mock_kafka, tmp_path)
    counts.produce(1000)
    with consuming(counts) as consumer, workers(consumer, counts):
        wait_until(counts.effects, "it works")
        for broker in (1, 2, 3):
            mock_kafka.broker_set_rtt(broker, 500)
        counts.produce(1000)
        wait_until(lambda: consumer.stats().counts.acked == 2000, "all of it is done")
        wait_until(lambda: is_committed(consumer), "commits arrive")
        for broker in (1, 2, 3):
            mock_kafka.broker_set_rtt(broker, 0)
        counts.wait_for_the_end()
        assert consumer.stats().counts.rejected == 0
    counts.check_complete()


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it is asked of Linux")
def test_memory_is_flat_however_much_goes_through_slow_workers(mock_kafka, tmp_path):
    """F19, N9: in a process in use, it grows by less than an eighth of what is read then."""
    counts = Counts(mock_kafka, tmp_path, partitions=2)
    round_, used = [b"x" * 1000] * 1000, []
    with consuming(counts, max_in_flight=500) as consumer:
        for number in range(50):
            for partition in range(2):
                mock_kafka.produce(counts.topic, round_, partition)
            wait_until(
                lambda: {p.paused for p in consumer.stats().partitions} == {"in flight"}, "full"
            )
            for _ in range(20):
                assert consumer.ack_many(take(consumer, 100)) == 100
            pages = Path("/proc/self/statm").read_text().split()[1]
            # Until then allocators of the client's threads and the mock cluster's log fill.
            if number >= 20:
                used.append(int(pages) * os.sysconf("SC_PAGE_SIZE"))
        wait_until(lambda: [at for at, _ in counts.committed()] == [50_000] * 2, "it is committed")
    assert used[-1] - used[4] < 25 * 2 * 1_000_000 / 8, [n >> 20 for n in used]
