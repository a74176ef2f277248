"""Changes during a run are noticed and named: changed parameters, changed groups, and a notebook cell that
runs again."""

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gossip.rosters import RUNS_MAX
from node.errors import UsageError
from node.library.sync import SyncNode
from node.optimizer.wrapper import PeerOptimizer
from tests.node.optimizer.test_wrapper import adamw, backward, batch_of, model_of, together, until, weights

WINDOW_SECONDS = 60.0
JOIN_SECONDS = 0.2
Pair = tuple[SyncNode, SyncNode]


def frozen() -> torch.nn.Sequential:
    """Return a model whose first layer is frozen at first."""
    model = model_of()
    model[0].requires_grad_(False)
    return model


def make_pair(
    pair: Pair, run: str, make: Callable[[], torch.nn.Sequential], **options: Any
) -> list[tuple[torch.nn.Sequential, PeerOptimizer]]:
    """Return two peers of one run that know each other."""
    models = [make(), make()]
    if "local_steps" in options:  # a group forms only once both are ready, however busy the machine is
        options["window_seconds"] = WINDOW_SECONDS
    options = {"join_seconds": JOIN_SECONDS, "aggregate": "mean"} | options
    made = together(
        *(
            lambda each=each, model=model: each.optimizer(adamw(model), run, model=model, **options)
            for each, model in zip(pair, models, strict=True)
        )
    )
    until(lambda: all(each.stats.peers == 1 for each in made))
    return list(zip(models, made, strict=True))


def test_parameters_unfrozen_later_are_averaged_too(pair: Pair) -> None:
    peers = make_pair(pair, "thawed", frozen, local_steps=1_000)
    for number, (model, optimizer) in enumerate(peers):
        backward(model, batch_of(number))
        optimizer.step()
    for model, _ in peers:
        model[0].requires_grad_(True)
    for number, (model, optimizer) in enumerate(peers):
        backward(model, batch_of(10 + number))
        optimizer.step()
        assert [name for name, _, _ in optimizer.rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert weights(peers[0][0][0]) != weights(peers[1][0][0])
    until(lambda: all(optimizer.stats.peers == 1 for _, optimizer in peers))
    assert together(*(optimizer.average_now for _, optimizer in peers)) == [True] * 2
    assert weights(peers[0][0]) == weights(peers[1][0])


def test_parameters_unfrozen_later_join_a_target_batch(pair: Pair) -> None:
    # On a busy machine one peer may be seconds behind, and the other would then make a step alone.
    peers = make_pair(pair, "thawed batch", frozen, target_batch_size=64, window_seconds=20.0)

    def train(at: int, steps: int) -> None:
        model, optimizer = peers[at]
        number = 0
        while optimizer.stats.global_step < steps:
            backward(model, batch_of(100 * at + number))
            optimizer.step()
            number += 1

    together(*(lambda at=at: train(at, 2) for at in range(2)))
    for model, _ in peers:
        model[0].requires_grad_(True)
    for steps in range(4, 12):  # a round may fail on a busy machine; the next one synchronizes them
        together(*(partial(train, at, steps) for at in range(2)))
        if weights(peers[0][0]) == weights(peers[1][0]):
            break
    assert weights(peers[0][0]) == weights(peers[1][0])
    assert weights(peers[0][0][0]) != weights(model_of()[0])
    assert all(len(optimizer.rows) == 4 for _, optimizer in peers)


def test_a_peer_with_different_parameters_is_reported_with_their_names(pair: Pair) -> None:
    peers = make_pair(pair, "differing", frozen, local_steps=1_000)
    (model, optimizer), (_, behind) = peers
    model[0].requires_grad_(True)
    backward(model, batch_of(0))
    optimizer.step()
    until(lambda: optimizer.average_now() or "do not train" in optimizer.status)
    assert "1 under this name still do not train 0.weight, 0.bias" in optimizer.status
    until(lambda: behind.average_now() or "too" in behind.status)
    assert "1 under this name train 0.weight, 0.bias too" in behind.status


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"target_batch_size": 64}, "1 under this name have target_batch_size=64"),
        ({"target_batch_size": 32, "codec": "int8"}, '1 under this name have codec="int8"'),
        ({"target_batch_size": 32, "model": None}, "1 under this name were given no model="),
        ({"local_steps": 5}, "1 under this name have local_steps="),
        ({"target_batch_size": 32, "aggregate": "median"}, 'average by aggregate = "median"'),
    ],
)
def test_a_setting_that_separates_peers_is_reported(pair: Pair, options: dict[str, Any], named: str) -> None:
    model, other = model_of(), model_of()
    run = f"apart {options}"
    common: dict[str, Any] = {"aggregate": "mean", "join_seconds": JOIN_SECONDS}
    first = pair[0].optimizer(adamw(model), run, target_batch_size=32, model=model, **common)
    options = common | {"model": other} | options
    second = pair[1].optimizer(adamw(other), run, **options)

    def is_named() -> bool:
        backward(model, batch_of(0))
        first.step()
        return named in first.status

    until(is_named)
    second.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": 0.02}, r"1 made step 1 by another learning rate \(here 0.01\)"),
        ({"betas": (0.8, 0.999)}, "1 made step 1 by another momentum"),
        ({"weight_decay": 0.5}, "1 made step 1 by another weight_decay, eps or other number"),
    ],
)
def test_peers_with_different_step_settings_are_reported(
    pair: Pair, options: dict[str, Any], named: str
) -> None:
    models = [model_of(), model_of()]
    rows = [{"lr": 0.01}, {"lr": 0.01} | options]
    optimizers = together(
        *(
            lambda me=me, model=model, row=row: me.optimizer(
                torch.optim.AdamW(model.parameters(), **row),
                f"numbers {options}",
                target_batch_size=64,
                join_seconds=JOIN_SECONDS,
            )
            for me, model, row in zip(pair, models, rows, strict=True)
        )
    )
    until(lambda: all(each.stats.peers == 1 for each in optimizers))

    def train(model: torch.nn.Module, optimizer: PeerOptimizer) -> None:
        while optimizer.stats.global_step < 1:
            backward(model, batch_of(0))
            optimizer.step()

    together(*(partial(train, *each) for each in zip(models, optimizers, strict=True)))
    until(lambda: re.search(named, optimizers[0].status))
    for each in optimizers:
        each.close()


def test_a_parameter_group_added_later_is_trained_and_averaged(me: SyncNode) -> None:
    model = model_of()
    inner = torch.optim.SGD(model[2].parameters(), 0.1)
    optimizer = me.optimizer(inner, "group", local_steps=5, model=model)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    backward(model, batch_of(0))
    optimizer.step()
    assert [name for name, _, _ in optimizer.rows] == ["2.weight", "2.bias", "0.weight", "0.bias"]


def test_a_replaced_layer_is_reported(me: SyncNode) -> None:
    model = model_of()
    optimizer = me.optimizer(adamw(model), "replaced", target_batch_size=32, model=model)
    model[2] = torch.nn.Linear(8, 3)
    backward(model, batch_of(0))
    optimizer.step()
    assert "2.weight, 2.bias are in the optimizer but no longer in the model" in optimizer.status


def test_freezing_all_parameters_for_a_while_breaks_nothing(me: SyncNode) -> None:
    model = model_of()
    optimizer = me.optimizer(adamw(model), "all frozen", target_batch_size=32)
    model.requires_grad_(False)
    optimizer.step()
    model.requires_grad_(True)
    backward(model, batch_of(0))
    optimizer.step()
    assert optimizer.stats.global_step == 1


def test_an_optimizer_of_a_rerun_cell_replaces_the_earlier_one(
    me: SyncNode, capfd: pytest.CaptureFixture[str]
) -> None:
    model = model_of()
    first = me.optimizer(adamw(model), "cell", target_batch_size=32)
    again = model_of()
    second = me.optimizer(adamw(again), "cell", target_batch_size=32)
    assert "run 'cell': this optimizer takes the place of the one" in capfd.readouterr().err
    assert "another optimizer of this script has taken its place" in first.status
    for each, optimizer in ((model, first), (again, second)):
        backward(each, batch_of(0))
        optimizer.step()
        assert optimizer.stats.global_step == 1, "the replaced optimizer stopped stepping as a plain one"
    del second, optimizer
    gc.collect()
    third = me.optimizer(adamw(model_of()), "cell", local_steps=3)
    assert third.status.startswith("alone in run 'cell'")


def test_a_different_model_under_the_same_name_gets_a_remedy(me: SyncNode) -> None:
    first = me.optimizer(adamw(model_of()), "two models", local_steps=3)
    with pytest.raises(ValueError, match=r"4 there, 2 here.*close\(\) it first.*different run_id"):
        me.optimizer(adamw(torch.nn.Linear(2, 2)), "two models", local_steps=3)
    first.close()
    me.optimizer(adamw(torch.nn.Linear(2, 2)), "two models", local_steps=3).close()


def test_too_many_runs_and_a_held_run_have_different_errors(me: SyncNode) -> None:
    held: list[PeerOptimizer] = []

    def open_many() -> None:
        for number in range(RUNS_MAX + 1):
            parameter = torch.zeros(1, requires_grad=True)
            held.append(me.optimizer(torch.optim.SGD([parameter], 0.1), f"many {number}", local_steps=1))

    with pytest.raises(UsageError, match=f"already takes part in {RUNS_MAX} runs; close one first"):
        open_many()
    for each in held:
        each.close()
