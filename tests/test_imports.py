"""Each module can be imported by itself, loads only what its layer may, and imports downwards."""

from __future__ import annotations

import ast
import functools
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

#: The layers from the lowest up: what is in each, and what each may import beside the standard
#: library, numpy and the layers below.  "" is ``ackcore/__init__.py``.
LAYERS: tuple[tuple[set[str], set[str]], ...] = (
    ({"_records", "_columns", "_arguments", "_files", "_error_hints"}, set()),
    ({"_native", "_kafka_native", "_reference"}, set()),
    ({"_backend"}, set()),
    ({"acker", "dead_limit", "ids", "offsets", "retry", "flow"}, set()),
    ({""}, set()),
    ({"calls"}, set()),
    ({"dispatch"}, set()),
    ({"metrics"}, {"prometheus_client", "opentelemetry"}),
    ({"_arrow"}, {"pyarrow"}),
    ({"kafka"}, {"pyarrow", "confluent_kafka"}),
    ({"tables"}, {"pyarrow", "datasketches"}),
    ({"topology"}, {"pyarrow", "sqlglot"}),
    (
        {"spark"},
        {
            "pyarrow",
            "pyspark",
            "py4j",
            "psycopg",
            "deltalake",
            "pyiceberg",
            "obstore",
            "hdfs_native",
        },
    ),
    ({"testing"}, {"pyarrow", "pyspark"}),
    ({"ui"}, {"pyarrow", "pyspark", "py4j", "starlette", "uvicorn"}),
    ({"examples"}, {"pyarrow", "pyspark", "py4j", "rich", "typer", "confluent_kafka", "pymongo"}),
    ({"cli"}, {"pyarrow", "pyspark", "py4j", "rich", "typer"}),
)

#: What single sinks need, and nothing else may load.
OF_SINKS = {"psycopg", "deltalake", "pyiceberg"}

#: The packages of ``spark/``, by when and where code runs, and what each may import of the others.
#: The modules of ``spark/`` itself, the entry points, may import them all.
PACKAGES: dict[str, set[str]] = {
    "base": set(),
    "stores": {"base"},
    "settle": {"base"},
    "tasks": {"base", "stores", "settle"},
    "sinks": {"base", "stores", "settle", "tasks"},
    "checkpoint": {"base", "stores"},
    "dead_letters": {"base", "stores", "checkpoint"},
    "kafka": {"base", "settle", "tasks", "engine", "checkpoint"},
    "planned": {"base", "stores", "kafka", "engine", "checkpoint"},
    "tables": {"base", "stores", "tasks", "sinks", "checkpoint"},
    "engine": {
        *("base", "stores", "settle", "tasks", "sinks", "checkpoint", "dead_letters", "tables")
    },
    "inspect": {"base", "stores", "checkpoint", "dead_letters", "tables", "engine"},
}


def module_name(path: Path) -> str:
    """``ackcore/spark/settle/wire.py`` as ``ackcore.spark.settle.wire``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["ackcore", *(part for part in parts if part != "__init__")])


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def layer_of(module: str) -> int:
    """Return the layer of a module."""
    part = module.split(".")[1] if "." in module else ""
    layers = [n for n, (parts, _) in enumerate(LAYERS) if part in parts]
    assert layers, f"{module} has no layer; give it one here and in CONTRIBUTING"
    return layers[0]


def package_of(module: str) -> str:
    """In which package of ``spark/`` a module is, or "" for an entry point."""
    path = MODULES[module].relative_to(ROOT / "spark")
    package = path.parts[0] if len(path.parts) > 1 else ""
    assert not package or package in PACKAGES, (
        f"{package} is not in PACKAGES; give it its place there"
    )
    return package


@functools.cache
def parsed(module: str) -> ast.Module:
    """Return the text of its file."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def imported(module: str, *, anywhere: bool = True) -> frozenset[str]:
    """Every module that one names in an import, as far as it can be resolved.

    Anywhere in it, or only where nothing decides whether the line is reached.
    """
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(parsed(module)) if anywhere else parsed(module).body:
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
    return frozenset(names)


def test_imports_point_down() -> None:
    """No module names one of a higher layer, nor a third party that its layer may not import."""
    for module in MODULES:
        layer = layer_of(module)
        # Python 3.14 has annotationlib.
        may = sys.stdlib_module_names | {"numpy", "annotationlib"} | LAYERS[layer][1]
        for name in imported(module):
            if name.split(".")[0] == "ackcore":
                assert layer_of(name) <= layer, f"{module} imports {name} from above"
            else:
                assert name.split(".")[0] in may, f"{module} may not import {name} in its layer"


def test_packages_import_down() -> None:
    """No package of ``spark/`` imports one above it, nor an entry point."""
    for module in MODULES:
        if module.startswith("ackcore.spark.") and (package := package_of(module)):
            for name in imported(module) & MODULES.keys():
                if name.startswith("ackcore.spark"):
                    assert package_of(name) in PACKAGES[package] | {package}, (
                        f"{module} imports {name} from above"
                    )


def test_modules_of_one_layer_do_not_import_each_other_in_a_ring() -> None:
    """Those of a layer may import one another, but never in a ring."""
    ours = {name: imported(name) & MODULES.keys() - {name} for name in MODULES}
    assert list(graphlib.TopologicalSorter(ours).static_order())


def test_class_names_are_unique() -> None:
    """One name for one class, so that a traceback or a search leads to one place."""
    found: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_file_names_are_unique() -> None:
    """One name for one file, so that a name in a traceback or in an editor is one module."""
    found: dict[str, list[Path]] = {}
    for path in MODULES.values():
        if path.name != "__init__.py":
            found.setdefault(path.name, []).append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


# A process for each, as fresh as a new interpreter but for numpy and for what the module's own
# first lines import anyway, whose process it is forked from: what that has loaded alone is loaded
# already, at a tenth of the price.  Rings, where it mattered who came first, are ruled out above.
EACH_ALONE = """
import gc, importlib, json, os, sys
import numpy
gc.disable()  # a child would copy the pages of all objects that it looks at
before = set(sys.modules)
forked_from = json.loads(sys.argv[1])

def load(module):
    try:
        importlib.import_module(module)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    # What has no spec was not found by an importer: Cython's runtime makes itself up.
    new = [name for name in sys.modules if name not in before]
    new = [name for name in new if getattr(sys.modules[name], "__spec__", None)]
    return sorted({module, *(name.partition(".")[0] for name in new)}) if module in new else new

def load_those_from(parent):
    children = [name for name in forked_from if forked_from[name] == parent]
    for module in children:
        child = 0 if module == children[-1] else os.fork()  # the last one takes this process
        if child == 0:
            print(json.dumps([module, load(module)]), flush=True)
            load_those_from(module)
            os._exit(0)
        os.waitpid(child, 0)

load_those_from(None)
"""

#: How long third parties take to load, against a module of ours.
WEIGHTS = {"pandas": 100, "pyspark": 40, "confluent_kafka": 20, "pyarrow": 20}


@functools.cache
def loaded_by(module: str) -> frozenset[str]:
    """The modules that importing one always loads, without the packages that contain it."""
    if module not in MODULES:
        return frozenset({module})
    direct = imported(module, anywhere=False) - {module}
    return frozenset(direct).union(*map(loaded_by, direct))


def weight(module: str) -> int:
    """About how much time a fork of the process that has loaded this module saves."""
    tops = {name.partition(".")[0] for name in loaded_by(module)}
    return len(loaded_by(module)) + sum(WEIGHTS.get(top, 0) for top in tops)


def forked_from(module: str) -> str | None:
    """From whose process it can be forked: of those that it loads, the one that loads most."""
    direct = imported(module, anywhere=False) - {module} if module in MODULES else set()
    direct = {name for name in direct if name in MODULES or name.partition(".")[0] in WEIGHTS}
    if direct:
        return max(direct, key=lambda name: (weight(name), name))
    return None if module in {"ackcore"} | loaded_by("ackcore") else "ackcore"


def run_python(code: str, *arguments: str, backend: str) -> str:
    """Return the output of a fresh interpreter on one backend."""
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
    """Return the packages that importing each module alone loads, or the error it ended in."""
    tree = {module: forked_from(module) for module in MODULES}
    for foreign in {*tree.values()} - tree.keys() - {None}:
        tree[str(foreign)] = "ackcore"
    lines = run_python(EACH_ALONE, json.dumps(tree), backend="native").splitlines()
    return dict(map(json.loads, lines))


def test_every_module_can_be_imported_alone(loaded: dict[str, list[str] | str]) -> None:
    """It needs nothing that another import happened to load, and loads no higher layer."""
    for module in MODULES:
        answer = loaded[module]
        layer = layer_of(module)
        if isinstance(answer, str):
            extras = {*LAYERS[layer][1], "confluent_kafka"}
            absent = [name for name in extras if find_spec(name) is None]
            assert any(name in answer for name in absent), answer
            continue
        assert module in answer
        banned = {"pyarrow", "confluent_kafka", "pyspark", "pandas", "rich", "typer", *OF_SINKS}
        banned -= LAYERS[layer][1] - OF_SINKS
        if module.startswith("ackcore.spark.sinks."):
            banned -= OF_SINKS  # they are loaded where a sink is made
        if "pyarrow" in LAYERS[layer][1]:
            banned -= {"pandas"}  # both look whether it is there
        if module.startswith("ackcore.spark.kafka."):
            banned -= {"confluent_kafka"}  # they are loaded where a spout reads Kafka
        assert not banned & {*answer}, module


@pytest.mark.parametrize("module", ["ackcore", "ackcore.testing"])
def test_it_loads_numpy_and_the_standard_library_only(
    module: str, loaded: dict[str, list[str] | str]
) -> None:
    """On a cluster, and where somebody makes a backend, there may be no other package."""
    assert {*loaded[module]} <= sys.stdlib_module_names | {module, "ackcore", "numpy"}


def test_the_python_backend_loads_nothing_compiled() -> None:
    """All that can be imported here can be where the extension cannot."""
    here = [name for name in MODULES if all(map(find_spec, LAYERS[layer_of(name)][1]))]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; "
    code += "print('ackcore._native' in sys.modules)"
    assert run_python(code, *here, backend="python") == "False\n"
