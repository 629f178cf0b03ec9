"""Fixtures of the tests of a dispatcher."""

import inspect

import pytest

from ackcore.dispatch import Dispatcher


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Retries and broken consumers wait for a millisecond, unless a test gives a longer time."""
    defaults = inspect.unwrap(Dispatcher.__init__).__kwdefaults__
    for name in ("backoff_s", "breaker_reset_s"):
        monkeypatch.setitem(defaults, name, 0.001)
