"""Tuples, and which records they come from."""

import copy
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore.calls import Reject, Retry, Unavailable
from ackcore.topology.bolt_calls import joined
from ackcore.topology.failure_reasons import MAX_AFTER_MS, ReasonMaker
from ackcore.topology.tuples import MESSAGE_CHARS, Anchors, Identity, Origin, Reason, Tuple

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
    with pytest.raises(KeyError, match=r"no field 'xyz'.*its fields are word, n$"):
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


# --- Why a tuple failed: from any exception or text, to a line that is read back.


TEXTS = st.text(max_size=8) | st.sampled_from(["\x1f", "!\x1f", "a\x1fb", "", "é\n"])


ENDS = st.sampled_from([(True, 0, True), (False, 0, True), (False, 0, False)])
WAITS = st.tuples(st.just(False), st.integers(0, MAX_AFTER_MS), st.booleans())


@given(TEXTS, TEXTS, TEXTS, ENDS | WAITS)
def test_a_reason_is_read_as_it_was_written(component, kind, message, end):
    reason = Reason(component.replace("\x1f", " "), kind.replace("\x1f", " "), message, *end)
    assert Reason.decode(reason.encode()) == reason
    # A separator in a name is not one that decode would read.
    odd = Reason.decode(Reason(component, kind, message, *end).encode())
    assert odd == reason


def test_what_is_final_neither_waits_nor_goes_uncounted():
    reason = Reason("b", "E", "m", final=True, after_ms=5, counts=False)
    assert Reason.decode(reason.encode()) == Reason("b", "E", "m", final=True)


@pytest.mark.parametrize(
    "text",
    ["", "no parts", "x\x1fa\x1fb\x1fc", "!\x1fa\x1fb"]
    + [f"{head}\x1fa\x1fb\x1fc" for head in ("!5", "-05", "-x", "~-1", "-1 ", "-" + "9" * 19)],
)
def test_what_is_no_reason_is_refused(text):
    with pytest.raises(ValueError, match=r"needs a text that Reason\.encode"):
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
    assert Reason.of("b", Reject("why")) == Reason("b", "Reject", "why", True)
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
    reasons = ReasonMaker("b", [KeyError, "ZeroDivisionError", f"{__name__}.Narrow", "OSError"])
    final = [Reject("x"), KeyError(1), ZeroDivisionError(), Narrow(), FileNotFoundError()]
    assert all(reasons.of(error).final for error in final)
    assert not any(reasons.of(error).final for error in [LookupError(), ValueError(), "KeyError"])
    assert ReasonMaker("b").of(None) == Reason("b", "Failed", "failed by b")
    given = Reason("x", "T\ud800", "m" * 9999, True)
    assert reasons.of(given) == Reason("x", "T?", "m" * MESSAGE_CHARS, True)
    with pytest.raises(TypeError, match="must be an exception, a text or a Reason, got int"):
        reasons.of(7)


class Throttled(Retry):
    def __init__(self, after_s):
        self.after_s = after_s


@pytest.mark.parametrize(
    ("error", "after_ms", "counts"),
    [
        (Retry(after_s=1.5), 1500, True),
        (Retry(after_s=0.0001), 1, True),  # never earlier than was asked for
        (Retry("soon"), 0, True),
        (Retry(after_s=10**9), MAX_AFTER_MS, True),
        (Unavailable("open", after_s=30), 30_000, False),
        (Unavailable(), 0, False),
        (Throttled(2), 2000, True),
        (Throttled("2"), 0, True),
        (Throttled(-1), 0, True),
        (ValueError(), 0, True),
    ],
)
def test_a_retry_says_when_and_whether_it_was_an_attempt(error, after_ms, counts):
    made = ReasonMaker("b").of(error)
    assert (made.after_ms, made.counts, made.final) == (after_ms, counts, False)
    assert made.type == type(error).__name__
    assert Reason.of("b", error) == made
    assert ReasonMaker("b", [type(error)]).of(error) == made._replace(
        final=True, after_ms=0, counts=True
    )


def test_the_waits_of_a_reason_are_bounded():
    given = Reason("x", "T", "m", after_ms=10**15, counts=False)
    assert ReasonMaker("b").of(given) == given._replace(after_ms=MAX_AFTER_MS)
    assert ReasonMaker("b").of(given._replace(after_ms=-7)).after_ms == 0


def test_what_is_not_to_be_retried_is_final():
    reasons = ReasonMaker("b", ["UnicodeError"], retry_on=[OSError, "ValueError"])
    retried = [TimeoutError(), ValueError(), Retry(after_s=1), Unavailable(), "a text", None]
    assert not any(reasons.of(error).final for error in retried)
    # What is rejected is so first, though it is a ValueError.
    final = [KeyError(), UnicodeError(), Reject(), SystemExit()]
    assert all(reasons.of(error).final for error in final)
    assert all(ReasonMaker("b", retry_on=[]).of(error).final for error in [OSError(), Exception()])
    assert not ReasonMaker("b", retry_on=[]).of(Retry()).final
    assert ReasonMaker("b", ["ackcore.calls.Retry"], retry_on=[]).of(Unavailable()).final


# --- Pieces of emissions become as few as there can be.


def piece(*values, offsets=None):
    handles = np.arange(len(values) if offsets is None else offsets[-1])
    return (
        pa.record_batch({"n": list(values)}),
        Anchors(handles, None if offsets is None else np.array(offsets)),
    )


def test_pieces_become_one_emission():
    (one,) = joined("s", [piece(1, 2), piece(3)])
    assert one.batch.to_pydict() == {"n": [1, 2, 3]}
    assert (one.anchors.handles.tolist(), one.anchors.offsets) == ([0, 1, 0], None)
    (one,) = joined("s", [piece(1), piece(2, 3, offsets=[0, 0, 2]), piece(4)])
    assert one.anchors.handles.tolist() == [0, 0, 1, 0]
    assert one.anchors.offsets.tolist() == [0, 1, 1, 3, 4]
    assert joined("s", []) == []


def test_pieces_that_are_too_large_to_join_stay_apart(monkeypatch):
    monkeypatch.setattr("ackcore.topology.bolt_calls.JOIN_BYTES", 16)
    parts = joined("s", [piece(1), piece(2), piece(3), piece(4, 5, 6), piece(7)])
    assert [part.batch["n"].to_pylist() for part in parts] == [[1, 2], [3], [4, 5, 6], [7]]


def test_dictionaries_that_do_not_fit_into_one_stay_apart():
    kind = pa.dictionary(pa.int8(), pa.string())
    columns = [
        pa.array([f"{part}-{n}" for n in range(100)]).dictionary_encode().cast(kind)
        for part in range(2)
    ]
    anchors = Anchors(np.arange(100), None)
    parts = joined("s", [(pa.record_batch({"w": column}), anchors) for column in columns])
    assert [part.batch["w"].to_pylist() for part in parts] == [c.to_pylist() for c in columns]
