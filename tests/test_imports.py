"""Each module can be imported by itself, loads only what its floor may, and imports downwards."""

from __future__ import annotations

import ast
import graphlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ackcore

ROOT = Path(ackcore.__file__).parent

#: The floors of the house from the ground up: what stands on each, and what each may bring in
#: beside the standard library, numpy and the floors below.  "" is ``ackcore/__init__.py``.
FLOORS: tuple[tuple[set[str], set[str]], ...] = (
    ({"_records", "_columns", "_id_parts", "_row_parts"}, set()),
    ({"_native", "_reference"}, set()),
    ({"_backend"}, set()),
    ({"_sharded", "_shuffle", "acker", "ids", "retry"}, set()),
    ({""}, set()),
    ({"testing"}, set()),
    ({"arrow"}, {"pyarrow"}),
    ({"topology"}, {"pyarrow"}),
    ({"spark"}, {"pyarrow", "pyspark", "py4j"}),
    ({"examples"}, {"pyarrow", "pyspark", "py4j", "rich", "typer"}),
)

#: The rooms of ``spark/``, by when and where code runs, and what each may import of the others.
#: What lies in ``spark/`` itself, the doors, may import them all.
ROOMS: dict[str, set[str]] = {
    "base": set(),
    "settle": {"base"},
    "tasks": {"base", "settle"},
    "run": {"base", "settle", "tasks"},
    "sinks": {"base", "settle", "tasks"},
    "checkpoint": {"base"},
    "dead_letters": {"base", "checkpoint"},
    "protocol": {"base", "settle", "tasks", "run", "sinks", "checkpoint", "dead_letters"},
}


def module_name(path: Path) -> str:
    """``ackcore/spark/wire.py`` as ``ackcore.spark.wire``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["ackcore", *(part for part in parts if part != "__init__")])


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def floor_of(module: str) -> int:
    """Which floor a module stands on."""
    part = module.split(".")[1] if "." in module else ""
    floors = [n for n, (parts, _) in enumerate(FLOORS) if part in parts]
    assert floors, f"{module} has no floor; give it one here and in CONTRIBUTING"
    return floors[0]


def room_of(module: str) -> str:
    """In which room of ``spark/`` a module is, or "" for a door."""
    path = MODULES[module].relative_to(ROOT / "spark")
    room = path.parts[0] if len(path.parts) > 1 else ""
    assert not room or room in ROOMS, f"{room} is no room; give it its place in ROOMS"
    return room


def imported(module: str) -> set[str]:
    """Every module that one names in an import, anywhere in it, as far as it can be resolved."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *base.split(".")]).rstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in MODULES or full == "ackcore._native" else base)
    return names


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    """No module names one of a higher floor, nor a third party that its floor may not know."""
    floor = floor_of(module)
    may = sys.stdlib_module_names | {"numpy"} | FLOORS[floor][1]
    for name in imported(module):
        if name.split(".")[0] == "ackcore":
            assert floor_of(name) <= floor, f"{module} imports {name} from above"
        else:
            assert name.split(".")[0] in may, f"{module} may not import {name} on its floor"


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.startswith("ackcore.spark.") and room_of(name)]
)
def test_rooms_import_down(module: str) -> None:
    """No room of ``spark/`` knows one above it, nor a door."""
    room = room_of(module)
    for name in imported(module) & MODULES.keys():
        if name.startswith("ackcore.spark"):
            assert room_of(name) in ROOMS[room] | {room}, f"{module} imports {name} from above"


def test_modules_of_one_floor_do_not_lean_on_each_other_in_a_ring() -> None:
    """Neighbours may import one another, but never in a circle."""
    ours = {name: imported(name) & MODULES.keys() - {name} for name in MODULES}
    assert list(graphlib.TopologicalSorter(ours).static_order())


# As fresh as a new interpreter, at a tenth of the price.  Importing a module imports its package
# first: what that has loaded with it would be the very same import, and needs no fork of its own.
EACH_ALONE = """
import importlib, json, os, sys
import numpy
before = set(sys.modules)

def load(module):
    try:
        importlib.import_module(module)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    # What has no spec was not found by an importer: Cython's runtime makes itself up.
    new = [name for name in sys.modules if name not in before]
    return sorted(name for name in new if getattr(sys.modules[name], "__spec__", None))

def load_in_a_fork(module):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with open(writer, "w") as pipe:
            json.dump(load(module), pipe)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    return answer

found = {}
for module in sys.argv[1:]:
    of_package = found.get(module.rpartition(".")[0], [])
    same = isinstance(of_package, str) or module in of_package
    found[module] = of_package if same else load_in_a_fork(module)
print(json.dumps(found))
"""


def run_python(code: str, *arguments: str, backend: str) -> str:
    """What a fresh interpreter prints, on one backend."""
    built = find_spec("ackcore._native") or os.environ.get("ACKCORE_REQUIRE_NATIVE")
    if backend == "native" and not built:
        pytest.skip("the extension is not built")
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        # numpy starts no threads then, so that forking is safe.
        env={**os.environ, "ACKCORE_BACKEND": backend, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str] | str]:
    """What importing each module alone loads, or the error it ended in."""
    found: dict[str, list[str] | str] = json.loads(
        run_python(EACH_ALONE, *MODULES, backend="native")
    )
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported_alone(
    module: str, loaded: dict[str, list[str] | str]
) -> None:
    """It needs nothing that another import happened to load, and loads no higher floor."""
    answer = loaded[module]
    floor = floor_of(module)
    if isinstance(answer, str):
        absent = [name for name in FLOORS[floor][1] if find_spec(name) is None]
        assert any(name in answer for name in absent), answer
        pytest.skip(f"an extra is not installed: {answer}")
    assert module in answer
    banned = {"pyarrow", "pyspark", "pandas", "rich", "typer"} - FLOORS[floor][1]
    if "pyarrow" in FLOORS[floor][1]:
        banned -= {"pandas"}  # both look whether it is there
    assert not banned & {name.partition(".")[0] for name in answer}


def test_the_package_loads_numpy_and_the_standard_library_only(
    loaded: dict[str, list[str] | str],
) -> None:
    """`import ackcore` must work, and be quick, on a cluster that brings its own everything."""
    top = {name.partition(".")[0] for name in loaded["ackcore"]}
    assert top <= sys.stdlib_module_names | {"ackcore", "numpy"}


def test_the_python_backend_loads_nothing_compiled() -> None:
    """All that can be imported here can be where the extension cannot."""
    here = [name for name in MODULES if all(map(find_spec, FLOORS[floor_of(name)][1]))]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; "
    code += "print('ackcore._native' in sys.modules)"
    assert run_python(code, *here, backend="python") == "False\n"
