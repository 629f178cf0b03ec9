"""Methods of bolts, as build looks at them; several mistakes at once."""

from __future__ import annotations

import functools
import pickle
from types import MethodType
from unittest.mock import Mock

import pyarrow as pa
import pytest
from acting import refusal

from ackcore.calls import RateLimit
from ackcore.flow import DelayTarget
from ackcore.testing import Source
from ackcore.topology import (
    AsyncBolt,
    BasicBolt,
    BatchBolt,
    Bolt,
    TopologyBuilder,
    TopologyError,
    Tuple,
)

# --- methods that could not be called ------------------------------------------------------------


def one(base, **methods):
    """A bolt of these methods."""
    return type("Split", (base,), methods)()


def plain(self, *arguments):
    pass


def two(self, a):
    pass


def three(self, a, b):
    pass


def lazy(self, *arguments):
    yield


async def later(self, *arguments):
    pass


def not_run(method):
    return (
        f"bolt 'x': Split.{method} must be a plain method, got one with 'yield' or 'async': "
        "calling it would do nothing; emit values instead of 'yield', or derive from AsyncBolt to "
        "await"
    )


def must_have(arguments, because, has):
    return f"bolt 'x' must have a method {arguments}, because it is {because}, and Split has {has}"


def must_take(arguments, of, got, method="execute"):
    return f"bolt 'x': Split.{method} must take {arguments}, as in a {of}, got {got}"


def not_awaited(method):
    return (
        f"bolt 'x': Split.{method} must be a coroutine function, because the bolt is an AsyncBolt; "
        "write it with 'async def', or derive from BasicBolt with threads=... for a blocking client"
    )


@pytest.mark.parametrize(
    ("bolt", "problem"),
    [
        (one(Bolt), must_have("execute(self, tuple)", "a Bolt", "none")),
        (one(AsyncBolt), must_have("execute(self, tuple, collector)", "an AsyncBolt", "none")),
        (
            one(BasicBolt, process=plain),
            must_have(
                *("execute(self, tuple, collector)", "a BasicBolt"),
                "process, which is a BatchBolt's; rename it or derive from that class",
            ),
        ),
        (
            one(BatchBolt, execute=plain),
            must_have(
                *("process(self, batch, out)", "a BatchBolt"),
                "execute, which is a Bolt's or a BasicBolt's; rename it or derive from that class",
            ),
        ),
        (one(Bolt, execute=three), must_take("(self, tuple)", "Bolt", "(self, a, b)")),
        (
            one(BasicBolt, execute=two),
            must_take("(self, tuple, collector)", "BasicBolt", "(self, a)"),
        ),
        (
            one(BatchBolt, process=two),
            must_take("(self, batch, out)", "BatchBolt", "(self, a)", "process"),
        ),
        (
            one(BatchBolt, process=lambda self, batch, *, out: None),
            must_take("(self, batch, out)", "BatchBolt", "(self, batch, *, out)", "process"),
        ),
        (one(Bolt, execute=lambda: None), must_take("(self, tuple)", "Bolt", "()")),
        (one(Bolt, execute=staticmethod(lambda: None)), must_take("(tuple)", "Bolt", "()")),
        (
            one(BatchBolt, process=plain, flush=lambda self: None),
            must_take("(self, out)", "BatchBolt", "(self)", "flush"),
        ),
        (one(Bolt, execute=plain, flush=two), must_take("(self)", "Bolt", "(self, a)", "flush")),
        (
            one(Bolt, execute=plain, prepare=lambda self: None),
            must_take("(self, context)", "Bolt", "(self)", "prepare"),
        ),
        (
            one(Bolt, execute=plain, cleanup=two),
            must_take("(self)", "Bolt", "(self, a)", "cleanup"),
        ),
        (one(Bolt, execute=5), "bolt 'x': Split.execute must be a method, got int"),
        (one(BasicBolt, execute=lazy), not_run("execute")),
        (one(Bolt, execute=later), not_run("execute")),
        (one(Bolt, execute=plain, prepare=later), not_run("prepare")),
        (one(BatchBolt, process=lazy), not_run("process")),
        (one(AsyncBolt, execute=plain), not_awaited("execute")),
        (one(AsyncBolt, execute=later, prepare=plain), not_awaited("prepare")),
        (one(AsyncBolt, execute=later, cleanup=plain), not_awaited("cleanup")),
        (
            one(AsyncBolt, execute=later, flush=later),
            "bolt 'x': Split.flush would never be called, because an input of an AsyncBolt is "
            "done when its execute returns; emit in execute",
        ),
    ],
)
def test_a_bolt_that_would_fail_every_record_is_refused(builder, bolt, problem):
    builder.bolt("x", bolt).shuffle("split")
    assert refusal(builder) == problem


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        (
            {"reject": ValueError},
            "reject of bolt 'x' must be a list of exception classes or of their names, got type "
            "<class 'ValueError'>; put it in brackets",
        ),
        ({"reject": None}, "reject of bolt 'x' must be a list of exception classes or of their "),
        # A check that iterated over it would leave the tasks an exhausted iterator.
        ({"retry_on": iter(["OSError"])}, "retry_on of bolt 'x' must be a list of exception cl"),
        ({"reject": (one for one in [OSError])}, "reject of bolt 'x' must be a list of exception"),
        ({"retry_on": ["TimeoutEror"]}, "retry_on of bolt 'x' has 'TimeoutEror', which cannot be"),
        ({"retry_on": [3]}, "retry_on of bolt 'x' must hold classes derived from Exception, got 3"),
        (
            {"reject": ["OSError"], "retry_on": [ValueError, "TimeoutError"]},
            "retry_on of bolt 'x' must not contain rejected exceptions, got TimeoutError, "
            "which reject contains as OSError; remove it from one of them",
        ),
        (
            {"retry_on": [KeyError]},  # the setting has it
            "retry_on of bolt 'x' must not contain rejected exceptions, got KeyError, which reject "
            "contains;",
        ),
    ],
)
def test_what_a_bolt_is_to_retry_is_checked(builder, attributes, problem):
    bolt = one(BasicBolt, execute=plain, **attributes)
    builder.bolt("x", bolt).shuffle("split")
    with pytest.raises(TopologyError) as caught:
        builder.build(reject=[KeyError])
    (found,) = caught.value.problems
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("bolt", "problem"),
    [
        (
            one(BatchBolt, process=plain, journal=True),
            "must be False, got True for a bolt that is neither an",
        ),
        (
            one(BasicBolt, execute=plain, flush=plain, journal=True),
            "must be False, got True for a bolt with a flush",
        ),
        (one(BasicBolt, execute=plain, journal="yes"), "must be True or False, got str 'yes'"),
    ],
)
def test_a_journal_that_cannot_be_is_refused(builder, bolt, problem):
    builder.bolt("x", bolt).shuffle("split")
    assert refusal(builder).startswith(f"bolt 'x': Split.journal {problem}")


@pytest.mark.parametrize(
    ("attribute", "meant"),
    [
        ("max_concurency", "max_concurrency"),
        ("timout_s", "timeout_s"),
        ("ouputs", "outputs"),
        ("breaker_falures", "breaker_failures"),
        ("jornal", "journal"),
    ],
)
@pytest.mark.parametrize("of_class", [True, False])
def test_a_misspelt_setting_is_refused(builder, attribute, meant, of_class):
    bolt = one(AsyncBolt, execute=later, **{attribute: DelayTarget} if of_class else {})
    if not of_class:
        setattr(bolt, attribute, 5)
    builder.bolt("b", bolt).shuffle("split")
    assert refusal(builder) == (
        f"attribute {attribute!r} of bolt 'b' has no effect; did you mean {meant!r}? Otherwise "
        "rename it"
    )


def test_a_limit_under_another_name_is_refused(builder):
    bolt = one(AsyncBolt, execute=later, rate_limit=RateLimit(calls_per_s=1))
    builder.bolt("b", bolt).shuffle("split")
    assert "attribute 'rate_limit' of bolt 'b' is a RateLimit, and its limit is None" in refusal(
        builder
    )


def test_names_near_a_setting_are_the_users_own(builder):
    near = "output input thread rejected rejects table endpoint endpoints_ limits timeout timeouts"
    near += " timeout_ms max_batches max_concurrent journals retries_on uses_s max_batch_size"
    own = dict.fromkeys(near.split(), 5)
    builder.bolt("b", one(AsyncBolt, execute=later, **own)).shuffle("split")
    builder.bolt("c", one(BatchBolt, process=plain, **own, timout_s=1)).shuffle("split")
    builder.build()


def test_what_a_bolt_may_retry_beside_what_it_rejects(builder):
    attributes = {"reject": [TimeoutError], "retry_on": (OSError, "Exception")}
    bolt = one(BasicBolt, execute=plain, **attributes)
    builder.bolt("x", bolt).shuffle("split")
    builder.build(reject=["KeyError"])


def test_a_refused_method_is_shown_without_its_types(builder):
    class Split(BasicBolt):
        def execute(self, tuple: Tuple, n: int = 3, *, loud: bool) -> None:
            """Never called."""

    builder.bolt("x", Split()).shuffle("split")
    assert refusal(builder).endswith("got (self, tuple, n=3, *, loud)")


def decorated(method):
    @functools.wraps(method)
    def call(self, *inputs):
        return method(self, *inputs, "more")

    return call


@pytest.mark.parametrize(
    "bolt",
    [
        one(Bolt, execute=lambda self, tuple, n=3: None),
        one(BasicBolt, execute=lambda self, *inputs: None),
        one(BasicBolt, execute=lambda me, t, out: None),
        one(BatchBolt, process=lambda self, batch, out: None, execute=lambda self: None),
        one(Bolt, execute=decorated(lambda self, tuple, more: None)),
        one(Bolt, execute=staticmethod(lambda tuple: None)),
        one(Bolt, execute=classmethod(lambda cls, tuple: None)),
        one(Bolt, execute=functools.partialmethod(lambda self, n, tuple: None, 3)),
        one(Bolt, execute=Mock()),
        one(Bolt, execute=dict.fromkeys),  # a builtin
        one(Bolt, execute=iter),  # a builtin without a signature
        one(Bolt, execute=MethodType(iter, ())),
    ],
)
def test_what_can_be_called_is_accepted_however_it_is_written(builder, bolt):
    builder.bolt("x", bolt).shuffle("split")
    assert builder.build()


def test_a_method_of_the_instance_counts(builder):
    bolt = one(Bolt)
    bolt.execute = lambda tuple: None
    builder.bolt("x", bolt).shuffle("split")
    assert builder.build()


# --- several at once -----------------------------------------------------------------------------


def test_everything_that_is_wrong_is_said_at_once(builder, make):
    builder.bolt("x", make.batches(), parallelism=0).fields("split", "wrod")
    builder.spout("clicks", make.frame("user"))
    with pytest.raises(TopologyError) as caught:
        builder.build()
    assert len(caught.value.problems) == 3
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 problems:"
    assert lines[1].startswith("1. parallelism of bolt 'x'")
    assert lines[2].startswith("2. fields grouping of bolt 'x' names field 'wrod'")
    assert lines[3].startswith("3. no bolt, sink or table reads spout 'clicks'")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.problems) == (TopologyError, caught.value.problems)


def test_what_hangs_from_a_mistake_is_not_said_beside_it(make):
    builder = TopologyBuilder()
    builder.spout("lines", make.frame("line"))
    builder.bolt("split", make.batches(make.words)).fields("lnies", "lnie")
    assert refusal(builder).startswith("bolt 'split' reads 'lnies', which is not declared")


def test_a_long_list_of_names_is_cut(make):
    builder = TopologyBuilder()
    builder.spout("s", make.frame(*(f"c{n}" for n in range(20))))
    builder.bolt("x", make.batches()).fields("s", "zebra")
    assert refusal(builder).endswith("'c10', 'c11' and 8 more")


@pytest.mark.parametrize(
    "type_",
    [
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
        pa.struct([("a", pa.string_view())]),
        pa.binary_view(),
        pa.run_end_encoded(pa.int32(), pa.int64()),
        pa.dense_union([pa.field("a", pa.int64())]),
    ],
    ids=str,
)
def test_types_that_cannot_be_sent_row_by_row_are_refused(make, builder, type_):
    """They would be found out by a sink, when everything is decided."""
    schema = pa.schema([("n", pa.int64()), ("odd", type_)])
    builder.bolt("more", make.batches(schema)).shuffle("split")
    problem = refusal(builder)
    assert "field 'odd' of" in problem
    assert "must have a type whose rows can be sent one by one" in problem
    assert "declare the type of the values" in problem


def test_what_is_nested_may_be_null_whatever_is_declared():
    """Parquet raises for a null in a nested field that is declared NOT NULL: the sink would."""

    def columns(nullable):
        x = pa.field("x", pa.int64(), nullable)
        kinds = [
            pa.struct([x]),
            pa.list_(x),
            pa.large_list(x),
            pa.list_(x, 2),
            pa.map_(pa.string(), pa.field("value", pa.struct([x]), nullable)),
        ]
        return pa.schema([pa.field(f"c{i}", kind, False) for i, kind in enumerate(kinds)])

    builder = TopologyBuilder()
    builder.spout("in", Source(pa.schema([("n", pa.int64())])))
    builder.bolt("a", one(BasicBolt, outputs=columns(False), execute=plain)).shuffle("in")
    assert builder.build().bolts["a"].schemas["default"].equals(columns(True))
