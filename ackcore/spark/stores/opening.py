"""The store of a user's path or URL."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ackcore.spark.base.paths import local_path
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.objects import ObjectStore

#: Schemes of buckets, and their names in obstore; ``s3a`` is Hadoop's name.
_BUCKETS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "az": "az",
    "abfs": "abfss",
    "abfss": "abfss",
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
#: Mistyped URLs of buckets; `pathlib.Path` removes a slash from correct ones.
_NEARLY = re.compile(r"(s3a?|gs|az|abfss?)(?::/?|//)")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_AZURE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*@[A-Za-z0-9][A-Za-z0-9.-]*")


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the URL of a bucket, and not a path of a file system."""
    text = os.fspath(path)
    found = _URL.match(text) if isinstance(text, str) else None
    return found is not None and found[1].lower() in _BUCKETS


def store_url(url: str, argument: str) -> str:
    """Return a bucket's URL in its normal form, which records and messages use.

    Raises
    ------
    ValueError
        If ``url`` is not the URL of a bucket, names no place in a bucket, or holds a possible
        secret.
    """
    found = _URL.match(url)
    if found is None or found[1].lower() not in _BUCKETS:
        schemes = ", ".join(f"{scheme}://" for scheme in _BUCKETS)
        # The message omits the URL: it may be signed.
        raise ValueError(f"{argument} must be a path, or begin with one of {schemes}")
    scheme = _BUCKETS[found[1].lower()]
    host, _, path = found[2].partition("/")
    pattern = _AZURE if scheme == "abfss" else _HOST
    bucket = "container@account.dfs.core.windows.net" if scheme == "abfss" else "bucket"
    form = f"{scheme}://{bucket}"
    if not host:
        raise ValueError(f"{argument} must name a bucket, and a place in it, as {form}/path")
    if "?" in url or "#" in url or pattern.fullmatch(host) is None:
        raise ValueError(
            f"{argument} must be {form}/path without user, password, '?' or '#': credentials are "
            "taken from the environment of driver and workers, and never from a URL"
        )
    parts = [part for part in path.split("/") if part]
    if not parts or any(part in (".", "..") or "\0" in part for part in parts):
        raise ValueError(
            f"{argument} must name a place in the bucket, as {scheme}://{host}/path, and without "
            f"'.' and '..', got {url!r}"
        )
    return f"{scheme}://{host}/{'/'.join(parts)}"


def place_of(path: str | os.PathLike[str], argument: str) -> str:
    """Return an absolute path, or a bucket's URL in its normal form.

    Raises
    ------
    ValueError, TypeError
        If ``path`` is neither a path nor the URL of a bucket.
    """
    if isinstance(path, str) and is_bucket(path):
        return store_url(path, argument)
    return str(_local(path, argument))


def open_store(path: str | os.PathLike[str], argument: str) -> Store:
    """Return the store of a path or of a bucket's URL. This sends no request yet.

    Raises
    ------
    ValueError, TypeError
        If ``path`` is neither a path nor the URL of a bucket.
    """
    if isinstance(path, str) and is_bucket(path):
        return ObjectStore(store_url(path, argument))
    return LocalStore(_local(path, argument))


def _local(path: str | os.PathLike[str], argument: str) -> Path:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    near = _NEARLY.match(text) if isinstance(text, str) else None
    if near is not None:
        raise ValueError(
            f"{argument} must be a str that begins with {near[1]}:// to name a bucket, or a path "
            f"that begins with ./{near[1]} to name a directory; it begins with {near[0]}"
        )
    return local_path(path, argument)
