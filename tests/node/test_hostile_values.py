"""Values from members and other peers that once crashed the node that received them.

Tests do not contain failures, so any bug of ours ends the scenario here.
"""

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from node.checkpoints.replication import CheckpointOffer
from node.cli.screen import EventScreen
from node.content import datasets as datasets
from node.errors import UsageError
from node.events import RunEnded, StepCommitted
from node.pipeline.committer import _rounding
from node.placement.leases import rounded
from node.protocols.notices import Notice, RunEvent, event_of, news_of
from node.runs.checkpointing import CheckpointKeeper, newest_name, read_newest
from node.runtime import Node
from node.state_documents import event_document
from node.storage.folder import FolderStorage
from partition.plan.plan import (
    NO_HASH,
    REPLICAS_MAX,
    STEPS_MAX,
    Plan,
    StagePlan,
    decode_plan,
    encode_plan,
    plan_hash,
)
from partition.run.asks import Asks
from partition.run.checkpoint_rounds import CheckpointRounds
from partition.run.events import Event as MemberEvent
from partition.run.events import NewestChanged
from partition.run.messages import Checkpointed
from partition.run.way_back import WaysBack
from partition.steps.messages import Open, StageRoutes, Work
from partition.steps.routes import attempts
from tests.source import ROOT
from tests.stack import Swarm, manifest, prepare, simulate, swarm

ALICE, BOB = (Identity(bytes([number]) * 32).peer for number in (1, 2))


def npz(**members: bytes) -> bytes:
    """Write an archive with these files."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("_npy", ".npy"), data)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


X, Y = npy(np.zeros((4, 2))), npy(np.zeros(4, np.int64))


@pytest.mark.parametrize(
    "file",
    [
        npz(x_npy=X, y=b"raw bytes"),
        npz(x=b"raw bytes", y_npy=Y),
        npz(x_npy=X, y_npy=Y[:-8]),
        npz(x_npy=X, y_npy=Y.replace(b"(4,)", b"(9,)")),
        npz(x_npy=X, y_npy=Y.replace(b"(4,)", b"(-4)")),
        npz(x_npy=X, y_npy=Y.replace(b"'<i8'", b"'|O' ")),
        npz(x_npy=X, y_npy=Y.replace(b"\x93NUMPY\x01", b"\x93NUMPY\x09")),
        npz(x_npy=X, y_npy=Y.replace(b"descr", b"\xff\xff\xff\xff\xff")),
        npz(x_npy=X, y_npy=Y).replace(b"PK\x01\x02", b"PK\x01\x03"),
        npz(x_npy=X, y_npy=Y).replace(b"\x14\x00\x00\x00\x00\x00", b"\x14\x00\x01\x00\x00\x00"),
        npz(x_npy=X, y_npy=Y).replace(b"\x14\x00\x00\x00\x00\x00", b"\x14\x00\x00\x00\x63\x00"),
        Y,
        b"",
        b"\x80\x04.",
    ],
)
def test_a_file_that_is_not_data_is_a_user_error(file: bytes, tmp_path: Path) -> None:
    for name in ("train.npz", "test.npz"):
        (tmp_path / name).write_bytes(npz(x_npy=X, y_npy=Y))
    assert len(datasets.load_folder(tmp_path).train["y"]) == 4
    (tmp_path / "train.npz").write_bytes(file)
    with pytest.raises(UsageError):
        datasets.load_folder(tmp_path)


@pytest.mark.parametrize("rate", [0.0, 1.0, 1e24, 1.7e308, float("inf"), float("nan"), -1.0, 2.0**63 - 1])
def test_a_plan_can_be_written_for_any_claimed_rate(rate: float) -> None:
    stage = StagePlan(0, 1, (ALICE,), (rounded(rate),))
    plan = Plan(bytes(32), NO_HASH, 0, (ALICE,), (ALICE,), 1, (stage,))
    assert decode_plan(encode_plan(plan)) == plan


NOTICE: dict[str, Any] = {
    "at": 1.0,
    "run": "0" * 16,
    "step": 1,
    "loss": 1.0,
    "samples": 1,
    "seconds": 1.0,
    "replicas": 1,
}


def told(event: RunEvent) -> RunEvent:
    """Return the event as a different member would show it. Raises RemoteProtocolError."""
    notice: Notice = decode(encode(Notice(bytes(32), news_of(event))), Notice, bytes_max=10_000)
    return event_of(notice.news, at=1.0, run="0" * 16)


@pytest.mark.parametrize(
    "changes", [{"seconds": 1.7e308}, {"seconds": -1.0}, {"step": 2**53}, {"step": STEPS_MAX + 1}], ids=str
)
def test_a_notice_with_impossible_values_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        told(StepCommitted(**(NOTICE | changes)))


@pytest.mark.parametrize("seconds", [1e-320, 1e300, 1.7e308])
def test_the_screen_shows_a_step_of_any_length(seconds: float) -> None:
    screen = EventScreen()
    screen._runs._steps["0" * 16] = 10_000_000
    event = StepCommitted(**(NOTICE | {"seconds": seconds}))
    assert screen.lines(event_document(event))


@pytest.mark.parametrize("step", [21, STEPS_MAX + 1, 2**63 - 1])
def test_a_step_beyond_the_last_is_refused_and_stops_no_run(step: int) -> None:
    async def scenario() -> None:
        async with swarm("ab") as group:

            async def lie(a: Node, b: Node, plan: Plan) -> None:
                event = StepCommitted(**(NOTICE | {"run": plan.run.hex()[:16], "step": step}))
                a.runs.send(b.peer, Notice(plan_hash(plan), news_of(event)))
                a.runs.send(b.peer, Checkpointed(plan_hash(plan), step, bytes(32)))

            await disturbed(group, lie)
            assert group.nodes["b"].counters["protocol_errors"] == 2

    simulate(scenario)


def test_an_open_for_missing_held_out_samples_is_refused() -> None:
    async def scenario() -> None:
        async with swarm("ab") as group:

            async def lie(a: Node, b: Node, plan: Plan) -> None:
                message = Open(
                    plan=plan_hash(plan),
                    step=19,
                    attempt=attempts(plan).stop - 1,
                    train=False,
                    first=1_000_000,
                    stages=(StageRoutes(bytes(2)),),
                )
                a.runs.send(b.peer, message)

            await disturbed(group, lie, trainers=2)
            assert group.nodes["b"].counters["protocol_errors"] >= 1

    simulate(scenario)


async def disturbed(group: Swarm, lie: Callable[[Node, Node, Plan], Any], **changes: Any) -> None:
    """Play a run whose committer `a` lies to `b` after the first step. The run must still end well."""
    a, b = group.nodes["a"], group.nodes["b"]
    run = prepare(a, manifest(stages=1, replicas=1, steps=20, **changes))
    with a.watch() as events:
        await a.runs.submit(run)
        async for event in events:
            if isinstance(event, StepCommitted) and event.step == 0:
                plan = a.runs.members[run.id].plan
                assert plan is not None
                assert plan.committer == a.peer
                assert b.peer in plan.roster
                await lie(a, b, plan)
            if isinstance(event, RunEnded):
                assert event.outcome == "done", event.detail
                break
    for name in "ab":
        ends = [event for event in group.events[name] if isinstance(event, RunEnded)]
        assert [end.outcome for end in ends] == ["done"], name


async def test_forty_concurrent_checkpoints_are_written_one_at_a_time(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)

    class Executor:
        async def run(self, task: Callable[[], Any]) -> Any:
            return await trio.to_thread.run_sync(task)

    class Seams:
        executor = Executor()

    class Signer:
        peer = bytes(32)

    class TheRun:
        text = "0" * 16
        id = bytes(32)

    Seams.storage = storage  # type: ignore[attr-defined]  # a part of the node, of which no more is needed
    async with trio.open_nursery() as nursery:

        class Service:
            signer = Signer()
            checkpoints = copies = None
            seams = Seams()

            def start_task(self, task: Callable[..., Any], *arguments: object, of: object) -> None:
                nursery.start_soon(task, *arguments)

        events: list[MemberEvent] = []
        rounds = CheckpointRounds(
            PeerId(bytes(32)),
            plan=lambda: None,
            ways_back=WaysBack(0),
            best=lambda: None,
            asks=Asks(),
            events=events,
            live=list,
            tell=lambda _peers, _message: None,
            learned=lambda _now: None,
        )

        keeping = CheckpointKeeper(cast(Any, Service()), cast(Any, TheRun()), rounds, list, act=lambda: None)
        for step in range(1, 41):
            rounds.learn(0.0, step, bytes([step]) * 32)
        for event in events:
            assert isinstance(event, NewestChanged)
            keeping.on_event(event)
    found = storage.read(newest_name(TheRun.text))
    assert found is not None
    assert decode(found, CheckpointOffer, bytes_max=64) == CheckpointOffer(40, bytes([40]) * 32)
    assert read_newest(cast(Any, Seams), TheRun.text) == (bytes([40]) * 32, 40)


def test_two_writers_of_one_name_do_not_disturb_each_other(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: storage.write("runs/a/newest", b"%d" % number), range(400)))
    assert storage.read("runs/a/newest") is not None
    assert [file.name for file in (tmp_path / "runs/a").iterdir()] == ["newest"]


def test_names_that_a_screen_cannot_encode_are_shown() -> None:
    program = (
        "import sys; from node.cli.errors import dispatch; from node.cli.render import show\n"
        "import typer; app = typer.Typer()\n"
        "@app.command()\n"
        "def main() -> None: show(['日本 joined'])\n"
        "sys.exit(dispatch(app, [], 'test'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert done.stderr == b""
    assert done.returncode == 0
    assert b"joined" in done.stdout


@pytest.mark.parametrize(
    "pair", [(-1.0, 1.0), (1e308, 5e-324), (float("nan"), 1.0), (1.0, float("inf")), (1.0, -1.0)]
)
def test_a_step_is_reported_for_any_claimed_rounding(pair: tuple[float, float]) -> None:
    rounding = _rounding([Work(rounding=(pair, (1.0, 4.0)))])
    assert rounding[1] == 0.5
    event = StepCommitted(**(NOTICE | {"rounding": rounding}))
    assert told(event) == event
    assert EventScreen().lines(event_document(event))


@pytest.mark.parametrize("name", ["sent_bytes", "returned_bytes", "replayed"])
def test_claimed_sent_bytes_of_all_replicas_fit_one_message(name: str) -> None:
    def taken(count: int) -> Work:
        work: Work = decode(encode(replace(Work(), **{name: count})), Work, bytes_max=1_000)
        return work

    with pytest.raises(RemoteProtocolError):
        taken(2**63 - 1)
    changes = {"sent_bytes": (REPLICAS_MAX * getattr(taken(2**46), name),)}
    told(StepCommitted(**(NOTICE | changes)))
