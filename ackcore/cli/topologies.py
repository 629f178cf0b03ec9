"""The topology that a command names as ``MODULE:NAME``."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import typer

from ackcore.topology.builder import Topology

_NAMED = re.compile(r"([\w.]+):([\w.]+)")


def add_path() -> None:
    """Let this process, and the workers that it starts, import from the current directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    before = os.environ.get("PYTHONPATH")
    if here not in (before or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{here}{os.pathsep}{before}" if before else here


def check_name(name: str) -> str:
    """Check the form of a topology's name; a callback of typer.

    Raises typer.BadParameter if it is not of this form.
    """
    if not _NAMED.fullmatch(name):
        raise typer.BadParameter(
            f"must be MODULE:NAME, a Topology or a function that returns one, got {name!r}"
        )
    return name


def load_topology(name: str, spark: Any) -> Topology:
    """Return a topology. A function of the session is called with the session.

    Raises typer.BadParameter if there is no topology of that name.

    ``spark``: the argument of the function, if it has a parameter.
    """
    found = find_named(name)
    if callable(found) and not isinstance(found, Topology):
        with raised_by(name):
            found = found(spark) if takes_session(name) else found()
    if not isinstance(found, Topology):
        raise typer.BadParameter(
            f"{name} must be a Topology or a function that returns one, as TopologyBuilder.build() "
            f"does, got {type(found).__name__}"
        )
    return found


def takes_session(name: str) -> bool:
    """Return whether a name denotes a function with a parameter for the session."""
    found = find_named(name)
    if isinstance(found, Topology) or not callable(found):
        return False
    return bool(inspect.signature(found).parameters)


@contextmanager
def raised_by(what: str) -> Iterator[None]:
    """A context that adds to exceptions the place where they were raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {what}")
        raise


def find_named(name: str) -> Any:
    """Return the object of a name. It is imported, and not called.

    Raises typer.BadParameter if there is no topology of that name.
    """
    module, _, path = name.partition(":")
    try:
        with raised_by(f"the import of {module}"):
            found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # an import of the module failed
        raise typer.BadParameter(f"no module {error.name} was found in {os.getcwd()}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise typer.BadParameter(f"{module} has no {path}{_like(path, found)}")
        found = getattr(found, part)
    return found


def _like(path: str, found: Any) -> str:
    """Return similar names that exist."""
    near = get_close_matches(path.rpartition(".")[2], dir(found), n=2)
    return f"; it has {' and '.join(near)}" if near else ""
