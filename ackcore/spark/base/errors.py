"""What an error of Spark's says, without the pages around it."""

from __future__ import annotations

#: Longer lines hold somebody's data rather than what was wrong.
_LONGEST = 500


def one_line(error: BaseException) -> str:
    """Return the line of an error that says what was wrong; Spark's go on for pages."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].startswith("An error occurred while calling") and len(lines) > 1:
        lines[0] = lines[1].removeprefix(": ")  # the first is Py4J's, and names what nobody knows
    # What a worker raised is the last line of its traceback, in the midst of Java's.
    for line in reversed(lines):
        name, colon, _ = line.partition(": ")
        if colon and name.isidentifier() and name.endswith(("Error", "Exception")):
            return line[:_LONGEST]
    return lines[0][:_LONGEST]
