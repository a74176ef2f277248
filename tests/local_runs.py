"""Access to a node's local mode for tests that inspect it."""

from typing import Any

from node.local.service import LocalRuns


def local_runs(node: Any) -> LocalRuns:
    """Return this node's runs in local mode, not only the part visible to the service of runs."""
    local = node.runs.local
    assert isinstance(local, LocalRuns)
    return local
