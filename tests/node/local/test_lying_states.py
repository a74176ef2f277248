"""No node continues from a state that is worse than claimed by the member that hands it out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import trio

from node.averaging.offered import SNAPSHOT_SECONDS
from node.averaging.snapshot import Snapshot, make_snapshot
from node.local.trainer import LocalTrainer
from partition.run.local_settings import LocalSettings
from partition.stage import OptimizerSettings
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.local_runs import local_runs
from tests.node.local.test_late_heads import begun, losses_of
from tests.node.local.test_runs import ADAM, QUICK, SLOW, submit
from tests.stack import Swarm, swarm

FAST = OptimizerSettings(kind="adam", learning_rate=0.005)
"""An optimizer with which a few steps improve a state far beyond the initial values."""
DILOCO = LocalSettings(local_steps=2, strategy="diloco")
AHEAD_STEPS = 12
"""Number of steps by which a liar claims to be ahead: of two different states the newest is tried first."""
Arrays = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


async def begin(group: Swarm, local: LocalSettings, optimizer: OptimizerSettings = ADAM) -> None:
    """Have the first node ask all others to train, without training itself."""
    group.nodes["a"].limit(accept_runs="never")
    await submit(group, optimizer=optimizer, local=local, steps=1_000, save_every=4)


def junk(arrays: Arrays) -> None:
    arrays["parameters"][:] = 0.3


def moments(arrays: Arrays) -> None:
    """Fake the moments so that the first step from the correct weights is gigantic."""
    arrays["moments"][: arrays["moments"].size // 2] = 1e6
    arrays["moments"][arrays["moments"].size // 2 :] = 0.0


def no_outer(arrays: Arrays) -> None:
    for name in [name for name in arrays if name.startswith("outer/")]:
        del arrays[name]


@dataclass
class Lie:
    """A change to a member's state that is applied whenever other members ask for it."""

    change: Callable[[Arrays], None]
    told: int = 0

    def install(self, group: Swarm, name: str) -> None:
        trainer = trainer_of(group, name)
        honest = trainer.snapshot

        async def snapshot(*arguments: Any) -> Snapshot:
            true = await honest(*arguments)
            arrays = {key: data.view("float32").copy() for key, (_, data) in true.arrays().items()}
            self.change(arrays)
            self.told += 1
            rows = {key: ("float32", each.shape, each.view(np.uint8)) for key, each in arrays.items()}
            table = true.table
            return make_snapshot(table.step + AHEAD_STEPS, table.rounds, table.lineage, rows)

        trainer.snapshot = snapshot  # type: ignore[method-assign,assignment]  # a member that lies


def trainer_of(group: Swarm, name: str) -> LocalTrainer:
    (member,) = local_runs(group.nodes[name]).members.values()
    assert member._trainer is not None
    return member._trainer


def refused_by(group: Swarm, name: str) -> int:
    return sum(part.counters["states_refused"] for part in group.nodes[name].averaging.runs)


@pytest.mark.parametrize(
    ("change", "local"),
    [(junk, QUICK), pytest.param(moments, QUICK, marks=pytest.mark.slow), (no_outer, DILOCO)],
)
def test_a_late_member_starts_fresh_if_every_state_is_useless(
    change: Callable[[Arrays], None], local: LocalSettings
) -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            await begin(group, local)
            lies = [Lie(change), Lie(change)]
            for name, lie in zip("bc", lies, strict=True):
                await begun(group, name, 8)
                lie.install(group, name)
            await trio.sleep(SNAPSHOT_SECONDS)  # honest copies are handed out for this long
            await nursery.start(stack._live, group, "d", "a", 1, SLOW)
            steps = await begun(group, "d", 4)
            assert sum(lie.told for lie in lies) > 0
            assert refused_by(group, "d") >= 1
            assert min(steps) == 0
            assert max(losses_of(group, "d")[:4]) < 1.2 * losses_of(group, "b")[0]
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_a_returning_member_keeps_its_better_state() -> None:
    """The liar hands out untrained weights as the state of a later step."""

    def untrained(arrays: Arrays) -> None:
        arrays["parameters"][:] = np.random.default_rng(1).normal(scale=0.01, size=arrays["parameters"].size)

    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            await begin(group, QUICK, FAST)
            for name in "bc":
                await begun(group, name, 28)
            lie = Lie(untrained)
            lie.install(group, "c")
            first, disk = losses_of(group, "b")[0], group.storages["b"]
            group.kill("b")
            group.events["b"] = []
            await trio.sleep(SNAPSHOT_SECONDS)
            await nursery.start(stack._live, group, "b", "a", 1, SLOW, disk)
            steps = await begun(group, "b", 28)
            assert lie.told
            assert refused_by(group, "b") == 1
            assert min(steps) >= 20
            assert losses_of(group, "b")[0] < 0.7 * first, losses_of(group, "b")
            nursery.cancel_scope.cancel()

    run_virtually(play)
