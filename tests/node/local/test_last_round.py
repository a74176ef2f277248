"""A run in local mode ends with a mean of its members. The result is never one member's progress since the
last round.
"""

from typing import Any

import numpy as np
import pytest
import trio

from crypto.identity import PeerId, peer_text
from gossip.averaging.robust.reduction import Vector
from node.averaging_events import AveragingEnded
from node.events import StepCommitted
from node.local.trainer import LocalTrainer
from partition.run.local.round_schedule import LAST_ROUND_SECONDS
from partition.run.local_settings import LocalSettings
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.node.local.heard_rounds import HeardRounds
from tests.node.local.test_columns import begin
from tests.node.local.test_runs import SLOW, ends, train
from tests.stack import Swarm, swarm

LOCAL_STEPS, STEPS = 4, 15
"""Three more steps follow the last scheduled round."""


@pytest.fixture
def held() -> HeardRounds:
    """Return a recorder of all rounds."""
    return HeardRounds()


def values_of(group: Swarm, name: str, run: Any) -> list[Vector]:
    """Return the values of each tensor of the result, flattened."""
    return [np.asarray(tensor).reshape(-1) for tensor in stack.weights(group, name, run).values()]


def has_all(vector: Vector | None, values: Vector) -> bool:
    return vector is not None and bool(np.isin(values, vector).all())


@pytest.mark.parametrize("local", [{}, {"patience": 1, "improvement": 100.0}], ids=["steps", "convergence"])
def test_the_result_is_a_mean_of_all_members(held: HeardRounds, local: dict[str, Any]) -> None:
    """The run ends after all steps, or when evaluations stop improving; evaluations also use weights that
    have not been averaged."""

    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan", parts=held.parts) as group:
            settings = LocalSettings(local_steps=LOCAL_STEPS, **local)
            run, _ = await train(group, settings, steps=STEPS if not local else 1_000)
            assert [end.outcome for end in await ends(group, "abc")] == ["done"] * 3
            values = np.concatenate(values_of(group, "a", run))
            means = [each.made for each in held if has_all(each.made.vector, values)]
            assert means, "the result is not any member's average"
            assert max(len(made.shares) for made in means) == 3
            result = await group.nodes["a"].run(run.text).result()
            told = [event for event in group.events["a"] if isinstance(event, AveragingEnded)][-1]
            assert result.last_round is not None
            assert (result.last_round.step, result.last_round.error) == (told.step, told.reason)
            assert result.last_round.peers == tuple(peer_text(peer) for peer in told.averaged)

    run_virtually(play)


def test_pairs_average_until_all_have_met(held: HeardRounds) -> None:
    """Four members that average in pairs form a grid of two axes, so the mean of all four takes two
    rounds."""

    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW, preset="lan", parts=held.parts) as group:
            settings = LocalSettings(local_steps=LOCAL_STEPS, strategy="gossip")
            run, _ = await train(group, settings, steps=STEPS)
            await ends(group, "abcd")
            values = np.concatenate(values_of(group, "a", run))
            last_round = next(each.made for each in held if has_all(each.made.vector, values))
            final = last_round.attempt
            offered = {each.peer: each.offered for each in held if each.made.attempt == final}
            # One member of the last pair may have made its last step just before, so the weights that it
            # offered are not a mean.
            met: set[PeerId] = set(last_round.shares)
            for each in held:
                last = offered.get(each.peer)
                if last is not None and each.made.vector is not None and np.allclose(each.made.vector, last):
                    met |= each.made.shares.keys()
            assert len(met) >= 3, "the author of the result had not averaged with another member before"

    run_virtually(play)


def test_a_damped_run_takes_partial_means_but_ends_with_a_full_one(held: HeardRounds) -> None:
    moved: list[Vector] = []
    before: dict[int, Vector] = {}

    class HeardTrainer(LocalTrainer):
        async def copy_out(self, *, moments: bool) -> Vector:
            before[id(self)] = await super().copy_out(moments=moments)
            return before[id(self)].copy()

        async def copy_in(self, vector: Vector) -> None:
            moved.append(vector - before[id(self)])
            await super().copy_in(vector)

    async def play() -> None:
        async with swarm(
            "ab", stage_seconds=SLOW, preset="lan", parts=held.parts | {LocalTrainer: HeardTrainer}
        ) as group:
            settings = LocalSettings(local_steps=LOCAL_STEPS, damping=0.25)
            run, _ = await train(group, settings, steps=STEPS)
            await ends(group, "ab")
            values = np.concatenate(values_of(group, "a", run))
            assert any(has_all(each.made.vector, values) for each in held), (
                "the result is not any member's mean"
            )

    run_virtually(play)
    gaps = [each.made.vector - each.offered for each in held if each.made.vector is not None]
    shares = [
        share
        for move in moved
        for share in (0.25, 1.0)
        if any(gap.any() and np.allclose(move, share * gap, 1e-3, 1e-6) for gap in gaps)
    ]
    assert shares.count(0.25) >= 2, "too few members applied a quarter of a round"
    assert shares[-1] == 1.0


def test_departed_members_do_not_prevent_the_end_of_a_run() -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW) as group:
            died_at = 0.0

            async def kill(event: Any) -> None:
                nonlocal died_at
                if isinstance(event, StepCommitted) and event.step == 10:
                    died_at = trio.current_time()
                    for name in "bc":
                        group.kill(name)

            settings = LocalSettings(local_steps=LOCAL_STEPS)
            await train(group, settings, kill, steps=STEPS)
            (end,) = await ends(group, "a")
            assert (end.outcome, end.is_here) == ("done", True)
            assert died_at
            assert trio.current_time() - died_at < LAST_ROUND_SECONDS + 20 * SLOW * LOCAL_STEPS

    run_virtually(play)


def test_both_stages_of_columns_end_with_a_mean(held: HeardRounds) -> None:
    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW, preset="lan", parts=held.parts) as group:
            run = await begin(group, steps=14)
            await ends(group, "abcd", 400.0)
            means: dict[str, list[Vector]] = {each.run: [] for each in held}
            for each in held:
                if each.made.vector is not None and len(each.made.shares) == 2:
                    means[each.run].append(each.made.vector)
            assert len(means) == 2, "the holders of some stage did not average"
            for values in values_of(group, "a", run):
                found = [name for name, vectors in means.items() if any(has_all(v, values) for v in vectors)]
                assert found, f"a tensor of {len(values)} values is not a mean"

    run_virtually(play)
