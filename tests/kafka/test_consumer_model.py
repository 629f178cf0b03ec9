"""Consumers while logs change under them: topics made anew, logs truncated, records deleted."""

import pytest
from consumer_world import world_of
from fake_cluster import At
from hypothesis import given
from hypothesis import strategies as st

from ackcore import OffsetTracker
from ackcore.offsets import encode_metadata

#: How members read, whether topics have ids, `out_of_range`, `start`, the longest metadata, and, in
#: `HOW`, `ordered_by`.
LIVES = {
    "it ends over a log that was filled up again": (
        ("tasks", True, "fail", "earliest", 4096),
        [("produce", 4, 3), ("work", 4, 7), ("truncate", 2, 10), ("work", 0, 5)],
    ),
    "it ends over a log that is shorter, and may be longer at the next start": (
        ("cooperative", True, "fail", "earliest", 4096),
        [
            *[("produce", 1, 3), ("turn", 1, 0), ("turn", 1, 0), ("take", 1, 3), ("ack", 1, 0)],
            *[("ack", 1, 1), ("truncate", 1, 4), ("turn", 1, 0)],
        ],
    ),
    "another partition comes while a log is truncated": (
        ("tasks", True, "earliest", "earliest", 4096),
        [
            *[("produce", 4, 5), ("pass_time", 2, 1), ("add_partition", 2, 2), ("turn", 3, 0)],
            ("truncate", 3, 10),
        ],
    ),
    "a log is truncated again before it is read": (
        ("cooperative", True, "earliest", "earliest", 4096),
        [
            *[("produce", 0, 3), ("turn", 0, 0), ("turn", 0, 0), ("take", 0, 3)],
            *[("truncate", 0, 5), ("turn", 0, 0), ("truncate", 4, 11)],
        ],
    ),
    "a truncated log begins where it is read": (
        ("cooperative", True, "latest", "earliest", 4096),
        [
            *[("produce", 5, 11), ("turn", 3, 4), ("truncate", 3, 4), ("delete", 5, 2)],
            ("produce", 5, 3),
        ],
    ),
    "a partition comes of a topic that is known to be made anew": (
        ("cooperative", True, "earliest", "latest", 4096),
        [("pass_time", 3, 10), ("make_anew", 5, 9), ("turn", 4, 1), ("move", 5, 0)],
    ),
    "a topic is made anew, and nobody knows its id yet": (
        ("cooperative", True, "earliest", "latest", 4096),
        [("make_anew", 1, 6), ("hide", 2, 6), ("lose", 3, 5)],
    ),
    "a log is shorter than what was done of it at a restart": (
        ("cooperative", True, "earliest", "earliest", 4096),
        [
            *[("produce", 0, 3), ("turn", 0, 0), ("turn", 0, 0), ("take", 0, 3), ("ack", 0, 0)],
            *[("pass_time", 1, 0), ("turn", 0, 0), ("truncate", 2, 0), ("crash", 0, 0)],
            ("produce", 0, 3),
        ],
    ),
    "a paused partition is gone for a while": (
        ("tasks", True, "earliest", "earliest", 4096),
        [
            *[("pass_time", 3, 8), ("make_anew", 1, 8), ("work", 0, 8), ("work", 5, 4)],
            *[("work", 0, 6), ("hide", 4, 7), ("produce", 0, 10), ("work", 0, 1), ("turn", 2, 0)],
            *[("pass_time", 2, 1), ("turn", 5, 6)],
        ],
    ),
    "a log is truncated while a record of it is out": (
        ("cooperative", True, "earliest", "earliest", 4096),
        [
            *[("produce", 0, 3), ("turn", 0, 0), ("turn", 0, 0), ("take", 0, 3), ("ack", 0, 0)],
            *[("truncate", 0, 5), ("turn", 0, 0), ("pass_time", 1, 0), ("turn", 0, 0)],
        ],
    ),
}

STEPS = (
    ["produce", "turn", "work", "take", "ack"] * 4
    + ["fail", "pass_time", "keep", "make_anew", "truncate", "truncate"] * 2
    + ["delete", "add_partition", "fault", "hide", "slow", "move", "lose", "crash", "seek"]
)
HOW = st.tuples(
    st.sampled_from(["cooperative", "eager", "tasks"]),
    st.sampled_from([True, True, False]),
    st.sampled_from(["earliest", "fail"]),  # "latest" says of some logs that they are not read
    st.sampled_from(["earliest", "latest"]),
    st.sampled_from([4096, 60, 20]),
    st.sampled_from([None, None, "key", "partition"]),
)
ANY = st.tuples(st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 11))


def live(how, steps):
    with world_of(*how) as world:
        for name, a, b in steps:
            getattr(world, f"do_{name}")(a, b)
        world.finish()


@pytest.mark.parametrize("name", LIVES)
def test_no_record_is_left_out_and_none_is_committed_that_is_not_done_where(name):
    live(*LIVES[name])


@given(HOW, st.lists(ANY, min_size=20, max_size=80))
def test_each_record_of_the_logs_that_are_there_is_read_whatever_happens_to_them(how, steps):
    live(how, steps)


def test_a_partition_that_is_resumed_is_fetched_at_once():
    """librdkafka's thread sleeps on for up to a second after a resume; a seek wakes it."""
    with world_of("tasks", True, "earliest", "earliest", 4096) as world:
        world.cluster.produce(world.key(0), 20)
        (member,) = world.members
        for _ in range(4):
            world.do_turn(0, 0)
        assert member.client.paused == {world.key(0)}
        position = member.held.position(world.key(0))
        while member.client.paused:
            assert member.client.sought == []
            member.held.ack(*member.held.take(1, world.now))
            world.do_turn(0, 0)
        assert member.client.sought == [(*world.key(0), position)]


def test_no_generation_comes_twice_where_who_committed_had_a_clock_that_is_ahead():
    with world_of("tasks", True, "earliest", "earliest", 4096) as world:
        key = world.key(0)
        ahead = OffsetTracker(*key, generation=world.now + 10**6, base=0)
        offset, metadata = encode_metadata(ahead, 0)
        world.cluster.committed[key] = At(*key, offset, metadata)
        world.do_crash(0, 0)
        generations = []
        for _ in range(2):
            (member,) = world.members
            generations.append(member.held._partitions[key].generation)
            world.do_make_anew(0, 0)
            for _ in range(3):
                world.do_pass_time(3, 0)
                world.do_turn(0, 0)
        assert world.now + 10**5 < generations[0] < generations[1]
