"""Models in two forms: as an ordinary module, and as its hand-written graph."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from partition.model.graph import DataType, Graph
from tests.partition.graphs import ONES, ZEROS, GraphBuilder


class Gpt(nn.Module):
    """A gpt with pre-norm blocks, learned positions, a head tied to the embedding, and dropout."""

    def __init__(
        self, vocabulary: int, context: int, width: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        values = self.dropout(self.tokens(tokens) + self.places(places))
        for block in self.blocks:
            values = block(values)
        return functional.linear(self.norm(values), self.tokens.weight)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rows, length, width = values.shape
        parts = self.qkv(self.norm1(values)).split(width, 2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(rows, length, width)
        values = values + self.dropout(self.out(mixed))
        out: torch.Tensor = values + self.dropout(self.down(functional.gelu(self.up(self.norm2(values)))))
        return out


def gpt_graph(
    vocabulary: int,
    context: int,
    width: int,
    heads: int,
    layers: int,
    dropout: float,
    dtype: DataType = "float32",
) -> Graph:
    """Return the graph of `train` of `Gpt` with the summed cross entropy, and the number of correct best
    guesses."""
    build = GraphBuilder("gpt", dtype)
    rows, length = build.symbol("batch"), build.symbol("length", 1, context)
    build.begin()
    tokens = build.input("tokens", "int64", rows, length)
    labels = build.label("labels", "int64", rows, length)
    table = build.parameter(("tokens.weight", "head.weight"), vocabulary, width)
    values = build.node("embedding", table, tokens, owner="tokens")
    places = build.node("embedding", build.parameter("places.weight", context, width),
                        build.node("arange", length), owner="places")  # fmt: skip
    values = build.node("add.Tensor", values, places)
    values = build.node("dropout", values, dropout, True, owner="dropout")
    for layer in range(layers):
        values = _block(build, f"blocks.{layer}", values, rows, length, width, heads, dropout)
    values = _norm(build, "norm", values, width)
    logits = build.node("linear", values, table, owner="head")
    flat = build.node("view", logits, [-1, vocabulary])
    wanted = build.node("view", labels, [-1])
    loss = build.node("cross_entropy_loss", flat, wanted, None, 2)
    right = build.node("eq.Tensor", build.node("argmax", flat, 1), wanted)
    count = build.node("sum", build.node("ones_like", wanted))
    build.end(outputs=[logits], loss=loss, count=count, metrics={"correct": build.node("sum", right)})
    return build.finish()


def _norm(build: GraphBuilder, name: str, values: Any, width: int) -> Any:
    weight = build.parameter(f"{name}.weight", width, source=ONES)
    bias = build.parameter(f"{name}.bias", width, source=ZEROS)
    return build.node("layer_norm", values, [width], weight, bias, owner=name)


def _linear(build: GraphBuilder, name: str, values: Any, width: int, out: int) -> Any:
    weight, bias = build.parameter(f"{name}.weight", out, width), build.parameter(f"{name}.bias", out)
    return build.node("linear", values, weight, bias, owner=name)


def _block(
    build: GraphBuilder,
    name: str,
    values: Any,
    rows: Any,
    length: Any,
    width: int,
    heads: int,
    dropout: float,
) -> Any:
    normed = _norm(build, f"{name}.norm1", values, width)
    parts = build.node("split.Tensor", _linear(build, f"{name}.qkv", normed, width, 3 * width), width, 2)
    shape = [rows, length, heads, width // heads]
    q, k, v = (build.node("transpose.int", build.node("view", part, shape), 1, 2) for part in parts)
    mixed = build.node("scaled_dot_product_attention", q, k, v, None, 0.0, True, owner=name)
    mixed = build.node("reshape", build.node("transpose.int", mixed, 1, 2), [rows, length, width])
    out = _linear(build, f"{name}.out", mixed, width, width)
    values = build.node("add.Tensor", values, build.node("dropout", out, dropout, True, owner=name))
    normed = _norm(build, f"{name}.norm2", values, width)
    up = build.node("gelu", _linear(build, f"{name}.up", normed, width, 4 * width), owner=name)
    down = _linear(build, f"{name}.down", up, 4 * width, width)
    return build.node("add.Tensor", values, build.node("dropout", down, dropout, True, owner=name))


class Cnn(nn.Module):
    """Two convolutions, each followed by the *same* batch norm, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width, momentum=0.2)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.fc = nn.Linear(width, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values = functional.relu(self.norm(self.conv1(images)))
        values = functional.relu(self.norm(self.conv2(values)))
        out: torch.Tensor = self.fc(values.mean(dim=(2, 3)))
        return out


def cnn_graph(width: int, dtype: DataType = "float32") -> Graph:
    """Return the graph of `train` of `Cnn` with the summed cross entropy."""
    build = GraphBuilder("cnn", dtype)
    batch = build.symbol("batch")
    build.begin()
    images = build.input("images", dtype, batch, 1, 8, 8)
    labels = build.label("labels", "int64", batch)
    conv1 = build.parameter("conv1.weight", width, 1, 3, 3)
    norm = (
        build.parameter("norm.weight", width, source=ONES),
        build.parameter("norm.bias", width, source=ZEROS),
        build.parameter("norm.running_mean", width, kind="statistic", source=ZEROS),
        build.parameter("norm.running_var", width, kind="statistic", source=ONES),
    )
    conv2 = build.parameter("conv2.weight", width, width, 3, 3), build.parameter("conv2.bias", width)
    values = build.node("conv2d", images, conv1, None, [1, 1], [1, 1], owner="conv1")
    values = build.node("batch_norm", values, *norm, True, 0.2, 1e-5, True, owner="norm")
    values = build.node("relu", values)
    values = build.node("conv2d", values, *conv2, [1, 1], [1, 1], owner="conv2")
    values = build.node("batch_norm", values, *norm, True, 0.2, 1e-5, True, owner="norm")
    values = build.node("mean.dim", build.node("relu", values), [2, 3])
    logits = build.node(
        "linear", values, build.parameter("fc.weight", 5, width), build.parameter("fc.bias", 5), owner="fc"
    )
    build.end(outputs=[logits], loss=build.node("cross_entropy_loss", logits, labels, None, 2))
    return build.finish()
