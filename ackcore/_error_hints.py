"""Parts of errors: numbers with nouns, suggestions of names and arguments, and hidden secrets."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from numbers import Real
from types import FunctionType
from typing import Any, TypeVar

_Public = TypeVar("_Public", bound=Callable[..., Any])
#: The functions that `naming_arguments` has made.
_PUBLIC: set[Callable[..., Any]] = set()

#: The seconds of a unit, by the first letters of its name; 0 for months, whose length varies.
_UNITS = {"ms": 0.001, "mil": 0.001, "s": 1, "m": 60, "mo": 0, "h": 3600, "d": 86_400, "w": 604_800}

#: The number of names that an error lists.
_MOST_NAMES = 12


class Unquoted(str):
    """A text for KeyError, whose str() is the repr of its argument: this repr has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def near_miss(name: str, known: Sequence[str], what: str, prefix: str = "") -> str:
    """Return the hint that an error gives for an unknown name.

    The hint is ``did you mean 'word'?`` if a known name is similar; otherwise it lists the known
    names, at most 12: ``the fields are 'n', 'word'``; or it is ``there are no fields``. ``what``:
    the noun of the names, such as "fields". ``prefix``: a text with which all names begin. It is
    left out of the comparison, because it would make all names similar.
    """
    near = nearest(name, known, prefix)
    if near is not None:
        return f"did you mean {near!r}?"
    if not known:
        return f"there are no {what}"
    return f"the {what} are {listed(known)}"


def nearest(name: str, known: Sequence[str], prefix: str = "") -> str | None:
    """Return the known name that is most similar to an unknown one, or None if none is similar.

    The comparison ignores case. ``prefix``: a text that is left out at the start of the names.
    """
    rest = {one.removeprefix(prefix).lower(): one for one in known}
    near = difflib.get_close_matches(name.removeprefix(prefix).lower(), rest, n=1, cutoff=0.6)
    return rest[near[0]] if near else None


def numbered(problems: Sequence[str]) -> str:
    """Join several problems into one text, a numbered line each; return a single one unchanged."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"{at}. {problem}" for at, problem in enumerate(problems, 1)]
    return "\n".join([f"{len(lines)} problems:", *lines])


def listed(names: Sequence[str]) -> str:
    """Join names, in quotes, into one text; of more than 12, the first 12 and "and 3 more"."""
    shown = ", ".join(repr(name) for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


#: Shorter secrets are replaced only where they are no part of a word.
_SHORT = 6
#: The text in place of a secret.
REDACTED = "[redacted]"


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return a text with "[redacted]" for each secret.

    A secret of less than six characters is often part of other words, and is replaced only where
    no letter, digit or underscore adjoins it. So it is replaced as a value, as in
    ``password=me`` and ``user:me@host``.
    """
    # The longest first: a short one may be part of it.
    for secret in sorted({*secrets} - {""}, key=len, reverse=True):
        if len(secret) >= _SHORT:
            text = text.replace(secret, REDACTED)
            continue
        # An escape, such as the n of a quoted line break, is no part of the word after it.
        alone = rf"(?:(?<!\w)|(?<=\\[nrt])){re.escape(secret)}(?!\w)"
        text = re.sub(alone, REDACTED, text)
    return text


@contextlib.contextmanager
def naming_extra(user: str, package: str, extra: str, where: str = "") -> Iterator[None]:
    """A context that raises ImportError, with ackcore's extra, if its body lacks a package.

    Other errors of the body pass. ``user``: the object that needs the package, for the error.
    ``where``: the end of the error.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package.replace("-", "_"):
            raise  # the package itself lacks another one
        raise ImportError(
            f"{user} needs {package}, which is not installed: pip install 'ackcore[{extra}]'{where}"
        ) from None


def text_of_error(error: BaseException) -> str:
    """Return ``str(error)``, or a note if that raises; its ``__str__`` may be user code.

    Lone surrogates, which are not valid in UTF-8, become question marks.
    """
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as broken:
        text = f"the exception has no text: __str__ raised {type(broken).__name__}"
    return without_surrogates(text)


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which are not valid in UTF-8, with question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def counted(n: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun, such as "1 row" or "2,000 rows".

    ``many``: the plural, if it is not ``one`` with an "s".
    """
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


def as_seconds(value: Any, name: str, least: float, most: float, way_out: str = "") -> float:
    """Return ``value``, a number of seconds in ``least..most``, as an int or a float.

    Raises TypeError if it is no real number; for a time in another form, such as ``"1 hour"``, the
    error suggests the number. Raises ValueError if it is out of range; that error ends with
    ``way_out``. ``name``: the argument's name, for both errors.
    """
    seconds = as_float(value)
    if seconds is None:
        raise TypeError(
            f"{name} must be a number of seconds, got {type(value).__name__} {value!r:.200}"
            f"{seconds_hint(value)}"
        )
    if not least <= seconds <= most:
        raise ValueError(
            f"{name} must be from {least} to {most:,} seconds, got {value!r}"
            + (f"; {way_out}" if way_out else "")
        )
    return value if type(value) is int else seconds


def as_float(value: Any) -> float | None:
    """Return a real number as a float; None for a bool or another object.

    A number too large for a float becomes infinity; a signaling NaN becomes NaN.
    """
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        return None
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
    except ValueError:  # a signaling NaN
        return math.nan


def seconds_hint(value: Any) -> str:
    """Return ``"; write 3600"`` for ``"1 hour"``, ``"3600"`` or ``timedelta(hours=1)``.

    Returns "" for other values, and for units shorter than a millisecond or longer than a week.
    """
    if isinstance(value, timedelta):
        return f"; write {value.total_seconds():.15g}"
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if not isinstance(value, str) or found is None:
        return ""
    unit = found[2] or "s"
    size = next((_UNITS[unit[:n]] for n in (3, 2, 1) if unit[:n] in _UNITS), 0)
    return f"; write {float(found[1]) * size:.15g}" if size else ""


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Return a function's signature; raise TypeError or ValueError if it has none.

    Python 3.14 evaluates annotations for it. Names that do not exist, such as imports for type
    checkers only, become ForwardRef objects.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format  # noqa: PLC0415

        return inspect.signature(
            function, follow_wrapped=follow_wrapped, annotation_format=Format.FORWARDREF
        )
    return inspect.signature(function, follow_wrapped=follow_wrapped)


def refused_call(function: Callable[..., object], arguments: Sequence[str]) -> str | None:
    """Return None if a function accepts this number of positional arguments, else its signature.

    ``arguments``: a text for each argument; only their number matters. Does not call the function.
    A function whose signature Python cannot read is assumed to accept them. The signature is a text
    without annotations, such as ``"(record, *, limit=3)"``.
    """
    try:
        # Do not follow a wrapper: it may accept fewer arguments and add others.
        signature = signature_of(function, follow_wrapped=False)
    except (TypeError, ValueError):  # many builtins have no signature
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        return str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return None


def refuse_uncalled(given: object, argument: str) -> None:
    """Raise TypeError for a class, or a function of ackcore, that was given in place of its result.

    A user's function that wraps one of ackcore's passes. ``argument``: its name, for the error.
    """
    if isinstance(given, type) or (isinstance(given, FunctionType) and given in _PUBLIC):
        kind = "class" if isinstance(given, type) else "function"
        raise TypeError(
            f"{argument} is the {kind} {given.__name__} itself; pass {given.__name__}(...)"
        )


def naming_arguments(public: _Public) -> _Public:
    """Decorate a public function, or all public methods of a class and its constructor.

    A call with an unknown keyword, or with too many arguments without one, then raises a TypeError
    that names the right arguments, and the class of the object if it inherits its constructor. A
    class is changed in place. Its class methods, and functions with ``**`` arguments, stay as they
    are.
    """
    if isinstance(public, type):
        for name, method in list(vars(public).items()):
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                setattr(public, name, naming_arguments(method))
        return public
    signature = inspect.signature(public)
    parameters = signature.parameters.values()
    own = [each for each in parameters if each.name != "self"]
    names = [each.name for each in own if each.kind is not each.VAR_POSITIONAL]
    ordered = [each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
    if any(each.kind is each.VAR_KEYWORD for each in own):
        return public
    most = len(ordered) + len(parameters) - len(own)
    if len(names) < len(own):
        most = sys.maxsize

    def title(args: tuple[Any, ...]) -> str:
        made = type(args[0]) if args else object
        name = made.__qualname__ if made.__init__ is checked else public.__qualname__
        return name.removesuffix(".__init__")

    @functools.wraps(public)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in names:
                hint = near_miss(name, names, "arguments")
                raise TypeError(f"{title(args)}() has no argument {name!r}; {hint}")
        if len(args) > most:
            others = names[len(ordered) :]
            way_out = f"pass it as a keyword: {', '.join(others)}" if others else "remove it"
            raise TypeError(
                f"{title(args)}() takes {listed(ordered) or 'no argument'} without a keyword, got "
                f"{args[most]!r:.200} as well; {way_out}"
            )
        return public(*args, **keywords)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    _PUBLIC.add(checked)
    return checked  # type: ignore[return-value]
