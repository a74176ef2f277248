"""Generation by a language model of a Hugging Face folder, token by token, with transformers' own `generate`.

It runs in the requester's own process, with the weights of a run. The folder's generation configuration
applies, except for settings that the user gives.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from partition.capture.errors import CaptureRefused
from partition.capture.hugging_face import IGNORED
from partition.capture.task import Task

Array = np.ndarray[Any, np.dtype[Any]]

TOKENS_USUAL = 64
"""Number of tokens to generate, if neither the user nor the folder gives one."""


class Writer:
    """A model that generates text. With `temperature` 0 it always takes the most likely token."""

    def __init__(
        self,
        task: Task,
        folder: Path,
        *,
        tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
    ) -> None:
        import transformers

        self._model: Any = task.model.eval()
        self._seed = seed
        try:
            if (folder / "generation_config.json").is_file():
                self._model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            raise CaptureRefused(f"{folder}: its generation configuration: {str(error)[:200]}") from None
        config: Any = self._model.generation_config
        self.tokens = tokens or config.max_new_tokens or TOKENS_USUAL
        end = config.eos_token_id
        self._ends = {*end} if isinstance(end, list) else {end}
        self._more: dict[str, Any] = {
            "max_new_tokens": self.tokens,
            "max_length": None,
            "do_sample": temperature > 0,
            "temperature": temperature or None,
            "top_k": top_k or None,
            "top_p": top_p if temperature > 0 and top_p < 1 else None,
            "use_cache": True,
            "pad_token_id": config.pad_token_id if config.pad_token_id is not None else 0,
        }
        if not temperature:
            self._more["top_k"] = None
        self._reads_all = bool(getattr(self._model.config, "is_encoder_decoder", False))

    def write(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens that follow a prompt, without the end token. Raises CaptureRefused."""
        ids = torch.tensor([list(prompt)], dtype=torch.int64)
        torch.manual_seed(self._seed)
        try:
            with torch.no_grad():
                found = self._model.generate(ids, attention_mask=torch.ones_like(ids), **self._more)[
                    0
                ].tolist()
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
            raise CaptureRefused(
                f"the model generates nothing: {' '.join(str(error).split())[:200]}"
            ) from None
        new = found[1:] if self._reads_all else found[len(prompt) :]
        return [each for each in new if each not in self._ends]


def judge_tokens(
    task: Task, names: Sequence[str], batches: Iterable[tuple[Sequence[Array], Array]]
) -> Mapping[str, float]:
    """Return the quality of a model's tokens, over those whose label counts. It computes one batch at a time,
    because all outputs over a vocabulary are too many to keep. Raises CaptureRefused if the model fails on
    them."""
    task.model.eval()
    loss, right, count = 0.0, 0, 0
    for arrays, labels in batches:
        inputs = {
            name: torch.from_numpy(array.astype(np.int64)) for name, array in zip(names, arrays, strict=True)
        }
        try:
            with torch.no_grad():
                logits = task.model(**inputs).logits.float()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            text = " ".join(str(error).split())[:200]
            raise CaptureRefused(f"the model fails on these samples: {text}") from None
        truth = torch.from_numpy(labels.astype(np.int64))
        loss += functional.cross_entropy(
            logits.flatten(0, 1), truth.flatten(), ignore_index=IGNORED, reduction="sum"
        ).item()
        counts = truth != IGNORED
        right += int((logits.argmax(-1)[counts] == truth[counts]).sum())
        count += int(counts.sum())
    if not count:
        return {}
    mean = loss / count
    return {
        "tokens": float(count),
        "token_accuracy": right / count,
        "cross_entropy": mean,
        "perplexity": float(np.exp(min(mean, 700.0))),
    }


def sample_rows(arrays: Mapping[str, Array]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield, for each sample x, y, the tokens before its last answer, and those of the answer."""
    for x, y in zip(arrays["x"], arrays["y"], strict=True):
        places = np.flatnonzero(np.asarray(y) != IGNORED)
        breaks = np.flatnonzero(np.diff(places) > 1)
        first = int(places[breaks[-1] + 1] if len(breaks) else places[0])
        if first == 0:  # all tokens count: give half of them
            first = len(places) // 2
        yield x[: first + 1].tolist(), y[first : places[-1] + 1].tolist()


def new_rows(arrays: Mapping[str, Array]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield, for each new sample, the tokens before its last answer, and those of the answer, if it has
    one."""
    for ids, counted, length in zip(arrays["ids"], arrays["counted"], arrays["lengths"], strict=True):
        places = np.flatnonzero(counted[:length])
        if not len(places):
            yield ids[:length].tolist(), []
            continue
        breaks = np.flatnonzero(np.diff(places) > 1)
        first = int(places[breaks[-1] + 1] if len(breaks) else places[0])
        first = first or len(places) // 2
        yield ids[:first].tolist(), ids[first : places[-1] + 1].tolist()
