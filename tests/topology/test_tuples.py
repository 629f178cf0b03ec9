"""Tuples, and which records they come from."""

import copy
import pickle

import numpy as np
import pyarrow as pa
import pytest

from ackcore.topology.tuples import Identity, Origin, Tuple

IDENTITY = Identity(
    pa.array(["m0", "m1", None]), np.array([0, 3, 0], np.int32), np.array([-5, 7, 9], np.int64)
)


def make(values, row=0, identity=IDENTITY):
    origin = Origin(object(), "lines", "default", ("word", "n"), 100, identity)
    return Tuple(values, origin, 100 + row)


def test_a_tuple_tells_its_values_and_where_it_is_from():
    one = make(("a", 1), row=1)
    assert (one["word"], one[1], one[-1], one[:1], len(one)) == ("a", 1, 1, ("a",), 2)
    word, n = one
    assert (word, n) == one.values == ("a", 1)
    assert (one.component, one.stream, one.fields) == ("lines", "default", ("word", "n"))
    assert (one.message_id, one.attempt, one.stable_id) == ("m1", 3, 7)
    assert (make((), row=2).message_id, bool(make(()))) == (None, True)
    assert repr(one) == "<Tuple of lines/default: word='a', n=1>"
    with pytest.raises(KeyError, match=r"no field 'Word'.*fields are word, n; did you mean 'word'"):
        one["Word"]
    with pytest.raises(KeyError, match=r"no field 'xyz'.*its fields are word, n\"$"):
        one["xyz"]
    with pytest.raises(IndexError):
        one[2]


def test_a_tuple_without_an_identity_has_none():
    one = make(("a", 1), identity=None)
    assert (one.message_id, one.attempt, one.stable_id) == (None, 0, None)


def test_there_is_one_of_each_tuple():
    one = make(("a", 1))
    assert copy.copy(one) is one
    assert copy.deepcopy([one])[0] is one
    assert one != make(("a", 1))
    with pytest.raises(TypeError, match="pickle its values instead"):
        pickle.dumps(one)
