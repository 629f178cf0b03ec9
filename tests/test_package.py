"""What is installed: types, version, entry points, no sources; and a README that is true."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points, metadata, version
from pathlib import Path

import ackcore
from ackcore import _reference

PACKAGE = Path(ackcore.__file__).parent


def test_the_version_is_that_of_the_installed_package() -> None:
    """One number, in one place."""
    assert version("ackcore") == ackcore.__version__


def test_numpy_is_the_one_runtime_dependency() -> None:
    """A cluster brings its own pyspark and pyarrow; ackcore alone must not ask for them."""
    needed = metadata("ackcore").get_all("Requires-Dist") or []
    always = [need for need in needed if "extra ==" not in need]
    assert [re.split(r"[^\w-]", need)[0] for need in always] == ["numpy"]


def test_types_are_shipped() -> None:
    """Type checkers find the annotations, and the stub of what has none of its own."""
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_native.pyi").exists()


def test_the_package_holds_no_sources_of_the_extension() -> None:
    """Cython and C stay in pyx/ and build/: nobody builds on our internals by accident."""
    suffixes = {path.suffix for path in PACKAGE.rglob("*") if path.is_file()}
    assert suffixes <= {".py", ".pyi", ".typed", ".so", ".pyd", ".pyc"}


def test_both_backends_are_registered() -> None:
    """Frameworks find ours the way they find anybody's."""
    points = entry_points(group="ackcore.backends")
    assert points["python"].load() is _reference.Ledger
    assert points["native"].value == "ackcore._native:Ledger"


def test_every_public_name_is_there() -> None:
    """`__all__` promises nothing that is missing, and names nothing twice."""
    assert len(set(ackcore.__all__)) == len(ackcore.__all__)
    missing = [name for name in ackcore.__all__ if not hasattr(ackcore, name)]
    assert not missing


def test_the_sessions_in_the_readme_are_true(run_readme: Callable[..., None]) -> None:
    """Each runs by itself and prints what the README says."""
    run_readme(on_spark=False)
