"""The path of `table_model`."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

# `table_model` is no test, and tests are no package.
sys.path.insert(0, str(Path(__file__).parent))
