"""The node: its network, services and runs, and its command line. `import node` loads no heavy module.

async with node.Node(join=["10.0.0.5:9747"]) as me: ...      under trio
with node.sync(join=["10.0.0.5:9747"]) as me: ...            blocking: scripts, notebooks
node.plan("gpt2", "PEERS.toml")                              predict a plan; needs no running node
node.run(node.Config.load("node.toml"))                      the daemon, = peerloom
"""

import sys
from typing import TYPE_CHECKING, Any

from node import shadowing

if TYPE_CHECKING:
    from node.config import Config as Config
    from node.library.embedding import Node as Node
    from node.library.sync import sync as sync
    from node.planning.request import plan as plan
    from node.process import main as run

shadowing.check_packages()

__all__ = ["Config", "Node", "plan", "run", "sync"]

_HOMES = {
    "Config": ("node.config", "Config"),
    "Node": ("node.library.embedding", "Node"),
    "plan": ("node.planning.request", "plan"),
    "run": ("node.process", "main"),
    "sync": ("node.library.sync", "sync"),
}


def check_system() -> None:
    """Raise UsageError if a node cannot run on this operating system."""
    if sys.platform == "win32":
        from node.errors import UsageError

        raise UsageError(
            "Windows is not supported yet; Linux is, and so is Linux on Windows (WSL)",
            "wsl --install, then install and start Peerloom inside WSL",
        )


def __getattr__(name: str) -> Any:
    # Client commands also import this package and must start quickly, so trio and torch are loaded only on
    # first use (PEP 562).
    if name not in _HOMES:
        raise AttributeError(f"module 'node' has no attribute '{name}'")
    check_system()
    from importlib import import_module

    module, attribute = _HOMES[name]
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        if (found := shadowing.shadow_behind(error)) is None:
            raise
        raise ImportError(
            f"{shadowing.shadow_text(*found)}: rename it", name=found[0], path=found[1]
        ) from error
