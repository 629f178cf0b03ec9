"""Tests in any framework: topologies run in this process, and the contract of a ledger.

`run` runs a topology on given records without Spark, and returns their outcomes. It needs
``ackcore[spark]``, but neither Java nor a running Spark. `check_backend` checks your own backend
against the contract of `ackcore.Ledger`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ackcore._error_hints import naming_arguments
from ackcore.testing.backends import check_backend
from ackcore.testing.results import Kill, Source, TopologyRun

if TYPE_CHECKING:
    import pyarrow as pa

    from ackcore.topology import Topology

__all__ = ["Source", "check_backend", "run"]


@naming_arguments
def run(
    topology: Topology,
    rows: Mapping[str, Sequence[Any] | pa.Table],
    *,
    tasks: int = 2,
    kills: Mapping[str, Kill] | None = None,
    listeners: Sequence[Any] = (),
) -> TopologyRun:
    """Run a topology in this process, until each of its records is ACKED or DEAD.

    The code that runs bolts, tracks, decides and retries is the same as on Spark, and so are
    protocol and checkpoint.  Only the exchanges between tasks are lists, and the clock is
    simulated: a wait takes no time, but advances the clock.  The calls of an `AsyncBolt` use
    simulated time, too, while it has no open socket and no running thread.

    Parameters
    ----------
    topology : Topology
        A topology from `TopologyBuilder.build`.  The source of each spout may be a `Source`, a
        `ackcore.kafka.KafkaSpout`, whose brokers are not contacted, or a DataFrame, of which only
        the columns are used.  Its sinks are not called: the result has their rows.
    rows : mapping from str to sequence of dict or tuple, or pyarrow.Table
        The records of each spout, in the columns of its source; columns that a dict lacks are null.
        Those of a `KafkaSpout` need only a ``value``; defaults are used for the rest.
    tasks : int, default 2
        The number of tasks that read each spout, and that run the bolts after an exchange.
    kills : mapping from str to int, ints or callable, optional
        By bolt, the tuples at which its task dies like a killed worker; the task then runs again,
        with the same ids.  A number n is the n-th tuple that the bolt receives in the whole run; a
        tuple that it receives again counts again.  A callable gets each tuple as a dict, and
        returns whether the task dies at it.
    listeners : sequence of `ackcore.spark.QueryListener`, optional
        The listeners, called at the start, after each micro-batch, and at the end.

    Returns
    -------
    TopologyRun
        The outcome.

    Raises
    ------
    ImportError
        If pyspark or pyarrow is not installed.
    TypeError, ValueError
        If an argument has another type, ``rows`` or ``kills`` has other names than the topology,
        rows do not fit their columns, or a bolt cannot be pickled.
    RunFailed
        If no run of a micro-batch succeeds: a task was killed four times in each, for example. Also
        if a tuple does not meet an expectation with ``on_fail="fail"``.

    Notes
    -----
    Each task has a pickled copy of a bolt, as on Spark.  So you cannot see changes of a bolt's
    attributes, or of variables next to its class.  You can see changes in an imported module.

    A bolt that hangs also hangs the test: ``bolt_call_timeout_s`` is ignored, since it would end
    this process.
    """
    # Imported here, because the check of a backend needs neither Arrow nor Spark.
    from ackcore.testing.local_runs import run_in_process  # noqa: PLC0415

    return run_in_process(topology, rows, tasks, {} if kills is None else kills, listeners)
