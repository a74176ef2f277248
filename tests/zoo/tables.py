"""Models of vectors, tables and graphs."""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, Scale, Tensors, class_loss, correct


class Perceptron(nn.Sequential):
    """Linear layers, ReLU, dropout."""

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise(widths[:-1]):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(0.3)]
        super().__init__(*layers, nn.Linear(widths[-2], widths[-1]))


def mlp(scale: Scale) -> Case:
    """The smallest model."""
    widths = (64, 512, 512, 512, 512, 10) if scale == "bench" else (6, 9, 8, 7, 8, 4)

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        x = torch.randn(batch, widths[0], generator=generator)
        return (x,), (torch.randint(widths[-1], (batch,), generator=generator),)

    return Case(
        "mlp",
        lambda: Perceptron(*widths),
        sample,
        class_loss,
        {"correct": correct},
        batch=256 if scale == "bench" else 3,
    )


class Recommender(nn.Module):
    """Embeddings of categories together with numbers, crossed (Wang et al. 2021), then a perceptron."""

    def __init__(self, numbers: int, categories: int, rows: int, width: int, layers: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, width) for _ in range(categories))
        self.norm = nn.BatchNorm1d(numbers)
        total = numbers + categories * width
        self.cross = nn.ModuleList(nn.Linear(total, total) for _ in range(layers))
        self.deep = Perceptron(total, 4 * width, 2 * width, 1)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Map numbers (batch, numbers) and ids (batch, categories) to a logit (batch,)."""
        parts = [self.norm(numbers)]
        parts += [table(categories[:, column]) for column, table in enumerate(self.embeddings)]
        first = x = torch.cat(parts, dim=1)
        for cross in self.cross:
            x = first * cross(x) + x
        return cast(Tensor, self.deep(x).squeeze(-1) + self.bias)


def binary_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the binary cross entropies."""
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def recommender(scale: Scale) -> Case:
    """A model with inputs of two types, a scalar parameter, and a weight that most stages lack."""
    rows, width, layers = (5_000, 32, 3) if scale == "bench" else (11, 4, 2)

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        numbers = torch.randn(batch, 5, generator=generator)
        categories = torch.randint(rows, (batch, 3), generator=generator)
        return (numbers, categories), (torch.randint(2, (batch,), generator=generator).float(),)

    return Case(
        "recommender",
        lambda: Recommender(5, 3, rows, width, layers),
        sample,
        binary_loss,
        batch=256 if scale == "bench" else 3,
    )


class GraphAttention(nn.Module):
    """Velickovic et al. 2018 over a dense adjacency, for a batch of small graphs."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.features = nn.Linear(before, after)
        self.scores = nn.Linear(2 * after, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Map (batch, nodes, before) and (batch, nodes, nodes) to (batch, nodes, after)."""
        x = self.features(x)
        count = x.shape[1]
        left = x.unsqueeze(2).expand(-1, -1, count, -1)
        right = x.unsqueeze(1).expand(-1, count, -1, -1)
        scores = functional.leaky_relu(self.scores(torch.cat((left, right), -1)).squeeze(-1), 0.2)
        weights = scores.masked_fill(edges < 0.5, float("-inf")).softmax(-1)
        return torch.bmm(functional.dropout(weights, 0.1, self.training), x)


class GraphNetwork(nn.Module):
    """Layers of graph attention, then the mean over nodes."""

    def __init__(self, before: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            GraphAttention(before if layer == 0 else width, width) for layer in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Map the nodes and their adjacency to (batch, classes)."""
        for layer in self.layers:
            x = functional.elu(layer(x, edges))
        return cast(Tensor, self.head(x.mean(1)))


def graph_network(scale: Scale) -> Case:
    """A model with an input that every stage reads, so each stage passes it on."""
    nodes, width, layers = (24, 48, 4) if scale == "bench" else (4, 6, 3)

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        x = torch.randn(batch, nodes, 7, generator=generator)
        edges = (torch.rand(batch, nodes, nodes, generator=generator) < 0.4).float()
        edges = torch.maximum(edges, torch.eye(nodes))
        return (x, edges), (torch.randint(3, (batch,), generator=generator),)

    return Case(
        "graph-network",
        lambda: GraphNetwork(7, width, layers, 3),
        sample,
        class_loss,
        {"correct": correct},
        batch=16 if scale == "bench" else 3,
    )
