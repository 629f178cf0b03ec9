"""``ackcore explain``: show the plan of a topology, which a command names as ``MODULE:NAME``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ackcore._error_hints import signature_of
from ackcore.cli.reporting import print_json
from ackcore.topology.builder import Topology
from ackcore.topology.explain import draw

_NAMED = re.compile(r"([\w.]+):([\w.]+)")


def check_name(name: str) -> str:
    """Return a topology's name; raise typer.BadParameter if it has not the form MODULE:NAME."""
    if not _NAMED.fullmatch(name):
        raise typer.BadParameter(
            "must have the form MODULE:NAME, such as my_module:topology, and name a Topology or a "
            f"function that returns one, got {name!r}"
        )
    return name


def add_to(app: typer.Typer) -> None:
    """Add ``ackcore explain`` to the app."""
    app.command()(explain)


def explain(
    topology: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            callback=check_name,
            help="A Topology, or a function that returns one.",
        ),
    ],
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an SVG drawing to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the structure as JSON.")] = False,
) -> None:
    """Show the stages of a topology, and the exchanges between them. Reads and runs nothing.

    Starts Spark if the function has a parameter, to pass a session.
    """
    add_path()
    if takes_session(topology):
        quiet_spark = import_module("ackcore.examples.quiet_spark")
        quiet_spark.check_java()
        with quiet_spark.spark_session("local[1]") as (spark, _):
            _show(load_topology(topology, spark), svg, as_json)
    else:
        _show(load_topology(topology, None), svg, as_json)


def _show(topology: Topology, svg: Path | None, as_json: bool) -> None:
    if svg is not None:
        svg.write_text(draw(topology.structure) + "\n", encoding="utf-8")
    if as_json:
        print_json({"fingerprint": topology.fingerprint, "structure": topology.structure})
    elif svg is None:
        print(topology.explain())


# -- names of topologies --------------------------------------------------------------------------


def add_path() -> None:
    """Let this process, and the workers that it starts, import from the current directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    before = os.environ.get("PYTHONPATH")
    if here not in (before or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{here}{os.pathsep}{before}" if before else here


def load_topology(name: str, spark: Any) -> Topology:
    """Return the topology of a name, or the one that the function of that name returns.

    Raises typer.BadParameter if there is neither, and the exception of the function or the import.

    ``spark``: the session, which a function with a parameter receives.
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
    """Import a name; return whether it is a function with a parameter, which gets the session."""
    found = find_named(name)
    if isinstance(found, Topology) or not callable(found):
        return False
    return bool(signature_of(found).parameters)


@contextmanager
def raised_by(what: str) -> Iterator[None]:
    """A context that adds the note "raised by ``what``" to an exception of its body."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {what}")
        raise


def find_named(name: str) -> Any:
    """Import the module of a name, and return the object, which is not called.

    Raises typer.BadParameter if there is no such module or object, and an exception that the module
    raises.
    """
    module, _, path = name.partition(":")
    try:
        with raised_by(f"the import of {module}"):
            found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # an import of the module failed
        raise typer.BadParameter(
            f"no module {error.name} was found in {os.getcwd()} or on PYTHONPATH; change the "
            "directory, or add that of the module to PYTHONPATH"
        ) from None
    owner = f"the module {module}"
    for part in path.split("."):
        if not hasattr(found, part):
            near = " and ".join(get_close_matches(part, dir(found), n=2))
            way_out = f"it has {near}" if near else "check the name after the colon"
            raise typer.BadParameter(f"{owner} has no {part}; {way_out}")
        found = getattr(found, part)
        owner = f"{owner}.{part}" if ":" in owner else f"{module}:{part}"
    return found
