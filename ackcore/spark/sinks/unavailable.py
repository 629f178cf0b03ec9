"""The error of a sink whose target cannot be reached, or does not let it in."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LONGEST = 500
_REDACTED = "[redacted]"
_SHORTEST = 4
#: Colours, of what deltalake says of a bucket.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: Of an address, a login; what has no colon is none: ``abfss://container@account`` is a place.
_LOGIN = re.compile(r"(?<=://)[^/?#\s@]*:[^/?#\s@]*@")
#: Its parameters, signatures and tokens among them.
_PARAMETERS = re.compile(r"(?<=\?)[^\s?<>]*=[^\s<>]*")
#: What a server says of a request that it refuses: whose it was, and how it was signed.
_SIGNED = re.compile(
    r"(<(AWSAccessKeyId|Signature|StringToSign|CanonicalRequest)(\w*)>).*?(?=</\2\3>|$)", re.DOTALL
)


class SinkUnavailable(RuntimeError):
    """The target of a sink cannot be used: it is away, gone, full, or refuses the login.

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
    """Return a text without secrets, and without logins, parameters and signatures in it.

    The longest secret first: a short one may be part of it.
    """
    found = {str(one) for one in secrets if len(str(one)) >= _SHORTEST}
    for secret in sorted(found - {"true", "false", "True", "False"}, key=len, reverse=True):
        text = text.replace(secret, _REDACTED)
    text = _LOGIN.sub(f"{_REDACTED}@", text)
    text = _PARAMETERS.sub(_REDACTED, text)
    return _SIGNED.sub(rf"\1{_REDACTED}", text)


def bare(address: str) -> str:
    """Return an address without a login and parameters; the path of a file has none."""
    if "://" not in address:
        return address
    scheme, slashes, place = address.partition("?")[0].rpartition("://")
    login, _, rest = place.rpartition("@")
    return scheme + slashes + (rest if ":" in login else place)


def secrets_of(address: str) -> list[str]:
    """Return what of an address no error may show: its password, and its parameters' values."""
    place, _, parameters = address.partition("?")
    login = place.partition("://")[2].rpartition("@")[0]
    return [login.partition(":")[2], *re.findall("=([^&]+)", parameters)]
