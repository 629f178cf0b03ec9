"""The store of a user's path or URL.

HDFS counts as a bucket: its checkpoints have the same objects as those in buckets.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ackcore.spark.base.paths import local_path
from ackcore.spark.stores.hdfs import HdfsStore
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.objects import ObjectStore

#: Schemes of buckets, and their names in obstore; ``s3a`` is Hadoop's name. HDFS has its own store.
_BUCKETS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "az": "az",
    "abfs": "abfss",
    "abfss": "abfss",
    "hdfs": "hdfs",
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
#: Mistyped URLs of buckets; `pathlib.Path` removes a slash from correct ones.
_NEARLY = re.compile(r"(s3a?|gs|az|abfss?|hdfs)(?::/?|//)")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]{1,5})?")
_AZURE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*@[A-Za-z0-9][A-Za-z0-9.-]*")
#: Control characters, and bytes of a file name that are not UTF-8.
_NOT_TEXT = re.compile(r"[\0-\x1f\x7f\ud800-\udfff]")
#: Parts of a URL that deltalake decodes or drops.
_DECODED = re.compile(r"%[0-9A-Fa-f]{2}|[?#\0-\x1f\x7f]")


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the URL of a bucket or of HDFS, and not a path of a file system."""
    text = os.fspath(path)
    found = _URL.match(text) if isinstance(text, str) else None
    return found is not None and found[1].lower() in _BUCKETS


def store_url(url: str, argument: str) -> str:
    """Return a bucket's URL with ``s3`` for ``s3a``, ``abfss`` for ``abfs``, and single slashes.

    Raises ValueError if ``url`` is not the URL of a bucket, may hold a secret, or names no path in
    the bucket. Also raises it for a path with ``.``, ``..`` or control characters. ``argument``:
    the name of the user's argument, for the message.
    """
    found = _URL.match(url)
    if found is None or found[1].lower() not in _BUCKETS:
        schemes = ", ".join(f"{scheme}://" for scheme in _BUCKETS)
        # The message omits the URL: it may be signed.
        raise ValueError(f"{argument} must be a path, or begin with one of {schemes}")
    scheme = _BUCKETS[found[1].lower()]
    host, _, path = found[2].partition("/")
    pattern = {"abfss": _AZURE, "hdfs": _NAME_NODE}.get(scheme, _HOST)
    what, example = {
        "abfss": ("bucket", "container@account.dfs.core.windows.net"),
        "hdfs": ("NameNode or nameservice", "namenode:8020"),
    }.get(scheme, ("bucket", "bucket"))
    form = f"{scheme}://{example}"
    if not host:
        raise ValueError(f"{argument} must name a {what} and a path in it, as {form}/path")
    if "?" in url or "#" in url or pattern.fullmatch(host) is None:
        raise ValueError(
            f"{argument} must be {form}/path without user, password, '?' or '#': credentials are "
            "taken from the environment of driver and workers, and never from a URL"
        )
    parts = [part for part in path.split("/") if part]
    if not parts or any(part in (".", "..") for part in parts) or _NOT_TEXT.search(path):
        raise ValueError(
            f"{argument} must name a path in the {what}, as {scheme}://{host}/path, without '.' "
            f"and '..', and without control characters, got {url!r}"
        )
    return f"{scheme}://{host}/{'/'.join(parts)}"


def check_delta_url(path: str) -> None:
    """Raise ValueError if deltalake takes a bucket's URL for another place than ackcore and Spark.

    deltalake decodes ``%20`` in it, and drops what follows a ``?`` or ``#``.
    """
    if is_bucket(path) and (found := _DECODED.search(path)):
        raise ValueError(
            f"path must be a URL without percent escapes, '?', '#' and control characters, got "
            f"{found[0]!r} in it: deltalake would write or read another place than Spark. Write a "
            "space as it is, and rename a place whose name has such characters"
        )


def place_of(path: str | os.PathLike[str], argument: str) -> str:
    """Return an absolute path, or a bucket's URL with the scheme and slashes of `store_url`.

    Raises ValueError or TypeError if ``path`` is neither a path nor the URL of a bucket.
    """
    if isinstance(path, str) and is_bucket(path):
        return store_url(path, argument)
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    near = _NEARLY.match(text) if isinstance(text, str) else None
    if near is not None:
        raise ValueError(
            f"{argument} must be a str that begins with {near[1]}:// to name a bucket, or a path "
            f"that begins with ./{near[1]} to name a directory; it begins with {near[0]}"
        )
    return str(local_path(path, argument))


def store_at(url: str) -> ObjectStore | HdfsStore:
    """Return the store at a URL from `store_url`, or at the root of a bucket or of HDFS."""
    return HdfsStore(url) if url.startswith("hdfs:") else ObjectStore(url)


def open_store(path: str | os.PathLike[str], argument: str) -> Store:
    """Return the store of a path or of a bucket's URL. This sends no request yet.

    Raises ValueError or TypeError if ``path`` is neither a path nor the URL of a bucket.
    """
    place = place_of(path, argument)
    return store_at(place) if is_bucket(place) else LocalStore(Path(place))
