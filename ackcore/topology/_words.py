"""Suggestions of a probable spelling in errors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def near_miss(name: str, known: Sequence[str], what: str, prefix: str = "") -> str:
    """Return the hint that an error gives for an unknown name.

    The hint is ``did you mean 'word'?`` if a known name is similar; otherwise it lists all known
    names: ``the fields are 'n', 'word'``. A prefix that all names share is left out of the
    comparison, because it would make all names similar.
    """
    near = nearest(name, known, prefix)
    if near is not None:
        return f"did you mean {near!r}?"
    if not known:
        return f"there are no {what}"
    return f"the {what} are {listed(known)}"


def nearest(name: str, known: Sequence[str], prefix: str = "") -> str | None:
    """Return the known name that is most similar to an unknown one, or None."""
    rest = {one.removeprefix(prefix).lower(): one for one in known}
    near = difflib.get_close_matches(name.removeprefix(prefix).lower(), rest, n=1, cutoff=0.6)
    return rest[near[0]] if near else None


def numbered(problems: Sequence[str]) -> str:
    """Join several problems into one text with numbers; return a single problem unchanged."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"{at}. {problem}" for at, problem in enumerate(problems, 1)]
    return "\n".join([f"{len(lines)} problems:", *lines])


def listed(names: Sequence[str], most: int = 12) -> str:
    """Join names, in quotes, into one text; only the first ones if there are very many."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
