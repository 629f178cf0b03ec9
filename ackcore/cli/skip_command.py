"""``ackcore skip``: leave out planned rows that cannot be read any more."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ackcore.cli.reporting import plain, print_json
from ackcore.spark.checkpoint.skips import skip_planned


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(skip)


def skip(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="The directory or URL of the checkpoint.")
    ],
    spout: Annotated[str, typer.Argument(metavar="SPOUT", help="The name of the spout.")],
    file: Annotated[
        list[str] | None,
        typer.Option(help="Only the rows of this file; may be given several times."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the rows that would be left out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Leave out rows of the planned micro-batch that their source cannot read any more.

    The query must not run. Its next start continues without these rows, which are not dead letters.
    """
    done = skip_planned(checkpoint, spout, file or (), dry_run=dry_run)
    if as_json:
        print_json({**asdict(done), "dry_run": dry_run})
        return
    will = "would be left out" if dry_run else "left out"
    typer.echo(plain(f"{will} of micro-batch {done.batch_id}, spout {done.spout}: {done.rows}"))
