"""The error for an argument that a function does not have."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches


def unknown_argument(
    function: str, given: Mapping[str, object], known: Mapping[str, str]
) -> TypeError:
    """Return the error for the first of some arguments that a function does not have.

    ``known``: the meaning of each argument that it has, with its unit.
    """
    name, value = next(iter(given.items()))
    near = get_close_matches(name.lower(), known, n=1) or list(known)
    hint = "; did you mean" if len(near) == 1 else "; its arguments are"
    names = ", ".join(f"{one}=... ({known[one]})" for one in near)
    end = "?" if len(near) == 1 else ""
    return TypeError(f"{function}() has no argument {name!r}, got {value!r}{hint} {names}{end}")
