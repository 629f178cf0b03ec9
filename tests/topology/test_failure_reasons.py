"""Why a tuple failed: from any exception or text, to a line that is read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore.topology.components import Reject
from ackcore.topology.failure_reasons import Reasons
from ackcore.topology.tuples import MESSAGE_CHARS, Reason

TEXTS = st.text(max_size=8) | st.sampled_from(["\x1f", "!\x1f", "a\x1fb", "", "é\n"])


@given(TEXTS, TEXTS, TEXTS, st.booleans())
def test_a_reason_is_read_as_it_was_written(component, kind, message, final):
    reason = Reason(component.replace("\x1f", " "), kind.replace("\x1f", " "), message, final)
    assert Reason.decode(reason.encode()) == reason
    # A separator in a name is not one that decode would read.
    odd = Reason.decode(Reason(component, kind, message, final).encode())
    assert odd == reason


@pytest.mark.parametrize("text", ["", "no parts", "x\x1fa\x1fb\x1fc", "!\x1fa\x1fb"])
def test_what_is_no_reason_is_refused(text):
    with pytest.raises(ValueError, match="not an encoded reason"):
        Reason.decode(text)


class Mute(Exception):
    def __str__(self):
        raise SystemExit("no text")


class Stubborn(Exception):
    def __str__(self):
        raise KeyboardInterrupt


def test_a_reason_is_made_of_any_exception():
    assert Reason.of("b", KeyError("x")) == Reason("b", "KeyError", "'x'")
    assert Reason.of("b", "why", final=True) == Reason("b", "Failed", "why", True)
    assert Reason.of("b", ValueError("x" * 9999)).message == "x" * MESSAGE_CHARS
    assert Reason.of("b", ValueError("a\udc80b")).message == "a?b"
    muted = Reason.of("b", Mute())
    assert muted.type == "Mute"
    assert "SystemExit" in muted.message
    with pytest.raises(KeyboardInterrupt):
        Reason.of("b", Stubborn())


class Narrow(LookupError):
    pass


def test_reject_and_listed_classes_are_final():
    reasons = Reasons("b", [KeyError, "ZeroDivisionError", f"{__name__}.Narrow", "OSError"])
    final = [Reject("x"), KeyError(1), ZeroDivisionError(), Narrow(), FileNotFoundError()]
    assert all(reasons.of(error).final for error in final)
    assert not any(reasons.of(error).final for error in [LookupError(), ValueError(), "KeyError"])
    assert Reasons("b").of(None) == Reason("b", "Failed", "failed by b")
    given = Reason("x", "T\ud800", "m" * 9999, True)
    assert reasons.of(given) == Reason("x", "T?", "m" * MESSAGE_CHARS, True)
    with pytest.raises(TypeError, match="must be an exception, a text or a Reason, got int"):
        reasons.of(7)
