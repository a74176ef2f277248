"""A run that cannot continue ends for all its members, with its reason: whole nodes in virtual time."""

import re
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from crypto.identity import PeerId
from node.content.datasets import load_digits, load_folder
from node.errors import RunFailed, Unreachable, UsageError
from node.events import CheckpointKept, Event, ReplicaDropped, RunChanged, RunEnded, RunPlanned, StepCommitted
from node.protocols import runs as wire
from node.protocols.manifest import Manifest, Run
from node.runs.stopping import make_stop
from node.runtime import Node
from partition.run.failures import PEERS_MAX, ROLLBACKS_MAX, Failures
from partition.stage import OptimizerSettings
from tests.stack import (
    STAGE_SECONDS,
    Swarm,
    _live,
    assert_equal,
    manifest,
    prepare,
    reference,
    simulate,
    swarm,
    train,
    weights,
)

SLOW = 0.1
"""Modelled seconds of a pass in tests with long runs: with them a tenth of the steps must be computed."""
FEW: dict[str, Any] = {"steps": 12, "microbatch": 4, "microbatches": 4, "test_samples": 8}
SPOILED = 21
"""The number of the sample that is spoiled."""


def spoil(
    folder: Path, *, label: int | None = None, number: float | None = None, image: float | None = None
) -> None:
    """Write sixty-four digits, one of which has this label, or this pixel value, or only this value in all
    pixels."""
    digits = load_digits()
    x, y = digits.train["x"][:64].astype("f4"), digits.train["y"][:64].copy()
    if label is not None:
        y[SPOILED] = label
    if number is not None:
        x[SPOILED, 0, 3, 4] = number
    if image is not None:
        x[SPOILED] = image
    np.savez(folder / "train.npz", x=x, y=y)
    np.savez(folder / "test.npz", x=digits.test["x"][:8].astype("f4"), y=digits.test["y"][:8])


async def learn(group: Swarm, folder: Path) -> str:
    """Let the requester hold this data, unchecked; return its hash."""
    digest = load_folder(folder).digest
    await group.nodes["a"].runs.data.keep(digest, folder)
    return digest


def ends(group: Swarm) -> dict[str, tuple[str, str]]:
    """Return each node's report of the end: outcome and detail."""
    return {
        name: (event.outcome, event.detail)
        for name, events in group.events.items()
        for event in events
        if isinstance(event, RunEnded)
    }


async def all_ended(group: Swarm) -> None:
    with trio.fail_after(60):
        while any(node.runs.members for node in group.nodes.values()):  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)


async def end_of(
    group: Swarm, wanted: Manifest, on_event: Callable[[Event], Awaitable[None]] | None = None
) -> tuple[Run, str]:
    """Train until the run has failed for all; return the run, and the requester's reason."""
    run, _ = await train(group, "a", wanted, on_event)
    await all_ended(group)
    assert {outcome for outcome, _ in ends(group).values()} == {"failed"}, ends(group)
    assert all(node.runs.has_slot for node in group.nodes.values())
    return run, ends(group)["a"][1]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        ({"label": 12}, "cross_entropy.*Target 12 is out of bounds"),
        ({"number": np.nan}, "nan at \\[.*3, 4\\]"),
    ],
    ids=["label", "number"],
)
def test_data_that_no_stage_can_use_ends_the_run_and_blames_nobody(
    tmp_path: Path, replicas: int, spoiled: dict[str, Any], words: str
) -> None:
    spoil(tmp_path, **spoiled)

    async def scenario() -> None:
        async with swarm("abcde") as group:
            wanted = manifest(data=await learn(group, tmp_path), replicas=replicas, trainers=2, **FEW)
            began = trio.current_time()
            _, reason = await end_of(group, wanted)
            assert trio.current_time() - began < 60
            assert re.search(rf"step \d+: the model cannot take the data: .*{words}", reason)
            shown = reason.partition("(samples ")[2].partition(" to train on)")[0]
            assert str(SPOILED) in shown.split(", "), reason
            for events in group.events.values():
                assert not any(isinstance(event, ReplicaDropped) for event in events)

    simulate(scenario)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_that_diverges_ends_with_its_last_good_checkpoint(tmp_path: Path, replicas: int) -> None:
    spoil(tmp_path, number=3e38)  # finite, until a convolution sums the pixels

    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            digest = await learn(group, tmp_path)
            wanted = manifest(dtype="float32", data=digest, replicas=replicas, save_every=1, **FEW)
            run, reason = await end_of(group, wanted)
            plans = [event for event in group.events["a"] if isinstance(event, RunPlanned)]
            assert len(plans) == 1, "a member was blamed"
            kept = [event.step for event in group.events["a"] if isinstance(event, CheckpointKept)]
            words = r"step \d: in stage \d (an output|a tensor|the loss) .*; a lower train.learning_rate"
            assert re.match(words, reason), reason
            said = re.search(r"the checkpoint of step (\d) is kept: `peerloom checkpoint export", reason)
            assert said, reason
            assert int(said[1]) in kept[-2:], (
                "a second checkpoint may be completed while the end is announced"
            )
            found = await group.nodes["a"].checkpoints.call(group.nodes["a"].checkpoints.store.all)
            assert kept[-1] in [row.checkpoint.step for row in found if row.run == run.text]

    simulate(scenario)


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_members_skip_the_same_diverged_steps_if_configured(tmp_path: Path, replicas: int) -> None:
    spoil(tmp_path, image=3e38)

    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            digest = await learn(group, tmp_path)
            optimizer = OptimizerSettings(kind="sgd", learning_rate=0.05, momentum=0.9, clip_norm=1.0)
            settings: dict[str, Any] = {"on_divergence": "continue", "optimizer": optimizer, **FEW}
            wanted = manifest(dtype="float32", data=digest, replicas=replicas, **settings)
            run, events = await train(group, "a", wanted)
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            said = [event for event in events if isinstance(event, StepCommitted)]
            skipped = [event.step for event in said if event.diverged]
            assert [event.step for event in said] == list(range(12))
            assert 0 < len(skipped) < 12
            assert group.nodes["a"].state.runs[run.text].steps_skipped == len(skipped)
            expected = reference(run, load_folder(tmp_path))
            assert_equal(weights(group, "a", run), expected, "float32")
            for name, other in group.events.items():
                told = [event.step for event in other if isinstance(event, StepCommitted) and event.diverged]
                assert told in (skipped, []), name

    simulate(scenario)


def test_no_checkpoint_is_made_of_a_non_finite_state() -> None:
    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:

            async def on_event(event: Event) -> None:
                """Spoil a stage after its third step, at every holder."""
                if isinstance(event, StepCommitted) and event.step == 2:
                    (first, _), *_ = [
                        (replica, stage)
                        for node in group.nodes.values()
                        for member in node.runs.members.values()
                        if (replica := member.hosting.replica) and (stage := replica.core.stage) == 1
                    ]
                    first._stage.vector("parameters")[-8:] = np.float64("nan").tobytes()
                    first.core._save = first.core.step  # due now, before any other event

            wanted = manifest(replicas=1, save_every=5, **FEW)
            _, reason = await end_of(group, wanted, on_event)
            assert "step 3: in stage 2 a parameter or moment is not finite; a lower" in reason
            assert "the checkpoint of step 0 is kept" in reason

    simulate(scenario)


def test_if_a_step_fails_on_two_peers_neither_is_blamed() -> None:
    failures = Failures()
    first, second = PeerId(b"1" * 32), PeerId(b"2" * 32)
    for step in range(3):
        assert failures.note(first, step, "no memory") is None
    assert failures.note(first, 2, "no memory") is None
    assert failures.note(second, None, "its disk is full") is None
    assert failures.note(second, 2, "no memory") == (
        f"step 2 failed on {PEERS_MAX} peers, so the peers are not at fault: no memory"
    )


def test_returns_to_a_checkpoint_without_progress_are_limited() -> None:
    failures = Failures()
    for furthest in range(20):
        assert failures.went_back(0, furthest, "") is None
    for _ in range(ROLLBACKS_MAX - 1):
        assert failures.went_back(18, 19, "it is dead") is None
    reason = failures.went_back(18, 19, "it is dead")
    assert reason is not None
    assert (
        f"to step 18 {ROLLBACKS_MAX + 1} times and got no further than step 19; the last time: it is dead"
        in reason
    )


LONG: dict[str, Any] = {"steps": 100_000, "microbatch": 4, "microbatches": 4, "test_samples": 8}


def is_free(node: Node) -> bool:
    """Return whether a stage may be placed on this node."""
    return node.runs.has_slot


async def begun(group: Swarm, requester: str, **changes: Any) -> Run:
    """Return a run without an end, after its first step."""
    run = prepare(group.nodes[requester], manifest(**(LONG | changes)))
    with group.nodes[requester].watch() as events:
        await group.nodes[requester].runs.submit(run)
        with trio.fail_after(120):
            async for event in events:
                if isinstance(event, StepCommitted) and event.run == run.text:
                    return run
    raise AssertionError("no step was committed")


def test_a_requesters_stop_ends_the_run_for_all_members() -> None:
    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            run = await begun(group, "a")
            a, members = group.nodes["a"], [name for name, node in group.nodes.items() if node.runs.members]
            assert len(members) == 5
            began = trio.current_time()
            said = await a.runs.stopping.stop(run.text)
            assert said == {"run": run.text, "status": "stopped", "told": 4, "left": 0}
            assert trio.current_time() - began < 5
            assert ends(group) == dict.fromkeys(members, ("stopped", "its requester stopped it"))
            assert all(node.runs.has_slot and not node.runs.members for node in group.nodes.values())
            assert {node.state.runs[run.text].status for node in group.nodes.values()} == {"stopped"}
            with pytest.raises(RunFailed, match="is not active here"):
                await a.runs.stopping.stop(run.text)

    simulate(scenario)


def test_a_returning_member_leaves_a_stopped_run() -> None:
    """The member learns of the stop. Or it first learns of the plan that continued without it, because a vote
    was waiting for it.
    """

    async def scenario() -> None:
        async with swarm("abcde", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            run = await begun(group, "a")
            storage = group.storages["c"]
            group.kill("c")
            await trio.sleep(30)
            await group.nodes["a"].runs.stopping.stop(run.text)
            group.events["c"].clear()
            await nursery.start(_live, group, "c", "b", 1, SLOW, storage)
            with trio.fail_after(60):
                while group.nodes["c"].runs.members:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            left_before = any(isinstance(event, RunPlanned) and event.height for event in group.events["c"])
            assert left_before or ends(group)["c"] == ("stopped", "its requester stopped it")
            nursery.cancel_scope.cancel()

    simulate(scenario)


def test_a_restarted_requester_may_still_stop_its_run() -> None:
    async def scenario() -> None:
        async with swarm("abcde", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            run = await begun(group, "a", trainers=2)
            storage = group.storages["a"]
            group.kill("a")
            await trio.sleep(20)
            await nursery.start(_live, group, "a", "b", 1, SLOW, storage)
            await trio.sleep(20)
            others = [name for name in "bcde" if group.nodes[name].runs.members]
            assert others
            assert run.text in group.nodes["a"].runs.stopping.known()
            await group.nodes["a"].runs.stopping.stop(run.text)
            await all_ended(group)
            assert {ends(group)[name][0] for name in others} == {"stopped"}
            nursery.cancel_scope.cancel()

    simulate(scenario)


def test_only_the_requester_may_stop_a_run() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            run = await begun(group, "a", replicas=1)
            b, c = group.nodes["b"], group.nodes["c"]
            with pytest.raises(UsageError, match="only its requester may stop it"):
                await b.runs.stopping.stop(run.text)
            with pytest.raises(UsageError, match="is this node's own"):
                await group.nodes["a"].runs.stopping.drop(run.text)
            before = c.counters.get("protocol_errors", 0)
            with pytest.raises(Unreachable):
                await b.runs.ask(c.peer, wire.Stop(make_stop(b.signer, run)), 5)
            assert c.counters["protocol_errors"] == before + 1
            assert not ends(group)

    simulate(scenario)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_node_drops_a_run_and_the_others_continue(replicas: int) -> None:
    async def scenario() -> None:
        async with swarm("abcdef", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            run = await begun(group, "a", replicas=replicas, save_every=1)
            plan = group.nodes["a"].state.runs[run.text].plan
            assert plan is not None
            name = group.name_of(plan.stages[1][0])
            node = group.nodes[name]
            await trio.sleep(5)
            assert not is_free(node)
            began = trio.current_time()
            assert await node.runs.stopping.drop(run.text) == {"run": run.text, "status": "stopped"}
            assert trio.current_time() - began < 1
            assert is_free(node), "the run is not dropped immediately"
            step = group.nodes["a"].state.runs[run.text].step
            await trio.sleep(25)
            assert ends(group) == {name: ("stopped", "dropped on this node; the others go on without it")}
            view = group.nodes["a"].state.runs[run.text]
            assert view.step > step + 5
            assert view.plan is not None
            assert node.peer not in [peer for stage in view.plan.stages for peer in stage]
            storage = group.storages[name]
            group.kill(name)
            await trio.sleep(1)
            await nursery.start(_live, group, name, "a", 1, SLOW, storage)
            await trio.sleep(10)
            assert is_free(group.nodes[name]), "the dropped run returns after a restart"
            assert not group.nodes[name].runs.members
            nursery.cancel_scope.cancel()

    simulate(scenario)


def test_a_run_may_be_stopped_while_it_is_placed() -> None:
    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group, trio.open_nursery() as nursery:
            a = group.nodes["a"]
            run = prepare(a, manifest(replicas=1, **LONG))
            nursery.start_soon(a.runs.submit, run)
            await trio.sleep(0.01)
            assert a.runs.members
            await a.runs.stopping.stop(run.text)
            await trio.sleep(5)
            assert ends(group) == {"a": ("stopped", "its requester stopped it")}
            assert all(node.runs.has_slot and not node.runs.members for node in group.nodes.values())

    simulate(scenario)


def test_a_run_waits_for_missing_peers_if_asked_to() -> None:
    async def scenario() -> None:
        async with swarm("ab") as group, trio.open_nursery() as nursery:
            requester = group.nodes["a"]
            run = prepare(requester, manifest(stages=1, replicas=3, **FEW))
            nursery.start_soon(partial(requester.runs.submit, run, wait_seconds=600.0))
            await trio.sleep(100)
            said = [event for event in group.events["a"] if isinstance(event, RunChanged)]
            assert [event.reason for event in said if "waiting" in event.reason] == [
                "waiting for peers: simple-cnn: 3 peers are needed (1 stage x 3), 2 offer a slot"
            ]
            assert not ends(group)
            await nursery.start(_live, group, "c", "b", 1, STAGE_SECONDS)
            with trio.fail_after(300):
                while "a" not in ends(group):  # noqa: ASYNC110 - virtual time
                    await trio.sleep(1.0)
            assert ends(group)["a"][0] == "done"
            late = prepare(requester, manifest(stages=1, replicas=4, **FEW))
            began = trio.current_time()
            await requester.runs.submit(late, wait_seconds=50.0)
            assert 50 <= trio.current_time() - began < 80
            reasons = [event.reason for event in group.events["a"] if isinstance(event, RunChanged)]
            assert "reduced to 1 x 3 for want of peers: 1 stage x 4 were asked for" in reasons
            nursery.cancel_scope.cancel()

    simulate(scenario)
