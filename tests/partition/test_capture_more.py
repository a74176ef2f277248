"""Further features of models: a separate evaluation, bounds of the batch, complex numbers, and autograd
functions.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partition.capture import Captured, CaptureRefused, Task, capture
from partition.capture.task import captured_and_proved
from partition.execute.admit import admit
from partition.model.check import check_graph
from partition.model.cut import cut, legal_positions
from partition.model.graph import decode_graph
from partition.stage import StageSpecification
from tests.zoo.case import Case
from tests.zoo.equivalence import FLOAT64_MAX, Trial, errors, random_cut, run_module, run_stages

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = 5


def total(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels, reduction="sum")


class Blocks(nn.Module):
    """Three residual blocks, each with an operation between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + self.inner(layer(x))
        out: Tensor = self.head(x)
        return out

    def inner(self, x: Tensor) -> Tensor:
        return x


class DropPath(Blocks):
    """Drops whole samples in training (Huang et al. 2016), and none in evaluation."""

    def inner(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape[0], 1, dtype=x.dtype) < 0.7
        return x * kept / 0.7


class Another(Blocks):
    """A model that computes a different function in evaluation."""

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.training else torch.relu(x)


class Fourier(Blocks):
    """Mixes tokens by a Fourier transform (Lee-Thorp et al. 2021); complex numbers go from block to block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        whole = torch.fft.rfft(x, dim=-1)
        for layer in self.layers:
            whole = whole + torch.fft.rfft(torch.tanh(layer(x)), dim=-1).conj()
            x = torch.fft.irfft(whole, n=8, dim=-1)
        out: Tensor = self.head(x)
        return out


def case_of(model: type[nn.Module], name: str) -> Case:
    def sample(generator: torch.Generator, batch: int) -> Any:
        x = torch.randn(batch, 8, generator=generator, dtype=torch.float64)
        return (x,), (torch.randint(CLASSES, (batch,), generator=generator),)

    def build() -> nn.Module:
        torch.manual_seed(3)
        return model()

    return Case(name, build, sample, total, batch=3)


def proved(case: Case) -> Captured:
    inputs, labels = case.data(0, case.batch, torch.float64)
    task = Task(case.model(torch.float64), inputs, labels, loss=case.loss, name=case.name)
    captured, _ = captured_and_proved(task)
    check_graph(decode_graph(captured.data))
    return captured


@pytest.mark.parametrize("model", [DropPath, Another, Fourier])
def test_stages_train_and_evaluate_like_the_module(model: type[nn.Module]) -> None:
    case = case_of(model, model.__name__)
    captured = proved(case)
    names = [entry.name for entry in captured.graph.entries]
    assert names == (["train"] if model is Fourier else ["train", "evaluate"])
    expected = run_module(case, captured.graph, Trial())
    for seed in range(2):
        stages = random_cut(captured.graph, captured.hash, 3, seed)
        for stage in stages:
            admit(StageSpecification(b"test", stage, (3,)))
        found = errors(run_stages(case, captured.graph, stages, Trial()), expected, torch.float64)
        assert found.worst <= FLOAT64_MAX


def test_complex_numbers_may_cross_a_cut() -> None:
    captured = proved(case_of(Fourier, "fourier"))
    crossing = set()
    for position in legal_positions(captured.graph):
        stage = cut(captured.graph, captured.hash, (position,))[0]
        types = dict(stage.entries[0].types)
        crossing |= {stage.types[types[value]].dtype for value in stage.entries[0].outputs}
    assert "complex128" in crossing


class Least(Blocks):
    """A model that accepts batches of three or more."""

    def inner(self, x: Tensor) -> Tensor:
        if x.shape[0] < 3:
            raise ValueError("a mean of others needs some")
        return x - (x.sum(0) - x) / (x.shape[0] - 1)


class Pairs(Blocks):
    """A model that accepts only the batch that it is traced with."""

    def inner(self, x: Tensor) -> Tensor:
        return torch.stack([x[place] for place in range(len(x))])


@pytest.mark.parametrize(("model", "bounds"), [(Least, (3, 4_096)), (Pairs, (3, 3))])
def test_the_batch_has_the_bounds_that_the_model_has(model: type[nn.Module], bounds: tuple[int, int]) -> None:
    task = Task(model(), (torch.randn(3, 8),), (torch.tensor([0, 1, 2]),), loss=total, reduction="microbatch")
    symbol = captured_and_proved(task)[0].graph.symbols[0]
    assert (symbol.minimum, symbol.maximum) == bounds


class Plain(torch.autograd.Function):
    """Its own backward equals autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2 * ctx.saved_tensors[0]


class Straight(Plain):
    """Its own backward differs from autograd's."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


@pytest.mark.parametrize("function", [Plain, Straight])
def test_an_autograd_function_is_accepted_if_its_backward_is_proved(function: Any) -> None:
    class Squared(Blocks):
        def inner(self, x: Tensor) -> Tensor:
            out: Tensor = function.apply(x)
            return out

    task = Task(Squared(), (torch.randn(3, 8),), (torch.tensor([0, 1, 2]),), loss=total)
    with pytest.raises(CaptureRefused, match=f"uses the autograd function {function.__name__}"):
        capture(task.model, task.example_inputs, labels=task.labels, loss=task.loss)
    if function is Plain:
        assert captured_and_proved(task)[0].functions
    else:
        with pytest.raises(CaptureRefused, match=r"autograd function Straight(.|\n)*the gradient of"):
            captured_and_proved(task)


class Clamped(Plain):
    """A model whose backward is right only while no value is clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-3, 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def test_a_backward_that_is_right_only_at_the_examples_is_refused() -> None:
    class Squeezed(Blocks):
        def inner(self, x: Tensor) -> Tensor:
            assert x.abs().max() < 3, "the examples already clamp a value, so the test proves nothing"
            out: Tensor = Clamped.apply(x)  # type: ignore[no-untyped-call]  # torch's own
            return out

    class Exported(Squeezed):
        def inner(self, x: Tensor) -> Tensor:
            out: Tensor = Clamped.apply(x)  # type: ignore[no-untyped-call]  # torch's own
            return out

    torch.manual_seed(1)
    inputs, labels = torch.randn(3, 8), torch.tensor([0, 1, 2])
    Squeezed()(inputs)
    task = Task(Exported(), (inputs,), (labels,), loss=total)
    with pytest.raises(CaptureRefused, match=r"function Clamped: its own backward differs from the gradient"):
        captured_and_proved(task)


def test_a_number_may_be_the_first_operand() -> None:
    class Numbers(Blocks):
        def inner(self, x: Tensor) -> Tensor:
            mask = torch.add(0.25, x > 0, alpha=0.5)
            return torch.mul(0.5, x) * mask + torch.sub(1, x)

    task = Task(Numbers().double(), (torch.randn(3, 8).double(),), (torch.tensor([0, 1, 2]),), loss=total)
    _, proof = captured_and_proved(task)
    assert proof.error < 1e-12


class Various(Blocks):
    """Operators that few models use."""

    def inner(self, x: Tensor) -> Tensor:
        ids = (x > 0).long()
        bags = functional.embedding_bag(ids, self.first.weight, mode="mean")
        turned = torch.einsum("b i, i j -> b j", x, torch.matrix_exp(self.first.weight * 0.1))
        theta = torch.eye(2, 3, dtype=x.dtype).expand(x.shape[0], 2, 3)
        grid = functional.affine_grid(theta, [x.shape[0], 1, 2, 4], align_corners=False)
        picture = functional.grid_sample(x.reshape(-1, 1, 2, 4), grid, align_corners=False)
        columns = functional.unfold(picture, (2, 2)).flatten(1)
        return bags + turned + functional.pad(columns, (0, 8 - columns.shape[1] % 8))[:, :8]


def test_further_operators_are_captured_proved_and_admitted() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    margin = functional.multi_margin_loss
    task = Task(Various().double(), (x,), (torch.tensor([0, 1, 2]),), loss=margin)
    captured, _ = captured_and_proved(task)
    admit(StageSpecification(b"test", cut(captured.graph, captured.hash, ())[0], (3,)))


def test_an_exponential_distribution_draws_the_same_values_as_torch() -> None:
    class Gumbel(Blocks):
        def inner(self, x: Tensor) -> Tensor:
            return functional.gumbel_softmax(x, tau=0.7)

    proved(case_of(Gumbel, "gumbel"))
