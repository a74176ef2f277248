"""A training task in a user's own file: a model, examples of its data, its loss.

    # my_model.py
    from partition.capture import Task, skeleton

    def build() -> Task:
        with skeleton():                       # only for a model that does not fit into memory
            model = MyModel()
        return Task(model, example_inputs=(torch.zeros(2, 3, 32, 32),), labels=(torch.zeros(2).long(),),
                    loss=lambda output, target: cross_entropy(output, target, reduction="sum"))

`load_factory` imports such a file. It is the only place in the program that runs a named file. The file is
the user's own, run on their own machine by their own command; nothing received from a peer is run here.
"""

import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from crypto.errors import RemoteProtocolError
from partition.capture.capture import Bounds, Captured, Further, capture
from partition.capture.errors import CaptureRefused, EvaluationDiffers
from partition.capture.lower import Groups
from partition.capture.proof import Proof, prove
from partition.capture.proof_inputs import given
from partition.capture.reduction import Reduction
from partition.capture.trees import Inputs, Labels, form_of
from partition.execute.admit import admit
from partition.model.cut import cut
from partition.stage import StageSpecification


@dataclass(frozen=True)
class Task:
    """A model with the arguments of `capture`.

    `example_inputs` are the model's positional tensors, or a mapping for those passed by keyword; `labels`
    are the tensors that only the loss sees. Only their shapes and types matter. `loss(output, *labels)` is a
    scalar tensor, summed over samples or a mean over them, or a pair of a sum and its divisor; `own_loss`
    stands for the loss that the model itself computes from named labels. `metrics` are sums. The other fields
    are `capture`'s arguments with the same names.
    """

    model: nn.Module
    example_inputs: Inputs
    labels: Labels = ()
    loss: Callable[..., Any] | None = None
    metrics: Mapping[str, Callable[..., torch.Tensor]] = field(default_factory=dict)
    dynamic: Mapping[str, Bounds] | None = None
    entries: Mapping[str, Further] | None = None
    split: Sequence[str] = ()
    together: Sequence[Sequence[str]] = ()
    groups: Groups | None = None
    reduction: Reduction = "auto"
    name: str = ""


Factory = Callable[..., Any]


def load_factory(reference: str) -> Factory:
    """Load the function that `PATH.py:name` names, from a user's own file.

    The file is imported as a module, and can import other modules in its folder.

    Raises:
        CaptureRefused: the reference has a wrong form, there is no such file or no such function in it, or
            the file raises.
    """
    path_text, colon, name = reference.rpartition(":")
    if not colon or not path_text.endswith(".py") or not name.isidentifier():
        raise CaptureRefused(f"'{reference}' is not of the form PATH.py:function")
    path = Path(path_text).expanduser().resolve()
    if not path.is_file():
        raise CaptureRefused(f"there is no file {path}")
    # A name that shadows nothing, registered in `sys.modules` because dataclasses and pickles need that.
    module_name = f"_peerloom_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise CaptureRefused(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        sys.modules.pop(module_name, None)
        raise CaptureRefused(f"{path} could not be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    factory = getattr(module, name, None)
    if not callable(factory):
        known = sorted(
            key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"
        )
        raise CaptureRefused(f"{path} has no function '{name}'; it has {', '.join(known) or 'none'}")
    made: Factory = factory
    return made


def task_of(factory: Factory, *arguments: Any, **options: Any) -> Task:
    """Call a factory, which returns a Task, or a model and its example inputs.

    Raises:
        CaptureRefused: it raised, does not accept these options, or returned something else.
    """
    name = getattr(factory, "__name__", "the factory")
    try:
        made = factory(*arguments, **options)
    except CaptureRefused:
        raise
    except Exception as error:  # a user's own function
        raise CaptureRefused(f"{name} failed: {type(error).__name__}: {str(error)[:300]}") from error
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        inputs = (made[1],) if isinstance(made[1], torch.Tensor) else made[1]
        made = Task(made[0], inputs)
    if not isinstance(made, Task):
        kind = type(made).__name__
        raise CaptureRefused(f"{name} returned a {kind}; it must return a Task, or (model, example_inputs)")
    if not isinstance(made.model, nn.Module):
        raise CaptureRefused(f"{name} returned a Task whose model is a {type(made.model).__name__}")
    return made


def call_seeded(factory: Factory, seed: int) -> Any:
    """Call a user's function with all global generators seeded. Raises CaptureRefused if it raises."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        return factory()
    except Exception as error:  # a user's own function
        name, text = getattr(factory, "__name__", "the function"), " ".join(str(error).split())[:300]
        raise CaptureRefused(f"{name} failed: {type(error).__name__}: {text}") from error


def captured_and_proved(task: Task, *, name: str = "") -> tuple[Captured, Proof]:
    """Capture a task and prove it. It makes a separate graph for evaluation if one graph cannot serve both,
    and accepts those autograd functions whose backward passes the graph reproduces. Raises CaptureRefused."""
    captured = capture_task(task, name=name, unproved=True)
    check_admission(task, captured)
    try:
        try:
            proof = prove_task(task, captured)
        except EvaluationDiffers:
            captured = capture_task(task, name=name, unproved=True, evaluation=True)
            check_admission(task, captured)
            proof = prove_task(task, captured)
    except CaptureRefused as refusal:
        if captured.functions:
            raise CaptureRefused("\n".join([*captured.functions, str(refusal)])) from refusal
        raise
    return captured, proof


def check_admission(task: Task, captured: Captured) -> None:
    """Check the graph against the rules of a peer, before it is offered to one.

    It is checked as one stage at the examples' sizes, because only the cost depends on sizes. Raises
    CaptureRefused.
    """
    graph = captured.graph
    form, tensors = form_of(task.model.forward, task.example_inputs, task.labels, task.loss)
    sizes = given(graph, graph.entries[0], form, tensors).sizes
    try:
        admit(StageSpecification(b"capture", cut(graph, captured.hash, ())[0], tuple(sizes)))
    except (RemoteProtocolError, ValueError) as error:
        raise CaptureRefused(f"no peer would accept this model: {error}") from error


def capture_task(
    task: Task, *, name: str = "", unproved: bool = False, evaluation: bool | None = None
) -> Captured:
    """Call `capture` with everything that a task specifies. Raises CaptureRefused."""
    return capture(
        task.model,
        task.example_inputs,
        labels=task.labels,
        loss=task.loss,
        metrics=task.metrics,
        dynamic=task.dynamic,
        entries=task.entries,
        split=task.split,
        together=task.together,
        groups=task.groups,
        reduction=task.reduction,
        evaluation=evaluation,
        unproved=unproved,
        name=name or task.name or _class_of(task.model),
    )


def _class_of(model: nn.Module) -> str:
    """Return the name of a user's own class, for naming a model; empty for torch's containers."""
    return "" if type(model).__module__.startswith("torch.") else type(model).__name__


def prove_task(task: Task, captured: Captured, *, seed: int = 0) -> Proof:
    """Call `prove` with everything that a task specifies. Raises CaptureRefused."""
    return prove(
        task.model,
        captured,
        task.example_inputs,
        task.labels,
        loss=task.loss,
        metrics=task.metrics,
        entries=task.entries,
        reduction=task.reduction,
        seed=seed,
    )


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy summed over the batch. `output` is (batch, classes, ...), `target` (batch,
    ...)."""
    return functional.cross_entropy(output, target, reduction="sum")


def correct(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return how many samples are classified correctly."""
    return (output.argmax(dim=1) == target).sum()
