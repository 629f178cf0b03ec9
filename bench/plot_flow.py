"""Draw `bench_flow_servers`: ``python -m bench.plot_flow build/bench/flow.json flow.svg``.

For each policy, over the time of the last run: work done a second beside what could be done, the
tuples that the windows allow and those that are out, and the latency.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, ROW, LEFT, GAP, TOP = 1080, 130, 60, 50, 70
STEP_S = 0.5
ALLOWED, OUT, DONE, COULD, MEDIAN, WORST = (
    "#a8324a",
    "#1f5fa8",
    "#1f5fa8",
    "#999999",
    "#3a8a3a",
    "#c2571a",
)

Line = list[tuple[float, float]]


def percentile(values: list[float], percent: float) -> float:
    """A percentile of what may be nothing."""
    ordered = sorted(values)
    return (
        ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else math.nan
    )


def lines_of(trial: dict[str, Any], seconds: float) -> dict[str, Line]:
    """The curves of one policy, in steps."""
    steps = int(seconds / STEP_S)
    done: list[list[tuple[float, float]]] = [[] for _ in range(steps)]
    for at, took, work, _ in trial["done"]:
        if at < seconds:
            done[min(steps - 1, int(at / STEP_S))].append((took, work))
    middles = [(n + 0.5) * STEP_S for n in range(steps)]
    took_ms = [[1e3 * took for took, _ in each] for each in done]
    return {
        "done": [
            (at, sum(work for _, work in each) / STEP_S)
            for at, each in zip(middles, done, strict=True)
        ],
        "allowed": [(at, sum(limits)) for at, limits, _ in trial["windows"] if at < seconds],
        "out": [(at, sum(out)) for at, _, out in trial["windows"] if at < seconds],
        "p50": [(at, percentile(each, 50)) for at, each in zip(middles, took_ms, strict=True)],
        "p99": [(at, percentile(each, 99)) for at, each in zip(middles, took_ms, strict=True)],
    }


class Panel:
    """One chart: a place, and the scales of its axes."""

    def __init__(self, column: int, row: int, seconds: float, low: float, high: float, log: bool):
        self.width = (WIDTH - 4 * GAP - LEFT) / 3
        self.left = LEFT + GAP / 2 + column * (self.width + GAP)
        self.top = TOP + row * ROW
        self.height = ROW - 38
        self.seconds, self.low, self.high, self.log = seconds, low, high, log

    def y(self, value: float) -> float:
        """The height of a value, which is put on the edge if it is beyond."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.top + self.height * (1 - part)

    def frame(self, marks: list[float]) -> list[str]:
        """The edge, and a line and a number for each mark."""
        drawn = []
        for mark in marks:
            at = self.y(mark)
            drawn.append(f'<path d="M{self.left} {at:.1f}h{self.width:.1f}" stroke="#dddddd"/>')
            drawn.append(
                f'<text x="{self.left - 4:.1f}" y="{at + 4:.1f}" text-anchor="end">{mark:,g}</text>'
            )
        return drawn

    def line(self, points: Line, colour: str, width: float = 1.2) -> str:
        """A curve; where there is nothing it has a gap."""
        path, pen = [], "M"
        for at, value in points:
            if math.isnan(value):
                pen = "M"
                continue
            x = self.left + self.width * at / self.seconds
            path.append(f"{pen}{x:.1f} {self.y(value):.1f}")
            pen = "L"
        return f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def svg(report: dict[str, Any]) -> str:
    """The picture: a row a policy, a column for each of the three."""
    seconds = report["seconds"]
    could = [((n + 0.5) * STEP_S, value) for n, value in enumerate(report["capacity"])]
    most = max(value for _, value in could) * 1.1
    height = TOP + ROW * len(report["series"]) + 10
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="10" fill="#222222">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="15">12 unequal HTTP servers that slow down, stall and '
        "throttle, and one dead for a quarter of the time; saturated</text>",
    ]
    titles = (
        ("work done a second", DONE, "what could be done", COULD),
        ("tuples out", OUT, "tuples that the windows allow", ALLOWED),
        ("latency in ms: median", MEDIAN, "99th percentile", WORST),
    )
    for column, (one, colour, other, second) in enumerate(titles):
        x = Panel(column, 0, seconds, 0, 1, False).left
        drawn.append(f'<text x="{x:.1f}" y="44" fill="{colour}">{one}</text>')
        drawn.append(f'<text x="{x + 130:.1f}" y="44" fill="{second}">{other}</text>')
    for row, (name, trial) in enumerate(report["series"].items()):
        lines = lines_of(trial, seconds)
        work = Panel(0, row, seconds, 0, most, False)
        windows = Panel(1, row, seconds, 10, 1000, True)
        latency = Panel(2, row, seconds, 1, 10_000, True)
        drawn.append(
            f'<text x="10" y="{work.top - 8:.1f}" font-size="12" font-weight="bold">'
            f"{escape(name)}</text>"
        )
        half = 10 ** math.floor(math.log10(most))
        drawn += work.frame([0, half])
        drawn += windows.frame([10, 100, 1000])
        drawn += latency.frame([1, 10, 100, 1000, 10_000])
        drawn.append(work.line(could, COULD))
        drawn.append(work.line(lines["done"], DONE, 1.6))
        drawn.append(windows.line(lines["allowed"], ALLOWED))
        drawn.append(windows.line(lines["out"], OUT))
        drawn.append(latency.line(lines["p50"], MEDIAN))
        drawn.append(latency.line(lines["p99"], WORST))
    return "\n".join([*drawn, "</svg>", ""])


def main() -> None:
    """Read the series, write the picture."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    Path(sys.argv[2]).write_text(svg(json.loads(Path(sys.argv[1]).read_text())))
    print(f"drawn: {sys.argv[2]}")


if __name__ == "__main__":
    main()
