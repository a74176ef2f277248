"""The `model` of a RUN.toml, captured: a built-in model, a Hugging Face folder, or the result of a user's own
function.

Parameters get the type that the run asks for, as if it were torch's default. Built-in models are made without
values: every stage draws its own from the run's seed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from partition.capture.capture import Captured
from partition.capture.hugging_face import folder_task
from partition.capture.models import BUILTIN
from partition.capture.skeleton import skeleton
from partition.capture.task import (
    Task,
    capture_task,
    captured_and_proved,
    check_admission,
    load_factory,
    task_of,
)

Precision = Literal["float32", "float64"]
Options = Mapping[str, Any]
_NONE: Options = MappingProxyType({})


def capture_built_in(
    name: str,
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    dtype: Precision = "float32",
    options: Options = _NONE,
) -> Captured:
    """Return the model in BUILTIN with this name, for such samples and labels.

    Raises:
        KeyError: there is no such model.
        CaptureRefused: the model does not accept such samples or options.
    """
    factory = BUILTIN[name]
    with default_dtype(dtype):
        with skeleton():
            task = task_of(factory, sample_shape, classes, **options)
        return capture_task(task)


def capture_own(reference: str, *, dtype: Precision = "float32", options: Options = _NONE) -> Captured:
    """Return the model made by the function `PATH.py:name`, captured and proved.

    Raises:
        CaptureRefused: there is no such function, or its model cannot be captured.
    """
    with default_dtype(dtype):
        task = task_of(load_factory(reference), **options)
        kind = type(task.model)
        # A user's own class says more than the file in which it is made; torch's containers say nothing.
        is_named = bool(task.name) or not kind.__module__.startswith("torch.")
        return captured_and_proved(task, name="" if is_named else Path(reference.rpartition(":")[0]).stem)[0]


def capture_folder(reference: str, *, dtype: Precision = "float32", options: Options = _NONE) -> Captured:
    """Return the model in a Hugging Face folder. The options are `length` (tokens of a sample) and `values`;
    false leaves its weights out.

    Raises:
        CaptureRefused: there is no such model, it cannot be captured, or transformers is not installed.
    """
    with default_dtype(dtype):
        task = task_of(partial(folder_task, Path(reference).expanduser()), **options)
        if task_has_values(task):
            return captured_and_proved(task)[0]
        captured = capture_task(task, unproved=True)
        check_admission(task, captured)
        return captured


def task_has_values(task: Task) -> bool:
    """Return whether the model of a task can be computed, so that its capture can be proved."""
    return not any(parameter.is_meta for parameter in task.model.parameters())


@contextmanager
def default_dtype(dtype: Precision) -> Iterator[None]:
    """Make `dtype` the default type of floating-point tensors while the context lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
