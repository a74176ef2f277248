"""Cases in which a graph could differ from its model without an error. Each is detected."""

import random
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from partition.capture import Captured, CaptureRefused, Task, own_loss
from partition.capture.task import capture_task, prove_task

CLASSES = 5


class Net(nn.Module):
    """Two layers with the operation of a test between them."""

    def __init__(self, between: Callable[["Net", Tensor], Tensor] = lambda net, x: x) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, CLASSES)
        self.between = between
        self.calls = 0
        self.seen: list[int] = []
        self.table = {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self, functional.relu(self.first(x))))
        return out


def total(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels, reduction="sum")


def task_of(model: nn.Module, inputs: Any = None, labels: Any = None, **settings: Any) -> Task:
    torch.manual_seed(1)
    model = model.double()
    inputs = (torch.randn(6, 4, dtype=torch.float64),) if inputs is None else inputs
    labels = (torch.tensor([0, 1, 2, 3, 4, 0]),) if labels is None else labels
    return Task(model, inputs, labels, **({"loss": total} | settings))


def proved(task: Task) -> Captured:
    captured = capture_task(task)
    prove_task(task, captured)
    return captured


def refusal(task: Task) -> str:
    with pytest.raises(CaptureRefused) as caught:
        proved(task)
    # `test_capture_strangers` checks which line of the code is named.
    return re.sub(r" \([^ ]+\.py:\d+\)", "", str(caught.value))


# Hooks


def test_a_hook_on_a_weight_is_refused() -> None:
    model = Net()
    weight: Any = model.first.weight
    handle = weight.register_hook(lambda gradient: 2 * gradient)
    assert "'first.weight' has a hook on its gradient" in refusal(task_of(model))
    handle.remove()
    proved(task_of(model))


def test_a_hook_after_accumulation_is_refused() -> None:
    model = Net()
    weight: Any = model.first.weight
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert "'first.weight' has a hook" in refusal(task_of(model))


def test_a_backward_hook_of_a_module_is_refused() -> None:
    model = Net()
    model.second.register_full_backward_hook(lambda module, gradients, outputs: None)
    assert "module 'second': has a backward hook" in refusal(task_of(model))


# State in Python


def counted(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return x / net.calls


def appended(net: Net, x: Tensor) -> Tensor:
    net.seen.append(1)
    return x * len(net.seen)


def annealed(net: Net, x: Tensor) -> Tensor:
    net.table["scale"] *= 0.9
    return x * net.table["scale"]


def unfrozen(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    net.first.weight.requires_grad_(net.calls > 3)
    return x


@pytest.mark.parametrize(
    ("between", "what"),
    [(counted, "calls"), (appended, "seen"), (annealed, "table.scale"), (unfrozen, "calls")],
)
def test_python_state_that_forward_changes_is_refused(
    between: Callable[[Net, Tensor], Tensor], what: str
) -> None:
    assert f"forward changes '{what}" in refusal(task_of(Net(between)))


def remembered(net: Net, x: Tensor) -> Tensor:
    net.table["width"] = x.shape[1]
    return x


def test_python_state_that_is_constant_after_one_call_is_accepted() -> None:
    model = Net(remembered)
    proved(task_of(model))
    assert model.table == {"scale": 1.0}


# Inputs in containers


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, batch: dict[str, Any], pair: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
        out: Tensor = self.layer(batch["x"] * batch["more"][0] + pair[0] - pair[1]) * scale
        return out


def test_tensors_inside_containers_become_inputs() -> None:
    x, more, one, other = (torch.randn(6, 4, dtype=torch.float64) for _ in range(4))
    inputs = {"batch": {"x": x, "more": [more]}, "pair": (one, other), "scale": 3.0}
    captured = proved(task_of(Nested(), inputs))
    entry = captured.graph.entries[0]
    assert [port.name for port in entry.inputs] == ["batch.x", "batch.more.0", "pair.0", "pair.1"]
    assert not captured.graph.constants


def test_arrays_among_the_inputs_are_refused() -> None:
    inputs = {"batch": {"x": torch.zeros(6, 4), "more": np.zeros(3)}}
    assert "'batch.more' is ndarray" in refusal(task_of(Nested(), inputs))


# Averages


def masked(output: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return ((output - y) ** 2).mean(1).mul(mask).sum() / mask.sum().clamp(min=1)


REAL = torch.randn(6, CLASSES, dtype=torch.float64)
MASK = torch.tensor([1, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    ("loss", "labels", "count"),
    [
        (functional.cross_entropy, (torch.tensor([0, -100, 2, -100, -100, 1]),), 3),
        (lambda o, y: 0.5 * functional.cross_entropy(o, y) + o.square().mean(), None, 6),
        (functional.mse_loss, (REAL,), None),
        (lambda o, y: (o - y).abs().sum() / y.shape[0], (REAL,), None),
        (masked, (REAL, MASK), 4),
    ],
)
def test_a_mean_becomes_a_sum_and_its_divisor(loss: Any, labels: Any, count: int | None) -> None:
    task = task_of(Net(), labels=labels, loss=loss)
    captured = capture_task(task)
    proof = prove_task(task, captured)
    (entry,) = captured.graph.entries
    assert (entry.count is None) == (count is None)
    expected = float(loss(task.model(*task.example_inputs), *task.labels).detach()) * (count or 6)
    assert proof.loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: functional.cross_entropy(o, y).sqrt(),
        lambda o, y: (functional.cross_entropy(o, y), y.shape[0]),
        lambda o, y: (functional.cross_entropy(o, y), 6),
        lambda o, y: (o @ o.T).logsumexp(1).sum(),
        lambda o, y: functional.cross_entropy(o, y, weight=torch.ones(CLASSES, dtype=o.dtype)),
    ],
)
def test_a_mean_without_a_clear_divisor_is_refused(loss: Any) -> None:
    text = refusal(task_of(Net(), loss=loss))
    assert "mean" in text or "the batch" in text


def test_a_loss_over_the_whole_batch_is_accepted_if_declared() -> None:
    proved(task_of(Net(), loss=lambda o, y: functional.cross_entropy(o @ o.T, y), reduction="microbatch"))


class Own(Net):
    """A model that computes its loss."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(x)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if loss is not None else {"logits": logits}


def test_the_loss_of_the_model_itself_is_used() -> None:
    captured = proved(task_of(Own(), labels={"labels": torch.tensor([0, 1, -100, 3, 4, 0])}, loss=own_loss))
    (entry,) = captured.graph.entries
    assert [port.name for port in entry.inputs] == ["x"]
    assert [port.name for port in entry.labels] == ["labels"]
    assert entry.count is not None


# Random numbers of Python


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: float(np.random.rand())])
def test_random_numbers_from_python_are_refused(draw: Callable[[], float]) -> None:
    text = refusal(task_of(Net(lambda net, x: x if draw() < 2 else -x)))
    assert text.startswith("the model itself: draws from Python's or numpy's random")


def test_a_generator_of_the_model_is_refused() -> None:
    model = Net(lambda net, x: x * net.own.uniform(1, 2))  # type: ignore[operator, union-attr]  # set below
    model.own = random.Random(3)  # type: ignore[assignment]  # no module and no tensor
    assert "forward changes 'own'" in refusal(task_of(model))


# The model afterwards


def hooked(net: Net, x: Tensor) -> Tensor:
    """A model that installs hooks at the first call, as a library does."""
    if "is_hooked" not in vars(net):
        net.is_hooked = True  # type: ignore[assignment]  # a plain flag
        net.first.register_forward_hook(lambda module, given, output: output)
    return x


def test_capture_and_proof_restore_the_model() -> None:
    model = Net(hooked)
    first = model.second.register_forward_hook(lambda module, given, output: output)
    model.eval()
    model.norm.train()
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    hooks = {name: OrderedDict(module._forward_hooks) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.double().state_dict().items()}
    generators = random.getstate(), torch.random.get_rng_state()
    task = task_of(model)
    random.setstate(generators[0])
    torch.random.set_rng_state(generators[1])
    capture_task(task)
    prove_task(task, capture_task(task))
    assert (random.getstate(), torch.random.get_rng_state().tolist()) == (
        generators[0],
        generators[1].tolist(),
    )
    for name, module in model.named_modules():
        assert vars(module) == attributes[name]
        assert module._forward_hooks == hooks[name]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    first.remove()


class Recomputed(Net):
    """A batch norm that is recomputed in the backward pass, and updates its statistics there once more."""

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda y: self.norm(self.first(y)), x, use_reentrant=False)
        out: Tensor = self.second(inner)
        return out


def test_statistics_that_eager_updates_twice_are_detected() -> None:
    assert "'norm.running_mean' differs in training" in refusal(task_of(Recomputed()))
