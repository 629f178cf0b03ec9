"""Ids in bulk: how many a second, native and in plain Python."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

ROWS = 100_000
KEY = 0x5EED
COMPONENT = 0xB017


@pytest.fixture(params=["_native", "_reference"], ids=["native", "python"])
def backend(request: pytest.FixtureRequest) -> Any:
    """The module that makes the ids."""
    try:
        return importlib.import_module(f"ackcore.{request.param}")
    except ImportError as error:
        if os.environ.get("ACKCORE_REQUIRE_NATIVE"):
            raise
        pytest.skip(f"not built: {error}")


@pytest.fixture
def per_id(benchmark: BenchmarkFixture, quick: bool) -> Callable[..., Any]:
    """Time a call that makes or routes ``ROWS`` ids, and note the rate."""

    def run(call: Callable[..., Any], *args: object) -> Any:
        made = benchmark.pedantic(call, args, rounds=3 if quick else 20, warmup_rounds=1)
        if benchmark.stats:  # there are none under --benchmark-disable
            benchmark.extra_info["ids_per_s"] = round(ROWS / benchmark.stats.stats.median)
        return made

    return run


@pytest.mark.benchmark(group="ids: root_ids")
def bench_root_ids(per_id: Callable[..., Any], backend: Any) -> None:
    """Root ids of one partition's records."""
    roots = per_id(backend.root_ids, KEY, 3, np.arange(ROWS), 0)
    assert len(np.unique(roots)) == ROWS


@pytest.mark.benchmark(group="ids: edge_ids")
def bench_edge_ids(per_id: Callable[..., Any], backend: Any) -> None:
    """Edge ids of one child of each of many parents."""
    roots = np.arange(ROWS)
    edges = per_id(backend.edge_ids, KEY, roots, COMPONENT, roots ^ KEY, 0)
    assert len(np.unique(edges)) == ROWS


@pytest.mark.benchmark(group="ids: xor_by_parent")
def bench_xor_by_parent(per_id: Callable[..., Any], backend: Any) -> None:
    """The ack vals of a batch whose inputs emitted four tuples each."""
    parents = np.repeat(np.arange(ROWS // 4), 4)
    edges = np.arange(ROWS)
    vals = per_id(backend.xor_by_parent, parents, edges, ROWS // 4)
    np.testing.assert_array_equal(vals, np.bitwise_xor.reduce(edges.reshape(-1, 4), axis=1))


@pytest.mark.benchmark(group="ids: acker_task")
def bench_acker_task(per_id: Callable[..., Any], backend: Any) -> None:
    """Routing a column of root ids to seven ackers."""
    tasks = per_id(backend.acker_task, np.arange(ROWS), 7)
    assert (np.bincount(tasks, minlength=7) > 0).all()


@pytest.mark.benchmark(group="ids: IdSource.next_many")
def bench_id_source(per_id: Callable[..., Any], backend: Any) -> None:
    """Ids for use within one process."""
    ids = per_id(backend.IdSource(KEY).next_many, ROWS)
    assert len(np.unique(ids)) == ROWS
