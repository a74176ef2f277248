"""A peer that claims ten times its rate, also in its reports, ends with its fair share.

Whole nodes in virtual time: the liar's neighbours measure when its work is done, and the planner prefers
their measurements.
"""

from typing import Any

import msgspec
import trio

from node.events import RunPlanned
from node.seams import Stage
from sim.network.pace import PeerPace
from sim.worlds.stages import NodeExecutor
from tests.node.test_placement import claim
from tests.stack import manifest, simulate, swarm, train
from tests.test_recut import _ignore, deep_model

RATE = 1.5e6
"""FLOP/s of a simulated peer: a step takes seconds, so that moving layers pays off within a short run."""
LIE = 10


class LyingStage:
    """A stage that reports a tenth of its busy time."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.vector = stage.vector
        self.aclose = stage.aclose

    async def call(self, request: object) -> object:
        reply: Any = await self._stage.call(request)
        if busy := getattr(reply, "busy_nanoseconds", 0):
            return msgspec.structs.replace(reply, busy_nanoseconds=busy // LIE)
        return reply


class LyingExecutor(NodeExecutor):
    async def open_stage(self, specification: bytes) -> Stage:
        return LyingStage(await super().open_stage(specification))


def play(*steps_of_runs: int, lies: bool) -> list[list[dict[str, int]]]:
    """Return the layers of each node, in each plan, in each run; node b lies."""
    executors = {
        name: (LyingExecutor if lies and name == "b" else NodeExecutor)(
            RATE, 1.0, lambda _: 0.0, PeerPace(), _ignore
        )
        for name in "abcd"
    }
    found: list[list[dict[str, int]]] = []

    async def scenario() -> None:
        async with swarm("abcd", preset="lan", executors=executors) as group:
            if lies:
                claim(group.nodes["b"], LIE * group.nodes["b"].capacity.flops_per_second)
                await trio.sleep(5)
            for seed, steps in enumerate(steps_of_runs):
                wanted = manifest(
                    deep_model(),
                    stages=3,
                    replicas=1,
                    steps=steps,
                    microbatch=8,
                    microbatches=4,
                    test_samples=16,
                    save_every=50,
                    seed=seed,
                    created_milliseconds=seed + 1,
                )
                _, events = await train(group, "d", wanted)
                plans = [event for event in events if isinstance(event, RunPlanned)]
                found.append(
                    [
                        {
                            group.name_of(peers[0]): last - first
                            for peers, (first, last) in zip(plan.stages, plan.layers, strict=True)
                        }
                        for plan in plans
                    ]
                )

    simulate(scenario)
    return found


def test_a_liar_gets_its_fair_share_within_three_plans() -> None:
    first, second = play(16, 1, lies=True)
    honest = play(1, lies=False)[0][0]
    assert first[0]["b"] >= 2 * honest["b"], "the claim is not believed at first"
    assert len(first) <= 3
    assert abs(first[-1]["b"] - honest["b"]) <= 1
    # The requester's second run starts with the shares with which the first ended.
    assert abs(second[0].get("b", honest["b"]) - honest["b"]) <= 1


def test_measurements_of_honest_peers_change_nothing() -> None:
    (plans,) = play(11, lies=False)
    assert len(plans) == 1
