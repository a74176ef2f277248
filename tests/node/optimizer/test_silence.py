"""Members that are listed in a run of the optimizer and give nothing: what they cost the others.

Real nodes in threads of this process.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from node.library.sync import SyncNode
from tests.hostile.silent import Silence, SilentParticipant
from tests.node.optimizer.test_liars import Options, Trainer
from tests.node.optimizer.test_wrapper import adamw, model_of, open_nodes, until

torch.set_num_threads(1)
RUNS = itertools.count()
BATCH: Options = {"target_batch_size": 64, "window_seconds": 5.0}
LOCAL: Options = {"local_steps": 4, "window_seconds": 5.0}
ROUNDS = 10
SECONDS = 15.0
"""For so many rounds, the first with the silent member included. It was 5 s for each, so 50 s."""

LONE_STEPS, LONE_SECONDS = 6, 12.0
"""Only the first waits for the window and for anybody; it was 3.5 s for each."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SyncNode]]:
    with ExitStack() as stack:
        yield open_nodes(stack, tmp_path_factory.mktemp("silence"), 3)


Start = Callable[[Options, int], tuple[str, list[Trainer]]]


@pytest.fixture
def start(nodes: list[SyncNode]) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(options: Options, count: int) -> tuple[str, list[Trainer]]:
            name = f"silence-{next(RUNS)}"
            members = []
            for number in range(count):
                members.append(Trainer(nodes[number], number, name, options))
                members[-1].begin()
                stack.callback(members[-1].close)
            for each in members:
                stack.callback(each.end)
            until(lambda: count == 1 or all(each.optimizer.stats.rounds >= 3 for each in members))
            return name, members

        yield begin


@pytest.mark.parametrize("options", [BATCH, LOCAL])
@pytest.mark.parametrize("silence", ["absent", "ready"])
def test_a_silent_member_holds_up_few_rounds(
    nodes: list[SyncNode], start: Start, options: Options, silence: Silence
) -> None:
    name, members = start(options, 2)
    silent = SilentParticipant(nodes[2], adamw(model_of(9)), name, silence=silence, **options)  # type: ignore[arg-type]  # no `samples`
    try:
        until(lambda: all(each.optimizer.stats.peers == 2 for each in members))
        rounds = [each.optimizer.stats.rounds for each in members]
        begun = time.monotonic()
        until(
            lambda: all(
                each.optimizer.stats.rounds >= before + ROUNDS
                for each, before in zip(members, rounds, strict=True)
            )
        )
        assert time.monotonic() - begun < SECONDS
    finally:
        silent.close()


def test_a_lone_trainer_goes_on_beside_a_silent_member(nodes: list[SyncNode], start: Start) -> None:
    options: Options = {"target_batch_size": 32, "window_seconds": 0.5}
    name, (trainer,) = start(options, 1)
    silent = SilentParticipant(nodes[2], adamw(model_of(9)), name, **options)  # type: ignore[arg-type]  # no `samples`
    try:
        until(lambda: trainer.optimizer.stats.peers == 1)
        reached = trainer.optimizer.global_step
        begun = time.monotonic()
        until(lambda: trainer.optimizer.global_step >= reached + LONE_STEPS)
        assert time.monotonic() - begun < LONE_SECONDS
    finally:
        silent.close()
