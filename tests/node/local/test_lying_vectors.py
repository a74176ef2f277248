"""A member of a run in local mode that lies in its averages: the run's aggregation rule bounds the damage."""

from math import log
from typing import Any

import numpy as np
import pytest
import trio

from gossip.averaging.robust.reduction import Vector
from node.averaging.participation import Participation
from node.averaging.rounds import Round, RoundWish
from node.averaging_events import AveragingEnded
from node.errors import UsageError
from node.events import Event, RunEvaluated
from node.protocols.run_file import RunFile, TrainTable, check_run_file
from node.seams import Parts
from partition.run.local_settings import LocalSettings
from sim.worlds.scheduling import run_virtually
from tests.node.local.test_runs import SLOW, train
from tests.stack import swarm

GUESS = log(10)
"""The loss of an untrained model on ten digits."""
RUINED = 10


class LyingParticipation(Participation):
    """Averages ten times the opposite of what it learned, at the largest weight."""

    async def average(self, vector: Vector | None, weight: float, wanted: RoundWish) -> Round:
        assert vector is not None
        lie = np.clip(-10 * np.clip(vector, -1, 1), -10, 10)
        return await super().average(lie, 1e12, wanted)


@pytest.mark.parametrize(("choice", "rule"), [("mean", "mean"), ("auto", "nnm-trimmed-mean")])
def test_a_recruited_liar_ruins_only_runs_that_average_by_mean(choice: Any, rule: str) -> None:
    """Node d is asked to join, like any node with a free slot, and lies in every average."""

    async def play() -> None:
        losses: list[float] = []
        parts: dict[str, Parts] = {"d": {Participation: LyingParticipation}}
        async with swarm("abcd", stage_seconds=SLOW, parts_of=parts) as group:
            liar = group.nodes["d"].peer

            async def judge(event: Event) -> None:
                if isinstance(event, RunEvaluated):
                    losses.append(event.loss)
                    if event.loss > RUINED * GUESS:
                        scope.cancel()  # the run is ruined: do not wait for its end

            with trio.CancelScope() as scope:
                await train(group, LocalSettings(local_steps=2, aggregate=choice), judge, steps=16)
            rounds = [e for e in group.events["a"] if isinstance(e, AveragingEnded) and e.outcome == "ok"]
            assert {each.aggregate for each in rounds} == {rule}
            assert any(liar in each.averaged for each in rounds)
            assert scope.cancelled_caught == (rule == "mean")
            if rule != "mean":
                assert max(losses) < 1.1 * GUESS
                assert losses[-1] < GUESS

    run_virtually(play)


@pytest.mark.parametrize(
    ("train_table", "said"),
    [
        ({"strategy": "sparseloco"}, "train.aggregate median: strategy sparseloco sends only a few values"),
        ({"strategy": "gossip"}, "train.aggregate median: strategy gossip averages in pairs"),
        (
            {"strategy": "diloco", "codec": "topk64"},
            "train.aggregate median: codec topk64 sends only a few values",
        ),
        ({"mode": "exact"}, 'train.aggregate: is only for train.mode = "local"'),
        ({"mode": "auto"}, 'train.aggregate: is only for train.mode = "local"'),
    ],
)
def test_a_rule_that_contradicts_a_run_file_is_refused(train_table: dict[str, Any], said: str) -> None:
    run_file = RunFile(
        model="m", train=TrainTable(**({"mode": "local", "aggregate": "median"} | train_table))
    )
    with pytest.raises(UsageError, match=f"RUN.toml: {said}"):
        check_run_file(run_file, "RUN.toml")


def test_a_run_file_sets_the_aggregation_rule_for_all_members() -> None:
    run_file = RunFile(model="m", train=TrainTable(mode="local", aggregate="median"))
    check_run_file(run_file, "RUN.toml")
    assert run_file.local == LocalSettings(aggregate="median")
