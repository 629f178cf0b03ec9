"""Fixtures of the tests of a dispatcher; tests are no package."""

import sys
from pathlib import Path

import pytest

from ackcore.dispatch import Dispatcher

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Retries and broken consumers wait for a millisecond, unless a test gives a longer time."""
    for name in ("backoff_s", "breaker_reset_s"):
        monkeypatch.setitem(Dispatcher.__init__.__kwdefaults__, name, 0.001)
