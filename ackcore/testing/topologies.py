"""Topologies run in this process: the way to test one's bolts.

Needs ``ackcore[spark]``, and neither Java nor a Spark that runs; loaded when `run` is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ackcore.testing.results import Kill, TopologyRun

if TYPE_CHECKING:
    import pyarrow as pa

    from ackcore.topology import Topology


def run(
    topology: Topology,
    rows: Mapping[str, Sequence[Any] | pa.Table],
    *,
    tasks: int = 2,
    kills: Mapping[str, Kill] | None = None,
    listeners: Sequence[Any] = (),
) -> TopologyRun:
    """Run a topology in this process, until each of its records is ACKED or DEAD.

    What runs bolts, tracks, decides and retries is what does so on Spark, protocol and checkpoint
    included; only the exchanges are lists, and the clock is a number that waiting adds to.  So is
    the time of an `AsyncBolt`'s calls as long as it has no socket open and no thread at work.

    Parameters
    ----------
    topology : Topology
        What `TopologyBuilder.build` made.  The source of each spout is a `Source`, a
        `ackcore.kafka.KafkaSpout`, which is not asked, or a DataFrame, whose columns are read and
        nothing else.  Its sinks are not called: their rows are in the result.
    rows : mapping from str to sequence of dict or tuple, or pyarrow.Table
        The records of each spout, in the columns of its source.  Those of a `KafkaSpout` need no
        more than a ``value``: the rest is made up.
    tasks : int, default 2
        How many tasks read each spout, and run the bolts behind an exchange.
    kills : mapping from str to int, ints or callable, optional
        By bolt, what its task dies of, as a worker does that is killed; the task is then run again,
        with the same ids.  A number is the place, from 1, of a tuple among all that the bolt takes
        in the whole run, those of earlier tries included; a callable is asked of each tuple, as a
        dict, and says whether it always kills.
    listeners : sequence of `ackcore.spark.QueryListener`, optional
        Are told as `ackcore.spark.run_batch` tells them.

    Returns
    -------
    TopologyRun

    Raises
    ------
    ImportError
        If pyspark or pyarrow is not installed.
    TypeError, ValueError
        If an argument is wrong, rows do not fit their columns, or a bolt cannot be pickled.
    RunFailed
        If a micro-batch cannot be run, as on Spark.

    Notes
    -----
    Each task has a copy of a bolt, as on Spark: what one keeps in itself, or in a variable that its
    class was defined beside, is not to be seen from outside.  What is in an imported module is.

    A bolt that hangs hangs the test: ``bolt_call_timeout_s`` would end this process.
    """
    # Loaded here: what tests a backend needs neither Arrow nor Spark.
    from ackcore.testing.local_runs import run_in_process  # noqa: PLC0415

    return run_in_process(topology, rows, tasks, {} if kills is None else kills, listeners)
