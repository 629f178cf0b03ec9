"""The planted bugs of `make mutations` are where the code is: they move with it."""

from __future__ import annotations

import pytest
from mutations import ROOT, Mutation, load

if not (ROOT / "pyx").is_dir():
    pytest.skip("a wheel is tested, not a tree", allow_module_level=True)


@pytest.mark.parametrize("mutation", load(), ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_and_names_a_test(mutation: Mutation) -> None:
    """Otherwise it proves nothing, and only the next whole run would tell."""
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    file, _, name = mutation.test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not name or f"def {name.partition('[')[0]}(" in text
