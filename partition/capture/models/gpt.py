"""`gpt`: a decoder like GPT-2 (Radford et al. 2019), with nanoGPT's module names and initialisation.

Embeddings are tied; residual projections are initialised smaller by sqrt(2 * layers), as in GPT-2. With
`cache_rows` the model also serves: `decode` keeps keys and values in static buffers, one row for each
sequence. A batch names the rows that it continues and the positions of its tokens. So sequences of different
lengths share batches, and may start and end at any time.

Shapes in names: B batch, T tokens, C width, H heads, D width of a head, S cached positions, V vocabulary.
"""

# ruff: noqa: N803, N806 - shapes stand in names

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from partition.capture.capture import Bounds, Further
from partition.capture.task import Task

IGNORED = -1
"""A target that is not counted: padding."""
_DEVIATION = 0.02

Cached = tuple[torch.Tensor, torch.Tensor]
"""Rows of the cache (batch,), and the positions of the tokens in them (batch, tokens)."""


@dataclass(frozen=True)
class GPTConfiguration:
    """The sizes of a GPT. `block` is the longest sequence. Up to `cache_rows` sequences can be decoded
    simultaneously; 0 disables decoding."""

    vocabulary: int
    block: int
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.0
    bias: bool = True
    cache_rows: int = 0

    def __post_init__(self) -> None:
        sizes = (self.vocabulary, self.block, self.layers, self.heads, self.width)
        if min(sizes) < 1 or self.cache_rows < 0:
            raise ValueError("a GPT's sizes must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} is not divisible by {self.heads} heads")
        if not 0 <= self.dropout < 1:
            raise ValueError("dropout must be at least 0 and below 1")


class CausalSelfAttention(nn.Module):
    """Causal attention over a whole sequence or over the cache."""

    cache_keys: torch.Tensor
    cache_values: torch.Tensor

    def __init__(self, configuration: GPTConfiguration) -> None:
        super().__init__()
        width = configuration.width
        self.c_attn = nn.Linear(width, 3 * width, bias=configuration.bias)
        self.c_proj = nn.Linear(width, width, bias=configuration.bias)
        self.resid_dropout = nn.Dropout(configuration.dropout)
        self.heads = configuration.heads
        self.dropout = configuration.dropout
        if configuration.cache_rows:
            shape = (configuration.cache_rows, configuration.block, self.heads, width // self.heads)
            self.register_buffer("cache_keys", torch.zeros(shape), persistent=False)
            self.register_buffer("cache_values", torch.zeros(shape), persistent=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        q_BTHD, k_BTHD, v_BTHD = self._project(x_BTC)
        y_BHTD = functional.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            k_BTHD.transpose(1, 2),
            v_BTHD.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self._merge(y_BHTD)

    def decode(self, x_BTC: torch.Tensor, rows_B: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        """Compute attention for tokens at `positions_BT`, after the cached positions of `rows_B`."""
        q_BTHD, k_BTHD, v_BTHD = self._project(x_BTC)
        self.cache_keys[rows_B.unsqueeze(1), positions_BT] = k_BTHD
        self.cache_values[rows_B.unsqueeze(1), positions_BT] = v_BTHD
        places_S = torch.arange(self.cache_keys.size(1), device=x_BTC.device)
        mask_B1TS = (places_S <= positions_BT.unsqueeze(-1)).unsqueeze(1)
        y_BHTD = functional.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            self.cache_keys[rows_B].transpose(1, 2),
            self.cache_values[rows_B].transpose(1, 2),
            attn_mask=mask_B1TS,
        )
        return self._merge(y_BHTD)

    def _project(self, x_BTC: torch.Tensor) -> tuple[torch.Tensor, ...]:
        head = x_BTC.size(2) // self.heads
        return tuple(
            part.unflatten(2, (self.heads, head)) for part in self.c_attn(x_BTC).split(x_BTC.size(2), 2)
        )

    def _merge(self, y_BHTD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.resid_dropout(self.c_proj(y_BHTD.transpose(1, 2).flatten(2)))
        return out


class MLP(nn.Module):
    """A feed-forward block whose hidden layer is four times as wide."""

    def __init__(self, configuration: GPTConfiguration) -> None:
        super().__init__()
        width, bias = configuration.width, configuration.bias
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(configuration.dropout)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(self.c_proj(self.gelu(self.c_fc(x_BTC))))
        return out


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a skip connection."""

    def __init__(self, configuration: GPTConfiguration) -> None:
        super().__init__()
        width, bias = configuration.width, configuration.bias
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = CausalSelfAttention(configuration)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = MLP(configuration)

    def forward(self, x_BTC: torch.Tensor, cached: Cached | None = None) -> torch.Tensor:
        """Compute the block; with `cached`, decode."""
        inner_BTC = self.ln_1(x_BTC)
        if cached is None:
            x_BTC = x_BTC + self.attn(inner_BTC)
        else:
            x_BTC = x_BTC + self.attn.decode(inner_BTC, *cached)
        out: torch.Tensor = x_BTC + self.mlp(self.ln_2(x_BTC))
        return out


class GPT(nn.Module):
    """A decoder that maps token ids (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, configuration: GPTConfiguration) -> None:
        super().__init__()
        width = configuration.width
        self.configuration = configuration
        transformer: Any = nn.ModuleDict(
            {
                "wte": nn.Embedding(configuration.vocabulary, width),
                "wpe": nn.Embedding(configuration.block, width),
                "drop": nn.Dropout(configuration.dropout),
                "h": nn.ModuleList([Block(configuration) for _ in range(configuration.layers)]),
                "ln_f": nn.LayerNorm(width, bias=configuration.bias),
            }
        )
        self.transformer = transformer
        self.lm_head = nn.Linear(width, configuration.vocabulary, bias=False)
        transformer.wte.weight = self.lm_head.weight
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, 0.0, _DEVIATION / sqrt(2 * configuration.layers))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self._run(tokens_BT, torch.arange(tokens_BT.size(1), device=tokens_BT.device), None)

    def decode(self, tokens_BT: torch.Tensor, rows_B: torch.Tensor, starts_B: torch.Tensor) -> torch.Tensor:
        """Return the logits for tokens that continue the cache's rows `rows_B`, all different, at positions
        `starts_B`.

        A prompt is decoded from position 0. Prompts of different lengths are padded: padding after the end of
        a shorter one is overwritten before anything attends to it.
        """
        positions_BT = starts_B.unsqueeze(1) + torch.arange(tokens_BT.size(1), device=tokens_BT.device)
        return self._run(tokens_BT, positions_BT, (rows_B, positions_BT))

    def _run(self, tokens_BT: torch.Tensor, places: torch.Tensor, cached: Cached | None) -> torch.Tensor:
        parts: Any = self.transformer
        x_BTC = parts.drop(parts.wte(tokens_BT) + parts.wpe(places))
        for block in parts.h:
            x_BTC = block(x_BTC, cached)
        logits_BTV: torch.Tensor = self.lm_head(parts.ln_f(x_BTC))
        return logits_BTV


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, 0.0, _DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_token_loss(
    logits_BTV: torch.Tensor,
    targets_BT: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy summed over the tokens that count, and the number of those tokens."""
    loss = functional.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, (targets_BT != IGNORED).sum()


def next_token_correct(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return how many of the next tokens are the most likely ones."""
    return (logits_BTV.argmax(dim=-1) == targets_BT).sum()


def gpt(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.0,
    bias: bool = True,
    cache_rows: int = 0,
) -> Task:
    """Return the task for sequences of at most (tokens,) and a vocabulary of `classes`; the defaults are
    GPT-2's.

    Sequences may be shorter: their length is a size of the graph. With `cache_rows` there is an entry point
    `decode`: it maps tokens (batch, tokens), the row of the cache for each sequence, and the position at
    which it continues, to logits. Raises ValueError for invalid options.
    """
    if len(sample_shape) != 1:
        raise ValueError(f"gpt needs samples of shape (tokens,), not of shape {sample_shape}")
    block = sample_shape[0]
    model = GPT(GPTConfiguration(classes, block, layers, heads, width, dropout, bias, cache_rows))
    tokens_BT = (torch.arange(2 * block) * 7 % classes).view(2, block)
    entries: dict[str, Further] = {}
    if cache_rows:
        inputs = (
            torch.zeros(2, block, dtype=torch.int64),
            torch.tensor([0, cache_rows - 1]),
            torch.zeros(2, dtype=torch.int64),
        )
        bounds: dict[str, Bounds] = {"sequence": (1, block, {0: 1})}
        entries["decode"] = ("decode", inputs, bounds)
    return Task(
        model,
        example_inputs=(tokens_BT,),
        labels=(tokens_BT.roll(-1, dims=1),),
        loss=next_token_loss,
        metrics={"correct": next_token_correct},
        dynamic={"sequence": (1, block, {0: 1, 1: 1})},
        entries=entries,
        name="gpt",
    )
