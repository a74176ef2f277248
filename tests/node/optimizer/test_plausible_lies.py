"""One participant lies plausibly about everything among three honest scripts that use the wrapper.

Real nodes in threads of this process. PEERLOOM_PLAUSIBLE_SEEDS is the number of seeds.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from random import Random

import pytest

from node.library.sync import SyncNode
from tests.hostile.plausible import PlausibleLiar
from tests.node.optimizer.test_liars import Options, Run, norm
from tests.node.optimizer.test_wrapper import adamw, model_of, open_nodes, until

SEEDS = range(1, 1 + int(os.environ.get("PEERLOOM_PLAUSIBLE_SEEDS", "1")))
HONEST = 3
STEPS = 12
ROUNDS_MIN = 1
"""Number of rounds that the liar must have entered. One is enough, because honest members exclude the liar
for longer each time."""
KINDS = {"step", "rounds", "samples", "state", "vector", "weight", "silence"}
GROWTH_MAX = 2.0
STEP_SECONDS_MAX = 60.0
"""The limit for one call on a busy machine. On an idle machine, two attempts of a round with their window and
the trial of another peer's state take 15 s.
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SyncNode]]:
    with ExitStack() as stack:
        yield open_nodes(stack, tmp_path_factory.mktemp("plausible"), HONEST + 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "options",
    [{"target_batch_size": 64, "window_seconds": 1.0}, {"local_steps": 4, "window_seconds": 1.0}],
    ids=["target batch", "local steps"],
)
def test_plausible_lies_change_no_honest_model_and_block_no_call(
    nodes: list[SyncNode], options: Options, seed: int
) -> None:
    with closing(Run(nodes, options)) as run:
        run.train(HONEST)
        before = max(norm(each.model) for each in run.members)
        liar = PlausibleLiar(nodes[-1], adamw(model_of(9)), run.name, rng=Random(seed), **options)
        with closing(liar):
            targets = [each.optimizer.global_step + STEPS for each in run.members]
            until(
                lambda: (
                    liar.entered >= ROUNDS_MIN
                    and all(m.optimizer.global_step >= t for m, t in zip(run.members, targets, strict=True))
                ),
                seconds=120,
            )
            assert {kind for kind, _ in liar.said} == KINDS
        assert [norm(each.model) < GROWTH_MAX * before for each in run.members] == [True] * HONEST
        assert max(each.longest_seconds for each in run.members) < STEP_SECONDS_MAX
        assert all(each.optimizer.global_step < 2**20 for each in run.members)
