"""Drawings of a topology: a text of its stages, and an SVG of its components.

In the text, stages follow from top to bottom; a single line is a stream within a task, a double
line a stream that is shuffled. The SVG has components from left to right. It is made from
`Topology.structure`, which a checkpoint has as well, so no topology need be built. Its colours
follow the viewer's light or dark scheme, and all names are escaped.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import pyarrow as pa

from ackcore.calls import RateLimit
from ackcore.tables.time_windows import END, START
from ackcore.topology.bolt_calls import CALL_SETTINGS
from ackcore.topology.components import DEFAULT_STREAM, AsyncBolt, BasicBolt, Component
from ackcore.topology.dedup import DedupBolt
from ackcore.topology.expectations import Expectations
from ackcore.topology.parts import DEDUP, BoltSpec, Parts, SinkSpec, Spout, TableSpec
from ackcore.topology.settings import Settings
from ackcore.topology.stage_layout import Layout, Subscription
from ackcore.topology.table_views import CHANGES, CLOSED, ClosedWindows

_HIGH, _GAP_Y, _GAP_X, _MARGIN = 44, 26, 150, 14
_CHAR = 8.2
#: Longer names are cut; the tooltip has the full name.
_LONGEST = 26

_STYLE = """
.ackcore-topology { color-scheme: light dark; font: 13px system-ui, sans-serif; }
.ackcore-topology { --ink: #1c2430; --line: #7b8794; --spout: #dbe9fb; --bolt: #eef0f3;
  --sink: #dcf3e4; --back: #fff; }
@media (prefers-color-scheme: dark) { .ackcore-topology { --ink: #e6e9ee; --line: #8d99a8;
  --spout: #1d3a5f; --bolt: #2b323c; --sink: #1c4530; --back: #1d232a; } }
.ackcore-topology rect { stroke: var(--line); }
.ackcore-topology .spout rect { fill: var(--spout); } .ackcore-topology .bolt rect { fill:
  var(--bolt); } .ackcore-topology .sink rect,
  .ackcore-topology .table rect { fill: var(--sink); }
.ackcore-topology text { fill: var(--ink); } .ackcore-topology .small { font-size: 11px;
  fill-opacity: .8; }
.ackcore-topology .label text { paint-order: stroke; stroke: var(--back); stroke-width: 3;
  stroke-linejoin: round; }
.ackcore-topology path { fill: none; stroke: var(--line); stroke-width: 1.5; }
.ackcore-topology marker path { fill: var(--line); stroke: none; }
.ackcore-topology .shuffled { stroke-width: 3; }
"""


class _Edge(NamedTuple):
    source: str
    stream: str
    target: str
    label: str
    shuffled: bool


class _Box(NamedTuple):
    kind: str
    name: str
    x: float
    y: float
    width: float


def draw(
    structure: Mapping[str, Any], counts: Mapping[str, Mapping[str, int]] | None = None
) -> str:
    """Return a drawing of a topology as one ``svg`` element with its own style.

    ``structure``: `Topology.structure`, possibly read from JSON. ``counts``: the number of emitted
    tuples, by component and stream, shown on the edges.
    """
    edges = list(_edges(structure))
    columns = _columns(structure, edges)
    boxes = _boxes(structure, columns)
    width = max((box.x + box.width for box in boxes.values()), default=0) + _MARGIN
    height = max((box.y + _HIGH for box in boxes.values()), default=0) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ackcore-topology" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">',
        f"<title>topology</title><style>{_STYLE}</style>",
        '<defs><marker id="ackcore-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z"/>'
        "</marker></defs>",
    ]
    arrows = [_arrow(edge, boxes, counts or {}) for edge in edges]
    parts += [arrow for arrow, _ in arrows]
    parts += [label for _, label in arrows]  # after the arrows, so that none crosses a label
    parts += [_node(box) for box in boxes.values()]
    return "".join([*parts, "</svg>"])


def _edges(structure: Mapping[str, Any]) -> list[_Edge]:
    found = []
    for name, bolt in structure["bolts"].items():
        for source, stream, grouping, *keys in bolt["inputs"]:
            label = f"{grouping}({', '.join(keys)})" if keys else str(grouping)
            local = str(grouping).startswith("local")
            found.append(_Edge(source, stream, name, label, not local))
    tables = structure.get("tables", {})
    for name, (source, stream) in structure.get("sinks", {}).items():
        table, _, end = source.rpartition(".")
        if table in tables and f".{end}" in (CHANGES, CLOSED):
            source = f"table {table}"
        found.append(_Edge(source, stream, f"sink {name}", "", False))
    for name, table in tables.items():
        source, stream = table["from"]
        found.append(_Edge(source, stream, f"table {name}", "", False))
    for name, spout in structure["spouts"].items():
        if spout.get("source") == ClosedWindows.source_kind:
            table = f"table {name.removesuffix(CLOSED)}"
            found.append(_Edge(table, DEFAULT_STREAM, name, "", False))
    return found


def _columns(structure: Mapping[str, Any], edges: list[_Edge]) -> dict[str, int]:
    """Return each component's column in the SVG, from 0: right of all components that it reads."""
    column = dict.fromkeys([*structure["spouts"], *structure["bolts"]], 0)
    column |= {edge.target: 0 for edge in edges}
    for _ in range(len(column)):  # a topology has no cycle
        for edge in edges:
            column[edge.target] = max(column[edge.target], column.get(edge.source, 0) + 1)
    return column


def _boxes(structure: Mapping[str, Any], columns: Mapping[str, int]) -> dict[str, _Box]:
    boxes: dict[str, _Box] = {}
    x = float(_MARGIN)
    for column in range(max(columns.values(), default=-1) + 1):
        names = [name for name, at in columns.items() if at == column]
        width = max((_CHAR * len(_cut(_shown(name))) + 28 for name in names), default=0)
        for row, name in enumerate(names):
            kind = "spout" if name in structure["spouts"] else "bolt"
            if name.startswith(("sink ", "table ")):  # a component's name has no space
                kind = name.partition(" ")[0]
            boxes[name] = _Box(kind, name, x, _MARGIN + row * (_HIGH + _GAP_Y), width)
        x += width + _GAP_X
    return boxes


def _shown(name: str) -> str:
    return name.removeprefix("sink ").removeprefix("table ")


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _node(box: _Box) -> str:
    middle = box.x + box.width / 2
    name = escape(_cut(_shown(box.name)))
    return (
        f'<g class="{box.kind}"><title>{box.kind} {escape(_shown(box.name))}</title>'
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{_HIGH}" rx="6"/>'
        f'<text x="{middle:.0f}" y="{box.y + 20:.0f}" text-anchor="middle">{name}</text>'
        f'<text x="{middle:.0f}" y="{box.y + 35:.0f}" text-anchor="middle" class="small">'
        f"{box.kind}</text></g>"
    )


def _arrow(
    edge: _Edge, boxes: Mapping[str, _Box], counts: Mapping[str, Mapping[str, int]]
) -> tuple[str, str]:
    """Return an edge's line as SVG, and the text on it: label and count, or "" without both."""
    start, end = boxes[edge.source], boxes[edge.target]
    x1, y1 = start.x + start.width, start.y + _HIGH / 2
    x2, y2 = end.x - 2, end.y + _HIGH / 2
    bend = max(40.0, (x2 - x1) / 2)
    kind = ' class="shuffled"' if edge.shuffled else ""
    label = edge.label
    if edge.stream != DEFAULT_STREAM:
        label = f"{edge.stream}: {label}" if label else edge.stream
    many = counts.get(edge.source, {}).get(edge.stream)
    # The label is on the curve: in its middle, or before other columns that the curve passes.
    t = 0.5 if x2 - x1 <= _GAP_X else 0.25
    near, far = (1 - t) ** 3 + 3 * (1 - t) ** 2 * t, t**3 + 3 * (1 - t) * t**2
    x = near * x1 + far * x2 + 3 * (1 - t) * t * bend * (1 - 2 * t)
    y = near * y1 + far * y2
    text = "".join(
        f'<text x="{x:.0f}" y="{y + below:.0f}" text-anchor="middle" class="small">{shown}</text>'
        for below, shown in ((-6, escape(_cut(label))), (13, "" if many is None else f"{many:,}"))
        if shown
    )
    told = f"{escape(edge.source)} to {escape(_shown(edge.target))}: {escape(label)}"
    return (
        f"<g><title>{told}</title>"
        f'<path{kind} d="M{x1:.0f} {y1:.0f}C{x1 + bend:.0f} {y1:.0f} {x2 - bend:.0f} {y2:.0f} '
        f'{x2:.0f} {y2:.0f}" marker-end="url(#ackcore-arrow)"/></g>',
        f'<g class="label"><title>{told}</title>{text}</g>' if text else "",
    )


_WIDTH = 100
_RULE = 78
#: The maximum number of characters of a writer's repr.
_WRITER = 72
#: Shown even if they have their defaults: readers of failures need them first.
_ALWAYS = ("max_attempts", "backoff_s", "max_backoff_s")


def explain(parts: Parts, settings: Settings) -> str:
    """Return a drawing of a topology as text; long lists are broken at 100 characters."""
    return "\n".join(_lines(parts, Layout.of(parts), settings))


def _lines(parts: Parts, layout: Layout, settings: Settings) -> Iterator[str]:
    yield f"topology {parts.fingerprint[:12]}: {_summary(parts, layout)}"
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
    yield from _tables(parts)
    yield from _end(layout)


def _summary(parts: Parts, layout: Layout) -> str:
    counted = [
        _count(len(parts.spouts), "spout"),
        _count(sum(not _is_dedup(bolt) for bolt in parts.bolts.values()), "bolt"),
        _count(len(parts.sinks), "sink"),
        *([_count(len(tables), "table")] if (tables := _declared_tables(parts)) else []),
        _count(layout.depth, "stage"),
        _count(layout.exchanges, "shuffle"),
    ]
    return ", ".join(counted)


def _settings(settings: Settings) -> str:
    """Return the line of the settings: those of retries, and all that are not the default."""
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
        known = "checked to be unique" if spout.checks_ids else "duplicates allowed"
        known = "unique" if spout.unique else known
        ids = f"message id ({', '.join(spout.message_id)}), {known}"
    else:
        ids = "ackcore assigns the message ids"
    tracked = ids if spout.tracked else "untracked: a record that fails is not retried"
    stream = f"{DEFAULT_STREAM} {_fields(spout.fields)}"
    branches = [(stream, _readers(spout.name, DEFAULT_STREAM, parts, layout))]
    given = []
    if spout.ordered_by:
        given.append(f"ordered_by: {', '.join(spout.ordered_by)}")
    if spout.dedup is not None:
        bounds = spout.dedup._asdict()
        columns = ", ".join(bounds.pop("columns"))
        some = (f", {name}={_setting(each)}" for name, each in bounds.items() if each is not None)
        given.append(f"dedup: {columns}{''.join(some)}")
    given += _expected(spout.expect)
    return [f"spout {spout.name}: {tracked}", *_wrapped(given), *_tree(branches)]


def _bolt(bolt: BoltSpec, parts: Parts, layout: Layout) -> list[str]:
    asked = "" if bolt.parallelism is None else f", parallelism {bolt.parallelism}"
    is_dedup, branches = _is_dedup(bolt), []
    for stream, schema in bolt.schemas.items():
        if is_dedup and stream != DEFAULT_STREAM:
            continue  # the keys that the engine keeps
        known = [field.type for field in schema if not pa.types.is_null(field.type)]
        fields = _fields(
            [f"{field.name}: {field.type}" for field in schema] if known else schema.names
        )
        branches.append((f"{stream} {fields}", _readers(bolt.name, stream, parts, layout)))
    if is_dedup:
        spout = bolt.name.removesuffix(DEDUP)
        return [f"{bolt.name}: leaves out the duplicates of spout {spout}", *_tree(branches)]
    given = [_calls(bolt.component), *_expected(bolt.expect)]
    if bolt.component.uses:
        given.insert(0, f"uses: {', '.join(bolt.component.uses)}")
    head = f"bolt {bolt.name}: {type(bolt.component).__name__}{asked}"
    return [head, *_wrapped(given), *_tree(branches)]


def _is_dedup(bolt: BoltSpec) -> bool:
    """Return whether a bolt was made by ackcore, for the argument ``dedup`` of a spout."""
    return isinstance(bolt.component, DedupBolt)


def _declared_tables(parts: Parts) -> list[TableSpec]:
    of_dedup = {bolt.name for bolt in parts.bolts.values() if _is_dedup(bolt)}
    return [table for name, table in parts.tables.items() if name not in of_dedup]


def _expected(expected: Sequence[Expectations]) -> Iterator[str]:
    for one in expected:
        of = "" if one.stream == DEFAULT_STREAM else f" of {one.stream}"
        conditions = ", ".join(map(_setting, one.conditions))
        yield f"expect{of}: {conditions}; on_fail={one.on_fail}"


def _tables(parts: Parts) -> Iterator[str]:
    tables = _declared_tables(parts)
    if tables:
        yield ""
        yield _rule("tables")
    for table in tables:
        shape = table.shape
        given = [f"key ({', '.join(key for key in shape.key_names if key != START)})"]
        given += [] if shape.window is None else [f"window={shape.window!r}"]
        given += [] if shape.ttl_s is None else [f"ttl_s={_setting(shape.ttl_s)}"]
        given += [f"{name}={one!r}" for name, one in shape.aggregates.items() if name != END]
        yield from _wrapped([f"table {table.name}: {', '.join(given)}"])


def _wrapped(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of texts, indented, and broken so that they fit in `_WIDTH` characters."""
    for text in texts:
        yield from textwrap.wrap(
            text, _WIDTH - 4, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )


def _calls(component: Component) -> str:
    """Return the settings of a bolt's calls that differ from their defaults as text; "" if none."""
    base: type[Component] = BasicBolt
    names: Sequence[str] = ("threads", "journal")
    if isinstance(component, AsyncBolt):
        base, names = AsyncBolt, ("limit", *CALL_SETTINGS, "max_batch", "journal")
    elif not isinstance(component, BasicBolt):
        return ""
    shown = []
    for name in names:
        value = getattr(component, name)
        if isinstance(value, RateLimit):
            some = (f"{key}={_setting(each)}" for key, each in vars(value).items() if each)
            shown.append(f"{name}({', '.join(some)})")
        elif value != getattr(base, name):
            shown.append(f"{name}={_setting(value)}")
    return f"calls: {', '.join(shown)}" if shown else ""


def _setting(value: Any) -> str:
    if callable(value):
        return _writer(value)
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _tree(branches: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Yield the lines of a tree of streams, each with the lines of its readers below it."""
    for at, (stream, readers) in enumerate(branches):
        last = at == len(branches) - 1
        yield f"{'└' if last else '├'}─ {stream}"
        for number, reader in enumerate(readers):
            corner = "└" if number == len(readers) - 1 else "├"
            yield f"{' ' if last else '│'}  {corner}{reader}"


def _readers(component: str, stream: str, parts: Parts, layout: Layout) -> list[str]:
    readers = [_reader(sub) for sub in layout.out(component, stream)]
    readers += [_sink(sink) for sink in _sinks(parts, component, stream)]
    for table in parts.tables.values():
        if (table.component, table.stream) == (component, stream):
            readers.append(f"──▶ table {table.name}")
            if f"{table.name}{CLOSED}" in parts.closed:
                readers.append(f"──▶ spout {table.name}{CLOSED}, in the next micro-batch")
            for sink in parts.sinks.values():
                if parts.table_read(sink) is table:
                    closed = sink.component.endswith(CLOSED)
                    what = "closed windows of" if closed else "changes to"
                    readers.append(f"{_sink(sink)}, of {what} {table.name}")
    return readers or ["─ not read"]


def _reader(sub: Subscription) -> str:
    if not sub.moves:
        return f"──▶ {sub.target}: {sub.grouping}, in the same task"
    return f"══▶ {sub.target}: {sub.grouping}, to stage {sub.level_to}{_same_task(sub)}"


def _same_task(sub: Subscription) -> str:
    """Return the note on a stream to a later stage whose grouping moves no tuples; else "".

    Its tuples go to the task of the later stage with the number of the task that emitted them.
    """
    return "" if sub.spreads else ", partition by partition"


def _sinks(parts: Parts, component: str, stream: str) -> list[SinkSpec]:
    return [
        sink
        for sink in parts.sinks.values()
        if (sink.component, sink.stream) == (component, stream) and parts.table_read(sink) is None
    ]


def _sink(sink: SinkSpec) -> str:
    return f"──▶ sink {sink.name}: {_writer(sink.writer)}"


def _writer(writer: Any) -> str:
    """Return the name of a function, or the repr of an object: its class if the repr is long or
    has an address.
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
        note = _same_task(sub)
        if sub.level_to > level + 1:
            note += f", undecoded until stage {sub.level_to}"
        elif sub.level_from < level:
            note += f", undecoded since stage {sub.level_from}"
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
        yield "  message ids are checked: a duplicate in a micro-batch is an error"


def _rule(word: str) -> str:
    return f"══ {word} {'═' * (_RULE - len(word) - 4)}"


def _fields(fields: Sequence[str]) -> str:
    """Return the names of fields as text, ``(word, n)``; only as many as fit in a line."""
    room = _WIDTH - 24
    shown = list(fields)
    while len(shown) > 1 and len(", ".join(shown)) > room:
        shown.pop()
    more = len(fields) - len(shown)
    return f"({', '.join(shown)}{f', and {more} more' if more else ''})"
