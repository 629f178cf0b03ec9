"""The differences between two structures of topologies (`Parts.structure`), as texts for users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ackcore.tables.aggregates import MADE_BY
from ackcore.tables.time_windows import Window
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.parts import DEDUP


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a text for each component, sink and table that is new, gone or differs.

    ``old``, ``new``: `Parts.structure`, possibly read from JSON. Texts are for example ``"bolt
    'count' is new"``, ``"spout 'lines' differs in its fields: ['line'] before, ['line', 'at']
    now"``.
    """
    found = []
    for kind in ("spouts", "bolts", "sinks", "tables"):
        before, after = old.get(kind, {}), new.get(kind, {})
        for name in sorted({*before, *after}):
            subject = f"{kind[:-1]} {name!r}"
            words = _WORDS
            if name.endswith(DEDUP):
                subject = f"dedup of spout {name.removesuffix(DEDUP)!r}"
                words = {**words, "ttl_s": "within_s"}
            if name not in after:
                found.append(f"{subject} is gone")
            elif name not in before:
                found.append(f"{subject} is new")
            elif before[name] != after[name]:
                found.append(f"{subject} {_difference(kind, before[name], after[name], words)}")
    return tuple(dict.fromkeys(found))  # dedup is both a bolt and a table


def _difference(kind: str, before: Any, after: Any, words: Mapping[str, str]) -> str:
    if kind == "sinks":
        return f"reads another stream: {'/'.join(after)}, not {'/'.join(before)}"
    keys = [key for key in {**after, **before} if before.get(key) != after.get(key)]
    names = " and ".join(words.get(key, key) for key in keys)
    values = "; ".join(_VALUES.get(key, _values)(before.get(key), after.get(key)) for key in keys)
    return f"differs in its {names}: {values}"


def _values(was: Any, now: Any) -> str:
    return f"{was} before, {now} now"


def _by_name(show: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    """Return a function that describes the differences of an old and a new mapping.

    ``show``: describes the old and the new value of a key that both have.
    """

    def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        found = [f"{name!r} is gone" for name in was if name not in now]
        found += [f"{name!r} is new" for name in now if name not in was]
        both = [name for name in was if name in now and was[name] != now[name]]
        return ", ".join(found + [f"{name!r} {show(was[name], now[name])}" for name in both])

    return differences


def _items(show: Callable[..., str]) -> Callable[[Any, Any], str]:
    """Return a function that describes an old and a new list by the items that only one has.

    If there are none, because only the order differs, it describes all. ``show``: describes an
    item, whose parts are its arguments.
    """

    def differences(was: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> str:
        only = [
            [one for one in some if one not in others] for some, others in ((was, now), (now, was))
        ]
        texts = [
            ", ".join(show(*one) for one in some) for some in (only if any(only) else (was, now))
        ]
        return _values(*(text or "no other" for text in texts))

    return differences


def _column(name: str, kind: str, *nullable: bool) -> str:
    return f"{name} {kind}{'' if all(nullable) else ' not null'}"


def _input(name: str, stream: str, grouping: str, *keys: str) -> str:
    source = name if stream == DEFAULT_STREAM else f"{name}/{stream}"
    return f"{source} by {grouping}" + (f"({', '.join(keys)})" if keys else "")


def shown_aggregate(structure: Mapping[str, Any]) -> str:
    """Return the structure of an aggregate as text, such as ``"sum_of(euros) of int64"``."""
    made = structure["aggregate"]
    name = structure.get("class") or MADE_BY.get(f"_{made}", made)
    limit = [str(structure["max_items"])] if "max_items" in structure else []
    types = ", ".join(structure["states"].values())
    return f"{name}({', '.join([*structure['columns'], *limit])}) of {types}"


def shown_window(structure: Mapping[str, Any] | None) -> str:
    """Return `Window.structure` as the text of the call that makes the window, or "None"."""
    return "None" if structure is None else repr(Window.of(structure))


#: The words for entries of structures whose names users do not know.
_WORDS = {"message_id": "message id", "tracked": "tracking", "aggregates": "values"}
_VALUES: Mapping[str, Callable[[Any, Any], str]] = {
    "inputs": _items(_input),
    "streams": _by_name(_items(_column)),
    "from": lambda was, now: _values("/".join(was), "/".join(now)),
    "key": _items(_column),
    "aggregates": _by_name(lambda was, now: _values(shown_aggregate(was), shown_aggregate(now))),
    "window": lambda was, now: _values(shown_window(was), shown_window(now)),
}
