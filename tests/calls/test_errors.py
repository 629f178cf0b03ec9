"""A call's exception says when to try again, whatever a service asked for."""

import math
import pickle
from decimal import Decimal

import numpy as np
import pytest

from ackcore.calls import Retry, Unavailable
from ackcore.calls.outcomes import MAX_AFTER_S


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        (0, 0.0),
        (2.5, 2.5),
        (-3, 0.0),
        (math.inf, MAX_AFTER_S),
        (-math.inf, 0.0),
        (math.nan, None),
        pytest.param(10**400, MAX_AFTER_S, id="beyond a float"),
        (np.int64(5), 5.0),
        (np.float32(0.5), 0.5),
        (Decimal("2.5"), 2.5),
    ],
)
def test_when_a_record_is_due_is_a_number_of_seconds_within_a_year(given, kept):
    assert Retry("busy", after_s=given).after_s == kept


@pytest.mark.parametrize("given", ["30", True, [1]])
def test_a_header_is_no_number(given):
    with pytest.raises(TypeError, match=r"after_s must be a number of seconds or None, got"):
        Retry("busy", after_s=given)


def test_it_says_what_and_when():
    assert str(Retry("429 from it", after_s=30)) == "429 from it (again after 30 s)"
    assert str(Retry(after_s=0.5)) == "again after 0.5 s"
    assert str(Retry("later")) == "later"


def test_it_comes_through_pickling_as_it_is():
    again = pickle.loads(pickle.dumps(Retry("busy", after_s=7)))
    assert (type(again), again.args, again.after_s) == (Retry, ("busy",), 7.0)


def test_what_takes_nothing_says_when_as_well():
    assert Unavailable("open", after_s=7).after_s == 7.0
    assert str(Unavailable("open", after_s=7)) == "open (again after 7 s)"
    assert isinstance(Unavailable(), Retry)
