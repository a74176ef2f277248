"""Users' models: what capture must accept, and what it must refuse with a cause and a remedy."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from crypto.errors import RemoteProtocolError
from partition.capture import Captured, CaptureRefused, Task
from partition.capture.proof import Proof
from partition.capture.task import capture_task, captured_and_proved

CLASSES = 5


def proved(task: Task) -> tuple[Captured, Proof]:
    return captured_and_proved(task)


def refusal(task: Task) -> str:
    with pytest.raises(CaptureRefused) as caught:
        proved(task)
    return str(caught.value)


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), labels.view(-1))


class Shifted(nn.Module):
    """A decoder's inputs and labels are one tensor without its last and without its first column."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids.view(-1)).view(*ids.shape, 8))
        return out


def test_examples_may_be_slices_of_one_tensor() -> None:
    # A run feeds contiguous rows, which `view` accepts; it does not accept slices.
    torch.manual_seed(0)
    whole = torch.randint(0, 11, (4, 7))
    labels = whole[:, 1:]
    assert not labels.is_contiguous()
    _, proof = proved(Task(Shifted(), (whole[:, :-1],), (labels,), loss=mean_loss))
    assert proof.error < 1e-5


class Fails(nn.Module):
    """A model that raises an error with real values, which torch's trace does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 4), nn.Linear(4, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


def test_a_model_that_fails_on_its_examples_is_refused() -> None:
    def loss(output: Any, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels, reduction="sum")

    text = refusal(Task(Fails(), (torch.tensor([0, 7]),), (torch.tensor([0, 1]),), loss=loss))
    assert text.startswith("module 'table' (")
    assert "test_capture_strangers.py:" in text
    assert "the model itself fails on the example inputs: IndexError" in text


# Buffers that training changes are refused, and the named remedy works


class Holds(nn.Module):
    """A linear layer after the operation of a test."""

    def __init__(self, inner: nn.Module, **parts: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(4, CLASSES)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x))
        return out


class Average(nn.Module):
    """Keeps a running mean of its inputs, as an observer does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class Assigned(Average):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Teacher(nn.Module):
    """A mean teacher inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
        out: Tensor = self.student(x) + self.teacher(x)
        return out


class Shapes(nn.Module):
    """Reshapes (batch, 4) to (batch, 2, 2) for a norm, and back."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.reshape(-1, 2, 2)).flatten(1)
        return out


def task_of(model: nn.Module, *inputs: Any, labels: Any = None, **settings: Any) -> Task:
    torch.manual_seed(1)
    inputs = inputs or (torch.randn(6, 4, dtype=torch.float64),)
    labels = (torch.tensor([0, 1, 2, 3, 4, 0]),) if labels is None else labels
    return Task(model.double(), inputs, labels, **({"loss": summed} | settings))


def summed(output: Any, labels: Tensor) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return functional.cross_entropy(output, labels, reduction="sum")


@pytest.mark.parametrize(
    ("make", "words", "remedy"),
    [
        (
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            "spectral norm updates 'inner.parametrizations.weight.0._u'",
            lambda model: model.get_submodule("inner.parametrizations.weight.0").eval(),
        ),
        (
            lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
            "spectral norm updates 'inner.weight_",
            lambda model: model.get_submodule("inner").eval(),
        ),
        (
            Average,
            "changes the buffer 'inner.mean' in place while training",
            lambda model: model.inner.eval(),
        ),
        (Assigned, "the buffer 'inner.mean' is changed while training", lambda model: model.inner.eval()),
        (Teacher, "keep a teacher or an average of weights outside", lambda model: model.inner.eval()),
        (
            lambda: Shapes(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
            "set track_running_stats=False",
            lambda model: setattr(model.inner, "norm", nn.InstanceNorm1d(2, affine=True).double()),
        ),
    ],
    ids=["parametrization", "old-form", "average", "assigned", "teacher", "instance-norm"],
)
def test_buffers_that_training_changes_are_refused_and_the_remedy_works(
    make: Callable[[], nn.Module], words: str, remedy: Callable[[Any], object]
) -> None:
    model = Holds(make())
    text = refusal(task_of(model))
    assert text.startswith("module 'inner")
    assert words in text
    remedy(model)
    _, proof = proved(task_of(model))
    assert proof.error < 1e-9


# Random numbers that are unused, or drawn twice


class Drawing(nn.Module):
    """A layer with dropout. `wasted` makes unused draws; `how` is a way to checkpoint the layer."""

    def __init__(self, *, wasted: bool = False, how: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, CLASSES)
        self.wasted, self.how = wasted, how

    def inner(self, x: Tensor) -> Tensor:
        return functional.dropout(self.first(x), 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.wasted:
            torch.rand(3)
            functional.dropout(x, 0.3, self.training)
        x = functional.dropout(x, 0.2, self.training)
        x = self.how(self.inner, x) if self.how else self.inner(x)
        if self.wasted:
            torch.randn_like(x)
        out: Tensor = self.second(functional.dropout(x, 0.1, self.training))
        return out


@pytest.mark.parametrize(
    "model",
    [
        lambda: Drawing(wasted=True),
        lambda: Drawing(how=partial(checkpoint, use_reentrant=False)),
        lambda: Drawing(wasted=True, how=partial(checkpoint, use_reentrant=False)),
    ],
    ids=["for nothing", "recomputed", "both"],
)
def test_unused_and_repeated_draws_do_not_affect_the_proof(model: Callable[[], nn.Module]) -> None:
    _, proof = proved(task_of(model()))
    assert proof.error < 1e-9


def test_a_recomputation_that_draws_other_numbers_is_still_refused() -> None:
    how = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    assert "differs in training" in refusal(task_of(Drawing(how=how)))


# Results and inputs of other forms


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, CLASSES), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def test_a_loss_may_ignore_an_output() -> None:
    found, proof = proved(task_of(Pair()))
    assert proof.error < 1e-9
    assert found.unused == ("other.weight", "other.bias")


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES)

    def forward(self, batch: dict[str, Any], *, more: tuple[Tensor, list[Tensor]]) -> Tensor:
        out: Tensor = self.head(batch["x"] * more[0] + batch["deep"]["y"][0] - more[1][1])
        return out


def test_inputs_may_be_nested() -> None:
    def noise() -> Tensor:
        return torch.randn(6, 4, dtype=torch.float64)

    inputs = {"batch": {"x": noise(), "deep": {"y": [noise()]}}, "more": (noise(), [noise(), noise()])}
    task = Task(Nested().double(), inputs, (torch.tensor([0, 1, 2, 3, 4, 0]),), loss=summed)
    found, proof = proved(task)
    assert proof.error < 1e-9
    names = [port.name for port in found.graph.entries[0].inputs]
    assert names == ["batch.x", "batch.deep.y.0", "more.0", "more.1.0", "more.1.1"]


class Spectrum(nn.Module):
    """Windows of a signal as a spectrogram."""

    def __init__(self, *, normalized: bool) -> None:
        super().__init__()
        self.head, self.normalized = nn.Linear(9, CLASSES), normalized
        self.register_buffer("window", torch.hann_window(12))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stft(
            x, 16, 4, 12, self.get_buffer("window"), normalized=self.normalized, return_complex=True
        )
        out: Tensor = self.head(found.abs().mean(-1))
        return out


@pytest.mark.parametrize("normalized", [False, True])
def test_a_short_time_fourier_transform_is_captured(normalized: bool) -> None:
    _, proof = proved(task_of(Spectrum(normalized=normalized), torch.randn(6, 40, dtype=torch.float64)))
    assert proof.error < 1e-9


def test_an_embedding_with_sparse_gradients_trains_with_dense_ones() -> None:
    model = nn.Sequential(nn.Embedding(7, CLASSES, sparse=True), nn.Tanh())
    _, proof = proved(task_of(model, torch.tensor([0, 1, 2, 3, 6, 6])))
    assert proof.error < 1e-9


# Models that cannot be a graph are refused with module, line, cause and remedy, never by torch


class Says(nn.Module):
    """A model with one function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.function(self.body(x)))
        return out


class ComplexWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.randn(3, dtype=torch.cdouble)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4))
        return out


def chosen(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def counted(x: Tensor) -> Tensor:
    return x[: int(x.sum())].sum(0, keepdim=True) + x


def drawn_by_python(x: Tensor) -> Tensor:
    return x * random.random()


def mapped(x: Tensor) -> Any:
    return torch.vmap(lambda row: row.cumsum(0))(x)


def differentiated(x: Tensor) -> Any:
    return torch.func.grad(lambda y: (y**3).sum())(x)


def nested(x: Tensor) -> Any:
    return torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged).to_padded_tensor(0.0)[:, 0]


def sparse(x: Tensor) -> Any:
    return torch.sparse.mm(x.to_sparse(), x.T) @ x


def picked(x: Tensor) -> Tensor:
    return x.index_put((x > 0,), x[x > 0] * 2)


def unique(x: Any) -> Any:
    return x + x.unique().sum()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (chosen, "use torch.where or a mask"),
        (counted, "depends on the data"),
        (drawn_by_python, "draw with torch.rand"),
        (mapped, "operators over the whole batch"),
        (differentiated, "operators over the whole batch"),
        (nested, "use operators on whole tensors"),
        (sparse, "use dense tensors"),
        (unique, "keep all elements and use a mask"),
        (picked, "x = torch.where(mask, f(x), x)"),
    ],
)
def test_a_refusal_names_module_line_cause_and_remedy(
    function: Callable[[Tensor], Tensor], words: str
) -> None:
    text = refusal(task_of(Says(function)))
    # For a node, torch keeps only the line in `forward`. For an exception, our code finds the line itself.
    lines = [each.__code__.co_firstlineno + 1 for each in (function, Says.forward)]
    first, here = text.splitlines()[0], str(Path(__file__).relative_to(Path.cwd()))
    assert any(first.startswith(f"the model itself ({here}:{line})") for line in lines), first
    assert words in text
    for never in ("TORCH_LOGS", "http", "0x", "torch._check", "Traceback"):
        assert never not in text
    assert len(text) < 900


def test_a_complex_parameter_is_refused_with_a_remedy() -> None:
    torch.manual_seed(1)
    task = Task(ComplexWeight(), (torch.randn(6, 4),), (torch.tensor([0, 1, 2, 3, 4, 0]),), loss=summed)
    assert "torch.view_as_complex" in refusal(task)


def test_a_model_that_no_peer_would_admit_is_refused_at_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(specification: object) -> None:
        raise RemoteProtocolError("an operator of another version of torch")

    monkeypatch.setattr("partition.capture.task.admit", refuse)
    text = refusal(task_of(Pair()))
    assert text == "no peer would accept this model: an operator of another version of torch"


def test_a_model_is_named_after_its_class() -> None:
    assert capture_task(task_of(Pair())).graph.name == "Pair"
    assert capture_task(task_of(Pair(), name="mine")).graph.name == "mine"
    assert capture_task(task_of(nn.Sequential(nn.Linear(4, CLASSES)))).graph.name == ""
