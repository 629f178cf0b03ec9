"""``ackcore explain``: show the plan of a topology, as text or as a drawing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from ackcore.cli.declared_sources import NotKnownHere, Session
from ackcore.cli.reporting import print_json
from ackcore.cli.topologies import add_path, check_name, load_topology
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
    spark: Annotated[
        bool,
        typer.Option("--spark", help="Start Spark, if only Spark knows a source's columns."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the structure as JSON.")] = False,
) -> None:
    """Show the stages of a topology, and the exchanges between them. Reads and runs nothing."""
    add_path()
    found = _with_spark(topology) if spark else _declared(topology)
    if svg is not None:
        svg.write_text(draw(found.structure) + "\n", encoding="utf-8")
    if as_json:
        print_json({"fingerprint": found.fingerprint, "structure": found.structure})
    elif svg is None:
        typer.echo(found.explain())


def _declared(topology: str) -> Topology:
    try:
        return load_topology(topology, Session())
    except NotKnownHere as error:
        why = f"only Spark can tell the columns of {error}"
    except AssertionError as error:
        # What pyspark's functions raise where no session is.
        why = (
            f"it needs Spark ({type(error).__name__}: {error})" if str(error) else "it needs Spark"
        )
    raise typer.BadParameter(f"{topology} cannot be explained by itself: {why}; add --spark")


def _with_spark(topology: str) -> Topology:
    quiet_spark = import_module("ackcore.examples.quiet_spark")
    quiet_spark.check_java()
    with quiet_spark.spark_session("local[1]") as (spark, _):
        found = load_topology(topology, spark)
        assert found.fingerprint
    return found
