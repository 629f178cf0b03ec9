"""`SinkUnavailable`, and functions that remove secrets and values of rows from error texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NoReturn
from urllib.parse import unquote, unquote_plus

from ackcore._error_hints import REDACTED, without_secrets

_LONGEST = 500
#: Values of options that are no secrets, but occur as words in many errors.
_PLAIN = re.compile(r"\d{1,2}|[Tt]rue|[Ff]alse")
#: Terminal colours in deltalake's errors about a bucket.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: The login in an address. It has a colon: ``container`` in ``abfss://container@account`` is none.
_LOGIN = re.compile(r"(?<=://)[^/?#\s@]*:[^/?#\s@]*@")
#: The parameters of an address, which may include signatures and tokens.
_PARAMETERS = re.compile(r"(?<=\?)[^\s?<>]*=[^\s<>]*")
#: The key and the signature of a refused request in a server's answer.
_SIGNED = re.compile(
    r"(<(AWSAccessKeyId|Signature|StringToSign|CanonicalRequest)(\w*)>).*?(?=</\2\3>|$)", re.DOTALL
)

#: The SQLSTATE of a sequence that has reached its maximum. No row is at fault, and the message
#: quotes none.
SEQUENCE_ENDED = "2200H"
#: PostgreSQL's SQLSTATEs of values that do not fit, and of texts that a type cannot parse.
_OF_VALUES = ("22", "42601")
#: SQLSTATEs of values of regclass and similar types that name no object, but also of other errors.
_OF_NAMES = {"0A000", "3F000", "42602", "42704", "42725", "42883", "42P01"}
#: The line and the column of an error in a COPY, in the server's context; the value follows. The
#: context is in the server's language, and its words have other places in Japanese and Korean.
_COLUMN = re.compile(
    r"(?:COPY [^:\n]*?|[^:\n]*?のCOPY|[^:\n]*? 복사)"
    r"[,、][^,、:\n]*\d[^,、:\n]*[,、] ?([^:\n]+?)\s*:"
)


class SinkUnavailable(RuntimeError):
    """The target of a sink is unreachable, deleted or full, or refuses the login.

    The message names the sink and its target, without passwords, and suggests what to do.  At the
    start of a query the error is raised directly.  While a query runs, the sink is first retried;
    then the error is the cause of a `SinkError`.
    """


def unavailable(sink: str, where: str, said: str, way_out: str) -> SinkUnavailable:
    """Return a `SinkUnavailable` whose message has these parts.

    ``where``: the sink's target, such as ``table words at host=db dbname=shop``. ``said``: the
    cause, of which at most 500 characters are shown. ``way_out``: the advice to the user, without a
    full stop. The caller has removed secrets from all of them.
    """
    said = " ".join(_COLOURS.sub("", said).split())[:_LONGEST].rstrip(".")
    return SinkUnavailable(f"sink {sink!r}, {where}: {said}. {way_out}")


def raise_unavailable(
    sink: str, where: str, error: Exception, secrets: Iterable[object], way_out: str
) -> NoReturn:
    """Raise `SinkUnavailable` for a library's error, whose text may contain ``secrets``.

    The library's error becomes the ``__cause__``, unless its text shows a secret. The other
    arguments are those of `unavailable`.
    """
    text = f"{type(error).__name__}: {error}"
    said = redacted(text, secrets)
    raise unavailable(sink, where, said, way_out) from (error if said == text else None)


def redacted(text: str, secrets: Iterable[object]) -> str:
    """Return a text with ``[redacted]`` for secrets, logins, parameters and signatures.

    Each secret is replaced as given, and with its percent escapes decoded. Numbers of one or two
    digits, ``true`` and ``false`` are not replaced.
    """
    spelled = (spell(str(one)) for one in secrets for spell in (str, unquote, unquote_plus))
    text = without_secrets(text, [one for one in spelled if not _PLAIN.fullmatch(one)])
    text = _LOGIN.sub(f"{REDACTED}@", text)
    text = _PARAMETERS.sub(REDACTED, text)
    return _SIGNED.sub(rf"\1{REDACTED}", text)


def bare(address: str) -> str:
    """Return a URL without parameters and without a login that has a colon; a path unchanged."""
    if "://" not in address:
        return address
    scheme, slashes, place = address.partition("?")[0].rpartition("://")
    login, _, rest = place.rpartition("@")
    return scheme + slashes + (rest if ":" in login else place)


def secrets_of(address: str) -> list[str]:
    """Return the secrets in a URL: its password or "", and the values of its parameters."""
    place, _, parameters = address.partition("?")
    login = place.partition("://")[2].rpartition("@")[0]
    return [login.partition(":")[2], *re.findall("=([^&]+)", parameters)]


def names_no_object(state: str, context: str | None) -> bool:
    """Return whether a COPY failed because a value of regclass or a similar type names no object.

    ``state``, ``context``: the error's SQLSTATE and its context in PostgreSQL's answer.
    """
    return state in _OF_NAMES and _COLUMN.match(context or "") is not None


def shown_message(state: str, message: str, context: str | None) -> str:
    """Return the message of PostgreSQL's error without values of rows.

    ``state``, ``message``, ``context``: the error's SQLSTATE, message and context. If errors of
    this SQLSTATE show values, the result is the SQLSTATE, and the column if it is known.
    """
    is_of_value = state.startswith(_OF_VALUES) and state != SEQUENCE_ENDED
    if not (is_of_value or names_no_object(state, context)):
        return message
    column = _COLUMN.match(context or "")
    return f"SQLSTATE {state}" + (f" in {column[1]}" if column else "")
