"""A text drawing of a topology: stages from top to bottom, and the streams between them.

A single line is a stream within a task, a double line a stream that is shuffled.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.parts import BoltSpec, Parts, SinkSpec, Spout
from ackcore.topology.settings import Settings
from ackcore.topology.stage_layout import Layout, Subscription

_WIDTH = 100
_RULE = 78
#: The maximum number of characters of a writer's repr.
_WRITER = 72
#: Shown even if they have their defaults: readers of failures need them first.
_ALWAYS = ("max_attempts", "backoff_ms", "max_backoff_ms")


def explain(parts: Parts, fingerprint: str, settings: Settings) -> str:
    """Return the drawing of a topology.

    Parameters
    ----------
    parts : Parts
        The topology.
    fingerprint : str
        The topology's fingerprint. The drawing shows its first 12 characters.
    settings : Settings
        The topology's settings.

    Returns
    -------
    str
        Lines of at most 100 characters, unless a name is longer. No newline ends the last one.
    """
    return "\n".join(_lines(parts, Layout.of(parts), fingerprint, settings))


def _lines(parts: Parts, layout: Layout, fingerprint: str, settings: Settings) -> Iterator[str]:
    yield f"topology {fingerprint[:12]}: {_summary(parts, layout)}"
    yield from textwrap.wrap(_settings(settings), _WIDTH, subsequent_indent="  ")
    for level in range(1, layout.depth + 1):
        if level > 1:
            yield from _exchange(layout, level - 1)
        yield ""
        yield f"stage {level}" + (", reads the source" if level == 1 else "")
        blocks = [_spout(spout, parts, layout) for spout in parts.spouts.values() if level == 1]
        blocks += [_bolt(parts.bolts[name], parts, layout) for name in layout.at(level)]
        for at, block in enumerate(blocks):
            if at:
                yield ""
            yield from (f"  {line}" for line in block)
    yield from _end(layout)


def _summary(parts: Parts, layout: Layout) -> str:
    counted = [
        _count(len(parts.spouts), "spout"),
        _count(len(parts.bolts), "bolt"),
        _count(len(parts.sinks), "sink"),
        _count(layout.depth, "stage"),
        _count(layout.exchanges, "shuffle"),
    ]
    return ", ".join(counted)


def _settings(settings: Settings) -> str:
    """Return the retry settings, and the other settings that differ from their defaults."""
    default, shown = Settings(), []
    for name in Settings.names():
        value: Any = getattr(settings, name)
        if name in _ALWAYS or value != getattr(default, name):
            if isinstance(value, tuple):
                value = f"[{', '.join(kind.__name__ for kind in value)}]"
            shown.append(f"{name}={value}")
    return f"settings: {', '.join(shown)}"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _spout(spout: Spout, parts: Parts, layout: Layout) -> list[str]:
    if spout.message_id:
        known = "unique" if spout.unique else "checked to be unique"
        ids = f"message id ({', '.join(spout.message_id)}), {known}"
    else:
        ids = "message ids are stamped"
    tracked = ids if spout.tracked else "untracked: a record that fails is not retried"
    stream = f"{DEFAULT_STREAM} {_fields(spout.fields)}"
    branches = [(stream, _readers(spout.name, DEFAULT_STREAM, parts, layout))]
    return [f"spout {spout.name}: {tracked}", *_tree(branches)]


def _bolt(bolt: BoltSpec, parts: Parts, layout: Layout) -> list[str]:
    asked = "" if bolt.parallelism is None else f", parallelism {bolt.parallelism}"
    branches = []
    for stream, schema in bolt.schemas.items():
        fields = _fields([f"{field.name}: {field.type}" for field in schema])
        branches.append((f"{stream} {fields}", _readers(bolt.name, stream, parts, layout)))
    return [f"bolt {bolt.name}: {type(bolt.component).__name__}{asked}", *_tree(branches)]


def _tree(branches: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Draw streams, each with its readers below it."""
    for at, (stream, readers) in enumerate(branches):
        last = at == len(branches) - 1
        yield f"{'└' if last else '├'}─ {stream}"
        for number, reader in enumerate(readers):
            corner = "└" if number == len(readers) - 1 else "├"
            yield f"{' ' if last else '│'}  {corner}{reader}"


def _readers(component: str, stream: str, parts: Parts, layout: Layout) -> list[str]:
    readers = [_reader(sub) for sub in layout.out(component, stream)]
    readers += [_sink(sink) for sink in _sinks(parts, component, stream)]
    return readers or ["─ nobody reads it"]


def _reader(sub: Subscription) -> str:
    if not sub.moves:
        return f"──▶ {sub.target}: {sub.grouping}, in the same task"
    return f"══▶ {sub.target}: {sub.grouping}, to stage {sub.level_to}{_stays(sub)}"


def _stays(sub: Subscription) -> str:
    """Return a note for a stream that is shuffled without being spread.

    Its bolt is in a later stage; each tuple goes to the task with the number of its own.
    """
    return "" if sub.spreads else ", partition by partition"


def _sinks(parts: Parts, component: str, stream: str) -> list[SinkSpec]:
    return [s for s in parts.sinks.values() if (s.component, s.stream) == (component, stream)]


def _sink(sink: SinkSpec) -> str:
    return f"──▶ sink {sink.name}: {_writer(sink.writer)}"


def _writer(writer: Any) -> str:
    """Return a function's name or an object's repr; the class name if the repr is long or an
    address.
    """
    if hasattr(writer, "__name__"):
        return str(writer.__name__)
    try:
        shown = repr(writer)
    except Exception:  # the repr is user code, and a drawing can do without it
        shown = ""
    fits = 0 < len(shown) <= _WRITER and shown.isprintable() and " at 0x" not in shown
    return shown if fits else type(writer).__name__


def _exchange(layout: Layout, level: int) -> Iterator[str]:
    yield ""
    yield _rule("shuffle")
    subscriptions = layout.crossing(level)
    names = [_source(sub) for sub in subscriptions]
    width = max(len(name) for name in names)
    for name, sub in zip(names, subscriptions, strict=True):
        note = _stays(sub)
        if sub.level_to > level + 1:
            note += f", unopened until stage {sub.level_to}"
        elif sub.level_from < level:
            note += f", unopened since stage {sub.level_from}"
        yield f"  {name:<{width}} ══▶ {sub.target}: {sub.grouping}{note}"


def _source(sub: Subscription) -> str:
    return sub.source if sub.stream == DEFAULT_STREAM else f"{sub.source}.{sub.stream}"


def _end(layout: Layout) -> Iterator[str]:
    yield ""
    if not layout.settles:
        yield _rule("no shuffle")
        yield "  each task settles its own records"
        return
    yield _rule("settle")
    yield "  every tracked record ends ACKED, waiting for its retry, or in the dead letters"
    if layout.checks_unique:
        yield "  message ids are checked: one that comes twice in a micro-batch fails by name"


def _rule(word: str) -> str:
    return f"══ {word} {'═' * (_RULE - len(word) - 4)}"


def _fields(fields: Sequence[str]) -> str:
    """Return ``(word, n)``, with as many fields as fit in a line."""
    room = _WIDTH - 24
    shown = list(fields)
    while len(shown) > 1 and len(", ".join(shown)) > room:
        shown.pop()
    more = len(fields) - len(shown)
    return f"({', '.join(shown)}{f', and {more} more' if more else ''})"
