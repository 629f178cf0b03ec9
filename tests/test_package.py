"""The installed package: types, version, entry points, no sources; and a README that is true."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import entry_points, metadata, version
from pathlib import Path
from types import ModuleType

import pytest
from separately import run_python

import ackcore
from ackcore import _reference

PACKAGE = Path(ackcore.__file__).parent


def test_the_version_is_that_of_the_installed_package() -> None:
    """One number, in one place."""
    assert version("ackcore") == ackcore.__version__


def test_no_section_of_a_docstring_has_its_underline_in_its_text() -> None:
    """On one line, as in "Notes ----- A row", a section becomes text of the one before."""
    texts = {file: file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    assert [file for file, text in texts.items() if re.search(r"\n +[A-Z]\w+ -{3,}", text)] == []


#: ackcore.ui serves them as they are.
OF_THE_PAGE = (".html", ".css", ".js")


def test_numpy_is_the_one_runtime_dependency() -> None:
    """A cluster brings its own pyspark and pyarrow; ackcore alone must not ask for them."""
    needed = metadata("ackcore").get_all("Requires-Dist") or []
    always = [need for need in needed if "extra ==" not in need]
    assert [re.split(r"[^\w-]", need)[0] for need in always] == ["numpy"]


def test_the_lowest_versions_that_are_allowed_are_tested() -> None:
    """The tests on the oldest Sparks run with them: `.ci/test-spark`."""
    root = Path(__file__).parents[1]
    pins = dict(
        re.findall(r"^([\w-]+)==([\d.]+)", (root / "constraints-lowest.txt").read_text(), re.M)
    )
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = sum(project["optional-dependencies"].values(), project["dependencies"])
    bounds = {
        found.groups() for one in needed if (found := re.match(r"([\w-]+).*?>=([\d.]+)", one))
    }
    assert {re.match(r"[\w-]+", one)[0] for one in needed} == {name for name, _ in bounds}
    for name, lowest in (bound for bound in bounds if bound[0] != "pyspark"):
        assert re.fullmatch(rf"{re.escape(lowest)}(\.0)*", pins[name]), name


def test_types_are_shipped() -> None:
    """Type checkers find the annotations, and the stub of what has none of its own."""
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_native.pyi").exists()
    assert (PACKAGE / "_kafka_native.pyi").exists()


def test_the_package_holds_no_sources_of_the_extension() -> None:
    """Cython and C stay in pyx/ and build/: no project builds on our internals by accident."""
    suffixes = {path.suffix for path in PACKAGE.rglob("*") if path.is_file()}
    assert suffixes <= {".py", ".pyi", ".typed", ".so", ".pyd", ".pyc", *OF_THE_PAGE}


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Return the wheel that was installed: .ci/wheel and .ci/test-arm64 name it."""
    path = os.environ.get("TESTED_WHEEL")
    if path is None:
        pytest.skip("a tree is tested, not a wheel")
    return Path(path)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Types, stub and extension; no C, no Cython, no tests."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    assert {"ackcore/py.typed", "ackcore/_native.pyi"} <= set(names)
    for module in ("_native", "_kafka_native"):
        assert [name for name in names if re.fullmatch(rf"ackcore/{module}\..*\.(so|pyd)", name)]
    strays = [name for name in names if not name.startswith(("ackcore/", "ackcore-"))]
    kinds = (".py", ".pyi", "/py.typed", ".so", ".pyd", *OF_THE_PAGE)
    sources = [n for n in names if n.startswith("ackcore/") and not n.endswith(kinds)]
    assert not strays
    assert not sources


def test_the_wheel_is_tagged_for_this_python_and_any_linux(wheel: Path) -> None:
    """manylinux_2_17 is what the name promises; auditwheel checked the symbols for it."""
    package = zipfile.ZipFile(wheel)
    described = next(name for name in package.namelist() if name.endswith(".dist-info/WHEEL"))
    tags = re.findall(r"^Tag: (.*)$", package.read(described).decode(), re.MULTILINE)
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    abi = python + getattr(sys, "abiflags", "")  # "t" where there is no GIL; Windows has none
    if sys.platform == "linux":
        machine = os.uname().machine
        expected = [f"manylinux2014_{machine}", f"manylinux_2_17_{machine}"]
        assert sorted(tags) == [f"{python}-{abi}-{platform}" for platform in expected]
    assert all(tag.startswith(f"{python}-{abi}-") for tag in tags)
    assert all(tag.split("-")[2] in wheel.name for tag in tags)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_the_extension_runs_on_an_old_glibc(native: ModuleType) -> None:
    """Symbols of later versions than 2.17 would make it a wheel for newer systems only."""
    assert native.__file__ is not None
    asked = re.findall(rb"GLIBC_(\d+)\.(\d+)", Path(native.__file__).read_bytes())
    assert asked
    assert max((int(major), int(minor)) for major, minor in asked) <= (2, 17)


# On Windows none of these modules is there, nor these functions.
WITHOUT_POSIX = """
import os, sys
import asyncio, numpy, pyarrow.compute   # which know where they run, and ask no more
for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None    # importing it is an ImportError
for name in ("fork", "geteuid", "getuid", "kill", "killpg", "mkfifo", "register_at_fork",
             "sched_getaffinity", "setsid", "sysconf", "uname"):
    if hasattr(os, name):
        delattr(os, name)
import ackcore, ackcore.ids, ackcore.retry, ackcore.testing, ackcore.topology
acker = ackcore.Acker()
ledger = ackcore.Ledger()
ledger.init(1, 5, 0)
assert ledger.ack(1, 5) is not None
ackcore.testing.check_backend(ackcore.Ledger)
"""


@pytest.mark.parametrize("backend_name", ["native", "python"])
def test_check_backend_accepts_it_and_needs_nothing_of_posix(backend_name: str) -> None:
    """The acker runs on Windows, too: on its Python backend at least."""
    run_python(WITHOUT_POSIX, ACKCORE_BACKEND=backend_name)


def test_both_backends_are_registered() -> None:
    """Frameworks find ours the way they find any other."""
    points = entry_points(group="ackcore.backends")
    assert points["python"].load() is _reference.Ledger
    assert points["native"].value == "ackcore._native:Ledger"


def test_every_public_name_is_there() -> None:
    """`__all__` promises nothing that is missing, and names nothing twice."""
    for module in (ackcore, ackcore.ids):
        assert len(set(module.__all__)) == len(module.__all__)
        assert not [name for name in module.__all__ if not hasattr(module, name)]


@pytest.mark.parametrize(
    "package", ["calls", "dispatch", "flow", "kafka", "metrics", "spark", "tables", "testing"]
)
def test_each_public_function_with_keywords_names_an_unknown_one(package: str) -> None:
    """Python's own error suggests no argument."""
    needs = {
        "kafka": ("confluent_kafka",),
        "metrics": ("opentelemetry", "prometheus_client"),
        "spark": ("pyspark",),
    }
    for each in needs.get(package, ()):
        pytest.importorskip(each)
    module = importlib.import_module(f"ackcore.{package}")
    for name in module.__all__:
        try:
            found = inspect.signature(getattr(module, name)).parameters.values()
        except (TypeError, ValueError):
            continue  # no callable
        named = [each for each in found if each.kind == each.KEYWORD_ONLY and each.name[0] != "_"]
        if named and not any(each.kind == each.VAR_KEYWORD for each in found):
            with pytest.raises(TypeError, match=r"^\w+\(\) has no argument 'unknown'; "):
                getattr(module, name)(unknown=1)


def test_the_sessions_in_the_readme_are_true(
    run_readme: Callable[..., None], tmp_path: Path
) -> None:
    """Each runs by itself and prints what the README shows."""
    run_readme(on_spark=False, folder=tmp_path)
