"""A run's data on its way from other members: it is verified piece by piece, resumed after an interruption,
and kept within the quota."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio

from crypto.encoding import encode
from gossip.pieces.messages import PIECE_BYTES
from node.content.dataset_store import DataFiles
from node.content.datasets import Dataset, load_digits, load_folder, load_text
from node.errors import Unreachable, UsageError
from node.events import Event, RunEnded, StepCommitted
from node.executor import RealExecutor
from node.runtime import Node
from node.seams import RealClock, Seams
from node.storage.blobs import Blobs
from node.storage.folder import FolderStorage
from partition.plan.assignment import LANES, lanes_of
from tests.node.test_npz import NO_DATA
from tests.stack import Swarm, manifest, reference, simulate, swarm, train, weights


def save(folder: Path, count: int = 6, width: int = 3, seed: int = 1) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    for name in ("train", "test"):
        rows = count if name == "train" else min(count, 6)
        np.savez(folder / f"{name}.npz", x=rng.random((rows, width)), y=np.arange(rows) % 3)


def nodes(names: str, test: Callable[[Swarm], Awaitable[None]]) -> None:
    async def main() -> None:
        async with swarm(names) as group:
            await test(group)

    simulate(main)


def data_of(node: Node) -> DataFiles:
    return node.runs.data


def blobs_of(node: Node) -> Blobs:
    return node.checkpoints.store.blobs


def same(found: Dataset, expected: Dataset) -> None:
    assert found.digest == expected.digest
    for part, arrays in expected.parts.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(found.parts[part][name][:], array)


def test_data_arrives_whole_and_stays_on_the_disk(tmp_path: Path) -> None:
    async def test(group: Swarm) -> None:
        a, b = group.nodes["a"], group.nodes["b"]
        save(tmp_path)
        here = load_folder(tmp_path)
        await b.runs.data.keep(here.digest, tmp_path)
        same(await data_of(a).load(manifest(data=here.digest), [b.peer]), here)
        assert blobs_of(a).guest_bytes > 0
        assert blobs_of(b).guest_bytes == 0  # b sends the data from its own folder
        group.kill("b")
        same(await data_of(a).load(manifest(data=here.digest), []), here)

    nodes("ab", test)


def test_a_text_travels_together_with_its_window(tmp_path: Path) -> None:
    async def test(group: Swarm) -> None:
        a, b = group.nodes["a"], group.nodes["b"]
        (tmp_path / "text").write_bytes(bytes(range(256)) * 9)
        here = load_text(tmp_path / "text", window=50)
        await b.runs.data.keep(here.digest, tmp_path / "text", window=50)
        found = await data_of(a).load(manifest(data=here.digest, window=50), [b.peer])
        same(found, here)
        assert (found.label_values, found.window) == (256, 50)

    nodes("ab", test)


def test_members_exchange_pieces_so_the_source_may_die(tmp_path: Path) -> None:
    """Three members fetch. The only source is killed once it has sent as many bytes as one copy needs."""

    async def test(group: Swarm) -> None:
        save(tmp_path, count=3_000, width=500)  # 12 MB, 46 pieces
        here = load_folder(tmp_path)
        source = group.nodes["a"]
        await source.runs.data.keep(here.digest, tmp_path)
        size = sum(array.nbytes for arrays in here.parts.values() for array in arrays.values())
        others = [group.nodes[name] for name in "bcd"]
        peers = [node.peer for node in (source, *others)]
        exchange = data_of(source).exchange
        done: list[Dataset] = []

        async def fetch(node: Node) -> None:
            done.append(await data_of(node).load(manifest(data=here.digest), peers))

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for node in others:
                    nursery.start_soon(fetch, node)
                while exchange.uploaded_bytes < size:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.001)
                assert len(done) < 3
                group.kill("a")
        for found in done:
            same(found, here)
        assert all(data_of(node).exchange.uploaded_bytes for node in others)

    nodes("abcd", test)


def test_a_trainer_fetches_the_shards_of_its_lanes_and_reserve_lanes(tmp_path: Path) -> None:
    async def test(group: Swarm) -> None:
        a, b = group.nodes["a"], group.nodes["b"]
        save(tmp_path, count=8_000, width=512)  # 33 MB: 16 shards
        here = load_folder(tmp_path)
        await a.runs.data.keep(here.digest, tmp_path)
        strangers = [bytes([number]) * 38 for number in range(6)]
        lanes = lanes_of([*strangers, b.peer], b.peer)
        own = {lane % here.shards for lane in lanes[0]}
        kept = {lane % here.shards for lane in (*lanes[0], *lanes[1])}
        assert own < kept < set(range(here.shards))
        found = await data_of(b).load(manifest(data=here.digest), [a.peer], lanes)
        assert found.supply is not None
        await found.supply.ready("train", sorted(kept))
        for row in range(0, 8_000, 37):
            if row % here.shards in kept:
                np.testing.assert_array_equal(found.train["x"][row], here.train["x"][row])
        share = data_of(b).exchange.downloaded_bytes / (8_000 * 512 * 8)
        assert share < (len(kept) + 1) / here.shards

    nodes("ab", test)


def test_a_broken_fetch_resumes_from_the_disk(tmp_path: Path) -> None:
    async def test(group: Swarm) -> None:
        a, b = group.nodes["a"], group.nodes["b"]
        save(tmp_path, count=3_000, width=500)
        here = load_folder(tmp_path)
        await a.runs.data.keep(here.digest, tmp_path)
        first = data_of(b)
        with trio.move_on_after(600):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(first.load, manifest(data=here.digest), [a.peer]))
                while first.exchange.downloaded_bytes < 5 << 20:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
        had = first.exchange.downloaded_bytes
        for exchange in list(first.exchange._open.values()):
            first.exchange.close(exchange)
        assert had < 9 << 20
        same(await first.load(manifest(data=here.digest), [a.peer]), here)
        assert first.exchange.downloaded_bytes < 13 << 20  # of 12.0 MB, so no piece came twice

    nodes("ab", test)


def _raise(*_: object) -> None:
    raise AssertionError("a peer was refused")


def test_a_lying_holder_is_refused_and_the_data_fetched_elsewhere(tmp_path: Path) -> None:
    async def test(group: Swarm) -> None:
        a, b, c = (group.nodes[name] for name in "abc")
        save(tmp_path, count=1_000, width=500)
        here = load_folder(tmp_path)
        for node in (a, b):
            await node.runs.data.keep(here.digest, tmp_path)
        get = blobs_of(a).get

        def lie(name: bytes) -> bytes | None:
            data = get(name)
            return data if data is None or len(data) < PIECE_BYTES else bytes(len(data))

        blobs_of(a).get = lie  # type: ignore[method-assign]  # a liar
        same(await data_of(c).load(manifest(data=here.digest), [a.peer, b.peer]), here)
        assert c._refused["protocol_errors"]

    nodes("abc", test)


def test_a_malformed_data_manifest_is_refused(tmp_path: Path) -> None:
    async def test(group: Swarm) -> None:
        a, b = group.nodes["a"], group.nodes["b"]
        name = blobs_of(b).put(encode(["no", "manifest"]))
        with pytest.raises(Unreachable, match="is malformed"):
            await data_of(a).load(manifest(data=name.hex()), [b.peer])

    del tmp_path
    nodes("ab", test)


def test_a_fetch_without_any_holder_fails(tmp_path: Path) -> None:
    async def test(group: Swarm) -> None:
        a, b = group.nodes["a"], group.nodes["b"]
        with pytest.raises(Unreachable, match="no peer delivers the run's data"):
            await data_of(a).load(manifest(data="0" * 64), [b.peer])
        save(tmp_path)
        here = load_folder(tmp_path)
        await b.runs.data.keep(here.digest, tmp_path)
        await data_of(a).load(manifest(data=here.digest), [b.peer])
        for piece in list(blobs_of(b)._sizes):
            if blobs_of(b)._sizes[piece] > 100:
                blobs_of(b).delete(piece)
                blobs_of(a).delete(piece)
        data_of(a).exchange.close(next(iter(data_of(a).exchange._open.values())))
        with pytest.raises(Unreachable, match="no peer delivers"):
            await data_of(a).load(manifest(data=here.digest), [b.peer])

    nodes("ab", test)


def test_data_without_room_is_not_kept(tmp_path: Path) -> None:
    async def test(group: Swarm) -> None:
        a, b = group.nodes["a"], group.nodes["b"]
        save(tmp_path)
        here = load_folder(tmp_path)
        await b.runs.data.keep(here.digest, tmp_path)
        blobs_of(a).guest_bytes_max = 100
        with pytest.raises(Unreachable, match="no room for the data"):
            await data_of(a).load(manifest(data=here.digest), [b.peer])
        assert data_of(a).cache.digests == ()

    nodes("ab", test)


def test_the_least_recently_used_data_set_is_evicted(tmp_path: Path) -> None:
    async def test(group: Swarm) -> None:
        a, b = group.nodes["a"], group.nodes["b"]
        digests = []
        for number in range(3):
            save(tmp_path / str(number), count=300, width=300, seed=number)
            here = load_folder(tmp_path / str(number))
            await b.runs.data.keep(here.digest, tmp_path / str(number))
            digests.append(here.digest)
        blobs_of(a).guest_bytes_max = 2_000_000  # two of the three sets
        for digest in (digests[0], digests[1], digests[0], digests[2]):
            await data_of(a).load(manifest(data=digest), [b.peer])
        assert data_of(a).cache.digests == (digests[0], digests[2])
        assert data_of(a).cache.evicted == [digests[1]]
        assert blobs_of(a).guest_bytes <= 2_000_000

    nodes("ab", test)


async def test_a_private_folder_is_read_in_its_own_process(tmp_path: Path) -> None:
    save(tmp_path)
    expected = load_folder(tmp_path)
    storage = FolderStorage(tmp_path / "node")
    nothing = cast("Any", None)
    own = cast("Any", _NoNetwork())
    seams = Seams(own, RealClock(), nothing, nothing, RealExecutor(), storage)
    files = DataFiles(seams, Blobs(storage), refuse=_raise, start_task=_raise)
    found = await files.learn(tmp_path, window=0)
    assert found.digest == expected.digest
    np.testing.assert_array_equal(found.train["x"], expected.train["x"])
    await trio.Path(tmp_path / "test.npz").write_bytes(NO_DATA["labels that are raw bytes"]())
    with pytest.raises(UsageError, match=r"test\.npz: want numbers"):
        await files.learn(tmp_path, window=0)


class _NoNetwork:
    peer = b"me"


@pytest.mark.parametrize("trainers", [1, 2, 3, 5, 16])
def test_every_lane_has_one_trainer_and_a_second_in_reserve(trainers: int) -> None:
    peers = [bytes([number]) * 38 for number in range(trainers)]
    dealt = [lanes_of(peers, peer) for peer in peers]
    assert sorted(lane for own, _ in dealt for lane in own) == list(range(LANES))
    seconds = sorted(lane for _, next_ in dealt for lane in next_)
    assert seconds == (list(range(LANES)) if trainers > 1 else [])


def test_training_data_survives_the_death_of_the_requester(tmp_path: Path) -> None:
    """Two trainers share data of many shards. After the first dies, the second takes over all shards."""
    digits = load_digits()
    x, y = digits.train["x"], digits.train["y"]
    np.savez(tmp_path / "train.npz", x=np.repeat(x, 6, 0), y=np.repeat(y, 6, 0))  # 4.4 MB: 4 shards
    np.savez(tmp_path / "test.npz", x=digits.test["x"][:16], y=digits.test["y"][:16])
    here = load_folder(tmp_path)
    assert here.shards > 1
    found: dict[str, Any] = {}

    async def test(group: Swarm) -> None:
        async def disturb(event: Event) -> None:
            if isinstance(event, StepCommitted) and event.step == 2:
                group.kill("a")

        await group.nodes["a"].runs.data.keep(here.digest, tmp_path)
        wanted = manifest(data=here.digest, test_samples=16, trainers=2, steps=8)
        run, events = await train(group, "a", wanted, disturb, watcher="e")
        ended = [event for event in events if isinstance(event, RunEnded)]
        assert [event.outcome for event in ended] == ["done"], ended
        found.update(run=run, weights=weights(group, "e", run))

    nodes("abcde", test)
    expected = reference(found["run"], here)
    for name, tensor in found["weights"].items():
        np.testing.assert_allclose(tensor, expected[name], atol=1e-9)
