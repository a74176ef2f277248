"""Models that cannot become a graph are refused before transfer. The error names the operator and the
module."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partition.capture import CaptureRefused, capture
from tests.partition.captured_models import class_loss

pytestmark = pytest.mark.usefixtures("one_thread")


class Part(nn.Module):
    """A linear layer, and an operation of the test: (module, layer's output, input) -> output."""

    held: Tensor
    seen: Tensor

    def __init__(self, script: Callable[["Part", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("held", torch.ones(4))
        self.script = script

    def forward(self, x: Tensor) -> Tensor:
        return self.script(self, self.layer(x), x)


class Net(nn.Module):
    def __init__(self, script: Callable[[Part, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.part = Part(script)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.part(x))
        return out


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def rounded(x: Tensor) -> Tensor:
    out: Tensor = Rounded.apply(x)  # type: ignore[no-untyped-call]  # torch's own has no types
    return out


EXAMPLE = (torch.zeros(3, 4),)
LABELS = (torch.zeros(3, dtype=torch.int64),)


def refusal(model: nn.Module, **options: Any) -> str:
    settings: dict[str, Any] = {"labels": LABELS, "loss": class_loss} | options
    with pytest.raises(CaptureRefused) as caught:
        capture(model, EXAMPLE, **settings)
    # `test_capture_strangers` checks which line of the code is named.
    return re.sub(r" \([^ ]+\.py:\d+\)", "", str(caught.value))


def stale_view(part: Part, y: Tensor, x: Tensor) -> Tensor:
    v = y.view(-1)
    y.add_(1)
    return v.view(-1, 4)


def stale_base(part: Part, y: Tensor, x: Tensor) -> Tensor:
    y.view(-1).mul_(2)
    return y


def written_input(part: Part, y: Tensor, x: Tensor) -> Tensor:
    x.add_(1)
    return y


def written_parameter(part: Part, y: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.layer.weight.mul_(0.5)
    return y


def written_buffer(part: Part, y: Tensor, x: Tensor) -> Tensor:
    part.held.mul_(0.9)
    return y


def assigned_buffer(part: Part, y: Tensor, x: Tensor) -> Tensor:
    part.held = part.held * 0.9
    return y


def written_behind_autograd(part: Part, y: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(2)
    return y


def branch(part: Part, y: Tensor, x: Tensor) -> Tensor:
    return y * 2 if bool(y.sum() > 0) else y


def number(part: Part, y: Tensor, x: Tensor) -> Tensor:
    return y * y.sum().item()


def selection(part: Part, y: Tensor, x: Tensor) -> Tensor:
    return y + y[y > 0].sum()


def own_backward(part: Part, y: Tensor, x: Tensor) -> Tensor:
    return rounded(y)


def hooked(part: Part, y: Tensor, x: Tensor) -> Tensor:
    seen: Any = y
    seen.register_hook(lambda gradient: gradient * 2)
    return y


def strided(part: Part, y: Tensor, x: Tensor) -> Tensor:
    return y + y.as_strided((2, 2), (1, 1)).sum()


def precise(part: Part, y: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out: Tensor = (y @ part.layer.weight).float()
    return out


def root_of_the_batch(part: Part, y: Tensor, x: Tensor) -> Tensor:
    out: Tensor = y / x.shape[0] ** 0.5
    return out


SCRIPTS: dict[Any, str] = {
    stale_view: r"module 'part': aten.reshape.default reads .* changed in place",
    stale_base: r"module 'head': aten.linear.default reads .* module 'part' changed in place",
    written_input: r"module 'part': aten.add_.Tensor changes an input",
    written_parameter: r"module 'part': aten.mul_.Tensor changes the parameter 'part.layer.weight'",
    written_buffer: r"module 'part': aten.mul_.Tensor changes the buffer 'part.held' in place while training",
    assigned_buffer: r"the buffer 'part.held' is changed while training",
    written_behind_autograd: r"module 'part': aten.mul_.Tensor .* in a region without gradients",
    branch: r"module 'part': control flow or a shape depends on the data",
    number: r"module 'part': aten.item.default reads a number out of a tensor",
    selection: r"module 'part': aten.index.Tensor makes a tensor whose size depends on the data",
    own_backward: r"module 'part': uses the autograd function Rounded",
    hooked: r"module 'part': hooks a function to a gradient",
    strided: r"module 'part': aten.as_strided.default",
    precise: r"module 'part': selects a precision with torch.autocast",
    root_of_the_batch: r"module 'part': .* depends on sizes and is not an integer",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_unsupported_code_is_refused_by_name(script: Any) -> None:
    assert re.search(SCRIPTS[script], refusal(Net(script)))


def test_all_refusals_are_reported_together() -> None:
    def script(part: Part, y: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.lgamma(y) + torch.linalg.inv(y @ y.T).sum() + torch.digamma(y)
        return out

    text = refusal(Net(script))
    for name in ("aten.lgamma.default", "aten.linalg_inv.default", "aten.digamma.default"):
        assert f"module 'part': the operator {name} cannot be in a graph" in text


def test_an_own_backward_is_named_even_if_the_model_fails() -> None:
    def script(part: Part, y: Tensor, x: Tensor) -> Tensor:
        return rounded(y) @ torch.zeros(5, 5)

    text = refusal(Net(script))
    assert "raises RuntimeError when it is traced" in text
    assert "autograd function Rounded" in text


def test_patches_of_torch_are_removed_after_the_capture() -> None:
    apply, hook = torch.autograd.Function.__dict__["apply"], Tensor.register_hook
    refusal(Net(own_backward))
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert Tensor.register_hook is hook


# Sizes


def fixed_batch(part: Part, y: Tensor, x: Tensor) -> Tensor:
    return y.reshape(3, 4)


@pytest.mark.parametrize("script", [fixed_batch, lambda part, y, x: y[: len(x)]])
def test_a_size_that_the_model_fixes_is_refused(script: Any) -> None:
    """If the batch is not declared variable, the graph has the example's batch size instead."""
    sizes = {"dynamic": {"batch": (1, 64)}}
    assert "fixes or restricts a size that should vary" in refusal(Net(script), **sizes)
    symbol = capture(Net(script), EXAMPLE, labels=LABELS, loss=class_loss).graph.symbols[0]
    assert (symbol.minimum, symbol.maximum) == (3, 3)


def test_a_recurrent_layer_over_a_variable_sequence_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.layer(x)[0].mean(1))
            return out

    with pytest.raises(
        CaptureRefused, match=r"recurrent layers are unrolled, so their sequence length must be fixed"
    ):
        capture(
            Model(),
            (torch.zeros(3, 6, 4),),
            labels=LABELS,
            loss=class_loss,
            dynamic={"sequence": (1, 8, {0: 1})},
        )


@pytest.mark.parametrize(
    ("dynamic", "reason"),
    [
        ({"batch": (0, 8)}, "sizes must be from 1"),
        ({"batch": (4, 2)}, "sizes must be from 1"),
        ({"width": (1, 8, {"y": 1})}, "varies in 'y', which is not an input"),
        ({"width": (1, 8, {0: 2})}, "is dimension 2 of 'x', which has 2"),
        ({"width": (1, 8, {})}, "is not the size of any input"),
        ({"batch": (1, 8, {0: 1, 1: 0})}, "several sizes"),
    ],
)
def test_inconsistent_sizes_are_refused(dynamic: Any, reason: str) -> None:
    assert reason in refusal(Net(lambda part, y, x: y), dynamic=dynamic)


# Losses, inputs, contents of the model


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda output, labels: functional.cross_entropy(output, labels, reduction="none"), "of shape"),
        (lambda output, labels: 1.0, "float"),
    ],
)
def test_a_loss_that_is_not_a_scalar_is_refused(loss: Any, reason: str) -> None:
    text = refusal(Net(lambda part, y, x: y), loss=loss)
    assert "the loss is" in text
    assert reason in text


def test_a_loss_with_parameters_is_refused() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, output: Tensor, labels: Tensor) -> Tensor:
            return class_loss(output * self.weight, labels)

    assert "the loss has a parameter" in refusal(Net(lambda part, y, x: y), loss=Weighted())


def test_labels_without_a_loss_are_refused() -> None:
    assert "need a loss" in refusal(nn.Linear(4, 5), loss=None)


def test_a_buffer_without_values_is_refused() -> None:
    model = Net(lambda part, y, x: y + part.held)
    model.part.register_buffer("held", torch.empty(4, device="meta"))
    assert "the buffer 'part.held' is on meta" in refusal(model)


def test_a_parameter_without_values_is_refused() -> None:
    text = refusal(nn.Linear(4, 5, device="meta"))
    assert "'weight' has neither values nor a recipe" in text


def test_a_half_precision_model_is_refused() -> None:
    model = nn.Linear(4, 5).bfloat16()
    with pytest.raises(CaptureRefused, match=r"'weight' is torch\.bfloat16"):
        capture(model, (torch.zeros(3, 4, dtype=torch.bfloat16),))


def test_a_lazy_module_is_refused() -> None:
    assert "run the model once" in refusal(nn.LazyLinear(5))


def test_a_state_that_does_not_start_at_zero_is_refused() -> None:
    def step(model: Net, x: Tensor) -> Tensor:
        model.part.held.add_(x.sum(0))
        return model.part.held * 2

    model = Net(lambda part, y, x: y)
    text = refusal(model, entries={"step": (step, EXAMPLE)})
    assert "does not begin at zero" in text


def test_a_tensor_kept_from_call_to_call_is_refused() -> None:
    def script(part: Part, y: Tensor, x: Tensor) -> Tensor:
        part.seen = part.seen + 1
        return y * part.seen

    model = Net(script)
    model.part.seen = torch.zeros(())
    assert "'part.seen' is kept for the next call" in refusal(model)
    assert float(model.part.seen) == 0


@pytest.mark.parametrize(
    "script",
    [
        lambda part, y, x: y * 2 if y.sum() > 0 else y,
        lambda part, y, x: y[: int(x.sum().item())],
        lambda part, y, x: part.layer(y, x),
        lambda part, y, x: torch.from_numpy(x.detach().numpy()),
        lambda part, y, x: y + torch.ones(3, 5),
    ],
    ids=["branch", "item", "arguments", "numpy", "shapes"],
)
def test_torchs_own_advice_never_reaches_a_user(script: Callable[[Part, Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureRefused) as caught:
        capture(
            Net(script), (torch.randn(2, 4),), labels=(torch.zeros(2, dtype=torch.int64),), loss=class_loss
        )
    text = str(caught.value)
    for word in ("TORCH", "torch._dynamo", "strict=", "Traceback", "draft_export", "set_printoptions"):
        assert word not in text
    assert len(text) < 1_000
