"""Rounds with a target batch among peers that idle, are slow, or join and leave. Virtual time."""

from collections.abc import Sequence

import numpy as np
import pytest
import trio

from node.averaging.participation import Participation
from node.averaging.rounds import RoundWish
from sim.worlds.scheduling import run_virtually
from tests.stack import swarm

SIGNATURE = bytes([7]) * 32
STEP_SECONDS, SLOWNESS = 0.25, 4.0
BEGUN_SECONDS, ALONE_SECONDS, SECONDS = 3.0, 6.0, 45.0
SLOWDOWN_MAX = 0.05


class Trainer:
    """A peer whose rounds are the steps of the run. If the peer is behind, it continues at the step of the
    others."""

    def __init__(self, run: Participation, step_seconds: float) -> None:
        self.run = run
        self.step_seconds = step_seconds
        self.step = 0
        self.rounds_at: list[float] = []

    def tell(self, samples: int) -> None:
        self.run.tell(
            step=self.step, samples=samples, rounds=len(self.rounds_at), lineage=bytes(32), has_state=True
        )

    async def train(self, steps: int | None = None) -> None:
        """Take part in this many rounds, or train for ever if `steps` is None."""
        made = 0
        while steps is None or made < steps:
            self.tell(0)
            await trio.sleep(self.step_seconds)
            while any(report.step.reaches(self.step + 1) for report in self.run.roster.reports.values()):
                self.step += 1
            self.tell(32)
            found = await self.run.average(np.ones(8, np.float32), 32.0, RoundWish(round=self.step))
            if found.vector is not None:
                self.step += 1
                self.rounds_at.append(trio.current_time())
                made += 1
        self.tell(0)


def slowdown(names: str, others: Sequence[tuple[str, float, int | None]]) -> float:
    """Return how much less often a group of equal peers holds rounds once `others` have joined, as a share of
    the rate without them. `others` are (name, seconds per step, number of steps).
    """
    rates: list[float] = []

    async def play() -> None:
        async with swarm(names + "".join(name for name, _, _ in others)) as group:
            nodes = group.nodes
            async with trio.open_nursery() as nursery:
                trainers = [Trainer(nodes[n].averaging.open("mixed", SIGNATURE), STEP_SECONDS) for n in names]
                for each in trainers:
                    await each.run.wait_for_peers(len(names) - 1)
                    nursery.start_soon(each.train)
                await trio.sleep(BEGUN_SECONDS)
                for seconds in (ALONE_SECONDS, SECONDS):
                    before = len(trainers[0].rounds_at)
                    await trio.sleep(seconds)
                    times = trainers[0].rounds_at[before:]
                    rates.append((len(times) - 1) / (times[-1] - times[0]))
                    for name, step_seconds, steps in () if len(rates) > 1 else others:
                        other = Trainer(nodes[name].averaging.open("mixed", SIGNATURE), step_seconds)
                        nursery.start_soon(other.train, steps)
                nursery.cancel_scope.cancel()

    run_virtually(play)
    return 1 - rates[1] / rates[0]


def test_a_peer_that_idles_after_one_step_barely_slows_others() -> None:
    assert slowdown("abc", [("i", STEP_SECONDS, 1)]) < SLOWDOWN_MAX


@pytest.mark.slow
def test_a_peer_that_idles_after_training_barely_slows_others() -> None:
    assert slowdown("abc", [("i", STEP_SECONDS, 20)]) < SLOWDOWN_MAX


def test_a_peer_that_is_four_times_slower_barely_slows_others() -> None:
    assert slowdown("abc", [("s", SLOWNESS * STEP_SECONDS, None)]) < SLOWDOWN_MAX
