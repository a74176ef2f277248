"""A node for tests of one script, alone; tests of a module share it, each under a run of its own."""

from collections.abc import Iterator

import pytest

import node
from node import config
from node.library.sync import SyncNode


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncNode]:
    """A node, alone."""
    settings = config.Config(
        name="alone",
        data_dir=tmp_path_factory.mktemp("alone") / "node",
        swarm=config.Swarm(name="scripts", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.Join(lan=False),
        resources=config.Resources(calibrate=False),
    )
    with node.sync(settings) as made:
        yield made
