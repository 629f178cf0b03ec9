"""Where the records come from that failed in a run: from files, or by reading them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pyarrow as pa

from ackcore.spark.protocol.decide import Payloads
from ackcore.spark.run.collect import ResultsTooLarge
from ackcore.spark.run.types import WrittenFailures


def payloads_of(
    failed: pa.Table,
    written: WrittenFailures | None,
    fetch: Callable[[pa.Table], Mapping[str, pa.Table]],
    write: Callable[[pa.Table], WrittenFailures] | None,
    few: int,
) -> Payloads:
    """Return failed records, those read again that their tasks have not written.

    Parameters
    ----------
    failed : pyarrow.Table
        `FAILED`; what tasks wrote in the run need not be among it.
    written : WrittenFailures or None
        What tasks wrote in the run.
    fetch : callable
        Reads failed records again.
    write : callable or None
        Has tasks read failed records again, and write them.
    few : int
        So many are fetched; and, without ``write``, any number.

    Raises
    ------
    ResultsTooLarge
        If they must be fetched, and Spark does not hand them to the driver.
    """
    left = failed
    if written is not None and len(failed):
        left = failed.filter(pa.array(~written.have(failed["root_id"].to_numpy())))
    if written is not None and not len(left):
        return written
    if write is None or len(left) <= few:
        try:
            fetched = fetch(left)
        except ResultsTooLarge:
            if write is None:
                raise
        else:
            return fetched if written is None else replace(written, tables=fetched)
    assert write is not None
    more = write(left)
    return more if written is None else written.plus(more)
