"""The word count's input: lines of text files, numbered, and staged for a stream to read.

A line ends at a newline and nowhere else; a missing last newline does not matter, and bytes that
are not UTF-8 become U+FFFD.  When more lines are wanted than the files hold, they are read again
from the first one on.  A line's number counts all lines before it, so it is its message id.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

#: What is staged, as Spark and as Arrow have it.
DDL = "line bigint, text string"
SCHEMA = pa.schema([("line", pa.int64()), ("text", pa.string())])


class InputError(ValueError):
    """The input cannot be read."""


def standard_library() -> list[str]:
    """Return the paths of the Python sources of the standard library, sorted."""
    top = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}  # by others, and not the same everywhere
    found = [path for path in top.rglob("*.py") if installed.isdisjoint(path.parts)]
    if not found:
        raise InputError(f"this Python has no library sources in {top}; name files with --input")
    return sorted(str(path) for path in found)


def _once(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        try:
            # Not opened if it is none: opening a pipe waits for its writer.
            if not os.path.isfile(path) and os.path.exists(path):
                raise InputError(f"input {path!r} is not a regular file")
            with open(path, encoding="utf-8", errors="replace", newline="\n") as source:
                for line in source:
                    yield line.removesuffix("\n")
        except OSError as error:
            raise InputError(f"input {path!r} cannot be read: {error.strerror}") from error


def read_lines(paths: Sequence[str], lines: int | None = None) -> Iterator[str]:
    """Yield lines of files, so many of them or each once.

    Raises
    ------
    InputError
        If a file cannot be read, or there is not one line.
    """
    if lines is None:
        yield from _once(paths)
        return
    left = lines
    while left:
        before = left
        for text in islice(_once(paths), left):
            left -= 1
            yield text
        if left == before:
            raise InputError("the input has no lines")


def stage(paths: Sequence[str], directory: Path, lines: int | None, files: int) -> int:
    """Write lines to Parquet files, of which a stream takes one at a time.

    Parameters
    ----------
    paths : sequence of str
        Where the lines are.
    directory : Path
        Where the files go; made if need be, and whole when it is there.
    lines : int or None
        How many; None for each line once.
    files : int
        How many files, at most.

    Returns
    -------
    int
        How many lines they have.

    Raises
    ------
    InputError
        If a file cannot be read, or there is not one line.
    """
    there = sum(1 for _ in read_lines(paths)) if lines is None else lines
    if not there:
        raise InputError("the input has no lines")
    size = -(-there // files)
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    source = read_lines(paths, lines)
    for first in range(0, there, size):
        text = list(islice(source, size))
        numbers = pa.array(range(first, first + len(text)), pa.int64())
        table = pa.table([numbers, pa.array(text, pa.string())], schema=SCHEMA)
        pq.write_table(table, unfinished / f"lines-{first // size:05}.parquet")
    unfinished.rename(directory)
    return there
