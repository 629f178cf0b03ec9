"""``ackcore ui CHECKPOINT...``: the page."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Annotated

import typer

from ackcore.cli.reporting import print_json
from ackcore.ui.server import PageServer


def add_to(app: typer.Typer) -> None:
    """Add ``ackcore ui`` to the app."""
    app.command()(ui)


def ui(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="CHECKPOINT...", help="The checkpoints to show.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for a free one.")] = 8440,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on. If it is not local, others can read everything."
        ),
    ] = "127.0.0.1",
    known_as: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host name of this machine that browsers use."),
    ] = None,
    allow_replay: Annotated[
        bool,
        typer.Option(
            "--allow-replay",
            help="Allow replays with a token: the value of ACKCORE_UI_TOKEN, or a new one, "
            "which is printed.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the page's address and a new token as one JSON object."),
    ] = False,
) -> None:
    """Serve a page with counts, throughput, waiting records, latency, the topology and dead
    letters.
    """
    token = new = None
    if allow_replay:
        token = os.environ.get("ACKCORE_UI_TOKEN", "").strip()
        if not token:  # any visitor could replay dead letters
            token = new = secrets.token_urlsafe(24)
    with PageServer(checkpoints, host=host, port=port, token=token, hosts=known_as or ()) as server:
        if as_json:
            print_json({"url": server.url, "token": new})
            sys.stdout.flush()  # the reader may be behind a pipe, and this process now waits
        else:
            typer.echo(f"{server.url} (Ctrl-C ends it)")
            if new is not None:
                typer.echo(f"the token for replays: {new}")
        server.wait()
