"""Runs in local mode by whole nodes in virtual time: they train, average, lose and gain members, and end."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from blake3 import blake3

from crypto.identity import peer_text
from node.averaging.participation import Participation
from node.averaging_events import AveragingEnded, StateFetched
from node.events import Event, RunEnded, RunEvaluated, StepCommitted
from node.protocols.manifest import Manifest, Run
from node.seams import Parts
from node.state_documents import run_document
from partition.run.local_settings import LocalSettings
from partition.stage import OptimizerSettings
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.local_runs import local_runs
from tests.stack import Swarm, swarm

ADAM = OptimizerSettings(kind="adam", learning_rate=0.002)
SLOW = 0.2
"""Modelled seconds of a pass. With this value a round of two steps takes as long as a few messages."""
QUICK = LocalSettings(local_steps=2)


def manifest(**changes: Any) -> Manifest:
    """Return the manifest of a small run in local mode."""
    fields: dict[str, Any] = {
        "stages": 1,
        "replicas": 0,
        "microbatches": 2,
        "microbatch": 16,
        "test_samples": 32,
        "dtype": "float32",
        "optimizer": ADAM,
        "local": QUICK,
    }
    return stack.manifest(**(fields | changes))


async def submit(group: Swarm, requester: str = "a", wait_seconds: float = 60.0, **changes: Any) -> Run:
    """Have a node request a small run in local mode."""
    node = group.nodes[requester]
    run = stack.prepare(node, manifest(**changes))
    await node.runs.submit(run, wait_seconds=wait_seconds)
    return run


async def train(
    group: Swarm,
    local: LocalSettings,
    on_event: Callable[[Event], Awaitable[None]] | None = None,
    **changes: Any,
) -> tuple[Run, list[Event]]:
    """Play a run in local mode that the first node requests."""
    return await stack.train(group, next(iter(group.nodes)), manifest(local=local, **changes), on_event)


async def ends(group: Swarm, names: str, seconds: float = 60.0) -> list[RunEnded]:
    """Return the end of the run as each of these nodes reports it, once all have reported it."""
    with trio.fail_after(seconds):
        while True:
            found = [next((e for e in group.events[n] if isinstance(e, RunEnded)), None) for n in names]
            if all(found):
                return [each for each in found if each is not None]
            await trio.sleep(0.2)


def test_members_average_and_end_with_one_model_on_all() -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            run, _ = await train(group, QUICK, steps=16)
            found = await ends(group, "abc")
            assert [event.outcome for event in found] == ["done"] * 3
            assert len({event.weights for event in found}) == 1
            assert all(event.is_here for event in found)
            rounds = [e for e in group.events["b"] if isinstance(e, AveragingEnded) and e.outcome == "ok"]
            assert rounds
            assert max(len(event.averaged) for event in rounds) == 3
            last = run_document(group.nodes["b"].state.runs[run.text])["last_round"]
            told = [e for e in group.events["b"] if isinstance(e, AveragingEnded)]
            assert last["round"] == len(told)
            assert last["peers"] == [peer_text(peer) for peer in told[-1].averaged]
            assert last["error"] == told[-1].reason
            results = [stack.weights(group, name, run) for name in "abc"]
            for name, tensor in results[0].items():
                assert all(np.array_equal(tensor, other[name]) for other in results[1:]), name

    run_virtually(play)


def test_a_death_stops_no_member_and_the_last_one_continues() -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW) as group:
            seen = 0

            async def disturb(event: Event) -> None:
                nonlocal seen
                if isinstance(event, AveragingEnded):
                    seen += 1
                    if seen in (1, 3):
                        group.kill("bc"[seen // 2])

            _, events = await train(group, QUICK, disturb, steps=40)
            (end,) = [event for event in events if isinstance(event, RunEnded)]
            assert (end.outcome, end.is_here) == ("done", True)
            assert seen >= 3

    run_virtually(play)


def test_a_late_member_starts_from_the_others_state_and_keeps_the_result() -> None:
    async def play() -> None:
        async with swarm("ab", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            is_added = False

            async def add(event: Event) -> None:
                nonlocal is_added
                if isinstance(event, AveragingEnded) and not is_added:
                    is_added = True
                    await nursery.start(stack._live, group, "c", "a", 1, SLOW)

            await train(group, QUICK, add, steps=30)
            found = await ends(group, "abc")
            assert len({event.weights for event in found}) == 1
            assert [event.is_here for event in found] == [True] * 3
            fetched = [e for e in group.events["c"] if isinstance(e, StateFetched)]
            assert fetched
            assert fetched[0].step > 0
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_a_run_ends_everywhere_once_its_evaluations_stop_improving() -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            local = LocalSettings(local_steps=2, patience=2, improvement=0.5)
            await train(group, local, steps=10_000)
            found = await ends(group, "abc")
            assert {event.detail for event in found} == {"its evaluations stopped improving"}
            assert len({event.weights for event in found}) == 1
            # The member with the most evaluations noticed it. The others heard of it, some before their third
            # evaluation.
            seen = [[e.loss for e in group.events[name] if isinstance(e, RunEvaluated)] for name in "abc"]
            losses = max(seen, key=len)
            best = losses.index(min(losses[:-2]))
            assert min(losses[-2:]) > losses[best] - 0.5

    run_virtually(play)


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [("gossip", 42), ("diloco", 42), ("sparseloco", 60)],
    ids=["gossip", "diloco", "sparseloco"],
)
def test_each_strategy_trains_a_run(strategy: str, steps: int) -> None:
    async def play() -> None:
        async with swarm("ab", stage_seconds=SLOW, preset="lan") as group:
            local = LocalSettings(local_steps=3, strategy=strategy)  # type: ignore[arg-type]  # one of its names
            _, events = await train(group, local, steps=steps)
            losses = [event.loss for event in events if isinstance(event, RunEvaluated)]
            assert min(losses) < 0.95 * losses[0], (
                "the loss never fell (an outer step's momentum may overshoot the minimum later)"
            )
            found = await ends(group, "ab")
            assert [event.outcome for event in found] == ["done"] * 2

    run_virtually(play)


def test_a_member_that_withholds_evaluations_cannot_prevent_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            silenced: list[str] = []

            async def disturb(event: Event) -> None:
                if isinstance(event, AveragingEnded) and not silenced:
                    (run_id,) = local_runs(group.nodes["a"]).members
                    name = min("abc", key=lambda each: blake3(run_id + group.nodes[each].peer).digest())
                    silenced.append(name)
                    ending = local_runs(group.nodes[name]).members[run_id].ending
                    monkeypatch.setattr(ending.turns, "is_mine", lambda *_: False)

            await train(group, QUICK, disturb, steps=8)
            assert silenced
            found = await ends(group, "abc")
            assert [event.outcome for event in found] == ["done"] * 3
            assert len({event.weights for event in found}) == 1

    run_virtually(play)


def test_one_member_that_claims_all_steps_cannot_end_a_run() -> None:
    claimed: list[int] = []

    class ClaimingParticipation(Participation):
        def tell(self, **said: Any) -> None:
            super().tell(**{**said, "step": 16} if claimed else said)

    async def play() -> None:
        parts: dict[str, Parts] = {"c": {Participation: ClaimingParticipation}}
        async with swarm("abc", stage_seconds=SLOW, preset="lan", parts_of=parts) as group:

            async def disturb(event: Event) -> None:
                if isinstance(event, AveragingEnded) and not claimed:
                    (member,) = local_runs(group.nodes["c"]).members.values()
                    claimed.append(member.step)

            await train(group, QUICK, disturb, steps=16)
            assert claimed[0] < 16
            found = await ends(group, "abc")
            assert [event.outcome for event in found] == ["done"] * 3
            honest = [
                event.step
                for name in "ab"
                for event in group.events[name]
                if isinstance(event, StepCommitted)
            ]
            assert max(honest) == 15, "no honest member made all steps"

    run_virtually(play)
