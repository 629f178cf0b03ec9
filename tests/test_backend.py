"""The choice of the backend: an order is obeyed or fails, a default warns when second best."""

import importlib.metadata
import json
import pathlib
import sys

import pytest
from separately import run_python

import ackcore
from ackcore import _backend, _reference
from ackcore._backend import load_backend

#: Runs first in the child: stands for an extension that was not built, or was built wrong.
NOT_BUILT = "import sys; sys.modules['ackcore._native'] = None\n"
WRONG_ABI = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "ackcore._native":
            raise ValueError("numpy.dtype size changed")
sys.meta_path.insert(0, Finder())
"""
WITHOUT_LEDGER = """
import sys, types
sys.modules["ackcore._native"] = types.ModuleType("ackcore._native")
"""
REPORT = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        import ackcore
        import ackcore.ids
    except Exception as error:
        found = {"error": [type(error).__name__, str(error), repr(error.__cause__)]}
    else:
        found = {
            "backend": ackcore.backend,
            "modules": [ackcore.Ledger.__module__, ackcore.ids.root_ids.__module__,
                        ackcore.ids.IdSource.__module__],
        }
found["warnings"] = [[warning.category.__name__, str(warning.message)] for warning in caught]
print(json.dumps(found))
"""


def imported(order, before=""):
    """Return the result of importing ackcore under an order in a fresh interpreter."""
    path = str(pathlib.Path(ackcore.__file__).parents[1])
    return json.loads(run_python(before + REPORT, ACKCORE_BACKEND=order, PYTHONPATH=path))


@pytest.mark.parametrize("order", [None, "", "native"])
def test_native_is_the_default_and_can_be_ordered(native, order):
    assert imported(order) == {
        "backend": "native",
        "modules": ["ackcore._native"] * 3,
        "warnings": [],
    }


def test_python_can_be_ordered():
    found = imported("python")
    assert (found["backend"], found["warnings"]) == ("python", [])
    assert all(module.startswith("ackcore._reference") for module in found["modules"])


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (NOT_BUILT, "import of ackcore._native halted"),
        (WRONG_ABI, "ValueError: numpy.dtype size changed"),
        (WITHOUT_LEDGER, "ackcore._native has no Ledger"),
    ],
    ids=["not built", "wrong ABI", "without a Ledger"],
)
def test_broken_native_fails_an_order_and_warns_without_one(broken, cause):
    ordered = imported("native", broken)
    kind, words, raised_from = ordered["error"]
    assert kind == "ImportError"
    assert words.startswith("ACKCORE_BACKEND=native cannot be loaded: ")
    assert cause in words
    assert raised_from != "None"

    fallen_back = imported(None, broken)
    assert fallen_back["backend"] == "python"
    [[category, words]] = fallen_back["warnings"]
    assert category == "RuntimeWarning"
    assert cause in words

    assert imported("python", broken)["warnings"] == []


@pytest.mark.parametrize("order", [None, "native", "python"])
def test_without_its_extension_kafka_is_read_in_python_with_a_warning(native, monkeypatch, order):
    monkeypatch.setitem(sys.modules, "ackcore._kafka_native", None)
    monkeypatch.setattr(_backend, "backend", order or "native")
    monkeypatch.setattr(_backend, "implementation", _reference if order == "python" else native)
    monkeypatch.delenv("ACKCORE_BACKEND", raising=False)
    if order == "native":
        monkeypatch.setenv("ACKCORE_BACKEND", order)
        with pytest.raises(ImportError, match=r"^ACKCORE_BACKEND=native cannot be loaded: "):
            _backend.kafka_implementation()
    elif order == "python":
        assert _backend.kafka_implementation() is _reference
    else:
        with pytest.warns(
            RuntimeWarning, match=r"^ackcore\.kafka reads in Python, which is slow: "
        ):
            assert _backend.kafka_implementation() is _reference


def test_unknown_order_names_the_two():
    kind, words, _ = imported("cython")["error"]
    assert kind == "ImportError"
    assert words == "ACKCORE_BACKEND must be 'native' or 'python', got 'cython'"


# Backends by name.


class Registered:
    """Installs entry points for the length of a test: name -> what it refers to."""

    def __init__(self, monkeypatch):
        self.points = []
        monkeypatch.setattr(importlib.metadata, "entry_points", self.find)

    def add(self, name, value):
        group = _backend.ENTRY_POINTS
        self.points.append(importlib.metadata.EntryPoint(name, value, group))

    def find(self, group):
        assert group == "ackcore.backends"
        return importlib.metadata.EntryPoints(self.points)


@pytest.fixture
def registered(monkeypatch):
    return Registered(monkeypatch)


def test_our_backends_go_by_name(native, reference):
    assert load_backend("native") is native.Ledger
    assert load_backend("python") is reference.Ledger


def test_ours_cannot_be_taken_over(registered, native):
    registered.add("native", "ackcore._reference:Ledger")
    assert load_backend("native") is native.Ledger


def test_installed_backend_is_found_by_name(registered):
    registered.add("theirs", "ackcore._reference:Ledger")
    registered.add("theirs", "ackcore._reference:Ledger")  # one package, twice on the path
    assert load_backend("theirs") is load_backend("python")


def test_unknown_name_lists_the_known(registered):
    registered.add("theirs", "ackcore._reference:Ledger")
    with pytest.raises(
        ValueError,
        match="no backend has the name 'rust'; the known names are native, python, theirs",
    ):
        load_backend("rust")


def test_name_registered_by_two_is_refused(registered):
    registered.add("theirs", "ackcore._reference:Ledger")
    registered.add("theirs", "elsewhere:Ledger")
    with pytest.raises(ValueError, match=r"is registered more than once: ackcore\._ref.*, elsew"):
        load_backend("theirs")


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("no_such_module_of_theirs:Ledger", "No module named 'no_such_module_of_theirs'"),
        ("ackcore._reference:Leger", "has no attribute 'Leger'"),
    ],
)
def test_backend_that_cannot_be_loaded_gives_the_cause(registered, value, cause):
    registered.add("theirs", value)
    with pytest.raises(ImportError, match="backend 'theirs' cannot be loaded") as refused:
        load_backend("theirs")
    assert cause in str(refused.value)
    assert refused.value.__cause__ is not None


@pytest.mark.parametrize("name", ["native", "theirs"])
def test_backend_for_another_numpy_cannot_be_loaded(registered, monkeypatch, name):
    def refuse(module):
        raise ValueError("numpy.dtype size changed, may indicate binary incompatibility")

    registered.add("theirs", "theirs:Ledger")
    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setattr(importlib.metadata, "import_module", refuse)  # of EntryPoint.load
    with pytest.raises(ImportError, match=f"backend '{name}' cannot be loaded: ValueError: numpy"):
        load_backend(name)


def test_backend_that_is_no_factory_is_refused(registered):
    registered.add("theirs", "ackcore._reference:__all__")
    with pytest.raises(TypeError, match="must be a callable that makes ledgers"):
        load_backend("theirs")


# What a backend is.


@pytest.mark.parametrize("name", ["native", "python"])
def test_ledgers_of_ours_are_backends(native, name):
    ledger = load_backend(name)()
    assert isinstance(ledger, ackcore.AckerBackend)
    assert _backend.missing_from(ledger) == []


def test_what_lacks_a_method_is_no_backend():
    assert not isinstance({}, ackcore.AckerBackend)
    missing = _backend.missing_from({})
    assert {"apply", "init_many", "rotate", "settle", "tables"} <= set(missing)
    assert not {"get", "__len__", "__contains__"} & set(missing)


def test_the_backend_is_named():
    assert ackcore.backend in ("native", "python")
    assert ackcore.Ledger is load_backend(ackcore.backend)


def test_the_functions_are_those_of_the_backend_that_runs():
    names = set(_reference.__all__) & set(vars(_backend))
    assert len(names) == 9
    for name in names:
        assert getattr(_backend, name) is getattr(_backend.implementation, name)
