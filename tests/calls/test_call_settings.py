"""Bad settings are refused by name, with the value and the way out."""

import math
import pickle

import numpy as np
import pytest

from ackcore.calls import RateLimit
from ackcore.calls.call_settings import CallSettings
from ackcore.calls.calls import Calls
from ackcore.flow import Fixed, RttThreshold


@pytest.mark.parametrize(
    ("setting", "error", "says"),
    [
        ({"max_concurrency": 0}, ValueError, "max_concurrency must be in 1..1000000, got 0"),
        (
            {"max_concurrency": "8"},
            TypeError,
            "max_concurrency must be a whole number of calls, .*, got str$",
        ),
        ({"max_concurrency": Fixed(8)}, TypeError, "its own limit, so pass the class"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be above 0"),
        ({"timeout_s": "1"}, TypeError, "timeout_s must be a number"),
        ({"limit": 100}, TypeError, r"limit must be a RateLimit, got int 100; write limit=Rate"),
        (
            {"limit": RateLimit(per="k"), "endpoints": ["a"]},
            ValueError,
            "endpoints must be left out if limit has a key",
        ),
        ({"endpoints": "http://a"}, TypeError, "endpoints must be a list, .*put it in brackets"),
        ({"endpoints": iter("ab")}, TypeError, r"got str_.*iterator .*; pass list\(\.\.\.\)"),
        ({"endpoints": []}, ValueError, "endpoints must not be empty"),
        ({"endpoints": [[]]}, TypeError, "endpoints must be hashable, got list"),
        (
            {"endpoints": ["a", "b", "a"]},
            ValueError,
            "endpoints must differ, got 'a' more than once",
        ),
        ({"max_attempts": 0}, ValueError, "max_attempts must be at least 1, got 0"),
        ({"wait_in_task_s": -1}, ValueError, "wait_in_task_s must be at least 0, got -1"),
        ({"wait_in_task_s": math.nan}, ValueError, "wait_in_task_s must be at least 0, got nan"),
        ({"wait_in_task_s": None}, TypeError, "wait_in_task_s must be a number of seconds"),
        ({"breaker_failures": 0}, ValueError, "breaker_failures must be at least 1"),
    ],
)
def test_a_setting_that_is_none_is_refused(setting, error, says):
    with pytest.raises(error, match=says):
        CallSettings(**setting)


@pytest.mark.parametrize(
    ("limit", "error", "says"),
    [
        ({}, ValueError, "must limit something; give calls_per_s"),
        ({"calls_per_s": math.inf}, ValueError, "calls_per_s must be above 0 and at most 1e"),
        ({"calls_per_s": "9"}, TypeError, "calls_per_s must be a number"),
        ({"tokens_per_min": 0}, ValueError, "tokens_per_min must be above 0"),
        ({"per": 3}, TypeError, "per must be the name of a column, or a function"),
        ({"per": ""}, ValueError, "per must not be empty"),
        ({"concurrency": 2}, ValueError, "concurrency must be left out without per, got 2; max_c"),
        ({"per": "k", "concurrency": 0}, ValueError, "concurrency must be in 1..1000000, got 0"),
        (
            {"per": "k", "concurrency": 2.5},
            TypeError,
            "concurrency must be a whole number of calls, .*float$",
        ),
        ({"per": "k", "concurrency": dict}, TypeError, "concurrency must make a Limit, an object"),
    ],
)
def test_a_limit_that_is_none_is_refused(limit, error, says):
    with pytest.raises(error, match=says):
        RateLimit(**limit)


def test_a_concurrency_may_be_an_integer_of_numpy():
    settings = CallSettings(
        max_concurrency=np.int64(5), limit=RateLimit(per="k", concurrency=np.uint8(3))
    )
    assert settings.thread_count() == 5
    assert (type(settings.max_concurrency), type(settings.limit.concurrency)) == (int, int)


def test_settings_go_to_the_workers():
    settings = CallSettings(
        max_concurrency=RttThreshold, endpoints=["a", "b"], retry_on=(OSError,), timeout_s=1
    )
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert again.endpoints == ("a", "b")
    assert again.retry_on == (OSError,)


def test_a_plain_function_has_as_many_threads_as_calls():
    assert CallSettings(max_concurrency=7).thread_count() == 7
    assert CallSettings(max_concurrency=10**6).thread_count() == 4096
    assert CallSettings().thread_count() == 32


def test_what_makes_no_limit_is_refused():
    with pytest.raises(TypeError, match="max_concurrency must make a Limit, an object with limit"):
        Calls(lambda item: item, CallSettings(max_concurrency=dict))
