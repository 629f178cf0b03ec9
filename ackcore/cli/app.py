"""The command-line application, assembled from its commands."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

import ackcore
from ackcore.cli.reporting import EXIT_CODES, Commands


def app_of(names: Iterable[str]) -> typer.Typer:
    """Return the command line with some of its commands, and load their modules."""
    app = typer.Typer(
        cls=Commands,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        epilog=EXIT_CODES,
    )
    app.callback()(_options)
    for name in names:
        import_module(f"ackcore.cli.{name}").add_to(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ackcore {ackcore.__version__}")
        raise typer.Exit


def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Run topologies on Spark with per-record delivery guarantees, and look at their status."""
