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


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (FROM_A_WORKER, "ValueError: no such word"),
        (
            "An error occurred while calling o762.getResult.\n: org.apache.spark.SparkException: "
            "Job aborted due to stage failure\n\tat somewhere",
            "org.apache.spark.SparkException: Job aborted due to stage failure",
        ),
        ("An error occurred while calling o1.x", "An error occurred while calling o1.x"),
        ("\n  plain\nand more", "plain"),
        ("", "RuntimeError"),
        ("x" * 1000, "x" * 500),
    ],
)
def test_what_was_wrong_is_one_line(said, line):
    assert one_line(RuntimeError(said)) == line
