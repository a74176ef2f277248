"""Data of a run on its way from another member: its hash comes first, and what is no data is said so."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pytest
import trio

from node.content.dataset_store import DataFiles, data_name
from node.content.datasets import FileName, digest_of, load_folder
from node.errors import Unreachable, UsageError
from node.executor import RealExecutor
from node.runtime import Node
from node.seams import Arrays, RealClock, Seams
from node.storage.folder import FolderStorage
from sim.executor import SimExecutor
from sim.storage import MemoryStorage
from tests.node.test_npz import NO_DATA
from tests.stack import Swarm, manifest, simulate, swarm


def save(folder: Path, count: int = 6) -> None:
    rng = np.random.default_rng(1)
    for name in ("train", "test"):
        np.savez_compressed(folder / f"{name}.npz", x=rng.random((count, 3)), y=np.arange(count) % 3)


def put(storage: MemoryStorage, digest: str, files: Mapping[FileName, bytes]) -> None:
    for name, data in files.items():
        storage.write(data_name(digest, name), data)


def files_of(folder: Path) -> dict[FileName, bytes]:
    return {
        "train.npz": (folder / "train.npz").read_bytes(),
        "test.npz": (folder / "test.npz").read_bytes(),
    }


def two_nodes(test: Callable[[Swarm, Node, Node], Awaitable[None]]) -> None:
    async def main() -> None:
        async with swarm("ab") as group:
            await test(group, group.nodes["a"], group.nodes["b"])

    simulate(main)


class CountingExecutor(SimExecutor):
    """Counts the archives that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.unpacked = 0

    async def unpack(self, archive: IO[bytes], out: IO[bytes], *, allow_unfenced: bool) -> Arrays:
        self.unpacked += 1
        return await super().unpack(archive, out, allow_unfenced=allow_unfenced)


def test_data_is_handed_over_whole_and_kept(tmp_path: Path) -> None:
    async def test(group: Swarm, a: Node, b: Node) -> None:
        save(tmp_path)
        here = load_folder(tmp_path)
        await b.runs.learn_data(here.digest, tmp_path)
        there = await a.runs.data.load(manifest(data=here.digest), [b.peer])
        np.testing.assert_array_equal(there.train["x"], here.train["x"])
        np.testing.assert_array_equal(there.test["y"], here.test["y"])
        assert here.digest in a.runs.guests.labels
        assert a.runs.guests.bytes_here == sum(map(len, files_of(tmp_path).values()))
        assert b.runs.guests.labels == ()  # its own
        group.kill("b")
        again = await a.runs.data.load(manifest(data=here.digest), [])
        assert again.digest == here.digest

    two_nodes(test)


def test_other_data_than_was_asked_for_is_never_read(tmp_path: Path) -> None:
    async def test(group: Swarm, a: Node, b: Node) -> None:
        save(tmp_path)
        put(group.storages["b"], "0" * 64, files_of(tmp_path))
        executor = CountingExecutor()
        seams = Seams(a.network, a.seams.clock, a.seams.rng, a.seams.entropy, executor, MemoryStorage())
        with pytest.raises(Unreachable, match="another than the run's"):
            await DataFiles(seams).load(manifest(data="0" * 64), [b.peer])
        assert executor.unpacked == 0
        assert seams.storage.sizes("data") == {}

    two_nodes(test)


def test_data_for_which_there_is_no_room_is_not_kept(tmp_path: Path) -> None:
    async def test(_: Swarm, a: Node, b: Node) -> None:
        save(tmp_path)
        here = load_folder(tmp_path)
        await b.runs.learn_data(here.digest, tmp_path)
        a.checkpoints.store.blobs.guest_bytes_max = 100
        with pytest.raises(Unreachable, match="no room for it"):
            await a.runs.data.load(manifest(data=here.digest), [b.peer])
        assert a.seams.storage.sizes("data") == {}

    two_nodes(test)


@pytest.mark.parametrize("name", NO_DATA)
def test_a_member_that_hands_over_no_data_is_named_and_nobody_falls(name: str, tmp_path: Path) -> None:
    async def test(group: Swarm, a: Node, b: Node) -> None:
        for file in ("train.npz", "test.npz"):
            (tmp_path / file).write_bytes(NO_DATA[name])
        with (tmp_path / "train.npz").open("rb") as train, (tmp_path / "test.npz").open("rb") as held_out:
            digest = digest_of({"train.npz": train, "test.npz": held_out}, 0)
        put(group.storages["b"], digest, files_of(tmp_path))
        with pytest.raises(Unreachable, match=r"train\.npz: "):
            await a.runs.data.load(manifest(data=digest), [b.peer])

    two_nodes(test)


async def test_a_person_s_own_folder_is_read_in_a_process_of_its_own(tmp_path: Path) -> None:
    save(tmp_path)
    expected = load_folder(tmp_path)
    storage = FolderStorage(tmp_path / "node")
    nothing = cast("Any", None)  # data of one's own needs neither network nor choices
    seams = Seams(nothing, RealClock(), nothing, nothing, RealExecutor(), storage)
    found = await DataFiles(seams).learn(tmp_path, window=0)
    assert found.digest == expected.digest
    np.testing.assert_array_equal(found.train["x"], expected.train["x"])
    await trio.Path(tmp_path / "test.npz").write_bytes(NO_DATA["labels that are raw bytes"])
    with pytest.raises(UsageError, match=r"test\.npz: want numbers"):
        await DataFiles(seams).learn(tmp_path, window=0)
