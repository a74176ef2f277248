"""Checks whether torch, which computes stages and captures models, is installed (the extra `compute`).

This never imports torch. A node without torch is a member, keeps records, watches, relays and answers
clients, but computes no stage.
"""

from functools import cache
from importlib.util import find_spec

from node.invocation import install_command

NO_TORCH = "torch is not installed"
EXTRA = "peerloom[compute]"


@cache
def has_torch() -> bool:
    """Return whether torch can be imported."""
    return find_spec("torch") is not None


def torch_remedy() -> str:
    """Return the command that installs torch into this package's environment."""
    return install_command(EXTRA)


def cannot_compute() -> str:
    """Return the reason why this node cannot compute a stage, for people; empty if it can."""
    return (
        "" if has_torch() else f"{NO_TORCH}, so this node cannot compute stages. Install it: {torch_remedy()}"
    )
