"""Without confluent-kafka each file of these tests is skipped."""

import pytest


class NeedsClient(pytest.Module):
    def collect(self):
        pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
        return super().collect()


def pytest_pycollect_makemodule(module_path, parent):
    return NeedsClient.from_parent(parent, path=module_path)
