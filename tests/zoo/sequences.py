"""Models of sequences, written here: recurrent nets, temporal convolutions, an encoder with a decoder, a
mixture of experts, and the built-in GPT."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from partition.capture.models.gpt import GPT, GPTConfiguration, next_token_correct, next_token_loss
from tests.zoo.case import Case, Scale, Tensors, counted_loss, token_loss, tokens, tokens_correct

METRICS = {"tokens_correct": tokens_correct}


def gpt(scale: Scale) -> Case:
    """The built-in GPT: tied embeddings, causal attention, dropout on."""
    length, vocabulary, width, layers = (64, 2_000, 192, 4) if scale == "bench" else (6, 29, 16, 2)
    configuration = GPTConfiguration(
        vocabulary, 2 * length, layers=layers, heads=4, width=width, dropout=0.1, bias=scale == "bench"
    )
    return Case(
        "gpt",
        lambda: GPT(configuration),
        tokens(length, vocabulary),
        next_token_loss,
        {"correct": next_token_correct},
        batch=4 if scale == "bench" else 3,
    )


class LstmLanguageModel(nn.Module):
    """Zaremba et al. 2014: two layers with dropout between them."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.drop = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, vocabulary)."""
        hidden, _ = self.lstm(self.drop(self.embedding(ids)))
        return cast(Tensor, self.head(self.drop(hidden)))


def lstm(scale: Scale) -> Case:
    """A recurrence over time, which capture unrolls."""
    length, vocabulary, width = (32, 1_000, 128) if scale == "bench" else (5, 23, 8)
    return Case(
        "lstm",
        lambda: LstmLanguageModel(vocabulary, width),
        tokens(length, vocabulary),
        token_loss,
        METRICS,
        batch=16 if scale == "bench" else 3,
    )


class GruTagger(nn.Module):
    """A bidirectional GRU that gives each word a tag."""

    def __init__(self, vocabulary: int, width: int, tags: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.gru = nn.GRU(width, width, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, ids: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, tags)."""
        hidden, _ = self.gru(self.embedding(ids))
        return cast(Tensor, self.head(hidden))


def gru(scale: Scale) -> Case:
    """A model with both directions of time, a padding row without gradient, and ignored labels."""
    length, vocabulary, width = (24, 1_000, 96) if scale == "bench" else (5, 19, 6)

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        ids = torch.randint(vocabulary, (batch, length), generator=generator)
        tags = torch.randint(7, (batch, length), generator=generator)
        return (ids,), (tags.masked_fill(ids == 0, -100),)

    return Case(
        "gru",
        lambda: GruTagger(vocabulary, width, 7),
        sample,
        counted_loss,
        METRICS,
        batch=16 if scale == "bench" else 3,
    )


class Experts(nn.Module):
    """Every expert processes every token; a softmax gives the weight of each."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width))
        nn.init.normal_(self.up, std=0.1)
        nn.init.normal_(self.down, std=0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (batch, length, width) to the same shape, and to the shares (batch, length, experts)."""
        shares = self.gate(x).softmax(-1)
        hidden = functional.silu(torch.einsum("btd,edh->bteh", x, self.up))
        each = torch.einsum("bteh,ehd->bted", hidden, self.down)
        return (each * shares.unsqueeze(-1)).sum(2), shares


class MixtureOfExperts(nn.Module):
    """Layers of densely routed experts; the loss balances their load (Shazeer et al. 2017)."""

    def __init__(self, vocabulary: int, width: int, experts: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map (batch, length) to logits (batch, length, vocabulary) and mean shares (batch, experts)."""
        x = self.embedding(ids)
        load = []
        for norm, experts in zip(self.norms, self.experts, strict=True):
            y, shares = experts(norm(x))
            x = x + y
            load.append(shares.mean(1))
        return self.head(x), torch.stack(load).mean(0)


def balanced_loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the cross entropy plus the cost of uneven use of the experts."""
    logits, load = output
    return token_loss(logits, labels) + 0.01 * load.shape[1] * load.square().sum()


def balanced_correct(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the number of correctly predicted next ids."""
    return tokens_correct(output[0], labels)


def experts(scale: Scale) -> Case:
    """A model with three-dimensional parameters, einsum, two outputs, and a loss over both."""
    length, vocabulary, width, layers = (64, 1_000, 96, 4) if scale == "bench" else (6, 23, 8, 3)
    return Case(
        "experts",
        lambda: MixtureOfExperts(vocabulary, width, 4, layers),
        tokens(length, vocabulary),
        balanced_loss,
        {"tokens_correct": balanced_correct},
        batch=8 if scale == "bench" else 3,
    )


class TemporalConvolution(nn.Module):
    """A causal, dilated, gated convolution (van den Oord et al. 2016), with a skip to the end."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=1 << layer) for layer in range(layers)
        )
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.head = nn.Conv1d(width, vocabulary, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, vocabulary)."""
        x = self.embedding(ids).transpose(1, 2)
        total = torch.zeros_like(x)
        for layer, (convolution, mix) in enumerate(zip(self.convolutions, self.mix, strict=True)):
            y = functional.glu(convolution(functional.pad(x, (1 << layer, 0))), dim=1)
            total = total + y
            x = x + mix(y)
        return cast(Tensor, self.head(functional.elu(total)).transpose(1, 2))


def temporal(scale: Scale) -> Case:
    """A model with one-dimensional convolutions, padding on one side, and a running sum that every part of
    the net uses."""
    length, vocabulary, width, layers = (64, 500, 64, 6) if scale == "bench" else (7, 19, 6, 3)
    return Case(
        "temporal",
        lambda: TemporalConvolution(vocabulary, width, layers),
        tokens(length, vocabulary),
        token_loss,
        METRICS,
        batch=16 if scale == "bench" else 3,
    )


class Translator(nn.Module):
    """torch's own `nn.Transformer` between embeddings: every decoder layer reads the encoder's output."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.target = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.1)
        self.transformer = nn.Transformer(width, 2, layers, layers, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Map two inputs (batch, length) to (batch, length, vocabulary)."""
        hidden = self.transformer(
            self.source(source) + self.places,
            self.target(target) + self.places,
            tgt_mask=self.mask,
            tgt_is_causal=True,
        )
        return cast(Tensor, self.head(hidden))


def translator(scale: Scale) -> Case:
    """A model with two inputs of ids, cross attention, and an encoder's result that every later layer
    reads."""
    length, vocabulary, width, layers = (32, 1_000, 128, 2) if scale == "bench" else (5, 19, 8, 1)

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        ids = torch.randint(vocabulary, (3, batch, length), generator=generator)
        return (ids[0].clone(), ids[1].clone()), (ids[2].clone(),)

    return Case(
        "translator",
        lambda: Translator(vocabulary, length, width, layers),
        sample,
        token_loss,
        METRICS,
        batch=8 if scale == "bench" else 3,
    )
