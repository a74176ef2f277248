"""Scripts that start a run together: no script waits for a missing state, and all start from the same state.

Real nodes in threads of this process. With PEERLOOM_STARTS, as in `make soak`, real processes are used: this
many starts each of 2, 4 and 8 processes, staggered by up to three seconds.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from node.library.sync import SyncNode
from node.optimizer.catching_up import STATE_WAIT_SECONDS
from node.optimizer.wrapper import PeerOptimizer
from tests.node.optimizer.starting import WAIT_SECONDS_MAX, start_processes
from tests.node.optimizer.test_wrapper import (
    adamw,
    backward,
    batch_of,
    model_of,
    open_nodes,
    together,
    until,
    weights,
)

torch.set_num_threads(1)
STARTS = int(os.environ.get("PEERLOOM_STARTS", "0"))
SECONDS = 25.0
"""Limit for each test: more than any of them takes on a slow machine, and less than the 30 s that scripts
once waited."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SyncNode]]:
    with ExitStack() as stack:
        yield open_nodes(stack, tmp_path_factory.mktemp("starts"), 3)


Start = Callable[..., tuple[torch.nn.Module, PeerOptimizer]]


@pytest.fixture
def start(nodes: list[SyncNode], request: pytest.FixtureRequest) -> Iterator[Start]:
    """Yield a function that makes the optimizer of one node in this test's run, with its own initial
    parameters."""
    with ExitStack() as stack:

        def make(number: int, **options: int) -> tuple[torch.nn.Module, PeerOptimizer]:
            model = model_of(seed=number)
            name = request.node.name
            optimizer = nodes[number].optimizer(adamw(model), name, batch_size=32, **options)  # type: ignore[arg-type]  # whichever
            stack.callback(optimizer.close)
            return model, optimizer

        yield make


def train(model: torch.nn.Module, optimizer: PeerOptimizer, number: int) -> float:
    """Train on one batch, and return how long `step` took."""
    backward(model, batch_of(number))
    begun = time.monotonic()
    optimizer.step()
    return time.monotonic() - begun


@pytest.mark.parametrize("options", [{"target_batch_size": 256}, {"local_steps": 5}])
def test_scripts_that_start_together_share_one_initial_state(start: Start, options: dict[str, int]) -> None:
    begun = time.monotonic()
    found = together(*(partial(start, number, **options) for number in range(3)))
    rounds = [threading.Event() for _ in found]

    def loop(number: int) -> float:
        model, optimizer = found[number]
        longest = 0.0
        while not all(each.is_set() for each in rounds):
            longest = max(longest, train(model, optimizer, 100 * number))
            # On a machine so busy that one script started alone, the script joins the others within a round
            # or two.
            is_one = "local_steps" not in options or len({each._lineage for _, each in found}) == 1
            if (optimizer.stats.rounds >= 2 and is_one) or time.monotonic() - begun > 3 * SECONDS:
                rounds[number].set()
            threading.Event().wait(0.01)
        return longest

    longest = together(*(partial(loop, number) for number in range(3)))
    assert max(longest) < SECONDS
    assert time.monotonic() - begun < 3 * SECONDS
    assert all(optimizer.stats.states_loaded <= 3 for _, optimizer in found)
    if "local_steps" in options:
        assert len({optimizer._lineage for _, optimizer in found}) == 1
    else:
        steps = {optimizer.global_step: weights(model) for model, optimizer in found}
        assert all(weights(model) == steps[optimizer.global_step] for model, optimizer in found)


def test_a_script_that_made_no_step_hands_out_its_state(start: Start) -> None:
    model, _ = start(0, target_batch_size=64)
    begun = time.monotonic()
    other, optimizer = start(1, target_batch_size=64)
    assert time.monotonic() - begun < SECONDS
    assert optimizer.stats.states_loaded == 1
    assert weights(other) == weights(model)


def test_a_script_that_sends_no_batch_delays_no_step(start: Start) -> None:
    _, idle = start(0, target_batch_size=32, window_seconds=60, round_seconds_max=120)
    model, optimizer = start(1, target_batch_size=32, window_seconds=60, round_seconds_max=120)
    until(lambda: idle.stats.peers == optimizer.stats.peers == 1)
    assert sum(train(model, optimizer, number) for number in range(3)) < SECONDS
    assert optimizer.global_step == 3


def test_a_peer_left_behind_gets_the_state_of_an_idle_peer(start: Start) -> None:
    model, ended = start(0, target_batch_size=32)
    other, optimizer = start(1, target_batch_size=32)
    until(lambda: ended.stats.peers == optimizer.stats.peers == 1)
    train(model, ended, 0)
    until(lambda: optimizer._session is not None and optimizer._session.view.reports[0].step.equals(1))
    begun = time.monotonic()
    until(lambda: train(other, optimizer, 50) and optimizer.stats.states_loaded == 2)
    assert time.monotonic() - begun < SECONDS
    assert weights(other) == weights(model)


def test_a_step_returns_while_an_idle_peer_still_owes_its_state(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    model, first = start(0, target_batch_size=32)
    for number in range(3):
        train(model, first, number)
    other, late = start(1, target_batch_size=32)
    assert late.stats.states_loaded == 0, "the first peer handed out a state between two steps"
    waited = train(other, late, 50)
    assert STATE_WAIT_SECONDS / 2 < waited < SECONDS
    assert late.status.startswith("catching up: waiting for ")
    assert "once a peer that has it makes its next step" in late.status
    assert "catching up: waiting for " in capsys.readouterr().err
    train(model, first, 3)
    until(lambda: train(other, late, 51) and late.stats.states_loaded)
    assert late.global_step == first.global_step
    assert weights(other) == weights(model)


@pytest.mark.skipif(not STARTS, reason="takes an hour: set PEERLOOM_STARTS=40")
@pytest.mark.parametrize("count", [2, 4, 8])
def test_processes_that_start_together_never_wait_long_for_a_step(count: int, tmp_path: Path) -> None:
    random = Random(count)
    for number in range(STARTS):
        seeds = "equal" if number % 4 == 0 else "own"
        staggers = [0.0, *(random.uniform(0.0, 3.0 * (number % 2)) for _ in range(count - 1))]
        found = start_processes(tmp_path / str(number), staggers, seeds=seeds)
        assert all(each.longest_seconds < WAIT_SECONDS_MAX for each in found), found
        assert len({each.digest for each in found}) == 1, found
