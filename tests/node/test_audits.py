"""Signed frames of committed steps are shown to members of a run, who recompute them. Whole nodes."""

from typing import Any

import pytest
import trio
from msgspec.structs import replace

from crypto.identity import peer_text
from node.commands import Commands
from node.errors import RunFailed
from node.events import RunPlanned, StepCommitted
from node.pipeline.replica import ReplicaShell
from node.protocols.audits import FramesHere, FrameShown, ShowFrame, WhichFrames
from node.protocols.manifest import Run
from node.runs.receipts import BACKWARD
from partition import stage as api
from partition.codecs.codec import pack, typed, unpack
from partition.plan.change import Change
from partition.plan.layer_costs import layer_costs
from tests import stack
from tests.node.test_slots import only
from tests.stack import Swarm, simulate, swarm
from tests.test_runs_end import all_ended

LIED_STEP = 2


async def done(group: Swarm, **changes: Any) -> Run:
    """Train a few steps on two stages: a requests the run, b and c compute it."""
    only(group, "b", "c")
    await trio.sleep(5)
    a = group.nodes["a"]
    run = stack.prepare(a, stack.manifest(stages=2, replicas=1, microbatches=2, **changes))
    await a.runs.submit(run)
    await all_ended(group)
    return run


def test_frames_of_an_honest_run_pass_audits_until_they_expire() -> None:
    async def scenario() -> None:
        async with swarm("abcd", preset="lan") as group:
            run = await done(group, steps=6, save_every=3)
            found = await group.nodes["a"].runs.audits.audit(run.text, None)
            assert found["step"] == 3, "the default is not the newest step that begins with a checkpoint"
            assert {(row["stage"], row["microbatch"], row["verdict"]) for row in found["frames"]} == {
                (stage, microbatch, "right") for stage in (0, 1) for microbatch in (6, 7)
            }
            first = await group.nodes["b"].runs.audits.audit(run.text, 0)
            assert {row["verdict"] for row in first["frames"]} == {"right"}
            # A peer outside the run is shown no frames.
            b, d = group.nodes["b"], group.nodes["d"]
            row = b.runs.audits._answer(b.peer, WhichFrames(run.id, 0))[0].rows[0]  # type: ignore[union-attr]  # FramesHere
            assert (await d.runs.audits._ask(b.peer, WhichFrames(run.id, 0)))[0] == FramesHere()
            assert (await d.runs.audits._ask(b.peer, ShowFrame(run.id, 0, row)))[0] == FrameShown()
            with pytest.raises(RunFailed, match="no plan here"):
                await d.runs.audits.audit(run.text, None)
            await trio.sleep(700)
            assert (await group.nodes["a"].runs.audits._ask(b.peer, WhichFrames(run.id, 0)))[
                0
            ] == FramesHere()
            with pytest.raises(RunFailed, match="kept for ten minutes"):
                await group.nodes["a"].runs.audits.audit(run.text, None)

    simulate(scenario)


def test_a_frame_that_does_not_follow_from_its_input_is_wrong() -> None:
    """In one step the first stage doubles the output that it sends. Nothing else reveals the lie."""

    class LyingReplica(ReplicaShell):
        async def _call(self, request: Any) -> object:
            answer = await super()._call(request)
            is_lie = isinstance(request, api.Forward) and request.train and request.step == LIED_STEP
            if is_lie and isinstance(answer, api.Forwarded) and answer.output is not None:
                arrays = [2 * array for _, array in unpack(answer.output, bytes_max=1 << 30)]
                return replace(answer, output=pack(list(map(typed, arrays)), "raw", answer.output.sizes))
            return answer

    async def scenario() -> None:
        async with swarm("abc", preset="lan", parts={ReplicaShell: LyingReplica}) as group:
            run = await done(group, save_every=2)
            found = await group.nodes["a"].runs.audits.audit(run.text, LIED_STEP)
            by_stage = {row["stage"]: row for row in found["frames"]}
            assert by_stage[0]["verdict"] == "wrong"
            assert by_stage[1]["verdict"] == "right", (
                "the second stage is blamed although it computed correctly from its input"
            )
            liar = group.nodes[group.name_of(_peer_of(group, by_stage[0]["peer"]))]
            assert liar.id == by_stage[0]["peer"]
            earlier = await group.nodes["a"].runs.audits.audit(run.text, 0)
            assert {row["verdict"] for row in earlier["frames"]} == {"right"}

    simulate(scenario)


def test_frames_are_audited_with_the_layers_of_their_step() -> None:
    """The stage borders move after the step. The stages of today would compute other frames from the same
    inputs.
    """

    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            only(group, "b", "c")
            await trio.sleep(5)
            a = group.nodes["a"]
            wanted = stack.manifest(stages=2, replicas=1, microbatches=2, save_every=2, steps=12)
            run = stack.prepare(a, wanted)
            await a.runs.submit(run)
            with trio.fail_after(60):
                while not any(isinstance(e, StepCommitted) and e.step == 3 for e in group.events["a"]):  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            member = a.runs.members[run.id]
            assert member.plan is not None
            before = member.plan.stages[0].last_layer
            member.core.between.recut(Change(cuts=(before + 1 if before < 3 else before - 1,)))
            member.act()
            await all_ended(group)
            plans = [event for event in group.events["a"] if isinstance(event, RunPlanned)]
            assert plans[-1].layers != plans[0].layers
            found = await a.runs.audits.audit(run.text, 0)
            assert {row["verdict"] for row in found["frames"]} == {"right"}
            expected = await _work_by_layers(a, run, group.events["a"])
            with trio.fail_after(90):
                while _signed_work(a) != expected:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(1)
            traced = await _layers_by_step(a, run)
            assert traced[0] == set(plans[0].layers), (
                "the trace does not show the layers of each stage at that step"
            )
            assert traced[11] == set(plans[-1].layers)
            newest = await a.runs.audits.audit(run.text, None)
            assert newest["step"] > 3
            assert {row["verdict"] for row in newest["frames"]} == {"right"}

    simulate(scenario)


async def _layers_by_step(node: Any, run: Run) -> dict[int, set[tuple[int, int]]]:
    async def nothing(_event: object) -> None:
        await trio.lowlevel.checkpoint()

    found: Any = await Commands(node).handlers["runs.trace"]({"run": run.text, "steps": 12}, nothing)
    layers: dict[int, set[tuple[int, int]]] = {}
    for peer in found["peers"]:
        for span in peer["spans"]:
            if span["kind"] == "forward":
                layers.setdefault(span["step"], set()).add(tuple(span["layers"]))
    return layers


async def _work_by_layers(node: Any, run: Run, events: list[Any]) -> dict[str, float]:
    """Return the FLOPs that each other member has computed, given the layers that it held in each step."""
    graph = await node.runs.models.get(run.manifest.graph_hash, [run.requester])
    costs = [row.forward_flops for row in layer_costs(graph, run.manifest.sizes_max)]
    plans = {event.height: event for event in events if isinstance(event, RunPlanned)}
    work: dict[str, float] = {}
    for event in events:
        if not isinstance(event, StepCommitted):
            continue
        plan = plans[event.height]
        for layers, (peer,) in zip(plan.layers, plan.stages, strict=True):
            flops = BACKWARD * run.manifest.microbatches * sum(costs[slice(*layers)])
            work[peer_text(peer)] = work.get(peer_text(peer), 0.0) + flops
    return work


def _signed_work(node: Any) -> dict[str, float]:
    rows = node.runs.receipts.document()["issued"]
    return {row["provider"]: row["flops"] for row in rows if row["kind"] == "compute"}


def _peer_of(group: Swarm, text: str) -> Any:
    return next(node.peer for node in group.nodes.values() if node.id == text)
