"""Checks of paths from the user, and the numbered files of a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeAlias

#: A path of a file system or, where documented, the URL of an object or a prefix in a bucket.
Place: TypeAlias = str | os.PathLike[str]


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """Return a user's path or ``file:`` URI as an absolute path, whether or not it exists.

    Raises ValueError if it is empty, has a NUL or a host, has letters that the locale lacks, or is
    a URI with another scheme. Raises TypeError if it is not a path. ``argument``: the name of the
    user's argument, for messages.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a str or a path, got {type(path).__name__}")
    text = os.fspath(path)
    if not text or "\0" in text:
        raise ValueError(
            f"{argument} must be a path that is not empty and has no NUL, got {text!r}"
        )
    scheme, colon, rest = text.partition(":")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", scheme):
        # Only the scheme is shown: the rest may contain a signature or a password.
        if scheme.lower() != "file":
            raise ValueError(
                f"{argument} must be a path on a local or shared file system, got a URL "
                f"({scheme}:): ackcore renames and syncs files there, which such stores do not "
                "support. Give a mounted directory; a sink that is a function of (DataFrame, "
                "batch id) can write to any store"
            )
        if rest.startswith("//") and not rest.startswith("///"):
            raise ValueError(
                f"{argument} must name no host, got a file: URI with one: ackcore uses files of "
                "this machine and its mounts only; write file:///path"
            )
        text = rest[2:] if rest.startswith("//") else rest
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{argument} is {text!r}, and Python cannot write {text[error.start]!r} in paths: "
            f"their encoding is {error.encoding}, by the locale. Start Python with "
            "LC_ALL=C.UTF-8, or choose another path"
        ) from None
    return Path(os.path.abspath(text))


def below(place: str, outer: str) -> str | None:
    """Return the path of a place below ``outer``, or None if ``outer`` does not contain it.

    The path of ``outer`` itself is "". Both are absolute paths, or URLs without double slashes.
    """
    root = f"{outer.rstrip('/')}/"
    return place[len(root) :] if f"{place}/".startswith(root) else None


def is_hidden(path: str) -> bool:
    """Return whether Spark and `FileSpout` ignore a relative path: a part begins with . or _."""
    return any(part[:1] in (".", "_") for part in path.split("/") if part)


def file_system(path: str) -> str:
    """Return the type of a path's file system on Linux, such as "ext4"; "" if it is unknown."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found, longest = "", -1
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)
        # The last of several mounts at one place hides the others.
        if len(point) >= longest and (point == "/" or f"{path}/".startswith(f"{point}/")):
            found, longest = kind, len(point)
    return found


def numbered(directory: Path, suffix: str = "") -> list[int]:
    """Return the sorted numbers of the files ``<number><suffix>``; [] without the directory.

    Other names are left out.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    stems = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return sorted(int(stem) for stem in stems if re.fullmatch(r"0|[1-9][0-9]{0,18}", stem))
