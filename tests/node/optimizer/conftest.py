"""Nodes for tests of training scripts. All tests of a module share them, each with its own run."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import node
from crypto.contact import parse_address
from node import config
from node.library.sync import SyncNode


def open_node(stack: ExitStack, folder: Path, *others: SyncNode) -> SyncNode:
    """Make a node that knows these peers."""
    settings = config.Config(
        name=folder.name,
        data_dir=folder,
        swarm=config.SwarmSettings(name="scripts", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(
            lan=False, seeds=tuple(parse_address(other.addresses[0]) for other in others)
        ),
        resources=config.Resources(calibrate=False),
    )
    return stack.enter_context(node.sync(settings))


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncNode]:
    """Yield a node without other peers."""
    with ExitStack() as stack:
        yield open_node(stack, tmp_path_factory.mktemp("alone") / "me")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SyncNode, SyncNode]]:
    """Yield two nodes that know each other."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        one = open_node(stack, folder / "one")
        other = open_node(stack, folder / "other", one)
        for each in (one, other):
            each.wait_for_members(1)
        yield one, other
