"""Frames are kept until their step is applied: a limited amount in memory, and the rest in unnamed files."""

import errno
import gc
import mmap
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import trio

from crypto.noise import Data
from node.config import Resources
from node.errors import StageFailed
from node.events import Event, RunChanged, RunEnded, StepCommitted
from node.pipeline.frame_store import FrameStore
from node.quantities import Memory
from node.runs.settings import RunServiceSettings
from node.seams import Parts
from node.service_settings import ServiceSettings
from node.storage.budget import ScratchBudget
from node.storage.folder import FolderStorage
from node.storage.spill import Spill
from partition.codecs.codec import Payload, pack, typed, unpack
from sim.executor import SimExecutor
from sim.storage import MemoryStorage
from tests.stack import assert_equal, manifest, reference, simulate, swarm, train, weights


def payload_of(number: int, floats: int = 1_000) -> Payload:
    return pack([typed(np.full(floats, number, np.float32))], "raw")


def is_payload(payload: Payload, number: int) -> bool:
    ((_, array),) = unpack(payload, bytes_max=1 << 20)
    return bool((array == number).all())


def files_open_in(folder: Path) -> int:
    """Return the number of open files of this process in `folder`, with or without a name."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # the descriptor that lists the folder
    return sum(target.startswith(str(folder)) for target in targets)


async def test_frames_over_the_memory_limit_spill_to_unnamed_files(
    tmp_path: Path,
) -> None:
    store = FrameStore(FolderStorage(tmp_path), SimExecutor(), 8_000)
    kept = [await store.keep(payload_of(number)) for number in range(5)]
    assert store.held_bytes == 8_000, "the store does not hold exactly two frames of 4,000 bytes in memory"
    assert files_open_in(tmp_path) > 0
    assert os.listdir(tmp_path) == [], "the spill file has a name"
    assert all(is_payload(payload, number) for number, payload in enumerate(kept))
    part = kept[1].data[100:200]  # part of a payload, as a link holds it until it is sent
    last = kept[4].data[100:200]
    kept.clear()
    assert store.held_bytes == 4_000
    assert files_open_in(tmp_path) > 0
    assert bytes(part[:4]) == np.float32(1).tobytes()
    assert bytes(last[:4]) == np.float32(4).tobytes()
    del part, last
    assert store.held_bytes == 0
    assert files_open_in(tmp_path) == 0


async def test_released_frames_free_memory(tmp_path: Path) -> None:
    store = FrameStore(FolderStorage(tmp_path), SimExecutor(), 8_000)
    for number in range(100):
        assert is_payload(await store.keep(payload_of(number)), number)
    assert files_open_in(tmp_path) == 0, "memory of released frames was not free, so a frame was spilled"


async def test_frames_kept_in_memory_are_shared_and_not_copied(tmp_path: Path) -> None:
    store = FrameStore(FolderStorage(tmp_path), SimExecutor())
    payload = payload_of(1)
    kept = await store.keep(payload)
    assert np.shares_memory(np.frombuffer(kept.data), np.frombuffer(payload.data))
    assert kept == payload
    assert (await store.keep(pack([], "raw"))).data.nbytes == 0


def test_further_frames_go_to_a_new_file_if_one_is_full(tmp_path: Path) -> None:
    storage = Spill(tmp_path, ScratchBudget(Resources().scratch, tmp_path), 1 << 14)
    views = [storage.put(bytes([number]) * 3_000) for number in range(9)]
    assert [bytes(view) for view in views] == [bytes([number]) * 3_000 for number in range(9)]
    assert files_open_in(tmp_path) == 2 * 3, (
        "the frames are not in three files, each with a descriptor and a map"
    )
    large = storage.put(bytes(100_000))
    assert len(large) == 100_000
    assert all(view.readonly for view in [*views, large])
    del views, large
    assert files_open_in(tmp_path) == 0


async def test_a_full_disk_fails_the_stage_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_room)
    store = FrameStore(FolderStorage(tmp_path), SimExecutor(), 8 << 20)
    with pytest.raises(StageFailed, match=r"more than 8 MiB, and the disk .*No space left on device.*: make"):
        await store.keep(payload_of(1, 3 << 20))
    assert store.held_bytes == 0
    assert files_open_in(tmp_path) == 0


async def test_all_stages_of_a_node_share_one_disk_limit(tmp_path: Path) -> None:
    budget = ScratchBudget(Memory(bytes=4 * mmap.PAGESIZE), tmp_path)
    storage = FolderStorage(tmp_path, budget)
    one, other = (FrameStore(storage, SimExecutor(), 0) for _ in range(2))
    kept = [await store.keep(payload_of(number)) for number, store in enumerate((one, other, one, other))]
    assert budget.held_bytes == 4 * mmap.PAGESIZE
    with pytest.raises(StageFailed, match=r"stages hold 0 MiB of the 0 MiB allowed by \[resources\] scratch"):
        await one.keep(payload_of(4))
    assert all(is_payload(payload, number) for number, payload in enumerate(kept))
    kept.clear()
    assert budget.held_bytes == 0
    assert is_payload(await other.keep(payload_of(5)), 5)


async def test_stages_leave_the_nodes_own_disk_reserve_untouched(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    storage = FolderStorage(tmp_path, ScratchBudget(Resources().scratch, tmp_path, 2 * free))
    with pytest.raises(StageFailed, match="for the node itself"):
        await FrameStore(storage, SimExecutor(), 0).keep(payload_of(1))
    assert storage.scratch.held_bytes == 0


TINY_BYTES_MAX = 20_000
"""Size of one step of the small model: two frames."""
TINY = ServiceSettings(run_service=RunServiceSettings(frames_bytes_max=TINY_BYTES_MAX))


def watched_stores(seen: list[tuple[FrameStore, int]]) -> Parts:
    """Return parts in which each frame store appends itself and its size to `seen` after each frame that it
    kept."""

    class WatchedStore(FrameStore):
        async def keep(self, payload: Payload) -> Payload:
            result = await super().keep(payload)
            seen.append((self, self.held_bytes))
            return result

    return {FrameStore: WatchedStore}


class SpillingStorage(MemoryStorage):
    """Keeps blobs in memory, spills frames to the disk, and records the sizes of the spilled frames."""

    def __init__(self, folder: FolderStorage, spilled: list[int]) -> None:
        super().__init__()
        self._folder, self._spilled = folder, spilled

    def spill(self, data: Data) -> memoryview:
        self._spilled.append(len(data))
        return self._folder.spill(data)


class FirstFullStorage(MemoryStorage):
    """Has no room for frames if it is the first storage of a swarm that must spill a frame."""

    def __init__(self, full: list[MemoryStorage]) -> None:
        super().__init__()
        self._full = full

    def spill(self, data: Data) -> memoryview:
        if not self._full:
            self._full.append(self)
        if self is self._full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().spill(data)


def test_a_run_with_spilled_frames_stays_exact_after_a_death(tmp_path: Path) -> None:
    seen: list[tuple[FrameStore, int]] = []
    folder, spilled = FolderStorage(tmp_path), list[int]()
    storages = {name: SpillingStorage(folder, spilled) for name in "abcde"}

    async def scenario() -> None:
        parts = watched_stores(seen)
        async with swarm("abcde", settings=TINY, storages=storages, parts=parts) as group:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1:
                    await trio.sleep(0.75 * event.seconds)
                    plan = next(iter(group.nodes["e"].state.runs.values())).plan
                    assert plan is not None
                    group.kill(group.name_of(plan.stages[0][0]))

            run, events = await train(group, "e", manifest(), disturb)
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            assert_equal(weights(group, "e", run), reference(run), "float64")

    simulate(scenario)
    gc.collect()  # a killed node is a reference cycle
    assert max(held for _, held in seen) <= TINY_BYTES_MAX
    assert sum(spilled) > 10 * TINY_BYTES_MAX
    assert {store.held_bytes for store, _ in seen} == {0}
    assert files_open_in(tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_stage_without_room_for_its_frames_is_replaced() -> None:
    full: list[MemoryStorage] = []
    storages = {name: FirstFullStorage(full) for name in "abcde"}
    reasons: list[str] = []

    async def scenario() -> None:
        async with swarm("abcde", preset="lan", settings=TINY, storages=storages) as group:
            run, events = await train(group, "e", manifest(steps=2))
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            reasons.extend(event.reason for event in events if isinstance(event, RunChanged))
            assert_equal(weights(group, "e", run), reference(run), "float64")

    simulate(scenario)
    assert any("No space left on device" in reason for reason in reasons), reasons
