"""Federated runs by whole nodes: each node trains on its own data set, and no byte of the set leaves the
node."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.facts import IdentitySigner
from crypto.identity import Identity
from node import toml
from node.averaging_events import AveragingEnded
from node.content.datasets import Dataset, load_digits, load_folder
from node.errors import Unreachable, UsageError
from node.events import RunEvaluated
from node.offering import NamedData, read_own_data
from node.protocols.manifest import MANIFEST_PURPOSE, Manifest, Run, check_run, make_run, own_data_hash
from node.protocols.run_file import RunFile, check_run_file
from node.runs.own_data import own_data_like
from partition.run.local_settings import LocalSettings
from sim.streams import SimStream
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.node.local.heard_rounds import HeardRounds
from tests.node.local.test_lying_states import FAST
from tests.node.local.test_runs import SLOW, ends
from tests.node.local.test_runs import manifest as small
from tests.stack import Swarm, swarm

NAME = "scans"


def write_sets(folder: Path, names: str, *, shares: tuple[float, ...] = ()) -> dict[str, Path]:
    """Return disjoint shares of the digits, one for each node name."""
    data = load_digits()
    order = np.random.default_rng(3).permutation(data.train_samples)
    held_out = np.random.default_rng(4).permutation(data.test_samples)
    weights = shares or (1.0 / len(names),) * len(names)
    ends_at = np.cumsum((0.0, *weights))
    paths = {}
    for number, name in enumerate(names):
        first, last = ends_at[number], ends_at[number + 1]
        path = paths[name] = folder / name
        path.mkdir()
        for part, arrays, places in (("train", data.train, order), ("test", data.test, held_out)):
            rows = places[int(first * len(places)) : int(last * len(places))]
            np.savez(path / f"{part}.npz", x=arrays["x"][rows].astype(np.float32), y=arrays["y"][rows])
    return paths


def wanted(path: Path, steps: int = 16, **local: Any) -> Manifest:
    """Return a federated run on data sets of the same form as the set at `path`."""
    own = own_data_like(load_folder(path), f"/data/{NAME}", "RUN.toml")
    return small(
        steps=steps,
        data=own_data_hash(own),
        local=LocalSettings(**({"local_steps": 2} | local), own_data=own),
    )


async def submit(group: Swarm, requester: str, manifest: Manifest, held: Dataset | None) -> Run:
    """Submit a run like the command `train` does."""
    node = group.nodes[requester]
    run = stack.prepare(node, manifest)
    if held is not None:
        node.runs.own_data.hold(run.id, held)
    await node.runs.submit(run)
    return run


@contextmanager
def overheard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """A tap that records all stream bytes before they are encrypted."""
    found: list[bytes] = []
    send = SimStream.send

    async def listened(self: SimStream, message: bytes, *payload: bytes) -> None:
        found.extend(bytes(part) for part in (message, *payload))
        await send(self, message, *payload)

    with monkeypatch.context() as patch:
        patch.setattr(SimStream, "send", listened)
        yield found


def marks(path: Path) -> list[bytes]:
    """Return byte strings that occur only in the samples of this set: the middle two rows of pixels of each
    image with enough pixels that are not empty.
    """
    images = np.load(path / "train.npz")["x"]
    return [image.tobytes()[64:192] for image in images if np.count_nonzero(image.ravel()[16:48]) > 12]


def found_in(data: bytes, stretches: list[bytes]) -> int:
    """Return how many of `stretches` occur in `data`. One pass over `data` looks for two pixels of each
    stretch, and then compares the whole stretch."""
    wanted: dict[bytes, list[tuple[int, bytes]]] = {}
    for stretch in stretches:
        at = next((at for at in range(48, 80, 4) if all(np.frombuffer(stretch[at : at + 8], np.float32))), 0)
        wanted.setdefault(stretch[at : at + 8], []).append((at, stretch))
    keys, found = np.frombuffer(b"".join(wanted), np.uint64), set()
    is_likely = np.zeros(1 << 16, bool)
    is_likely[keys >> 48] = True  # a pixel has one of seventeen values; parameters have others
    for shift in range(min(8, len(data))):
        values = np.frombuffer(data, np.uint64, (len(data) - shift) // 8, shift)
        likely = np.flatnonzero(is_likely[values >> 48])
        for place in likely[np.isin(values[likely], keys)]:
            begin = shift + 8 * int(place)
            for at, stretch in wanted[data[begin : begin + 8]]:
                if begin >= at and data.startswith(stretch, begin - at):
                    found.add(stretch)
    return len(found)


def test_federated_members_train_on_own_data_and_send_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_sets(tmp_path, "abc")
    stretches = [mark for path in paths.values() for mark in marks(path)]
    assert len(stretches) > 500

    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            for name in "bc":
                group.nodes[name].set("own_data", f"{NAME}={paths[name]}")
            data = load_folder(paths["a"])
            await submit(group, "a", wanted(paths["a"], steps=20), data)
            found = await ends(group, "abc", 200)
            assert [event.outcome for event in found] == ["done"] * 3
            assert len({event.weights for event in found}) == 1
            rounds = [e for e in group.events["b"] if isinstance(e, AveragingEnded) and e.outcome == "ok"]
            assert max(len(event.averaged) for event in rounds) == 3
            for storage in group.storages.values():
                for name in storage.names:
                    assert found_in(storage.read(name) or b"", stretches) == 0, name

    with overheard(monkeypatch) as heard:
        run_virtually(play)
    said = b"\0".join(heard)
    assert len(said) > 1_000_000, "no parameters were sent"
    assert found_in(said, stretches) == 0


def test_the_tap_finds_samples_if_a_run_sends_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This proves that the previous test can fail."""
    path = write_sets(tmp_path, "a")["a"]

    async def play() -> None:
        async with swarm("ab", stage_seconds=SLOW, preset="lan") as group:
            node = group.nodes["a"]
            data = await node.runs.data.learn(path, window=0)
            await submit(group, "a", small(steps=8, data=data.digest), None)
            await ends(group, "ab", 200)

    with overheard(monkeypatch) as heard:
        run_virtually(play)
    said = b"\0".join(heard)
    assert found_in(said, marks(path)) > 100


def test_a_federated_members_data_is_not_served_by_its_hash(tmp_path: Path) -> None:
    paths = write_sets(tmp_path, "ab")

    async def play() -> None:
        async with swarm("ab", stage_seconds=SLOW, preset="lan") as group:
            group.nodes["b"].set("own_data", f"{NAME}={paths['b']}")
            run = await submit(group, "a", wanted(paths["a"], steps=8), load_folder(paths["a"]))
            await ends(group, "ab", 200)
            digest = load_folder(paths["b"]).digest
            plain = stack.manifest(data=digest)
            with pytest.raises(Unreachable):
                await group.nodes["a"].runs.data.load(plain, [group.nodes["b"].peer])
            with pytest.raises(Unreachable):  # the run's own hash identifies no data either
                await group.nodes["a"].runs.data.load(run.manifest, [group.nodes["b"].peer])

    run_virtually(play)


def test_only_nodes_that_offer_a_matching_data_set_take_part(tmp_path: Path) -> None:
    """`b` has no set with that name, `c` has a set with different shapes, and `d` has a set with a value that
    is not finite."""
    paths = write_sets(tmp_path, "abcd")
    np.savez(paths["c"] / "train.npz", x=np.zeros((40, 1, 9, 9), np.float32), y=np.zeros(40, np.int64))
    np.savez(paths["c"] / "test.npz", x=np.zeros((40, 1, 9, 9), np.float32), y=np.zeros(40, np.int64))
    with np.load(paths["d"] / "train.npz") as file:
        images, labels = file["x"].copy(), file["y"].copy()
    images[5, 0, 3, 3] = np.nan
    np.savez(paths["d"] / "train.npz", x=images, y=labels)

    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW, preset="lan") as group:
            for name in "cd":
                group.nodes[name].set("own_data", f"{NAME}={paths[name]}")
            manifest = wanted(paths["a"], steps=30)
            run = await submit(group, "a", manifest, load_folder(paths["a"]))
            (end,) = await ends(group, "a", 200)
            assert end.outcome == "done"
            assert not any(isinstance(e, AveragingEnded) for e in group.events["a"])
            graph = await group.nodes["a"].runs.models.get(manifest.graph_hash, [])
            said = [await group.nodes[n].runs.own_data.refusal(run, graph) for n in "bcd"]
            assert said[0] == f"it offers no data set of its own with the name {NAME}"
            for reason in said[1:]:
                assert reason is not None
                assert "this model takes x float32[1,8,8], y int64[]" in reason
                assert str(tmp_path) not in reason, "the offer reveals the path"
                assert "nan" not in reason, "the offer reveals the content"
            with pytest.raises(UsageError, match=r"x of sample 5 at \[0, 3, 3\] is nan"):
                await group.nodes["d"].runs.own_data.find(run, graph)

    run_virtually(play)


def test_updates_are_weighted_by_samples(tmp_path: Path) -> None:
    paths = write_sets(tmp_path, "ab", shares=(0.75, 0.25))
    heard = HeardRounds()

    async def play() -> None:
        async with swarm("ab", stage_seconds=SLOW, preset="lan", parts=heard.parts) as group:
            group.nodes["b"].set("own_data", f"{NAME}={paths['b']}")
            await submit(group, "a", wanted(paths["a"], steps=8), load_folder(paths["a"]))
            await ends(group, "ab", 200)

    run_virtually(play)
    assert {each.weight for each in heard} == {
        float(load_folder(path).train_samples) for path in paths.values()
    }


def test_a_requester_without_a_data_set_provides_only_the_shape(tmp_path: Path) -> None:
    paths = write_sets(tmp_path, "abc")

    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            group.nodes["a"].set("accept_runs", "never")
            for name in "bc":
                group.nodes[name].set("own_data", f"{NAME}={paths[name]}")
            manifest = msgspec.structs.replace(wanted(paths["a"], steps=40), optimizer=FAST)
            await submit(group, "a", manifest, load_folder(paths["a"]))
            found = await ends(group, "abc", 300)
            assert [event.outcome for event in found] == ["done"] * 3
            judged = [e for e in group.events["b"] if isinstance(e, RunEvaluated)]
            sizes = {name: load_folder(paths[name]).test_samples // 16 * 16 for name in "bc"}
            assert {event.samples for event in judged} <= set(sizes.values())
            first, last = judged[0].loss, judged[-1].loss
            assert last < first / 2

    run_virtually(play)


# Impossible requests

RUN = 'model = "simple-cnn"\ndata = "digits"\n[train]\nfederated = true\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RUN, 'only in train.mode = "local"; in mode "exact" samples travel to the stages'),
        (RUN + 'mode = "auto"\n', 'in mode "auto" samples travel'),
        (RUN + 'mode = "local"\n[plan]\nstages = 2\n',
         "with plan.stages = 2 labels and activations of each sample would travel"),
    ],
)  # fmt: skip
def test_a_federated_run_is_refused_if_samples_would_travel(text: str, said: str) -> None:
    run_file = toml.parse(text, RunFile, name="RUN.toml").value
    with pytest.raises(UsageError) as caught:
        check_run_file(run_file, "RUN.toml")
    assert said in str(caught.value)


def test_a_manifest_with_data_in_addition_to_its_members_own_is_refused(tmp_path: Path) -> None:
    path = write_sets(tmp_path, "a")["a"]
    good = wanted(path)
    signer = IdentitySigner(Identity(bytes(32)), "test")
    make_run(signer, good)
    for wrong in ({"data": "0" * 64}, {"data": "digits"}, {"stages": 2}):
        fields = {name: getattr(good, name) for name in good.__struct_fields__} | wrong
        fact = signer.sign(MANIFEST_PURPOSE, encode(Manifest(**fields)))
        with pytest.raises(RemoteProtocolError, match="members' own"):
            check_run(signer, fact)


@pytest.mark.parametrize("text", ["scans", "scans=", "=/data", "a b=/data", "scans=data/here", "../x=/data"])
def test_own_data_needs_a_name_and_an_absolute_path(text: str) -> None:
    with pytest.raises(ValueError, match="such as scans=/data/scans"):
        read_own_data(text)
    assert read_own_data("scans=/data/s") == NamedData("scans", Path("/data/s"))
