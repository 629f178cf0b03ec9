"""``ackcore bench``: measure acks per second on this machine, in a few seconds."""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import numpy as np
import typer

import ackcore
from ackcore.cli.reporting import print_json

_ROWS = 8192
#: Edges of a tree: an INIT and so many acks.
_ACKS = 4


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)


def bench(
    trees: Annotated[int, typer.Option(min=1, help="Tuple trees that are pending at once.")] = (
        100_000
    ),
    rounds: Annotated[int, typer.Option(min=1, help="How often it is measured.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the ledger: trees of four edges, 8,192 messages a call, one thread."""
    root_ids, vals, tasks = _messages(trees)
    rates = []
    for _ in range(rounds):
        ledger = ackcore.Ledger(trees)
        acked = 0
        began = time.perf_counter()
        for start in range(0, len(root_ids), _ROWS):
            rows = slice(start, start + _ROWS)
            acked += len(ledger.apply(root_ids[rows], vals[rows], tasks[rows]))
        rates.append(len(root_ids) / (time.perf_counter() - began))
        if acked != trees or len(ledger):
            raise RuntimeError(f"{acked} of {trees} trees were acked: the ledger is wrong")
    rate = statistics.median(rates)
    if as_json:
        told = {"backend": ackcore.backend, "trees": trees, "messages_per_s": rate, "rates": rates}
        print_json(told)
        return
    typer.echo(
        f"{rate / 1e6:.1f} M messages/s (of {rounds} rounds {min(rates) / 1e6:.1f} to "
        f"{max(rates) / 1e6:.1f}), {trees:,} trees of {_ACKS} edges, backend {ackcore.backend}"
    )


def _messages(trees: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return messages that ack each tree, interleaved as if all trees were in flight at once."""
    draw = np.random.default_rng(0)
    roots = draw.integers(-(2**63), 2**63 - 1, trees)
    edges = draw.integers(1, 2**63 - 1, (_ACKS, trees))
    inits = edges[0]
    acks = [edges[n] ^ edges[n + 1] for n in range(_ACKS - 1)] + [edges[-1]]
    order = [draw.permutation(trees) for _ in range(_ACKS)]
    root_ids = np.concatenate([roots, *(roots[rows] for rows in order)])
    vals = np.concatenate([inits, *(ack[rows] for ack, rows in zip(acks, order, strict=True))])
    tasks = np.concatenate(
        [np.zeros(trees, np.int32), np.full(_ACKS * trees, ackcore.ACK, np.int32)]
    )
    return root_ids, vals, tasks
