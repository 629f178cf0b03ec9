"""Where the dead letters of a checkpoint are, and to which checkpoint a store belongs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ackcore.spark.base.checksummed import read_record
from ackcore.spark.base.errors import CheckpointForeign, StateError
from ackcore.spark.base.paths import local_path
from ackcore.spark.dead_letters.files import known_spouts
from ackcore.spark.dead_letters.topic import DeadLetterTopic

OWNER, POINTER = ".owner.json", "dead_letters.json"


def remembered(root: Path) -> Path:
    """Return where a checkpoint's store is."""
    pointer = read_record(root / POINTER, POINTER)
    return root / "dead_letters" if pointer is None else Path(pointer["path"])


def what_is_at(given: Path) -> str:
    """Say what is wrong with a path that is no checkpoint, and where one is, if it is near."""
    if not given.exists():
        return f"{given} is not there"
    lacks = f"{given} has no ackcore/meta.json in it"
    if (given / "meta.json").is_file():
        return f"{lacks}: it is within a checkpoint, {given.parent}"
    below = sorted(each.parents[1] for each in given.glob("*/ackcore/meta.json"))
    if below:
        names = ", ".join(str(each) for each in below[:3])
        return f"{lacks}: below it there is {names}{', …' if len(below) > 3 else ''}"
    return lacks


def store_of(path: str | os.PathLike[str]) -> Path:
    """Return the store that a path means: the path, or the one of that checkpoint.

    Raises
    ------
    FileNotFoundError
        If it is neither.
    TypeError
        If it is no path.
    """
    if isinstance(path, DeadLetterTopic):
        raise TypeError(
            f"path must be the checkpoint, got {path!r}: the letters of a topic are kept in the "
            "store of their checkpoint, too"
        )
    given = local_path(path, "path")
    if (given / OWNER).is_file():
        return given
    if not (given / "ackcore" / "meta.json").is_file():
        raise FileNotFoundError(
            f"path must be a checkpoint or a store of dead letters, with an {OWNER}, and "
            f"{what_is_at(given)}"
        )
    return remembered(given / "ackcore")


def checkpoint_of(store: Path) -> tuple[Path, dict[str, list[str]]]:
    """Return the checkpoint (its ``ackcore``) of a store, and the columns' names of its spouts.

    Raises
    ------
    FileNotFoundError
        If it is gone.
    CheckpointForeign
        If another one is in its place.
    """
    owner = read_record(store / OWNER, OWNER)
    root = store.parent
    if owner is None:  # nothing was started since, and the store is the checkpoint's own
        owner = {"checkpoint": str(root.parent), "deployment_key": None}
    if not (root.name == "ackcore" and (root / "meta.json").is_file()):
        root = Path(owner["checkpoint"]) / "ackcore"
    meta = read_record(root / "meta.json", "meta.json")
    if meta is None:
        raise FileNotFoundError(
            f"the dead letters in {store} belong to the checkpoint {owner['checkpoint']}, which is "
            "not there any more; read them by dead_letters() and send them to the source again"
        )
    if owner["deployment_key"] not in (None, meta["deployment_key"]):
        raise CheckpointForeign(
            f"the dead letters in {store} belong to deployment {owner['deployment_key']}, and "
            f"{root} is now that of {meta['deployment_key']}; read them by dead_letters() and "
            "send them to the source again"
        )
    spouts = meta["structure"]["spouts"]
    return root, {name: list(spout["fields"]) for name, spout in spouts.items()}


def check_spout(store: Path, spout: str | None) -> None:
    """Raise ValueError if a spout is neither in the topology nor has letters."""
    known = {*known_spouts(store)}
    if spout is None or spout in known:
        return
    # The letters can be read without their checkpoint.
    with contextlib.suppress(FileNotFoundError, StateError):
        known.update(checkpoint_of(store)[1])
    if known and spout not in known:
        raise ValueError(f"spout must be one of {', '.join(sorted(known))}, got {spout!r}")
