"""The error of a sink whose target cannot be reached, or does not let it in."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LONGEST = 500
_REDACTED = "[redacted]"
_SHORTEST = 4
#: Colours, of what deltalake says of a bucket.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class SinkUnavailable(RuntimeError):
    """What a sink writes into cannot be used: it is away, gone, full, or does not let the user in.

    The message names the sink and what it writes into, without passwords, and says what may help.
    At the start of a query it is raised as it is; while one runs the sink is tried again first, and
    then it is the cause of a `SinkError`.
    """


def unavailable(sink: str, where: str, said: str, way_out: str) -> SinkUnavailable:
    """Make the error.

    Parameters
    ----------
    sink : str
        The sink's name.
    where : str
        What it writes into, without secrets: ``table words at host=db dbname=shop``.
    said : str
        What went wrong, without secrets.
    way_out : str
        What may help; ends without a full stop.
    """
    said = " ".join(_COLOURS.sub("", said).split())[:_LONGEST].rstrip(".")
    return SinkUnavailable(f"sink {sink!r}, {where}: {said}. {way_out}")


def redacted(text: str, secrets: Iterable[object]) -> str:
    """Return a text without secrets, the longest first: a short one may be part of it."""
    found = {str(one) for one in secrets if len(str(one)) >= _SHORTEST}
    for secret in sorted(found - {"true", "false", "True", "False"}, key=len, reverse=True):
        text = text.replace(secret, _REDACTED)
    return text
