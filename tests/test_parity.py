"""The twins have the same names with the same arguments, and the protocol has all of them."""

import inspect

import pytest

from ackcore import _backend


def names_of(module_or_class):
    return {name for name in vars(module_or_class) if not name.startswith("_")}


def parameters(function):
    """Names, kinds and defaults; types are for the stubs to say."""
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]


def public(module):
    """The functions and classes that a backend offers, without what unpickling calls."""
    return {
        name
        for name in names_of(module)
        if getattr(getattr(module, name), "__module__", None) == module.__name__
    } - {"restored", "restored_tracker"}


def test_the_native_modules_have_what_the_reference_has(native, kafka_native, reference):
    assert not public(native) & public(kafka_native)
    # Messages in librdkafka's memory have no twin: in Python confluent-kafka's objects are read.
    assert public(native) | public(kafka_native) == {*reference.__all__, "RawMessages"}


@pytest.mark.parametrize("cls", ["Ledger", "IdSource", "OffsetTracker", "RecordBuffers"])
def test_classes_have_the_same_members(native, kafka_native, reference, cls):
    native_class = getattr(native, cls, None) or getattr(kafka_native, cls)
    reference_class = getattr(reference, cls)
    assert names_of(native_class) == names_of(reference_class)
    for name in names_of(reference_class):
        twins = (
            inspect.getattr_static(native_class, name),
            inspect.getattr_static(reference_class, name),
        )
        is_method = [callable(getattr(twin, "__func__", twin)) for twin in twins]
        assert is_method[0] == is_method[1], name
        if is_method[0]:
            bound = getattr(native_class, name), getattr(reference_class, name)
            assert parameters(bound[0]) == parameters(bound[1]), name


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"capacity": 5, "buckets": 4, "refresh_on_ack": True, "clock": int, "max_entries": 9},
        {"seed": 5},
    ],
)
def test_constructors_take_the_same(native, reference, arguments):
    ledgers = [backend.Ledger(**arguments) for backend in (native, reference)]
    for name in ("buckets", "refresh_on_ack", "clock", "max_entries"):
        assert getattr(ledgers[0], name) == getattr(ledgers[1], name)


@pytest.mark.parametrize("wrong", [(5, 3), (5, 3, True)])
def test_options_are_named(Ledger, wrong):
    with pytest.raises(TypeError, match="positional"):
        Ledger(*wrong)
    with pytest.raises(TypeError, match="shards"):
        Ledger(shards=2)


def test_functions_of_both_are_all_compared(native, reference):
    functions = {name for name in public(native) if not isinstance(getattr(native, name), type)}
    for name in functions:
        assert parameters(getattr(native, name)) == parameters(getattr(reference, name)), name


def test_the_protocol_has_every_method(Ledger, reference):
    protocol = names_of(_backend.AckerBackend)
    assert protocol <= names_of(Ledger)
    methods = {name for name in names_of(Ledger) if callable(getattr(Ledger, name))}
    assert methods <= protocol
    assert isinstance(Ledger(), _backend.AckerBackend)
    for name in protocol & methods:
        wanted = parameters(getattr(reference.Ledger, name))
        assert parameters(getattr(_backend.AckerBackend, name)) == wanted, name


def test_all_that_is_public_has_words(native, kafka_native, reference):
    for module in (native, kafka_native, reference):
        for cls in filter(inspect.isclass, (getattr(module, name) for name in public(module))):
            methods = [name for name in names_of(cls) if callable(getattr(cls, name))]
            silent = [name for name in methods if not inspect.getdoc(getattr(cls, name))]
            assert silent == []
