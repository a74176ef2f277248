"""The local mode of a node, for tests that look into it."""

from typing import Any

from node.local.service import LocalRuns


def local_runs(node: Any) -> LocalRuns:
    """This node's runs in local mode, not only what the service of runs sees of them."""
    local = node.runs.local
    assert isinstance(local, LocalRuns)
    return local
