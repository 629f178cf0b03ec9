"""Draw rate against roots in flight for every peer: ``python -m bench.plot out.json rates.svg``.

``out.json`` is what ``make bench ARGS=--benchmark-json=out.json`` wrote; ``bench/results.md``
may stand in its place: the medians of its first ``bench_ledger.py`` are drawn. Both axes are
logarithmic.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

HEADING = "Acks per second, INITs included, against trees in flight, calls of 8192"
WIDTH, HEIGHT = 940, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 330, 50, 50  # margins; the names stand in the right one
COLOURS = ("#1f5fa8", "#555555", "#c2571a", "#3a8a3a", "#8a4fa3", "#a8324a", "#8c6d1f", "#2a8f8f")
OURS, LIMIT = "ackcore", "LIMIT"

Rates = dict[str, dict[int, float]]


def rates_in(report: dict[str, object]) -> Rates:
    """Messages a second by contestant and roots in flight; the median of several contests."""
    found: dict[str, dict[int, list[float]]] = {}
    for bench in report["benchmarks"]:  # type: ignore[attr-defined]
        info = bench["extra_info"]
        for name, rate in info["records_per_s"].items() if "in_flight" in info else ():
            found.setdefault(name, {}).setdefault(info["in_flight"], []).append(rate)
    return {
        name: {size: statistics.median(rates) for size, rates in sorted(by_size.items())}
        for name, by_size in found.items()
    }


#: A row of the table of results: how many were in flight, against whom, and both rates.
_ROW = re.compile(
    r"^\| ([\d,]+) in flight: ackcore / ([^(|]+?) \(([\d.]+) / ([\d.]+) M records/s\) \|",
    re.MULTILINE,
)


def rates_written(table: str) -> Rates:
    """Read the same from the first section of ``bench_ledger.py`` in ``bench/results.md``."""
    section = table.partition("## bench_ledger.py")[2].partition("\n## ")[0]
    found: Rates = {}
    for in_flight, name, ours, theirs in _ROW.findall(section):
        size = int(in_flight.replace(",", ""))
        # Measured once against each peer: the one beside LIMIT stands for all.
        found.setdefault(OURS, {}).setdefault(size, float(ours) * 1e6)
        found.setdefault(name, {}).setdefault(size, float(theirs) * 1e6)
    return found


def decades(values: list[float]) -> tuple[int, int]:
    """The powers of ten that enclose values."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))


def spread(places: list[float], least: float = 15) -> list[float]:
    """Labels at these heights, moved down as far as it takes for none to cover another."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for before, here in pairwise(order):
        moved[here] = max(moved[here], moved[before] + least)
    return moved


def svg(rates: Rates, title: str) -> str:
    """The picture."""
    sizes = decades([size for line in rates.values() for size in line])
    speeds = decades([rate for line in rates.values() for rate in line.values()])

    def x(size: float) -> float:
        part = (math.log10(size) - sizes[0]) / max(1, sizes[1] - sizes[0])
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(rate: float) -> float:
        part = (math.log10(rate) - speeds[0]) / max(1, speeds[1] - speeds[0])
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    def text(at_x: float, at_y: float, words: str, more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" {more}>{escape(words)}</text>'

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 20, HEADING, 'font-size="15"'),
        text(LEFT, 38, title, 'font-size="10" fill="#666666"'),
    ]
    grid = 'stroke="#dddddd"'
    for power in range(sizes[0], sizes[1] + 1):
        at = x(10**power)
        drawn.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" {grid}/>')
        drawn.append(text(at, HEIGHT - BOTTOM + 18, f"{10**power:,}", 'text-anchor="middle"'))
    for power in range(speeds[0], speeds[1] + 1):
        at = y(10**power)
        drawn.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" {grid}/>')
        millions = f"{10 ** (power - 6):g} M/s"
        drawn.append(text(LEFT - 6, at + 4, millions, 'text-anchor="end"'))
    fastest_first = sorted(rates, key=lambda name: -list(rates[name].values())[-1])
    ends = spread([y(list(rates[name].values())[-1]) for name in fastest_first])
    for place, (name, end) in enumerate(zip(fastest_first, ends, strict=True)):
        colour = "#000000" if name == OURS else COLOURS[place % len(COLOURS)]
        width = 3 if name == OURS else 1.5
        dashes = 'stroke-dasharray="6 4"' if name == LIMIT else ""
        points = [(x(size), y(rate)) for size, rate in rates[name].items()]
        path = "L".join(f"{at_x:.1f} {at_y:.1f}" for at_x, at_y in points)
        drawn.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width}" {dashes}/>'
        )
        drawn.extend(
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3" fill="{colour}"/>'
            for at_x, at_y in points
        )
        last_x, last_y = points[-1]
        label_x = WIDTH - RIGHT + 14
        drawn.append(
            f'<path d="M{last_x + 5:.1f} {last_y:.1f}L{label_x - 3} {end:.1f}" '
            f'fill="none" stroke="{colour}" stroke-width="0.5"/>'
        )
        rate = f"{rates[name][max(rates[name])] / 1e6:.3g}"
        drawn.append(text(label_x, end + 4, f"{name} ({rate})", f'fill="{colour}"'))
    return "\n".join([*drawn, "</svg>", ""])


def main() -> None:
    """Read the report, write the picture."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    if sys.argv[1].endswith(".md"):
        rates, title = (
            rates_written(text),
            "bench/results.md names the machine, bench/README.md the method",
        )
    else:
        report = json.loads(text)
        rates, title = rates_in(report), report["machine"]
    if not rates:
        raise SystemExit(f"{sys.argv[1]} has no contest of bench_ledger.py in it")
    Path(sys.argv[2]).write_text(svg(rates, title))


if __name__ == "__main__":
    main()
