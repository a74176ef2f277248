"""Samples are counted when they enter a gradient, for any model and for any loop that skips batches."""

import copy
import gc
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from node.library.sync import SyncNode
from node.optimizer import samples
from node.optimizer.graph import LossReader
from node.optimizer.samples import SampleCounter
from node.optimizer.wrapper import PeerOptimizer

torch.set_num_threads(1)
BATCH = 16
Skip = Callable[[PeerOptimizer, nn.Module, torch.Tensor], None]


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch_of(number: int, samples: int = BATCH) -> torch.Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().sum(1).mean()
    return loss


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's


def mean_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = cross_entropy(logits, labels)
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def before_backward(optimizer: PeerOptimizer, model: nn.Module, batch: torch.Tensor) -> None:
    """Skip a batch by `continue`, after its loss has been computed."""
    optimizer.zero_grad()
    loss_of(model, batch)


def after_backward(optimizer: PeerOptimizer, model: nn.Module, batch: torch.Tensor) -> None:
    """Skip a batch after its gradients have been inspected; the next batch starts with `zero_grad`."""
    optimizer.zero_grad()
    backward(loss_of(model, batch))


def by_the_model(optimizer: PeerOptimizer, model: nn.Module, batch: torch.Tensor) -> None:
    """Skip a batch by the model's own `zero_grad`."""
    del optimizer
    backward(loss_of(model, batch))
    model.zero_grad()


def by_zeros(optimizer: PeerOptimizer, model: nn.Module, batch: torch.Tensor) -> None:
    """Skip a batch by setting its gradients to zero instead of None."""
    del optimizer
    backward(loss_of(model, batch))
    model.zero_grad(set_to_none=False)


def by_a_scaler(optimizer: PeerOptimizer, model: nn.Module, batch: torch.Tensor) -> None:
    """Skip a batch with a GradScaler, which finds infinities in the gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    backward(scaler.scale(loss_of(model, batch) * math.inf))
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("skip", [before_backward, after_backward, by_the_model, by_zeros, by_a_scaler])
def test_a_skipped_batch_does_not_count_toward_the_step(me: SyncNode, skip: Skip) -> None:
    model, plain = model_of(), model_of()
    optimizer = me.optimizer(sgd(model), skip.__name__, target_batch_size=2 * BATCH)
    for number in range(4):
        if number in (1, 2):
            skip(optimizer, model, batch_of(number))
            continue
        optimizer.zero_grad()
        backward(loss_of(model, batch_of(number)))
        optimizer.step()
        assert optimizer.stats.global_step == (number == 3), (
            "a step was made with only one batch, or not with two"
        )
    expected = sgd(plain)
    backward(loss_of(plain, torch.cat([batch_of(0), batch_of(3)])))
    expected.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_each_batch_of_an_accumulated_gradient_counts(me: SyncNode) -> None:
    model = model_of()
    optimizer = me.optimizer(sgd(model), "accumulation", target_batch_size=100)
    for number in range(3):
        backward(loss_of(model, batch_of(number)) / 3)
    optimizer.step()
    assert optimizer.stats.step_samples == 3 * BATCH


class OfDicts(nn.Module):
    """A model that takes one dictionary, in the form that tokenizers return."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model_of()

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.net(inputs["values"] * inputs["mask"])
        return out


def of_dicts() -> tuple[list[nn.Parameter], torch.Tensor]:
    model = OfDicts()
    batch = {"values": batch_of(0), "mask": torch.ones(BATCH, 1)}
    return list(model.parameters()), model(batch).square().mean()


def in_evaluation() -> tuple[list[nn.Parameter], torch.Tensor]:
    model = model_of().eval()
    return list(model.parameters()), loss_of(model, batch_of(0))


def without_a_module() -> tuple[list[nn.Parameter], torch.Tensor]:
    weight = nn.Parameter(torch.ones(6, 2))
    return [weight], (batch_of(0) @ weight).square().mean()


@pytest.mark.parametrize("make", [of_dicts, in_evaluation, without_a_module])
def test_samples_are_counted_whatever_module_uses_the_parameters(
    me: SyncNode, make: Callable[[], tuple[list[nn.Parameter], torch.Tensor]]
) -> None:
    parameters, loss = make()
    optimizer = me.optimizer(torch.optim.SGD(parameters, 0.1), make.__name__, target_batch_size=BATCH)
    backward(loss)
    optimizer.step()
    assert (optimizer.stats.step_samples, optimizer.stats.global_step) == (BATCH, 1)


@pytest.mark.parametrize("options", [{"target_batch_size": 8}, {"local_steps": 2}])
def test_a_step_with_an_unknown_sample_count_asks_for_it(me: SyncNode, options: dict[str, int]) -> None:
    weight = nn.Parameter(torch.ones(6))
    optimizer = me.optimizer(torch.optim.SGD([weight], 0.1), f"unknown {options}", **options)  # type: ignore[arg-type]  # whichever
    backward(batch_of(0)[0] @ weight)
    with pytest.raises(ValueError, match=r"cannot be seen: .*optimizer\.step\(samples=N\).*batch_size=N"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(6)), "the refused step changed the parameters"
    optimizer.step(samples=8)
    assert (optimizer.stats.step_samples, optimizer.stats.global_step) == (8, 1)
    weight.grad = torch.ones(6)  # set by hand, as in functional code
    optimizer.step()
    assert optimizer.stats.step_samples == 8, "the step did not reuse the latest count"


def test_an_explicit_sample_count_overrides_the_counted_one(me: SyncNode) -> None:
    model = model_of()
    optimizer = me.optimizer(sgd(model), "own", target_batch_size=1_000, batch_size=4)
    for _ in range(2):
        backward(loss_of(model, batch_of(0)))
    optimizer.step()
    assert optimizer.stats.step_samples == 8
    optimizer.zero_grad()
    backward(loss_of(model, batch_of(0)))
    optimizer.step(samples=5)
    assert optimizer.stats.step_samples == 5
    with pytest.raises(ValueError, match="0 samples or more"):
        optimizer.step(samples=-1)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.stats.samples == 13, "a step without gradients counted samples"


def test_gradients_of_a_different_models_loss_do_not_count(me: SyncNode) -> None:
    generator, critic = nn.Linear(3, 6), model_of()
    of_generator = me.optimizer(sgd(generator), "generator", local_steps=5)
    of_critic = me.optimizer(sgd(critic), "critic", local_steps=5)
    made = generator(torch.randn(5, 3))
    backward(loss_of(critic, torch.cat([batch_of(0), made.detach()])))
    of_critic.step()
    backward(loss_of(critic, made))
    of_generator.step()
    of_critic.zero_grad()
    assert of_generator.stats.step_samples == 5
    assert of_critic.stats.step_samples == BATCH + 5


LOADING = """
import sys
sys.modules["node"] = None  # importing it fails
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(model(torch.ones(1, 6)).shape[1])
"""


def test_a_saved_model_loads_without_this_package(me: SyncNode, tmp_path: Path) -> None:
    model = model_of()
    optimizer = me.optimizer(sgd(model), "saved", local_steps=2, model=model)
    backward(loss_of(model, batch_of(0)))
    optimizer.step()
    torch.save(model, tmp_path / "model.pt")
    loading = [sys.executable, "-c", LOADING, str(tmp_path / "model.pt")]
    loaded = subprocess.run(loading, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (loaded.stdout.strip(), loaded.stderr) == ("2", "")
    assert b"peerloom" not in (tmp_path / "model.pt").read_bytes()
    assert b"node." not in (tmp_path / "model.pt").read_bytes()
    copied = copy.deepcopy(model)
    backward(loss_of(copied, batch_of(1)))
    backward(loss_of(model, batch_of(1)))
    optimizer.step()
    assert optimizer.stats.step_samples == BATCH, "a batch of the copy counted for the original model"
    model.load_state_dict(copied.state_dict())


def test_samples_of_a_compiled_model_are_counted(me: SyncNode) -> None:
    model = model_of()
    compiled = torch.compile(model, backend="eager")
    optimizer = me.optimizer(sgd(model), "compiled", target_batch_size=BATCH)
    backward(compiled(batch_of(0)).square().mean())
    optimizer.step()
    assert (optimizer.stats.step_samples, optimizer.stats.global_step) == (BATCH, 1)


def test_torch_is_restored_once_no_counter_is_left() -> None:
    model = model_of()
    counters = [SampleCounter(list(model.parameters())) for _ in range(2)]
    backward(loss_of(model, batch_of(0)))
    assert [each.take() for each in counters] == [BATCH, BATCH]
    watched = torch.autograd.backward
    counters.clear()
    gc.collect()
    backward(loss_of(model, batch_of(0)))
    assert torch.autograd.backward is not watched or samples._counters, (
        "torch is still patched although no counter is left"
    )


class Decoder(nn.Module):
    """A small GPT: embeddings of tokens and positions, blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x_btc = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        out: torch.Tensor = self.head(self.blocks(x_btc))
        return out


def of_a_decoder(samples: int, **options: Any) -> torch.Tensor:
    ids = torch.arange(12 * samples).view(samples, 12) % 50
    logits = Decoder()(ids)
    if options.get("is_shifted"):
        return mean_of(logits[:, :-1].reshape(-1, 50), ids[:, 1:].reshape(-1))
    if options.get("is_masked"):
        return mean_of(logits[ids > 3].view(-1, 50), ids[ids > 3])
    return mean_of(logits.view(-1, 50), ids.view(-1)) * 1024


def of_images() -> torch.Tensor:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(8 * 7 * 7, 10))
    return mean_of(model(torch.randn(5, 3, 16, 16)), torch.zeros(5, dtype=torch.long))


def with_penalties(model: nn.Module) -> torch.Tensor:
    penalty = sum(parameter.pow(2).sum() + parameter.norm() for parameter in model.parameters())
    loss: torch.Tensor = loss_of(model, batch_of(0, 9)) + 0.1 * penalty
    return loss


def of_pairs() -> torch.Tensor:
    one, other, scale = nn.Linear(6, 4), nn.Linear(6, 4), nn.Parameter(torch.tensor(1.0))
    logits = normalize(one(batch_of(0, 9)), dim=1) @ normalize(other(batch_of(1, 9)), dim=1).T
    return mean_of(logits * scale.exp(), torch.arange(9))


def of_spectral_norms() -> torch.Tensor:
    return loss_of(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), batch_of(0, 9))


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda: of_a_decoder(4), 4),
        (lambda: of_a_decoder(1), 1),
        (lambda: of_a_decoder(4, is_shifted=True), 4),
        (lambda: of_a_decoder(4, is_masked=True), 4),
        (of_images, 5),
        (lambda: with_penalties(model_of()), 9),
        (of_pairs, 9),
        (of_spectral_norms, 9),
        (lambda: nn.GRU(6, 4, batch_first=True)(torch.randn(3, 7, 6))[0].mean(), 3),
        (lambda: loss_of(model_of(), batch_of(0, 9)).view(1), 9),
    ],
)  # fmt: skip
def test_the_graph_of_a_loss_shows_the_number_of_samples(
    loss: Callable[[], torch.Tensor], count: int
) -> None:
    assert LossReader().samples([loss()]) == count


def of_two_batches() -> torch.Tensor:
    model = model_of()
    return loss_of(model, batch_of(0, 9)) + loss_of(model, batch_of(0, 5))


def of_features() -> torch.Tensor:
    """Return a style loss: it compares matrices of features, in which the samples are no longer visible."""
    out = model_of()(batch_of(0))
    loss: torch.Tensor = (out.T @ out).square().mean()
    return loss


def of_chosen_rows() -> torch.Tensor:
    """Return the loss of a detector: its heads see positions chosen from all images."""
    rows = nn.Linear(6, 8)(batch_of(0, 5))[torch.tensor([0, 0, 2])]
    loss: torch.Tensor = nn.Linear(8, 2)(rows).square().mean()
    return loss


def of_one_number() -> torch.Tensor:
    loss: torch.Tensor = batch_of(0)[0] @ nn.Parameter(torch.ones(6))
    return loss


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (of_two_batches, "parts of the loss are made of 5 and 9 rows"),
        (of_features, "made of 2 rows, and nothing that meets a parameter has as many"),
        (of_chosen_rows, "made of 3 rows, but a result of AddmmBackward0 in it is 5x8"),
        (of_one_number, "shows no rows"),
    ],
)
def test_a_graph_that_hides_samples_is_refused_with_a_reason(
    loss: Callable[[], torch.Tensor], why: str
) -> None:
    found = LossReader().samples([loss()])
    assert isinstance(found, str)
    assert why in found
