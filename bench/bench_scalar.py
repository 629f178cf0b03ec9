"""One `ack()` against ``d[r] ^= v`` of a plain dict."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest

from bench.contest import Interleaved
from bench.streams import ledger_class

BOUNDS = {1_000: None, 10_000: 2, 100_000: None}  # by live roots


@pytest.mark.parametrize("roots", BOUNDS)
def bench_ack(
    roots: int, interleaved: Interleaved, report_ratio: Callable[..., None], quick: bool
) -> None:
    """Random roots that stay open. The time of the bare loop is taken off both."""
    rng = np.random.default_rng(4)
    ids = rng.integers(-(2**63), 2**63, roots)
    picks = rng.integers(0, roots, 20_000 if quick else 200_000)
    # The dict's own key objects: it then finds them by identity, which is its best case.
    keys = ids.tolist()
    roots_of = [keys[pick] for pick in picks.tolist()]
    pairs = list(zip(roots_of, rng.integers(1, 2**62, len(picks)).tolist(), strict=True))
    ledger = ledger_class()()
    ledger.init_many(ids, np.ones(roots, np.int64), np.zeros(roots, np.int32))
    xors = dict.fromkeys(keys, 1)

    def loop() -> None:
        for _root, _val in pairs:
            pass

    def with_dict() -> None:
        for root, val in pairs:
            xors[root] ^= val

    def with_ledger() -> None:
        ack = ledger.ack
        for root, val in pairs:
            ack(root, val)

    contestants = {"loop": loop, "dict": with_dict, "ledger": with_ledger}
    seconds = interleaved(contestants, 3 if quick else 15)
    assert all(ledger.get(root).val == val for root, val in xors.items())
    ratios = [
        (ledger_s - loop_s) / (dict_s - loop_s)
        for loop_s, dict_s, ledger_s in zip(*seconds.values(), strict=True)
    ]
    each = [
        (statistics.median(seconds[name]) - statistics.median(seconds["loop"])) / len(pairs) * 1e9
        for name in ("ledger", "dict")
    ]
    label = f"{roots:,} live roots: ack() / d[r] ^= v ({each[0]:.0f} / {each[1]:.0f} ns)"
    report_ratio(label, ratios, BOUNDS[roots], at_most=True)
