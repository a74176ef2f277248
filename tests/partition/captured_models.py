"""Small models for the tests of capture, and functions that compare the models with their graphs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from partition.capture import Captured, capture
from partition.execute.interpret import DTYPES, Program, Results, compile_entry
from partition.model.cut import cut
from partition.model.sizes import bind, evaluate, shape_of

CLASSES = 5
VOCABULARY = 23
Drawn = tuple[Any, tuple[Tensor, ...]]
"""Inputs as `capture` takes them, and labels."""


@dataclass(frozen=True)
class Sample:
    """A model, a sampler of its inputs and labels, its loss, and further arguments of capture."""

    build: Callable[[], nn.Module]
    draw: Callable[[int], Drawn]
    loss: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)


def class_loss(output: Any, labels: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits, labels, reduction="sum")


def token_loss(output: Any, labels: Tensor) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, labels.numel()


def vectors(batch: int) -> Drawn:
    return (torch.randn(batch, 4, dtype=torch.float64),), (torch.randint(CLASSES, (batch,)),)


def images(batch: int) -> Drawn:
    return (torch.randn(batch, 3, 8, 8, dtype=torch.float64),), (torch.randint(CLASSES, (batch,)),)


def sentences(batch: int) -> Drawn:
    return (torch.randint(VOCABULARY, (batch, 3)),), (torch.randint(CLASSES, (batch,)),)


def tokens(batch: int) -> Drawn:
    ids = torch.randint(VOCABULARY, (batch, 5 + batch))
    return (ids,), (ids.roll(-1, 1),)


def mapped_tokens(batch: int) -> Drawn:
    (ids,), labels = tokens(batch)
    return {"input_ids": ids, "use_cache": False}, labels


def masked_tokens(batch: int) -> Drawn:
    (ids,), labels = tokens(batch)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}, labels


SEQUENCE = {"batch": (1, 64), "sequence": (1, 32, {0: 1, 1: 1})}
MASKED_SEQUENCE = {"batch": (1, 64), "sequence": (1, 32, {0: 1, "attention_mask": 1, 2: 1})}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3)])
        self.short = nn.Conv2d(3, 4, 1, bias=False)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        y += self.short(x)
        out: Tensor = self.head(functional.max_pool2d(y.relu_(), 2).mean((2, 3)))
        return out


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, CLASSES, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        high = functional.gelu(self.down[0](x))
        low = functional.gelu(self.down[1](functional.avg_pool2d(high, 2)))
        wide = functional.interpolate(low, scale_factor=2.0, mode="bilinear")
        joined = torch.cat([self.up[0](low), high + wide[:, :4]], 1)
        out: Tensor = self.up[1](joined).amax((2, 3))
        return out


class Gpt(nn.Module):
    """A model with tied embeddings and dropout. It decodes over a cache of keys and values with one position
    per row.
    """

    def __init__(self, width: int = 8, heads: int = 2, context: int = 128, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, context, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out

    def decode(self, ids: Tensor, places: Tensor) -> Tensor:
        x = (self.tokens(ids) + self.places(places))[:, None]
        for block in self.blocks:
            x = cast(Block, block).decode(x, places)
        out: Tensor = self.head(self.norm(x))[:, 0]
        return out


class Block(nn.Module):
    keys: Tensor
    values: Tensor

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.dropout = nn.Dropout(dropout)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(3, heads, context, width // heads), persistent=False)

    def split(self, x: Tensor) -> list[Tensor]:
        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, 2)
        return [part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return out

    def decode(self, x: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.split(x)
        rows = torch.arange(places.shape[0])
        self.keys[rows, :, places] = k[:, :, 0]
        self.values[rows, :, places] = v[:, :, 0]
        seen = torch.arange(self.keys.shape[2]) <= places[:, None]
        mixed = functional.scaled_dot_product_attention(
            q, self.keys[: q.shape[0]], self.values[: q.shape[0]], attn_mask=seen[:, None, None]
        )
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Recurrent(nn.Module):
    """An embedding, a recurrent layer of some kind, and a head on its last position."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 4)
        self.layer = kind(4, 6, **settings)
        size = settings.get("proj_size", 6) * (2 if settings.get("bidirectional") else 1)
        self.head = nn.Linear(size, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.layer.batch_first:
            out: Tensor = self.head(self.layer(x)[0][:, -1])
        else:
            out = self.head(self.layer(x.transpose(0, 1))[0][-1])
        return out


class Experts(nn.Module):
    """A mixture of experts: every expert processes every sample, and a softmax gives each expert's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(4, 3), nn.Linear(4, CLASSES)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x).topk(2, 1)
        weights = torch.zeros(x.shape[0], 3, dtype=x.dtype).scatter(1, best.indices, best.values.softmax(1))
        mixed = torch.stack([expert(x) for expert in self.experts], 1) * weights[:, :, None]
        out: Tensor = self.head(mixed.sum(1))
        return out


def hugging_face(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a tiny transformers model, made from its configuration alone."""

    def build() -> nn.Module:
        import transformers

        names = {"vit": "ForImageClassification", "bert": "ForMaskedLM"}
        prefix = {"gpt2": "GPT2", "llama": "Llama", "bert": "Bert", "vit": "ViT"}[kind]
        config = getattr(transformers, f"{prefix}Config")(**settings)
        model = getattr(
            transformers, f"{prefix}{names.get(kind, 'LMHeadModel' if kind == 'gpt2' else 'ForCausalLM')}"
        )
        built: nn.Module = model(config)
        return built

    return build


_SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_WORDS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32, **_WORDS}

SAMPLES: dict[str, Sample] = {
    "mlp": Sample(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(6, CLASSES)),
        vectors,
        class_loss,
    ),
    "residual": Sample(Residual, images, class_loss),
    "unet": Sample(UNet, images, class_loss),
    "gpt": Sample(Gpt, tokens, token_loss, {"dynamic": SEQUENCE}),
    "lstm": Sample(
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.3), sentences, class_loss
    ),
    "projected lstm": Sample(
        lambda: Recurrent(nn.LSTM, batch_first=True, proj_size=3, bias=False), sentences, class_loss
    ),
    "gru": Sample(lambda: Recurrent(nn.GRU, bidirectional=True, batch_first=True), sentences, class_loss),
    "rnn": Sample(lambda: Recurrent(nn.RNN, nonlinearity="relu"), sentences, class_loss),
    "experts": Sample(Experts, vectors, class_loss),
    "gpt2": Sample(
        hugging_face("gpt2", **_GPT2),
        mapped_tokens,
        token_loss,
        {"dynamic": SEQUENCE},
    ),
    "llama": Sample(
        hugging_face(
            "llama",
            attn_implementation="eager",
            num_key_value_heads=1,
            max_position_embeddings=32,
            **_SMALL,
            **_WORDS,
        ),
        mapped_tokens,
        token_loss,
        {"dynamic": SEQUENCE},
    ),
    "bert": Sample(
        hugging_face("bert", max_position_embeddings=32, **_SMALL, **_WORDS),
        masked_tokens,
        token_loss,
        {"dynamic": MASKED_SEQUENCE},
    ),
    "vit": Sample(
        hugging_face(
            "vit", attn_implementation="eager", image_size=8, patch_size=4, num_labels=CLASSES, **_SMALL
        ),
        images,
        class_loss,
    ),
}


def captured(sample: Sample, model: nn.Module, batch: int = 3) -> Captured:
    inputs, labels = sample.draw(batch)
    return capture(model, inputs, labels=labels, loss=sample.loss, **sample.options)


class Whole:
    """Runs a captured graph as one stage, over a model's own tensors."""

    def __init__(self, captured: Captured, model: nn.Module) -> None:
        self.graph = captured.graph
        self.programs: dict[tuple[str, bool], Program] = {}
        (stage,) = cut(captured.graph, captured.hash, ())
        # A training stage sends no outputs; here they are inspected.
        self.stage = msgspec.structs.replace(
            stage,
            entries=tuple(
                msgspec.structs.replace(entry, outputs=self.graph.entry(entry.name).outputs)
                for entry in stage.entries
            ),
        )
        held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        held |= dict(model.named_buffers(remove_duplicate=False))
        self.parameters = {row: held[item.names[0]] for row, item in enumerate(self.graph.parameters)}
        self.constants = {
            row: torch.frombuffer(bytearray(item.data), dtype=DTYPES[item.type.dtype]).reshape(
                shape_of(item.type, ())
            )
            for row, item in enumerate(self.graph.constants)
        }
        self.states = {
            row: torch.zeros(shape_of(item.type, ()), dtype=DTYPES[item.type.dtype])
            for row, item in enumerate(self.graph.states)
        }

    def run(
        self, entry: str, inputs: Sequence[Tensor], labels: Sequence[Tensor] = (), train: bool = True
    ) -> Results:
        """Compute an entry point, and replace the states by its results."""
        graph, ports = self.graph, self.graph.entry(entry)
        types = [graph.types[port.type] for port in (*ports.inputs, *ports.labels)]
        shapes = [tuple(tensor.shape) for tensor in (*inputs, *labels)]
        sizes = bind(graph.symbols, graph.expressions, types, shapes)
        if (entry, train) not in self.programs:
            self.programs[entry, train] = compile_entry(
                self.stage, entry, train=train, device=torch.device("cpu")
            )
        program = self.programs[entry, train]
        results = program.run(self.parameters, self.constants, self.states, inputs, labels, sizes)
        self.states |= results.updates
        values = evaluate(graph.expressions, sizes)
        for number, output in zip(ports.outputs, results.outputs, strict=True):
            assert tuple(output.shape) == shape_of(graph.types[ports.types[number]], values)
        return results
