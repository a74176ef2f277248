"""Outputs of a trained model on new samples, in the requester's own process, computed by the model's own
code.

This runs the model that RUN.toml names, with the weights of a run. It does not run a graph, because a graph
ends in a loss.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partition.capture.errors import CaptureRefused
from partition.capture.hugging_face import folder_task
from partition.capture.models import BUILTIN
from partition.capture.models.model_spec import Options, Precision, default_dtype
from partition.capture.task import Task, load_factory, task_of

Array = np.ndarray[Any, np.dtype[Any]]


def make_task(
    model: str, sample_shape: tuple[int, ...], classes: int, *, dtype: Precision, options: Options
) -> Task:
    """Return the task of the built-in model with this name, of the function PATH.py:NAME, or of a Hugging
    Face folder without its weights. Raises CaptureRefused."""
    with default_dtype(dtype):
        if ".py:" not in model and model not in BUILTIN:
            length = options.get("length", 0)
            return folder_task(Path(model), length=length if isinstance(length, int) else 0, fresh=True)
        if model in BUILTIN:
            return task_of(BUILTIN[model], sample_shape, classes, **options)
        return task_of(load_factory(model), **options)


def input_names(task: Task) -> list[str]:
    """Return the names of the model's inputs, in order."""
    if isinstance(task.example_inputs, Mapping):
        return list(task.example_inputs)
    return list(inspect.signature(task.model.forward).parameters)[: len(task.example_inputs)]


def load_weights(task: Task, weights: Mapping[str, Array]) -> None:
    """Load a run's weights into the model. Raises CaptureRefused if they belong to a different model."""
    own = task.model.state_dict()
    missing = [name for name in own if name not in weights]
    if missing:
        raise CaptureRefused(f"the weights have no {missing[0]}, so they belong to a different model")
    for name, value in own.items():
        if tuple(value.shape) != weights[name].shape:
            raise CaptureRefused(
                f"{name} has the shape {tuple(value.shape)} in the model but "
                f"{weights[name].shape} in the weights"
            )
    found = {name: torch.from_numpy(np.array(weights[name])) for name in own}
    task.model.load_state_dict(found, strict=True)


def outputs_of(task: Task, batches: Iterable[Sequence[Array]]) -> Iterator[Array]:
    """Yield the model's output (the first, if there are several) for each batch of inputs, which are in the
    order of `input_names`. Raises CaptureRefused if the model fails on them."""
    task.model.eval()
    examples = task.example_inputs
    kinds = list(examples.values()) if isinstance(examples, Mapping) else list(examples)
    names = input_names(task)
    for arrays in batches:
        tensors = [
            torch.from_numpy(np.array(array)).to(kind.dtype)
            for array, kind in zip(arrays, kinds, strict=True)
        ]
        try:
            with torch.no_grad():
                if isinstance(examples, Mapping):
                    found = task.model(**dict(zip(names, tensors, strict=True)))
                else:
                    found = task.model(*tensors)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            text = " ".join(str(error).split())[:200]
            raise CaptureRefused(f"the model fails on these samples: {text}") from None
        while not isinstance(found, torch.Tensor):
            found = next(iter(found.values() if isinstance(found, Mapping) else found))
        yield found.float().numpy() if found.dtype == torch.bfloat16 else found.numpy()
