"""Checks whether torch, which computes stages and captures models, is installed: the extra `compute`.

It never imports it. A node without torch is a member, keeps records, watches, relays and answers clients; it
computes no stage.
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
    """Return the command that installs it beside this package."""
    return install_command(EXTRA)


def cannot_compute() -> str:
    """Return why this node can compute no stage, for people; empty if it can."""
    return "" if has_torch() else f"{NO_TORCH}, so it computes no stage: {torch_remedy()}"
