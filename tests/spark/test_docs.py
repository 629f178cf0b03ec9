"""The documentation of errors."""

import importlib
import re
from pathlib import Path

import pytest

ERRORS = Path(__file__).parents[2] / "docs" / "errors.md"


@pytest.mark.parametrize(
    "package",
    [
        "ackcore",
        "ackcore.calls",
        "ackcore.dispatch",
        "ackcore.kafka",
        "ackcore.spark",
        "ackcore.topology",
    ],
)
def test_every_public_error_is_in_the_errors_page(package):
    module = importlib.import_module(package)
    public = {name for name in module.__all__ if _is_error(getattr(module, name))}
    known = set(re.findall(r"`(\w+)`", ERRORS.read_text(encoding="utf-8")))
    assert public <= known


def test_no_error_in_the_errors_page_is_made_up():
    rows = re.findall(r"^\| `(\w+)`", ERRORS.read_text(encoding="utf-8"), re.MULTILINE)
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in (ERRORS.parents[1] / "ackcore").rglob("*.py")
    )
    assert [name for name in rows if not re.search(rf"\b{name}\b", source)] == []
    assert len(rows) > 20


def test_every_reason_that_the_source_gives_is_in_the_errors_page():
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in (ERRORS.parents[1] / "ackcore").rglob("*.py")
    )
    given = re.findall(
        r'(?:\bReason\(\s*[\w.]+,\s*|\bFailure\(|pa\.repeat\(|_replace\(type=)"([A-Z][a-z]\w+)"',
        source,
    )
    known = set(
        re.findall(r"`(\w+)`", ERRORS.read_text(encoding="utf-8").partition("## Reasons")[2])
    )
    assert len(given) > 10
    assert set(given) <= known


def _is_error(value):
    return isinstance(value, type) and issubclass(value, Exception)
