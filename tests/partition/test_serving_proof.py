"""Graphs that mix tokens in any way other than causal attention are refused before they are served."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partition.capture import Captured, capture
from partition.capture.models.gpt import gpt
from partition.capture.serving_proof import ServingDiffers, prove_graph_served
from partition.model.serving import serving_graph

WIDTH, WORDS, CONTEXT = 16, 31, 64


class Convolution(nn.Module):
    """Mixes each token with the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv(x.transpose(1, 2))
        return made[:, :, :-2].transpose(1, 2)


class RunningMean(nn.Module):
    """Mixes each token with all tokens before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class FullAttention(nn.Module):
    """Hand-written attention, which also attends to later tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class Words(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mixer = mixer
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        logits: Tensor = self.head(x + self.mixer(x))
        return logits


def loss(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")


def captured_words(mixer: nn.Module) -> Captured:
    ids = torch.zeros(2, 12, dtype=torch.int64)
    bounds: Any = {"batch": (1, 8, {0: 0, "y": 0}), "tokens": (2, CONTEXT, {0: 1, "y": 1})}
    return capture(Words(mixer), (ids,), labels={"y": ids}, loss=loss, dynamic=bounds)


def test_a_gpt_passes_the_proof() -> None:
    task = gpt((CONTEXT,), WORDS, layers=1, heads=2, width=WIDTH, dropout=0.1)
    captured = capture(
        task.model, task.example_inputs, labels=task.labels, loss=task.loss, dynamic=task.dynamic
    )
    served = serving_graph(captured.graph, CONTEXT)
    proof = prove_graph_served(served, captured.graph)
    assert proof.has_model
    assert proof.error <= proof.tolerance / 10
    assert not prove_graph_served(served, served).has_model


@pytest.mark.parametrize(
    ("mixer", "told"),
    [
        (Convolution, r"mixer\.conv mixes tokens \(.*conv"),
        (RunningMean, r"mixer mixes tokens \(cumsum"),
        (FullAttention, r"mixer mixes tokens \(.*softmax"),
    ],
)
def test_other_ways_to_mix_tokens_are_refused(mixer: type[nn.Module], told: str) -> None:
    captured = captured_words(mixer())
    served = serving_graph(captured.graph, CONTEXT)
    with pytest.raises(ServingDiffers, match=told):
        prove_graph_served(served, captured.graph)
    # Without the model, results in parts must agree with whole prompts.
    with pytest.raises(ServingDiffers, match=told):
        prove_graph_served(served, served)


def test_a_model_without_a_mixer_passes_the_proof() -> None:
    captured = captured_words(nn.Tanh())
    prove_graph_served(serving_graph(captured.graph, CONTEXT), captured.graph)
