"""Every optimizer class of torch trains with peers and transfers its state, or is refused when it is
wrapped."""

import inspect
import threading

import pytest
import torch

from node.library.sync import SyncNode
from node.optimizer.wrapper import PeerOptimizer
from tests.node.optimizer.compatibility import OPTIMIZERS, optimizer_of
from tests.node.optimizer.test_wrapper import batch_of, weights

GOOD = [name for name, options in OPTIMIZERS.items() if isinstance(options, dict)]
REFUSED = [name for name, options in OPTIMIZERS.items() if isinstance(options, str)]


def model_of(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(6, 4, bias=False)  # Muon accepts only matrices


def backward(model: torch.nn.Module, number: int) -> None:
    model.zero_grad()
    model(batch_of(number, 8)).square().mean().backward()


def test_the_table_lists_every_optimizer_of_torch() -> None:
    of_torch = {
        name
        for name, found in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
    }
    assert of_torch == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", GOOD)
def test_without_peers_each_class_equals_the_plain_one(me: SyncNode, name: str) -> None:
    plain, model = model_of(), model_of()
    expected = optimizer_of(name, plain.parameters())
    optimizer = me.optimizer(optimizer_of(name, model.parameters()), name, target_batch_size=8)
    for number in range(4):
        backward(plain, number)
        expected.step()
        backward(model, number)
        optimizer.step()
    assert weights(plain) == weights(model)
    assert weights(plain) != weights(model_of())


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_cannot_train_with_peers_is_refused(me: SyncNode, name: str) -> None:
    made = getattr(torch.optim, name)(model_of().parameters())
    with pytest.raises(TypeError, match=name):
        me.optimizer(made, "refused", target_batch_size=8)


def test_a_late_peer_adopts_the_state_of_each_class(pair: tuple[SyncNode, SyncNode]) -> None:
    def make(seed: int) -> tuple[torch.nn.ModuleList, list[torch.optim.Optimizer]]:
        models = torch.nn.ModuleList(model_of(seed) for _ in GOOD)
        made = zip(GOOD, models, strict=True)
        return models, [optimizer_of(name, model.parameters()) for name, model in made]

    def step(models: torch.nn.ModuleList, optimizer: PeerOptimizer, number: int, samples: int) -> None:
        models.zero_grad()
        sum(model(batch_of(number, 8)).square().mean() for model in models).backward()
        optimizer.step(samples=samples)

    (models, inner), (late_models, late_inner) = make(0), make(7)
    first = pair[0].optimizer(inner, "all", target_batch_size=8)
    for number in range(3):
        step(models, first, number, 8)
    joined: list[PeerOptimizer] = []
    thread = threading.Thread(
        target=lambda: joined.append(pair[1].optimizer(late_inner, "all", target_batch_size=8))
    )
    thread.start()
    while thread.is_alive():  # the training loop copies the state between two of its steps
        step(models, first, 3, 0)
        thread.join(0.02)
    (second,) = joined
    assert (second.stats.states_loaded, second.stats.global_step) == (1, 3), second.status
    assert weights(late_models) == weights(models)
    own, theirs = first.state_dict()["state"], second.state_dict()["state"]
    for place, name in enumerate(GOOD):
        assert own[place].keys() == theirs[place].keys(), name
        for key, value in own[place].items():
            same = torch.equal(value, theirs[place][key]) if isinstance(value, torch.Tensor) else None
            assert same or value == theirs[place][key], f"{name}: {key}"
    for all_models, wrapped in ((models, inner), (late_models, late_inner)):
        all_models.zero_grad()
        for number, (model, each) in enumerate(zip(all_models, wrapped, strict=True)):
            backward(model, number)
            each.step()
    assert weights(models) == weights(late_models)
