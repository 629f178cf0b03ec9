"""Checkpoints with dead letters, in each kind of place, read by others than who wrote them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from checkpoints import OPEN, died, ids, run_one

from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.dead_letters.checkpoints import letters_at, store_of
from ackcore.spark.dead_letters.listing import LetterFilter, LetterId, list_letters
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.stores.opening import open_store

VALUE = {"lines": pa.schema([("value", pa.string())])}


def reader(letters):
    """The store of a driver as others see it."""
    return letters_at(letters.place.url)


def active(letters, spout="lines"):
    """The names of the files that count, without what tells two of one name apart."""
    return [plain(file.path.name) for file in reader(letters).files(spout)]


def plain(name):
    return re.sub(r"\.e\d+\.[0-9a-f]{24}", "", name)


def path_of(letters, name, spout="lines"):
    """The path of a file that counts, by such a name."""
    files = reader(letters).files(spout)
    return next(Path(file.path) for file in files if plain(file.path.name) == name)


class Home(NamedTuple):
    """Where a checkpoint is, and its letters if they are elsewhere."""

    checkpoint: str
    elsewhere: str | None = None

    def driver(self, clock=wall_clock_ms):
        """Start one that has run a micro-batch; it stays open."""
        state = OPEN(self.checkpoint)
        if state.last_plan is None:
            run_one(state, 0)
        found = DeadLetters.checked(
            state.url, state.deployment_key, self.elsewhere, VALUE, state.records
        )()
        return state, DeadLetters(found.place, clock)

    def wrote(self, end):
        """Write the letters of the first micro-batches by a driver that then ends."""
        state, letters = self.driver()
        with state:
            write(letters, 0, end)
        return letters

    @property
    def letters(self):
        """The store of the letters, as objects."""
        return open_store(store_of(self.checkpoint).url, "path")


def write(letters, first, end):
    for n in range(first, end):
        letters.write(n, {"lines": died(2 * n, 2)})


def listed(home, **which):
    """Letters by id, read by somebody else than who wrote them."""
    found = list_letters(store_of(home.checkpoint), LetterFilter(**which))
    return {str(each.id): each.message_id for each in found}


def every(batches, but=()):
    return {
        f"lines/{n}/{at}": f"id-{2 * n + at}"
        for n in range(batches)
        for at in (0, 1)
        if n not in but
    }


def named(*numbers):
    return LetterFilter(tuple(LetterId("lines", n, at) for n in numbers for at in (0, 1)))


def asked(home):
    """Return the requests of replays to the query."""
    with OPEN(home.checkpoint) as state:
        plan = state.make_plan(state.last_done + 1, 0)
        due = state.split_due(plan).due
        return sorted(ids(due["lines"])) if due else []


def files_there(home):
    """All files of letters that there are, whether they count or not."""
    return {each.key for each in home.letters.list() if "/batch" in f"/{each.key}"}


def contents(home):
    """Return the letters of all files, also of those that do not count."""
    for key in files_there(home):
        table = pq.read_table(pa.BufferReader(home.letters.read(key)))
        yield str(table["message_id"].to_pylist()).encode()
