"""The models and data of `benchmarks/finetune.py`: small models of other libraries, written as users of these
libraries do.

A command loads this file by name, like a person's own (`model = ".../_finetune_models.py:bert"`). Each
function takes RUN.toml's `[options]` and returns a Task.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from partition.capture import Task, own_loss

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]

CLASSES = 3
LENGTH, TARGET = 12, 7
PICTURE = 16
VOCABULARY = 64


def bert() -> Task:
    """Return a BERT on pairs of sentences, with masks and token types. The loss is the model's own mean."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _own(transformers.BertForSequenceClassification(config), bert_data(4, 0), ["labels"])


def bert_data(count: int, seed: int) -> Arrays:
    """Return padded pairs of sentences of different lengths."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(6, LENGTH + 1, count)[:, None]
    places = np.arange(LENGTH)[None]
    ids = draw.integers(1, VOCABULARY, (count, LENGTH))
    mask = (places < lengths).astype(np.int64)
    kinds = ((places >= lengths // 2) & (places < lengths)).astype(np.int64)
    labels = (ids * mask).sum(1) % CLASSES
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": kinds, "labels": labels}


def t5() -> Task:
    """Return a T5 with encoder and decoder inputs. Labels of -100 do not count."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return _own(transformers.T5ForConditionalGeneration(config), t5_data(4, 0), ["labels"])


def t5_data(count: int, seed: int) -> Arrays:
    """Return inputs whose labels are their first tokens in reverse order."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(2, VOCABULARY, (count, LENGTH))
    mask = np.ones_like(ids)
    mask[::3, -4:] = 0
    labels = ids[:, :TARGET][:, ::-1].copy()
    labels[1::2, -3:] = -100
    begun = np.concatenate([np.zeros((count, 1), np.int64), np.maximum(labels, 0)[:, :-1]], 1)
    return {"input_ids": ids * mask, "attention_mask": mask, "decoder_input_ids": begun, "labels": labels}


def vit() -> Task:
    """Return a vision transformer for two classes of pictures."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=PICTURE,
        patch_size=4, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    examples = {"x": torch.rand(4, 3, PICTURE, PICTURE), "y": torch.zeros(4, dtype=torch.int64)}
    model = transformers.ViTForImageClassification(config)
    return Task(model, {"pixel_values": examples["x"]}, (examples["y"],), loss=logits_loss)


def logits_loss(output: Any, labels: Tensor) -> Tensor:
    """Return torch's default loss, a mean over the batch."""
    return functional.cross_entropy(output.logits, labels)


def write_pictures(folder: Path, count: int, seed: int) -> None:
    """Write one folder of pictures for each of two classes: bright in the upper half, or bright in the lower
    half."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    for name, upper in (("above", 200), ("below", 60)):
        (folder / name).mkdir(parents=True)
        for number in range(count // 2):
            pixels = draw.integers(0, 56, (PICTURE, PICTURE, 3)).astype(np.uint8)
            pixels[: PICTURE // 2] += np.uint8(upper)
            pixels[PICTURE // 2 :] += np.uint8(260 - upper - 60)
            Image.fromarray(pixels).save(folder / name / f"{number:04}.png")


def regression() -> Task:
    """Return an MLP with a floating-point label and mean squared error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    return Task(model, (torch.randn(4, 6),), (torch.randn(4),), loss=squared)


def squared(output: Tensor, label: Tensor) -> Tensor:
    """Return torch's default loss, a mean over the batch."""
    return functional.mse_loss(output.squeeze(-1), label)


class Siamese(nn.Module):
    """One network for two inputs. Its outputs are close for inputs that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the distances, (batch,)."""
        return functional.pairwise_distance(self.body(left), self.body(right))


def siamese() -> Task:
    """Return a Siamese network with contrastive loss (Hadsell 2006), a mean over pairs."""
    torch.manual_seed(0)
    examples = {name: torch.from_numpy(value) for name, value in siamese_data(4, 0).items()}
    inputs = {"left": examples["left"], "right": examples["right"]}
    return Task(Siamese(), inputs, {"alike": examples["alike"]}, loss=contrastive)


def contrastive(distance: Tensor, alike: Tensor) -> Tensor:
    """Return the squared distance of pairs that are alike; for other pairs, the squared amount by which they
    miss the margin."""
    return (alike * distance**2 + (1 - alike) * (1 - distance).clamp(min=0) ** 2).mean()


def siamese_data(count: int, seed: int) -> Arrays:
    """Return pairs of samples; every second pair is one sample twice, with noise."""
    draw = np.random.default_rng(seed)
    left, right = draw.normal(size=(2, count, 10))
    alike = np.arange(count) % 2
    right = np.where(alike[:, None] == 1, left + 0.1 * right, right)
    return {name: value.astype(np.float32) for name, value in
            {"left": left, "right": right, "alike": alike}.items()}  # fmt: skip


class Pairs(Dataset[dict[str, Any]]):
    """A user's data set: it returns one sample per call, as a dict of inputs and label."""

    def __init__(self, count: int) -> None:
        self.arrays = siamese_data(count, 1)

    def __len__(self) -> int:
        return len(self.arrays["alike"])

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {name: torch.from_numpy(array)[place] for name, array in self.arrays.items()}


def pairs() -> Pairs:
    """Return the data that RUN.toml names."""
    return Pairs(80)


def _own(model: nn.Module, arrays: Arrays, labels: list[str]) -> Task:
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    given = {name: tensors.pop(name) for name in labels}
    return Task(model, tensors, given, loss=own_loss)
