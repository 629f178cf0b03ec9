"""``ackcore explain``: show the plan of a topology, as text or as a drawing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from ackcore.cli.reporting import print_json
from ackcore.cli.topologies import add_path, check_name, load_topology, takes_session
from ackcore.topology.builder import Topology
from ackcore.topology.explain import draw


def add_to(app: typer.Typer) -> None:
    """Add the command."""
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
