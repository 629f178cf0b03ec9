"""``ackcore table``: show rows of a table of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import pyarrow as pa
import typer

from ackcore._arrow.shown import shown_rows, shown_values
from ackcore.cli.reporting import NO, cell, console, table
from ackcore.spark.dead_letters.listing import encoder_of
from ackcore.spark.inspect.table_reading import first_rows, read_table, rows_of_key


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    tables = typer.Typer(no_args_is_help=True, help="The tables of a query.")
    tables.callback()(lambda: None)
    tables.command()(show)
    app.add_typer(tables, name="table")


def show(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="The directory or URL of the checkpoint.")
    ],
    name: Annotated[str, typer.Argument(metavar="TABLE", help="The name of the table.")],
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Only the row of this key: once for each key column, in order, as the table shows "
            "the values. \\N is NULL. A time has its zone if the column has one: "
            "'2026-01-01 09:00:00+00:00'."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The maximum number of rows.")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object per line.")
    ] = False,
) -> None:
    """Show rows of a table as they are after the last finished micro-batch.

    Exits with 1 if there is no row of the key.
    """
    found, rows = read_table(
        checkpoint, name, lambda it: (it, rows_of_key(it, key) if key else first_rows(it, limit))
    )
    if as_json:
        for line in _json_lines(rows):
            print(line)
    else:
        title = f"table {name}: {len(rows):,} row{'' if len(rows) == 1 else 's'}"
        if not key and len(rows) == limit < found.rows:
            bound = "" if found.shape.ttl_s is None else "at most "
            title += f" of {bound}{found.rows:,}; --limit shows more"
        shown = table(title, *rows.column_names)
        for row in shown_rows(rows):
            shown.add_row(*(cell(_text(value)) for value in row.values()))
        console().print(shown)
    if key and not len(rows):
        raise typer.Exit(NO)


def _text(value: object) -> object:
    """Return bytes as text, such as the ids of ``dedup``."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _json_lines(rows: pa.Table) -> Iterator[str]:
    columns = [map(encoder_of(column.type), shown_values(column)) for column in rows.columns]
    names = [json.dumps(name, ensure_ascii=False) for name in rows.column_names]
    for row in zip(*columns, strict=True):
        pairs = (f"{name}: {text}" for name, text in zip(names, row, strict=True))
        yield f"{{{', '.join(pairs)}}}"
