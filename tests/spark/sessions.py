"""On which kinds of session a test runs."""

import pytest

#: On a classic one, and on Spark Connect: the contract is the same.
on_both_sessions = pytest.mark.parametrize("spark", ["classic", "connect"], indirect=True)
