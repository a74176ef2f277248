"""Access to a node's local mode for tests that inspect it."""

from typing import Any

from node.local.service import LocalRuns


def local_runs(node: Any) -> LocalRuns:
    """Return this node's runs in local mode with all their parts, not only those that the service of runs
    sees."""
    local = node.runs.local
    assert isinstance(local, LocalRuns)
    return local
