"""Checkpoints: equal states give equal bytes, unchanged parts cost nothing, and hostile input is refused."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from node.checkpoints.chunks import ArenaReader, cut_state, restore_state
from node.checkpoints.export import exporting
from node.checkpoints.service import Checkpoints
from node.checkpoints.store import KEPT, CheckpointStore
from node.checkpoints.weights import join_stages
from node.content.blobs import BlobsMissing
from node.content.graphs import graph_name
from node.executor import RealExecutor
from node.protocols import checkpoint as form
from node.seams import RealClock, Seams, Storage
from node.storage.blobs import Blobs, NoRoom, hash_of, split
from node.storage.folder import FolderStorage
from partition.execute.weights import export_file
from partition.plan.plan import STAGES_MAX, STEPS_MAX, plan_hash
from partition.stage import VECTOR_BYTES_MAX
from partition.stage_layout import parameter_layout
from sim.storage import MemoryStorage
from tests.node.nets import make_network
from tests.node.saved import SMALL_CHUNK_BYTES, Saved, build, saved, signer, use_small_chunks


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_chunks(monkeypatch)


def checkpoints_in(storage: Storage, *, by: str = "a", guest_bytes_max: int = 1 << 30) -> Checkpoints:
    network = make_network(by)
    seams = Seams(network, RealClock(), None, os.urandom, RealExecutor(1), storage)  # type: ignore[arg-type]  # no rng is drawn from

    def refuse(peer: PeerId, error: RemoteProtocolError) -> None:
        raise error

    return Checkpoints(seams, signer(by), Blobs(storage, guest_bytes_max=guest_bytes_max), refuse=refuse)


async def save(checkpoints: Checkpoints, of: Saved, step: int = 4, *, is_guest: bool = False) -> bytes:
    """Store a checkpoint of all stages and return its name."""
    stages = [
        await checkpoints.snapshot(
            of.run,
            step,
            number,
            of.ranges[number],
            memoryview(of.parameters[number]),
            memoryview(of.moments[number]),
            is_guest=is_guest,
        )
        for number in range(len(of.ranges))
    ]
    return await checkpoints.seal(
        of.run, of.plan, step=step, samples=32 * step, stages=stages, is_guest=is_guest
    )


# A state in chunks


class Shelf(dict[bytes, bytes]):
    """Stores blobs in a dictionary."""

    def put(self, data: memoryview) -> bytes:
        name = hash_of(data)
        self[name] = bytes(data)
        return name


arenas = st.binary(max_size=5 * SMALL_CHUNK_BYTES)


@given(arenas, arenas)
def test_a_state_is_restored_without_change(parameters: bytes, moments: bytes) -> None:
    shelf = Shelf()
    part = cut_state(memoryview(parameters), memoryview(moments), shelf.put)
    assert part.digest == blake3(parameters).digest()
    assert part.chunks == {name: len(data) for name, data in shelf.items()}
    back = bytearray(len(parameters)), bytearray(len(moments))
    restore_state(part, shelf.get, memoryview(back[0]), memoryview(back[1]))
    assert [bytes(arena) for arena in back] == [parameters, moments]
    assert form.decode_part(form.encode_part(part)) == part


@given(st.binary(min_size=1, max_size=400), st.data())
def test_any_range_of_an_arena_can_be_read(arena: bytes, draw: st.DataObject) -> None:
    shelf = Shelf()
    part = cut_state(memoryview(arena), memoryview(b""), shelf.put)
    reader = ArenaReader(part.parameters, len(arena), shelf.get)
    start = draw.draw(st.integers(0, len(arena)))
    length = draw.draw(st.integers(0, len(arena) - start))
    assert b"".join(reader.read(start, length)) == arena[start : start + length]
    with pytest.raises(RemoteProtocolError, match="are outside an arena of"):
        list(reader.read(start, len(arena) - start + 1))


def test_unchanged_parts_of_a_state_have_the_same_chunks() -> None:
    parameters = bytearray(os.urandom(10 * SMALL_CHUNK_BYTES))
    shelf = Shelf()
    before = cut_state(memoryview(parameters), memoryview(b""), shelf.put)
    parameters[3 * SMALL_CHUNK_BYTES] ^= 1
    after = cut_state(memoryview(parameters), memoryview(b""), shelf.put)
    pairs = zip(split(before.parameters), split(after.parameters), strict=True)
    assert [one == other for one, other in pairs] == [True] * 3 + [False] + [True] * 6
    assert len(shelf) == 11


def test_a_state_is_restored_only_as_a_whole_and_into_fitting_arenas() -> None:
    shelf = Shelf()
    part = cut_state(memoryview(bytes(range(200))), memoryview(b""), shelf.put)
    with pytest.raises(
        RemoteProtocolError, match="the state has 200 and 0 bytes, but the stage has 100 and 0"
    ):
        restore_state(part, shelf.get, memoryview(bytearray(100)), memoryview(b""))
    wrong = msgspec.structs.replace(part, digest=bytes(32))
    with pytest.raises(RemoteProtocolError, match="digest differs from that"):
        restore_state(wrong, shelf.get, memoryview(bytearray(200)), memoryview(b""))
    name = part.parameters[:32]
    short = {**shelf, name: b"short"}
    with pytest.raises(RemoteProtocolError, match="a chunk has 5 bytes in place of 64"):
        restore_state(part, short.get, memoryview(bytearray(200)), memoryview(b""))
    del shelf[name]
    with pytest.raises(BlobsMissing) as error:
        restore_state(part, shelf.get, memoryview(bytearray(200)), memoryview(b""))
    assert error.value.missing == (name,)


# The manifest


async def signed(storage: Storage) -> tuple[Saved, bytes]:
    of = saved()
    checkpoints = checkpoints_in(storage)
    data = checkpoints.store.blobs.get(await save(checkpoints, of))
    assert data is not None
    return of, data


async def test_a_checkpoint_states_its_run_and_content() -> None:
    of, data = await signed(MemoryStorage())
    author, run, checkpoint = form.check_checkpoint(signer("z"), data)
    assert (author, run) == (signer().peer, of.run)
    assert (checkpoint.step, checkpoint.samples, checkpoint.ranges) == (4, 128, of.ranges)
    assert (checkpoint.plan, checkpoint.height) == (plan_hash(of.plan), 3)
    assert checkpoint.state_bytes == sum(map(len, of.parameters + of.moments))
    assert checkpoint.stages[1].digest == blake3(of.parameters[1]).digest()
    assert form.read_checkpoint(data) == (author, run.manifest, checkpoint)


def changed(**changes: Any) -> Callable[[form.Checkpoint], bytes]:
    """Return a changed checkpoint with a valid signature."""

    def change(checkpoint: form.Checkpoint) -> bytes:
        body = encode(msgspec.structs.replace(checkpoint, **changes))
        return encode(signer().sign(form.CHECKPOINT_PURPOSE, body))

    return change


def with_stages(*ranges: tuple[int, int]) -> Callable[[form.Checkpoint], bytes]:
    def change(checkpoint: form.Checkpoint) -> bytes:
        stage = checkpoint.stages[0]
        stages = tuple(
            msgspec.structs.replace(stage, first_layer=first, last_layer=last) for first, last in ranges
        )
        return changed(stages=stages)(checkpoint)

    return change


def with_other_run(checkpoint: form.Checkpoint) -> bytes:
    return changed(manifest=saved(seed=2, by="b").run.fact)(checkpoint)


def unsigned(checkpoint: form.Checkpoint) -> bytes:
    fact = signer().sign(form.CHECKPOINT_PURPOSE, encode(checkpoint))
    return encode(msgspec.structs.replace(fact, author=signer("b").peer))


HOSTILE: dict[str, tuple[Callable[[form.Checkpoint], bytes], str]] = {
    "another version": (changed(version=2), "Expected `int`"),
    "another run": (changed(run=bytes(32)), "belong to different runs"),
    "another manifest": (with_other_run, "belong to different runs"),
    "another graph": (changed(graph=bytes(32)), "differs from its run's graph"),
    "a step too late": (changed(step=STEPS_MAX + 1), "beyond the last step"),
    "negative": (changed(samples=-1), "Expected `int`"),
    "no stages": (with_stages(), "length >= 1"),
    "a gap": (with_stages((0, 1), (2, 3)), "are not consecutive"),
    "an empty stage": (with_stages((0, 1), (1, 1)), "are not consecutive"),
    "not from the first layer": (with_stages((1, 2)), "are not consecutive"),
    "too many stages": (
        with_stages(*((number, number + 1) for number in range(STAGES_MAX + 1))),
        "at most|length <= 64",
    ),
    "another author": (unsigned, "wrong signature"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_checkpoint_that_no_correct_peer_makes_is_refused(name: str) -> None:
    _, data = await signed(MemoryStorage())
    spoil, words = HOSTILE[name]
    checkpoint = form.read_checkpoint(data)[2]
    with pytest.raises(RemoteProtocolError, match=words):
        form.check_checkpoint(signer(), spoil(checkpoint))


async def test_a_checkpoint_has_exactly_one_encoding() -> None:
    _, data = await signed(MemoryStorage())
    fact = msgspec.msgpack.decode(data)
    padded = msgspec.msgpack.encode([*fact, None])
    with pytest.raises(RemoteProtocolError, match="canonical encoding"):
        form.check_checkpoint(signer(), padded)
    with pytest.raises(RemoteProtocolError, match="at most"):
        form.check_checkpoint(signer(), bytes(form.CHECKPOINT_BYTES_MAX + 1))
    part = form.encode_part(cut_state(memoryview(b"x"), memoryview(b""), Shelf().put))
    with pytest.raises(RemoteProtocolError, match="canonical encoding"):
        form.decode_part(msgspec.msgpack.encode([*msgspec.msgpack.decode(part), 0]))


@given(st.binary(max_size=300), st.integers(0, 299), st.integers(1, 255))
def test_bytes_that_are_not_a_checkpoint_are_refused(noise: bytes, place: int, change: int) -> None:
    for decode in (form.decode_part, lambda data: form.check_checkpoint(signer(), data)):
        with pytest.raises(RemoteProtocolError):
            decode(noise)
    part = bytearray(form.encode_part(cut_state(memoryview(bytes(300)), memoryview(b"yy"), Shelf().put)))
    place %= len(part)
    part[place] ^= change
    with suppress(RemoteProtocolError):
        assert form.encode_part(form.decode_part(bytes(part))) == part, (
            "a changed list of chunks was accepted but encodes differently"
        )


def test_a_list_of_chunks_must_have_the_count_that_its_bytes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for parameters, hashes in ((64, b""), (64, bytes(64)), (0, bytes(32)), (VECTOR_BYTES_MAX + 1, b"")):
        body = encode([parameters, 0, bytes(32), hashes, b""])
        with pytest.raises(RemoteProtocolError, match=r"does not match the part's size|Expected `int`"):
            form.decode_part(body)


def test_the_largest_checkpoint_fits_the_size_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "CHUNK_BYTES", 1 << 20)
    count = VECTOR_BYTES_MAX >> 20
    part = form.StatePart(
        VECTOR_BYTES_MAX, 2 * VECTOR_BYTES_MAX, bytes(32), bytes(32 * count), bytes(64 * count)
    )
    assert len(form.encode_part(part)) <= form.PART_BYTES_MAX
    of = saved()
    stage = form.stage_state(part, bytes(32), form.PART_BYTES_MAX, (2**16 - 2, 2**16 - 1))
    assert len(encode(stage)) <= form._STAGE_BYTES_MAX
    stages = tuple(
        msgspec.structs.replace(stage, first_layer=number, last_layer=number + 1)
        for number in range(STAGES_MAX)
    )
    top = 2**53
    checkpoint = form.Checkpoint(
        1, of.run.id, of.run.fact, of.model.hash, bytes(32), 2**32 - 1, 5, top, stages, top
    )
    assert len(form.sign_checkpoint(signer(), checkpoint)) <= form.CHECKPOINT_BYTES_MAX


# In a data folder


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return FolderStorage(tmp_path / "data") if request.param == "folder" else MemoryStorage()


async def test_only_the_newest_checkpoints_are_kept(storage: Storage) -> None:
    checkpoints, of = checkpoints_in(storage), saved()
    names = []
    for step in (1, 2, 3):
        of.parameters[0][0] ^= step
        names.append(await save(checkpoints, of, step))
    store = CheckpointStore(storage, Blobs(storage))
    assert store.steps(of.run.text) == [(2, names[1]), (3, names[2])]
    assert [kept.checkpoint.step for kept in store.all()] == [2, 3]
    assert all(kept.is_whole for kept in store.all())
    assert store.blobs.get(names[0]) is None
    newest = store.find(of.run.text)
    assert newest is not None
    assert (newest.name, newest.stages_here) == (names[2], (0, 1))
    assert store.find(of.run.text, 1) is None
    assert len(store.steps(of.run.text)) == KEPT
    pinned = {name for label in store.blobs.labels() for name in store.blobs.pinned(label) or ()}
    assert not [file for file in storage.sizes("blobs") if bytes.fromhex(file[-64:]) not in pinned]


async def test_a_graph_is_kept_while_one_of_its_checkpoints_is_kept(storage: Storage) -> None:
    checkpoints, of, other = checkpoints_in(storage), saved(), saved("gpt")
    store = checkpoints.store
    for step in (1, 2, 3):
        await save(checkpoints, of, step)
    await save(checkpoints, other)
    assert store.graphs == {of.model.hash, other.model.hash}
    for step, _ in store.steps(of.run.text):
        store.drop(of.run.text, step)
    store.prune(other.run.text)
    assert store.graphs == {other.model.hash}


async def test_a_checkpoint_of_an_unchanged_state_costs_only_its_manifest(storage: Storage) -> None:
    checkpoints, of = checkpoints_in(storage), saved()
    await save(checkpoints, of, 1)
    before = storage.sizes("blobs")
    await save(checkpoints, of, 2)
    new = storage.sizes("blobs").keys() - before.keys()
    assert len(new) == 1


async def test_a_stage_is_restored_from_a_data_folder(storage: Storage) -> None:
    checkpoints, of = checkpoints_in(storage), saved()
    await save(checkpoints, of)
    kept = checkpoints.store.find(of.run.text)
    assert kept is not None
    for number, state in enumerate(kept.checkpoint.stages):
        parameters, moments = bytearray(state.parameters_bytes), bytearray(state.moments_bytes)
        await checkpoints.restore(state, memoryview(parameters), memoryview(moments), [])
        assert (parameters, moments) == (of.parameters[number], of.moments[number])


async def test_a_restart_removes_unfinished_checkpoints_and_repairs_pins(
    storage: Storage,
) -> None:
    of = saved()
    first = checkpoints_in(storage)
    await save(first, of, 1)
    of.parameters[0][0] ^= 1
    await first.snapshot(
        of.run, 2, 0, of.ranges[0], memoryview(of.parameters[0]), memoryview(of.moments[0]), is_guest=False
    )
    first.store.blobs.put(b"put and forgotten")
    storage.write(f"pins/checkpoints/{of.run.text}/1/0", b"damaged")
    storage.write(f"pins/checkpoints/{of.run.text}/1/manifest", b"damaged")
    store = checkpoints_in(storage).store
    assert store.graphs == frozenset()
    assert store.recover() > len(b"put and forgotten")
    kept = store.find(of.run.text)
    assert kept is not None
    assert kept.is_whole
    assert store.graphs == {of.model.hash}
    assert store.blobs.labels() == [f"checkpoints/{of.run.text}/1/{each}" for each in ("0", "1", "manifest")]
    assert store.recover() == 0


async def test_a_bad_entry_for_a_missing_stage_does_not_prevent_a_start(
    storage: Storage,
) -> None:
    checkpoints, of = checkpoints_in(storage), saved()
    await save(checkpoints, of)
    kept = checkpoints.store.find(of.run.text)
    assert kept is not None
    one, two = kept.checkpoint.stages
    lie = msgspec.structs.replace(two, part=one.part, part_bytes=one.part_bytes)
    checkpoints.store.drop_stage(of.run.text, 4, 1)
    await checkpoints.seal(of.run, of.plan, step=4, samples=1, stages=[one, lie], is_guest=False)
    store = checkpoints_in(storage).store
    store.recover()
    found = store.find(of.run.text)
    assert found is not None
    assert found.stages_here == (0,)


async def test_a_state_of_another_peers_run_over_the_budget_is_not_kept(storage: Storage) -> None:
    checkpoints, of = checkpoints_in(storage, guest_bytes_max=1_000), saved()
    with pytest.raises(NoRoom):
        await save(checkpoints, of, is_guest=True)
    assert checkpoints.store.all() == []
    checkpoints.store.blobs.sweep()
    assert storage.sizes("blobs") == {}


async def test_sealing_stages_of_a_different_plan_is_a_local_error() -> None:
    checkpoints, of, other = checkpoints_in(MemoryStorage()), saved(), saved(stages=3)
    await save(checkpoints, of)
    kept = checkpoints.store.find(of.run.text)
    assert kept is not None
    with pytest.raises(LocalProtocolError, match="are not those of its plan"):
        await checkpoints.seal(
            of.run, other.plan, step=5, samples=1, stages=kept.checkpoint.stages, is_guest=False
        )


async def test_other_files_in_the_checkpoints_folder_are_ignored(storage: Storage) -> None:
    checkpoints, of = checkpoints_in(storage), saved()
    await save(checkpoints, of)
    run = of.run.text
    storage.write(f"runs/{run}/model.safetensors", b"weights")
    storage.write(f"runs/{run}/checkpoints/9", b"short")
    storage.write(f"runs/{run}/checkpoints/8", bytes(32))
    storage.write(f"runs/{run}/checkpoints/7", checkpoints.store.blobs.put(b"no checkpoint"))
    storage.write(f"runs/{run}/checkpoints/new", bytes(32))
    assert [kept.checkpoint.step for kept in checkpoints.store.all()] == [4]
    assert checkpoints.store.find(run) == checkpoints.store.find(run, 4) != None  # noqa: E711 - all three


# Export


def exported(of: Saved, storage: Storage, step: int) -> bytes:
    store = CheckpointStore(storage, Blobs(storage))
    kept = store.find(of.run.text, step)
    assert kept is not None
    return b"".join(exporting(kept.checkpoint, kept.manifest, of.model.graph, store.blobs.get))


def joined(of: Saved) -> bytes:
    """Return the file that a trainer would write from the exported stages at the end of a run."""
    parts = [
        export_file(memoryview(arena), parameter_layout(specification), graph.constants)
        for arena, specification, graph in zip(of.parameters, of.specifications, of.graphs, strict=True)
    ]
    return join_stages(of.run, of.model.graph, parts)


@pytest.mark.parametrize("name", ["residual", "gpt", "gpt2", "unet", "lstm"])
@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_an_exported_checkpoint_equals_the_file_of_the_finished_run(name: str, stages: int) -> None:
    torch.set_num_threads(1)
    storage, of = MemoryStorage(), saved(name, stages, steps=4)
    await save(checkpoints_in(storage), of, 4)
    data = exported(of, storage, 4)
    assert data == joined(of)
    module = build(name)
    tensors = safetensors.torch.load(data)
    wanted = {key for key, value in module.state_dict().items() if key in tensors}
    assert wanted == set(tensors)
    module.load_state_dict(tensors, strict=True)
    for key in [key for key in tensors if key.endswith("num_batches_tracked")]:
        assert int(tensors[key]) == 4 * of.run.manifest.microbatches


async def test_a_failed_export_leaves_the_earlier_file_and_no_partial_one(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "data")
    checkpoints, of = checkpoints_in(storage), saved()
    await save(checkpoints, of)
    storage.write(graph_name(of.model.hash), of.model.data)
    store = checkpoints.store
    kept, graph = store.find(of.run.text), store.graph(of.model.hash)
    assert kept is not None
    assert graph is not None
    out = tmp_path / "out.safetensors"
    assert await checkpoints.export(kept, graph, out, []) == out.stat().st_size
    whole = out.read_bytes()
    state = kept.checkpoint.stages[1]
    victim = next(iter(form.decode_part(store.blobs.get(state.part) or b"").chunks))
    storage.write(f"blobs/{victim.hex()[:2]}/{victim.hex()}", b"damaged")
    with pytest.raises(BlobsMissing):
        await checkpoints.export(kept, graph, out, [])
    assert out.read_bytes() == whole, "the failed export changed the earlier file"
    assert os.listdir(tmp_path) in (["data", out.name], [out.name, "data"])
    again = store.find(of.run.text)
    assert again is not None
    assert again.stages_here == (0,)


def test_a_checkpoint_that_does_not_fit_its_graph_is_refused() -> None:
    of, other = saved(), saved("gpt")
    shelf = Shelf()
    stages = []
    for number, layers in enumerate(of.ranges):
        part = cut_state(memoryview(of.parameters[number]), memoryview(b""), shelf.put)
        data = form.encode_part(part)
        stages.append(form.stage_state(part, shelf.put(memoryview(data)), len(data), layers))
    checkpoint = form.Checkpoint(
        1, of.run.id, of.run.fact, of.model.hash, bytes(32), 0, 1, 1, tuple(stages), 0
    )

    def pieces(graph: Any, **changes: Any) -> Iterator[bytes | memoryview]:
        return exporting(msgspec.structs.replace(checkpoint, **changes), of.run.manifest, graph, shelf.get)

    assert len(b"".join(pieces(of.model.graph))) > sum(map(len, of.parameters))
    with pytest.raises(RemoteProtocolError, match=r"does not fit its model|larger or smaller"):
        list(pieces(other.model.graph))
    one = msgspec.structs.replace(stages[0], last_layer=stages[1].last_layer)
    with pytest.raises(RemoteProtocolError, match="larger or smaller"):
        list(pieces(of.model.graph, stages=(one,)))
    wrong = msgspec.structs.replace(stages[0], digest=bytes(32))
    with pytest.raises(RemoteProtocolError, match="does not match its checkpoint"):
        list(pieces(of.model.graph, stages=(wrong, stages[1])))
