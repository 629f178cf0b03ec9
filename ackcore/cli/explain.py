"""``ackcore explain``: what a topology does, as text or as a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ackcore.cli.reporting import print_json
from ackcore.cli.topologies import add_path, check_name, load_topology
from ackcore.examples.quiet_spark import check_java, spark_session
from ackcore.topology.drawing import draw


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(explain)


def explain(
    topology: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", callback=check_name, help="A function of it.")
    ],
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it as an SVG into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print its structure as JSON.")] = False,
) -> None:
    """Show the stages of a topology, and what crosses between them; nothing is run."""
    add_path()
    check_java()
    with spark_session("local[1]") as (spark, _):
        found = load_topology(topology, spark)
        text, structure = found.explain(), found.structure
    if svg is not None:
        svg.write_text(draw(structure) + "\n", encoding="utf-8")
    if as_json:
        print_json({"fingerprint": found.fingerprint, "structure": structure})
    elif svg is None:
        typer.echo(text)
