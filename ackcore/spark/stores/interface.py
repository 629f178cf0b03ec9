"""The interface of a store: objects by key, each whole or absent, and conditional puts.

A *key* is a relative path with slashes, ``batches/7.plan``.  A store promises:

* An object is seen whole or not at all, and by everyone from the moment that its put returned.
* Of several puts with one condition at most one comes about.  The condition is looked at when the
  object gets its name, not before: a driver that slept for an hour in between is refused.
* A put whose answer was lost is found out: it returns if what is there is byte for byte what was to
  be put, and raises `StoreConflict` if not.  So who must know whether it was *his* put that came
  about writes something random into what he puts.
* A `list` may lag: it may lack what was just put, and hold what was just deleted.  Nothing may
  depend on what one lacks, or has still.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from ackcore.spark.base.errors import StateError

#: Names that stores on file systems need for themselves.
_OWN = re.compile(r"\..+\.tmp|\d{12}\.version")


class StoreConflict(StateError):
    """The condition of a put does not hold: another wrote there first."""


class StoreUnavailable(StateError):
    """A store did not answer, or answered with an error of its own, however often it was asked."""


class Stored(NamedTuple):
    """An object's bytes, and the version that a put can depend on: opaque, and never again."""

    data: bytes
    version: str


class Entry(NamedTuple):
    """An object in a list."""

    key: str
    size: int


@runtime_checkable
class Store(Protocol):
    """Objects by key.  It may be pickled and used by several threads, and knows no credentials.

    Attributes
    ----------
    url : str
        Where it is, as a user may read it.

    All methods raise `StateError` if the store does not let it be done, `StoreUnavailable` if it
    cannot be reached, and ValueError for a key that is none.
    """

    url: str

    def get(self, key: str) -> Stored | None:
        """Return an object, None if there is none."""

    def read(self, key: str) -> pa.Buffer | None:
        """Return an object of any size, in place or mapped where it can be; None if none is there.

        Nothing is checked: whoever names an object names its checksum with it.  It begins where
        Arrow has columns begin, so those of an IPC file are aligned.
        """

    def read_range(self, key: str, start: int, length: int) -> pa.Buffer | None:
        """Return ``length`` bytes from ``start`` on, fewer at the end; None if none is there."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Write an object, and return its version.

        Parameters
        ----------
        key : str
            Its key.
        data : bytes
            Its content.
        if_absent : bool, default False
            Only if there is none.

        Raises
        ------
        StoreConflict
            If the condition does not hold, and what is there is not ``data``.
        """

    def replace(self, key: str, data: bytes, version: str | None) -> str:
        """Write an object in the place of one version of it, and return the new version.

        An object that is written by `replace` once is written by nothing else.

        Parameters
        ----------
        key : str
            Its key.
        data : bytes
            Its content.
        version : str or None
            The version that is there, as `get` or `replace` returned it; None if there is none.

        Raises
        ------
        StoreConflict
            If another version is there, and it is not ``data``.
        """

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> None:
        """Write an object of any size from a local file, which is gone afterwards.

        Parameters
        ----------
        key : str
            Its key.
        path : Path
            The file.
        if_absent : bool, default False
            Only if there is none, as `put` does.  Of a file of more than 64 MiB this is looked at
            before the object gets its name, and not when it gets it.

        Raises
        ------
        StoreConflict
            If there is one, and it is not what is in the file, or is larger than that.
        """

    def list(self, prefix: str = "") -> list[Entry]:
        """Return the objects whose keys begin with ``prefix/``, sorted; all if it is empty."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are passed over."""


def checked_key(key: str) -> str:
    """Return a key.

    Raises
    ------
    ValueError
        If it is none.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(
            f"key must be a relative path without empty parts, '.' or '..', got {key!r}"
        )
    if any(_OWN.fullmatch(part) for part in parts):
        raise ValueError(
            f"key must not have a part like '.name.tmp' or '000000000001.version', got {key!r}"
        )
    return key
