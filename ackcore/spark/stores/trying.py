"""Checks that a bucket keeps the promises of `Store`, by means of two temporary objects."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ackcore.spark.stores.interface import Store, StoreConflict
from ackcore.spark.stores.opening import open_store

#: Number of timed round trips.
_TIMES = 5
#: Number of threads that replace one version at once.
_AT_ONCE = 8


def tried(url: str) -> Iterator[tuple[str, bool, str]]:
    """Check a bucket or HDFS with two objects below ``ackcore-doctor/``, deleted at the end.

    Yield for each check its name, whether the store passed it, and a text about the result.

    Raises ValueError if ``url`` is not valid. Raises StateError if the bucket cannot be read or
    written at all. A path of a file system is checked, too, although its store needs no check.

    ``url``: the URL of a checkpoint, which need not exist yet.
    """
    store = open_store(url, "checkpoint")
    key = f"ackcore-doctor/{secrets.token_hex(8)}"
    version = store.replace(key, b"1", None)
    try:
        yield (
            "read and write",
            _read(store, key) == b"1",
            f"{store.url}: a written object is read back",
        )
        store.put(f"{key}.once", b"1", if_absent=True)
        once = _refused(lambda: store.put(f"{key}.once", b"2", if_absent=True))
        yield "put if absent", *once
        after = store.replace(key, b"3", version)
        stale = _refused(lambda: store.replace(key, b"4", version))
        if stale[0] and (after == version or _read(store, key) != b"3"):
            stale = (
                False,
                "a refused put replaced the object, or a replaced object kept its version",
            )
        yield "replace if unchanged", *stale
        yield "one of many at once", *_raced(store, key, after)
        listed = key in [entry.key for entry in store.list("ackcore-doctor")]
        lag = "a list has a new object" if listed else "a list lacks a new object, which is allowed"
        yield "list", True, lag
        began = time.monotonic()
        for _ in range(_TIMES):
            store.get(key)
        each_ms = (time.monotonic() - began) * 1000 / _TIMES
        yield "round trip", True, f"{each_ms:.0f} ms; a micro-batch takes about ten"
    finally:
        store.delete([key, f"{key}.once"])


def _raced(store: Store, key: str, version: str) -> tuple[bool, str]:
    """Replace one version from several threads at once.

    Return whether exactly one succeeded, and a text about the result.
    """

    def replaced(n: int) -> bool:
        return not _refused(lambda: store.replace(key, b"%d at once" % n, version))[0]

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        done = sum(pool.map(replaced, range(_AT_ONCE)))
    if done == 1:
        return True, f"of {_AT_ONCE} concurrent replacements one succeeded"
    return False, f"of {_AT_ONCE} concurrent replacements {done} succeeded, instead of one"


def _read(store: Store, key: str) -> bytes | None:
    found = store.get(key)
    return None if found is None else found.data


def _refused(put: Callable[[], object]) -> tuple[bool, str]:
    try:
        put()
    except StoreConflict:
        return True, "refused after another write"
    return False, "not refused, though the condition did not hold"
