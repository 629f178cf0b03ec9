"""What several test modules need: the backends, and how hard hypothesis tries."""

import doctest
import importlib
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ackcore import Acker
from ackcore.testing.scripts import Clock

# Both are deterministic: a run that fails on one machine fails on the next.
settings.register_profile("fast", max_examples=60, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "thorough",
    max_examples=2_000,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("ACKCORE_HYPOTHESIS", "fast"))


def load_backend(name):
    """Return a backend's module, or skip; in CI a broken build must not pass."""
    try:
        module = importlib.import_module(name)
        module.Ledger  # noqa: B018 - a build from before the ledger has only ids
    except (ImportError, AttributeError) as error:
        if os.environ.get("ACKCORE_REQUIRE_NATIVE"):
            raise
        pytest.skip(f"not built: {error}")
    return module


@pytest.fixture(scope="session", params=["ackcore._native", "ackcore._reference"])
def backend(request):
    return load_backend(request.param)


@pytest.fixture(scope="session")
def Ledger(backend):
    return backend.Ledger


@pytest.fixture(scope="session")
def native():
    return load_backend("ackcore._native")


@pytest.fixture(scope="session")
def reference():
    return load_backend("ackcore._reference")


@pytest.fixture(params=[1, 3], ids=["1 shard", "3 shards"])
def make_acker(Ledger, request):
    """Make ackers of either backend, of one shard or several, in simulated time."""

    def make_acker(**arguments):
        return Acker(Ledger, **{"shards": request.param, "clock": Clock(), **arguments})

    return make_acker


def pytest_collection_modifyitems(items):
    """Whatever asks for a Spark is marked so."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")


@pytest.fixture(scope="session")
def spark():
    """One Spark for all tests: two cores, and a task may fail three times before its job does."""
    # Here, since most tests must run where there is no Spark.
    from ackcore.examples.quiet_spark import spark_session  # noqa: PLC0415

    with spark_session("local[2,4]") as (session, _):
        session.conf.set("spark.sql.adaptive.enabled", "true")
        yield session


@pytest.fixture
def run_readme():
    """``run_readme(on_spark, **names)`` runs the README's sessions of one kind, each by itself."""

    def run_readme(on_spark, **names):
        text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
        fences = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        sessions = [fence for fence in fences if ">>>" in fence and ("spark." in fence) is on_spark]
        assert sessions
        report = []
        for session in sessions:
            test = doctest.DocTestParser().get_doctest(session, dict(names), "README.md", None, 0)
            doctest.DocTestRunner(verbose=False).run(test, out=report.append)
        assert not report, "".join(report)

    return run_readme
