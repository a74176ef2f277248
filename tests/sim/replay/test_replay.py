"""Replaying a node's record gives the same events. If the record was changed, an error says where."""

import errno
import io
import os
import random
from pathlib import Path
from typing import IO, Any

import pytest
import trio
from typer.testing import CliRunner

from crypto.identity import Identity
from node.averaging_events import AveragingEnded
from node.errors import EXIT_DONE
from node.events import Event, MemberLost, StepCommitted
from node.recording import values
from node.recording.blocks import MAGIC, Damage, pack_block, read_blocks
from node.recording.recorder import Recorder
from node.recording.values import Unrecordable, read
from sim.cli import run
from sim.replay.cli import app
from sim.replay.player import play
from tests.log_lines import heard_log
from tests.node.local.test_runs import QUICK
from tests.node.local.test_runs import train as train_locally
from tests.stack import Swarm, manifest, simulate, swarm, train

NAMES = "abcde"
TOKEN_SECRETS: dict[str, bytes] = {}
"""The secrets of the recorded nodes' write tokens."""
TIMES = int(os.environ.get("PEERLOOM_REPLAYS", "2"))
CHANGES = int(os.environ.get("PEERLOOM_RECORD_CHANGES", "40"))


class FullDisk(io.BufferedIOBase):
    """A file that accepts its header and the first block, and nothing more."""

    def __init__(self, file: IO[Any]) -> None:
        self._file = file
        self._left = 2

    def write(self, data: Any) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))

    def close(self) -> None:
        self._file.close()


async def lost(group: Swarm, name: str) -> None:
    """Wait until the first node has reported the loss of another."""
    peer = group.nodes[name].peer
    with trio.fail_after(60):
        while not any(  # noqa: ASYNC110 - virtual time: waiting costs nothing
            isinstance(each, MemberLost) and each.peer == peer for each in group.events["a"]
        ):
            await trio.sleep(0.1)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the records of five nodes that train with checkpoints, one of which dies while it holds a stage.
    The others then train in local mode, and a second one dies.
    """
    folder = tmp_path_factory.mktemp("records")
    recorders = {name: Recorder(folder / f"{name}.record") for name in NAMES}

    async def scenario() -> None:
        async with swarm(NAMES, recorders=recorders) as group:
            for name, node in group.nodes.items():
                tokens = node.discovery._core.tokens
                TOKEN_SECRETS[name] = getattr(tokens, "_value", tokens)._secret
            killed: list[str] = []

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1 and not killed:
                    plan = next(iter(group.nodes["a"].state.runs.values())).plan
                    assert plan is not None
                    holders = [group.name_of(peer) for stage in plan.stages for peer in stage]
                    killed.append(next(name for name in holders if name != "a"))
                    group.kill(killed[0])

            await train(group, "a", manifest(steps=6, save_every=2), disturb)
            await lost(group, killed[0])

            async def disturb_local(event: Event) -> None:
                if isinstance(event, AveragingEnded) and len(killed) < 2:
                    killed.append(next(name for name in NAMES if name not in ("a", *killed)))
                    group.kill(killed[1])

            await train_locally(group, QUICK, disturb_local, steps=16)
            await lost(group, killed[1])

    simulate(scenario)
    for recorder in recorders.values():
        recorder.close()
    return {name: recorder.path for name, recorder in recorders.items()}


def test_nodes_of_a_run_with_a_death_give_equal_events_when_replayed(records: dict[str, Path]) -> None:
    kinds: set[str] = set()
    for name, path in records.items():
        for _ in range(TIMES):
            played = play(path)
            assert (played.diverged, played.damage) == ("", ""), name
            assert played.over == "the node has ended"
            assert played.learnt > 0
            kinds |= set(played.turns)
    assert kinds == {"Committer", "Feeder", "Kademlia", "Member", "PaxosChain", "Replica", "Swim"}
    told = [event["kind"] for event in play(records["a"]).events]
    assert {"MemberJoined", "MemberLost", "RunChanged", "StepCommitted", "ReplicaDropped"} <= set(told)
    assert {"CheckpointKept", "AveragingEnded"} <= set(told)


def test_a_record_contains_no_key(records: dict[str, Path]) -> None:
    for name, path in records.items():
        seed = Identity(bytes([1, ord(name)]) * 16).seed
        for block in read_blocks(path.read_bytes()):
            assert isinstance(block, bytes)
            assert seed not in block
            assert TOKEN_SECRETS[name] not in block


def test_a_changed_byte_in_a_record_is_detected_and_located(records: dict[str, Path], tmp_path: Path) -> None:
    data, rng = records["b"].read_bytes(), random.Random(1)
    copy = tmp_path / "changed"
    for at in [0, len(MAGIC), len(data) - 1, *(rng.randrange(len(data)) for _ in range(CHANGES))]:
        other = (data[at] + rng.randrange(1, 256)) % 256
        damage = list(read_blocks(data[:at] + bytes([other]) + data[at + 1 :]))[-1]
        assert isinstance(damage, Damage)
        numbers = [int(word) for word in damage.text.replace(",", " ").split() if word.isdigit()]
        assert min(numbers) <= at <= max(numbers), f"byte {at}: {damage.text}"
    copy.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    played = play(copy)
    assert f"byte {len(data) - 1} is 0x{data[-1] ^ 1:02x} and was 0x{data[-1]:02x}" in played.damage


def test_the_error_names_a_core_that_behaves_differently(records: dict[str, Path], tmp_path: Path) -> None:
    """Return a record with a changed message, sealed anew, so that its signature and its checksums are
    valid."""
    blocks = [block for block in read_blocks(records["b"].read_bytes()) if isinstance(block, bytes)]
    changed, before = MAGIC, MAGIC
    for block in blocks:
        packed, before = pack_block(block.replace(b"MemberUp", b"MemberOp"), before)
        changed += packed
    copy = tmp_path / "other"
    copy.write_bytes(changed)
    played = play(copy)
    assert "Swim." in played.diverged
    assert "MemberOp" in played.diverged
    assert run(["replay", str(copy)]) == 6


def test_a_truncated_record_is_replayed_up_to_its_end(records: dict[str, Path], tmp_path: Path) -> None:
    data = records["c"].read_bytes()
    copy = tmp_path / "cut"
    # The cut may fall exactly between two blocks, because no block is one byte long.
    ends = (len(data) * 2 // 3, len(data) * 2 // 3 + 1)
    copy.write_bytes(
        data[: next(end for end in ends if not isinstance([*read_blocks(data[:end])][-1], bytes))]
    )
    played = play(copy)
    assert not played.diverged
    assert "is cut off" in played.damage
    assert played.turns.total() > 0


def test_a_full_record_ends_and_the_node_continues(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "full", bytes_max=20_000)

    async def scenario() -> None:
        async with swarm("abc", recorders={"a": recorder}) as group:
            await train(group, "a", manifest(steps=3, replicas=1))

    with heard_log() as said:
        simulate(scenario)
        recorder.close()
    assert recorder.over.startswith("the record has 2")
    assert [text for text in said if "ends here: the record has 2" in text]
    assert recorder.path.stat().st_size < 60_000
    played = play(recorder.path)
    assert played.is_same
    assert played.over.startswith("the record has 2")


def test_a_record_ends_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_descriptor = os.fdopen
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", lambda number, mode: FullDisk(open_descriptor(number, mode)))
        recorder = Recorder(tmp_path / "full")

    async def scenario() -> None:
        async with swarm("abc", recorders={"a": recorder}) as group:
            await train(group, "a", manifest(steps=3, replicas=1))

    simulate(scenario)
    recorder.close()
    assert recorder.over == "it cannot be written: [Errno 28] No space left on device"
    played = play(recorder.path)
    assert played.is_same
    assert played.turns.total() > 0


def test_many_large_events_recorded_together_form_readable_blocks(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "long")
    noise = os.urandom(1 << 20).hex()
    for number in range(14):
        recorder.event({"number": number, "noise": noise})
    recorder.close()
    sizes = [len(block) for block in read_blocks(recorder.path.read_bytes()) if isinstance(block, bytes)]
    assert len(sizes) > 3
    assert sum(sizes) > 14 * len(noise)


def test_the_command_reports_what_it_played(records: dict[str, Path]) -> None:
    done = CliRunner().invoke(app, [str(records["a"]), "--events"])
    assert done.exit_code == EXIT_DONE
    assert "MemberLost" in done.output
    assert "as recorded" in done.output
    assert run(["replay", str(records["a"].parent / "none")]) == 2


@pytest.mark.parametrize(
    "value",
    [
        ["of", "os:system", "true"],
        ["of", "node.storage.folder:FolderStorage", "/"],
        ["of", "node.recording.recorder:Recorder", "/tmp/x"],
        ["of", "gossip.member:Status", 1],
        ["payload", 1 << 40],
        ["array", "O", [1 << 40]],
        ["enum", "gossip.member:Status", "__class__"],
        ["of"],
        [],
        ["random", 3, [1], None],
        ["what"],
    ],
)
def test_a_record_from_others_cannot_name_code_that_runs(value: list[object]) -> None:
    with pytest.raises(Unrecordable):
        read(value, lambda reference: reference)


def test_a_record_from_others_calls_only_methods_of_cores(tmp_path: Path) -> None:
    for items in (
        [["make", 1, "node.storage.folder:FolderStorage", ["list", "/"], ["dict"]]],
        [["call", 1, "__init__", ["list"], ["dict"]]],
        [["set", 7, "x", 1]],
        [["end", [], "", ""]],
        [["event", {"kind": "MemberLost", "peer": "x"}]],
        [[1, 2]],
    ):
        data = b"".join(len(item).to_bytes(4, "little") + item for item in map(values.encode, items))
        path = tmp_path / "strange"
        path.write_bytes(MAGIC + pack_block(data, MAGIC)[0])
        assert not play(path).is_same, items
