"""Look-up of a checkpoint's store of dead letters, and of a store's checkpoint."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ackcore.spark.base.errors import CheckpointForeign, StateError
from ackcore.spark.checkpoint.places import WITHIN
from ackcore.spark.dead_letters.checkpoints import Checkpoint, checkpoint_at, letters_at
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.topic import DeadLetterTopic
from ackcore.spark.stores.opening import is_bucket, place_of


def what_is_at(given: Path) -> str:
    """Return a message that a path is no checkpoint, with any checkpoint nearby."""
    if not given.exists():
        return f"{given} is not there"
    lacks = f"{given} has no ackcore/head.json in it"
    if (given / "head.json").exists():
        return f"{lacks}: it is within a checkpoint, {given.parent}"
    below = sorted(each.parents[1] for each in given.glob("*/ackcore/head.json"))
    if below:
        names = ", ".join(str(each) for each in below[:3])
        return f"{lacks}: below it there is {names}{', …' if len(below) > 3 else ''}"
    return lacks


def opened_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint at a path or URL.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    place = place_of(path, "checkpoint")
    found = checkpoint_at(place)
    if found is None:
        what = f"{place} has no ackcore/head.json" if is_bucket(place) else what_is_at(Path(place))
        raise FileNotFoundError(
            "checkpoint must be the directory that start() or run_batch() was given, and " + what
        )
    return found


def store_of(path: str | os.PathLike[str]) -> Letters:
    """Return the store at a path or URL, or the store of the checkpoint there.

    Raises
    ------
    FileNotFoundError
        If there is neither a store nor a checkpoint.
    TypeError
        If ``path`` is not a path.
    """
    if isinstance(path, DeadLetterTopic):
        raise TypeError(
            f"path must be the query's checkpoint, got {path!r}: the checkpoint also keeps the "
            "letters that are sent to the topic"
        )
    given = place_of(path, "path")
    store = letters_at(given)
    if store.owner() is not None:
        return store
    checkpoint = checkpoint_at(given)
    if checkpoint is None:
        if is_bucket(given):
            lacks = "there is neither an ackcore/head.json nor an index.json of ackcore's"
            raise FileNotFoundError(
                f"path must be a checkpoint or a store of dead letters, and in {given} {lacks}"
            )
        raise FileNotFoundError(
            f"path must be a checkpoint or a store of dead letters, and {what_is_at(Path(given))}"
        )
    return checkpoint.letters()


def checkpoint_of(store: Letters) -> Checkpoint:
    """Return the checkpoint of a store.

    Raises
    ------
    FileNotFoundError
        If the checkpoint is gone.
    CheckpointForeign
        If another checkpoint is in its place.
    """
    owner = store.owner()
    # A store in its checkpoint moves with the checkpoint: its recorded path may be old.
    around = store.url.removesuffix(WITHIN) if store.url.endswith(WITHIN) else None
    if owner is None:  # nothing was started since, and the store is the checkpoint's own
        owner = {"checkpoint": str(around), "deployment_key": None}
    found = None if around is None else checkpoint_at(around)
    if found is None:
        found = checkpoint_at(owner["checkpoint"])
    meta = None if found is None else found.meta()
    if found is None or meta is None:
        raise FileNotFoundError(
            f"the dead letters in {store.url} belong to the checkpoint {owner['checkpoint']}, "
            "which is not there any more; read them by dead_letters() and send them to the source "
            "again"
        )
    if owner["deployment_key"] not in (None, meta["deployment_key"]):
        raise CheckpointForeign(
            f"the dead letters in {store.url} belong to deployment {owner['deployment_key']}, and "
            f"{found.url} is now that of {meta['deployment_key']}; read them by dead_letters() and "
            "send them to the source again"
        )
    return found


def fields_of(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the column names of each spout of a checkpoint."""
    meta = checkpoint.meta()
    assert meta is not None
    spouts = meta["structure"]["spouts"]
    return {name: list(spout["fields"]) for name, spout in spouts.items()}


def check_spout(store: Letters, spout: str | None) -> None:
    """Raise ValueError if a spout neither has letters nor is in the topology."""
    known = {*store.spouts()}
    if spout is None or spout in known:
        return
    # Letters are readable without their checkpoint.
    with contextlib.suppress(FileNotFoundError, StateError):
        known.update(fields_of(checkpoint_of(store)))
    if known and spout not in known:
        raise ValueError(f"spout must be one of {', '.join(sorted(known))}, got {spout!r}")
