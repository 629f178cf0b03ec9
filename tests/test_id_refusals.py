"""Arguments of ids are refused by name, with the row and the value, alike by both backends."""

import numpy as np
import pytest

import ackcore.ids

OFFSET = np.array([5, 6, 7])
TASK = np.array([1, 2, 3], np.int32)
REFUSED = {
    "partition too big": (ValueError, "partition must be in 0..65535, got 65536",
                          lambda m: m.root_id(1, 2**16, 0, 0)),
    "partition far too big": (ValueError, f"partition must be in 0..65535, got {2**80}",
                              lambda m: m.root_id(1, 2**80, 0, 0)),
    "offset negative": (ValueError, f"offset must be in 0..{2**42 - 1}, got -1",
                        lambda m: m.root_id(1, 0, -1, 0)),
    "offset too big": (ValueError, f"offset must be in 0..{2**42 - 1}, got {2**42}",
                       lambda m: m.root_id(1, 0, 2**42, 0)),
    "attempt too big": (ValueError, "attempt must be in 0..63, got 64",
                        lambda m: m.root_id(1, 0, 0, 64)),
    "key too wide": (OverflowError, "key must fit in 64 bits",
                     lambda m: m.root_id(2**64, 0, 0, 0)),
    "key no int": (TypeError, "key must be an integer, got float",
                   lambda m: m.root_id(1.0, 0, 0, 0)),
    "partition no int": (TypeError, "partition must be an integer, got str",
                         lambda m: m.root_id(1, "0", 0, 0)),
    "a partition too big": (ValueError, "partitions must be in 0..65535, got 65536 in row 2",
                            lambda m: m.root_ids(1, TASK + np.int32([0, 0, 65533]), OFFSET, 0)),
    "a partition negative": (ValueError, "partitions must be in 0..65535, got -1 in row 1",
                             lambda m: m.root_ids(1, np.int32([0, -1, 2**16]), OFFSET, 0)),
    "an offset too big": (ValueError, f"offsets must be in 0..{2**42 - 1}, got {2**42} in row 2",
                          lambda m: m.root_ids(1, 0, np.array([0, 1, 2**42]), 0)),
    "an offset negative": (ValueError, f"offsets must be in 0..{2**42 - 1}, got -7 in row 0",
                           lambda m: m.root_ids(1, 0, np.array([-7, 1, 2**42]), 0)),
    "an attempt too big": (ValueError, "attempts must be in 0..63, got 64 in row 0",
                           lambda m: m.root_ids(1, 0, OFFSET, np.int32([64, 0, 0]))),
    "one partition too big": (ValueError, "partitions must be in 0..65535, got 65536",
                              lambda m: m.root_ids(1, 2**16, OFFSET, 0)),
    "one attempt negative": (ValueError, "attempts must be in 0..63, got -1",
                             lambda m: m.root_ids(1, 0, OFFSET, -1)),
    "partitions wide": (TypeError, "partitions must hold 32-bit signed integers, got items of "
                        "dtype <i8; cast the column to int32 first",
                        lambda m: m.root_ids(1, OFFSET, OFFSET, 0)),
    "offsets a list": (TypeError, "offsets must be an array or another buffer of 64-bit integers",
                       lambda m: m.root_ids(1, 0, [1, 2], 0)),
    "offsets one int": (TypeError, "offsets must be an array", lambda m: m.root_ids(1, 0, 5, 0)),
    "offsets strided": (ValueError, "offsets must be C-contiguous",
                        lambda m: m.root_ids(1, 0, np.arange(6)[::2], 0)),
    "offsets 2-d": (ValueError, "offsets must be one-dimensional",
                    lambda m: m.root_ids(1, 0, np.zeros((2, 2), np.int64), 0)),
    "root lengths": (ValueError, "partitions has 3 rows and offsets has 2",
                     lambda m: m.root_ids(1, TASK, OFFSET[:2], TASK)),
    "attempt lengths": (ValueError, "offsets has 3 rows and attempts has 2",
                        lambda m: m.root_ids(1, 1, OFFSET, TASK[:2])),
    "lengths before ranges": (ValueError, "must pair up",
                              lambda m: m.root_ids(1, TASK - np.int32(9), OFFSET[:2], 0)),
    "component bytes": (TypeError, "component must be an integer, got bytes",
                        lambda m: m.edge_id(1, 2, b"b", 3, 4)),
    "component too wide": (OverflowError, "component must fit in 64 bits",
                           lambda m: m.edge_id(1, 2, 2**64, 3, 4)),
    "ordinal negative": (ValueError, f"ordinal must be in 0..{2**63 - 1}, got -1",
                         lambda m: m.edge_id(1, 2, "b", 3, -1)),
    "ordinal too big": (ValueError, f"ordinal must be in 0..{2**63 - 1}, got {2**63}",
                        lambda m: m.edge_id(1, 2, "b", 3, 2**63)),
    "parent edge too wide": (OverflowError, "parent_edge must fit in 64 bits",
                             lambda m: m.edge_id(1, 2, "b", -(2**63) - 1, 0)),
    "root no int": (TypeError, "root_id must be an integer, got NoneType",
                    lambda m: m.edge_id(1, None, "b", 3, 0)),
    "an ordinal negative": (ValueError, f"ordinals must be in 0..{2**63 - 1}, got -2 in row 1",
                            lambda m: m.edge_ids(1, OFFSET, "b", 0, np.array([0, -2, 0]))),
    "edge lengths": (ValueError, "root_ids has 3 rows and ordinals has 2",
                     lambda m: m.edge_ids(1, OFFSET, "b", 0, OFFSET[:2])),
    "parent edges a float": (TypeError, "parent_edges must be an array",
                             lambda m: m.edge_ids(1, OFFSET, "b", 0.5, 0)),
    "parent beyond": (ValueError, "parents must be row numbers in 0..6, got 7 in row 2",
                      lambda m: m.xor_by_parent(OFFSET, OFFSET, 7)),
    "parent negative": (ValueError, "parents must be row numbers in 0..6, got -1 in row 0",
                        lambda m: m.xor_by_parent(np.array([-1]), np.array([1]), 7)),
    "no parents at all": (ValueError, "parents must be row numbers in no rows at all",
                          lambda m: m.xor_by_parent(np.array([0]), np.array([1]), 0)),
    "parents and edges": (ValueError, "parents has 3 rows and edges has 2",
                          lambda m: m.xor_by_parent(OFFSET, OFFSET[:2], 9)),
    "n negative": (ValueError, "n must be", lambda m: m.xor_by_parent(OFFSET, OFFSET, -1)),
    "no ackers": (ValueError, f"n must be in 1..{2**31 - 1}, got 0",
                  lambda m: m.acker_task(1, 0)),
    "no ackers for a column": (ValueError, f"n must be in 1..{2**31 - 1}, got -3",
                               lambda m: m.acker_task(OFFSET, -3)),
    "too many ackers": (ValueError, f"n must be in 1..{2**31 - 1}, got {2**31}",
                        lambda m: m.acker_task(1, 2**31)),
    "root too wide": (OverflowError, "root_ids must fit in 64 bits",
                      lambda m: m.acker_task(2**64, 3)),
    "root a string": (TypeError, "root_ids must be an array", lambda m: m.acker_task("1", 3)),
    "source key": (TypeError, "key must be an integer", lambda m: m.IdSource("k")),
    "source given": (ValueError, "given must be in", lambda m: m.IdSource(1, -1)),
    "source many": (ValueError, "n must be", lambda m: m.IdSource(1).next_many(-1)),
    "source used up": (OverflowError, "has no 1 left; use another key",
                       lambda m: m.IdSource(1, 2**64 - 1).next()),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_argument_and_the_row(backend, case):
    error, words, call = REFUSED[case]
    with pytest.raises(error) as refused:
        call(backend)
    assert words in str(refused.value)


@pytest.mark.parametrize("case", REFUSED)
def test_backends_refuse_in_the_same_words(native, reference, case):
    refusals = []
    for backend in (native, reference):
        with pytest.raises(REFUSED[case][0]) as refused:
            REFUSED[case][2](backend)
        refusals.append((refused.type, str(refused.value)))
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((2**64, "c", "t", 0), OverflowError, "deployment_key must fit in 64 bits"),
        ((0, b"c", "t", 0), TypeError, "component must be a str, got bytes"),
        ((0, "c", None, 0), TypeError, "topic must be a str, got NoneType"),
        ((0, "c", "t", -1), ValueError, "generation must be in"),
    ],
)
def test_spout_key_refuses_by_name(arguments, error, words):
    with pytest.raises(error, match=words):
        ackcore.ids.spout_key(*arguments)
