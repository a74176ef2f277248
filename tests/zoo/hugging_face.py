"""Models of the transformers library, unchanged, built from configurations: nothing is downloaded."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from tests.zoo.case import (
    Case,
    Scale,
    Tensors,
    class_loss,
    correct,
    counted_loss,
    images,
    token_loss,
    tokens,
    tokens_correct,
)

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8_192,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "use_cache": False,
}
"""The published configuration of Llama 3 8B."""


def logits_loss(output: Any, labels: Tensor) -> Tensor:
    """Return the cross entropy of next ids."""
    return token_loss(output.logits, labels)


def masked_loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the masked ids, and their number."""
    return counted_loss(output.logits, labels)


def logits_correct(output: Any, labels: Tensor) -> Tensor:
    """Return the number of correctly predicted next ids."""
    return tokens_correct(output.logits, labels)


def picture_loss(output: Any, labels: Tensor) -> Tensor:
    """Return the cross entropy over classes."""
    return class_loss(output.logits, labels)


def picture_correct(output: Any, labels: Tensor) -> Tensor:
    """Return the number of correct classifications."""
    return correct(output.logits, labels)


METRICS = {"tokens_correct": logits_correct}


def gpt2(scale: Scale) -> Case:
    """GPT-2: tied embeddings, dropout at four places in each layer."""
    length, vocabulary, width, layers = (64, 2_000, 192, 4) if scale == "bench" else (6, 29, 16, 2)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=2 * length,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        use_cache=False,
    )
    return Case(
        "hf-gpt2",
        lambda: GPT2LMHeadModel(config),
        tokens(length, vocabulary),
        logits_loss,
        METRICS,
        batch=4 if scale == "bench" else 3,
    )


def llama(scale: Scale) -> Case:
    """Llama: rotary positions, grouped queries, RMS norm, gated layers."""
    if scale == "bench":
        length, vocabulary, sizes = 64, 2_000, (192, 512, 4, 6, 2)
    else:
        length, vocabulary, sizes = 6, 29, (16, 24, 2, 4, 2)
    width, hidden, layers, heads, shared = sizes
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=2 * length,
        attention_dropout=0.1,
        use_cache=False,
    )
    return Case(
        "hf-llama",
        lambda: LlamaForCausalLM(config),
        tokens(length, vocabulary),
        logits_loss,
        METRICS,
        batch=4 if scale == "bench" else 3,
    )


def llama_8b() -> nn.Module:
    """Llama 3 8B; build it under `skeleton()`, because it takes 32 GB otherwise."""
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**LLAMA_8B))
    return model


def bert(scale: Scale) -> Case:
    """BERT with its masked-language head, tied to the embeddings; the padding mask is a second input."""
    length, vocabulary, width, layers = (64, 2_000, 192, 4) if scale == "bench" else (6, 29, 16, 2)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=2 * length,
    )

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        ids = torch.randint(vocabulary, (batch, length), generator=generator)
        lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
        mask = (torch.arange(length) < lengths).long()
        guessed = (torch.rand(batch, length, generator=generator) < 0.5) & (mask == 1)
        return (ids, mask), (ids.masked_fill(~guessed, -100),)

    return Case(
        "hf-bert",
        lambda: BertForMaskedLM(config),
        sample,
        masked_loss,
        METRICS,
        batch=4 if scale == "bench" else 3,
    )


def vit(scale: Scale) -> Case:
    """The vision transformer: patches, a class token, dropout on."""
    side, patch, width, layers = (64, 8, 192, 4) if scale == "bench" else (8, 4, 16, 2)
    config = ViTConfig(
        image_size=side,
        patch_size=patch,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )

    return Case(
        "hf-vit",
        lambda: ViTForImageClassification(config),
        images(3, side, side, classes=10),
        picture_loss,
        {"correct": picture_correct},
        batch=4 if scale == "bench" else 3,
    )
