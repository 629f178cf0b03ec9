"""The one line of an error that says what was wrong."""

from __future__ import annotations

import pytest

from ackcore.spark.base.errors import one_line

FROM_A_WORKER = """An error occurred while calling o146.getResult.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 failed 4 times
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "job.py", line 3, in process
ValueError: no such word

\tat org.apache.spark.api.python.BasePythonRunner
"""


#: Of a class that is in a module, whose name is no word of Python's for an error.
OF_A_MODULE = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "job.py", line 3, in process
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "job.py", line 5, in process
    raise StoreReadOnly(
    ...<2 lines>...
    )
shop.stores.StoreReadOnly: s3://bucket/orders cannot be written (status 403)
which took
"""


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            OF_A_MODULE,
            "shop.stores.StoreReadOnly: s3://bucket/orders cannot be written (status 403)",
        ),
        (FROM_A_WORKER, "ValueError: no such word"),
        (
            "An error occurred while calling o762.getResult.\n: org.apache.spark.SparkException: "
            "Job aborted due to stage failure\n\tat somewhere",
            "org.apache.spark.SparkException: Job aborted due to stage failure",
        ),
        ("An error occurred while calling o1.x", "An error occurred while calling o1.x"),
        (
            "<_MultiThreadedRendezvous of RPC that terminated with:\n\tstatus = StatusCode."
            'RESOURCE_EXHAUSTED\n\tdetails = "CLIENT: Sent message larger than max"\n\tdebug_error'
            '_string = "RESOURCE_EXHAUSTED:CLIENT: Sent message larger than max"\n>',
            "RESOURCE_EXHAUSTED: CLIENT: Sent message larger than max",
        ),
        (
            "<_InactiveRpcError of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n"
            '\tdetails = ""\n>',
            "UNAVAILABLE",
        ),
        ("\n  plain\nand more", "plain"),
        ("", "RuntimeError"),
        ("x" * 1000, "x" * 500),
        (
            "An error occurred while calling o7.collect.\n: org.apache.spark.SparkException: "
            "Exception thrown in awaitResult: \n\tat somewhere\nCaused by: java.util.concurrent."
            "ExecutionException: SparkException: Exception thrown in awaitResult: \n"
            "Caused by: java.io.IOException: No space left on device\n\tat somewhere",
            "java.io.IOException: No space left on device",
        ),
    ],
)
def test_what_was_wrong_is_one_line(said, line):
    assert one_line(RuntimeError(said)) == line


class Captured(RuntimeError):
    """An error of Java's as PySpark keeps it, with its cause."""

    def __init__(self, said, cause=None):
        super().__init__(said)
        self._cause = cause


def test_what_another_thread_raised_is_told_by_its_cause():
    hollow = "Exception thrown in awaitResult: "
    cause = Captured(hollow, Captured("[CANNOT_READ_FILE] it is gone.\nmore"))
    assert one_line(Captured(f"[STREAM_FAILED] Query terminated: {hollow}", cause)) == (
        "[CANNOT_READ_FILE] it is gone."
    )
    assert one_line(Captured(hollow)) == hollow.strip()
