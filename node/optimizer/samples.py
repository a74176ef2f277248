"""Counts the samples in the present gradients, during `backward`.

Each batch of an accumulation counts. A batch does not count if it never reaches `backward`, or if its
gradients are discarded (`zero_grad`). The number is the user's `batch_size`, or is found in the loss's graph
(`node.optimizer.graph`). While any optimizer counts, `torch.autograd.backward` is hooked, because every
`backward` of torch calls it. Model and tensors are not changed.
"""

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from node.optimizer.graph import LossReader, reaches

log = logging.getLogger("peerloom")
NO_GRAPH = -1
"""Torch's value for the number of the running graph if no graph is running."""
HAND_MADE = "no backward() has put these gradients in place"

_counters: "weakref.WeakSet[SampleCounter]" = weakref.WeakSet()
_lock = threading.Lock()
_plain = torch.autograd.backward
"""Torch's own function. It is restored when the last counter is gone."""


class SampleCounter:
    """Counts the samples in the gradients of some parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor], batch_size: int | None = None) -> None:
        """`batch_size`: the number of samples of each `backward`, instead of the number found in the
        graph."""
        self.parameters = parameters
        self._batch_size = batch_size
        self._reader = LossReader()
        self._has_warned = False
        self.last: int | None = None
        """The number of samples of the latest step whose number was known."""
        self.forget()
        with _lock:
            _counters.add(self)
            torch.autograd.backward = _watched

    def forget(self) -> None:
        """Record that the gradients are discarded."""
        self._samples = self._batches = 0
        self._unknown = ""
        self._seen: list[tuple[int, int] | None] = []

    def of_step(self, given: int | None, run: str, *, is_needed: bool) -> int:
        """Return the number of samples of a step: the `given` number, or the counted one. If neither is
        known, return the number of the previous step.

        Raises ValueError if the number is below 0, or if it `is_needed` but was never known.
        """
        found = self.take()
        if given is not None:
            if given < 0:
                raise ValueError(f"step(samples={given}): a step is made of 0 samples or more")
            self.last = int(given)
        elif isinstance(found, int):
            if self.last is None and found and self._batch_size is None:
                log.info("run %r: a step here has %d samples, as its loss's graph shows", run, found)
            self.last = found or self.last
            return found
        elif self.last is None and is_needed:
            raise ValueError(
                f"run {run!r}: the number of samples in this step cannot be seen: {found}; "
                "give it at each step, optimizer.step(samples=N), or once, "
                "me.optimizer(..., batch_size=N)"
            )
        elif is_needed and not self._has_warned:
            self._has_warned = True
            log.warning("run %r: a step counts %s samples, as the last did: %s", run, self.last, found)
        return self.last or 0

    def take(self) -> int | str:
        """Return the number of samples since the previous call, and begin a new count; or return why the
        number is not known."""
        samples, batches, unknown = self._samples, self._batches, self._unknown
        self.forget()
        if unknown:
            return unknown
        if batches or all(parameter.grad is None for parameter in self.parameters):
            return samples
        return HAND_MADE if self._batch_size is None else self._batch_size

    @contextmanager
    def watch(self, losses: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside this context, count the samples that these losses add to the gradients. Unrelated gradients
        are not even read, because another thread may write them."""
        if not reaches(losses, self.parameters):
            yield
            return
        if self._batches and self._is_dropped():
            self.forget()
        before = self._marks()
        yield
        after = self._marks()
        if after == before:
            return  # torch was called with other inputs=
        self._seen = after
        self._batches += 1
        found = self._batch_size or self._reader.samples(losses)
        if isinstance(found, str):
            self._unknown = self._unknown or found
        else:
            self._samples += found

    def _marks(self) -> list[tuple[int, int] | None]:
        """Return marks that distinguish two states of the gradients without reading their values."""
        return [
            None if (gradient := parameter.grad) is None else (id(gradient), gradient._version)
            for parameter in self.parameters
        ]

    def _is_dropped(self) -> bool:
        """Return whether the counted gradients are gone. The model's own `zero_grad` is not hooked, so this
        must be checked."""
        gradients = [parameter.grad for parameter in self.parameters]
        if all(gradient is None for gradient in gradients):
            return True
        if self._marks() == self._seen:
            return False
        return not any(bool(gradient.any()) for gradient in gradients if gradient is not None)


@wraps(_plain)
def _watched(tensors: Any, *arguments: Any, **options: Any) -> None:
    """Replace `torch.autograd.backward`, and inform all counters."""
    losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    with _lock:
        counters = list(_counters)
        if not counters and torch.autograd.backward is _watched:
            torch.autograd.backward = _plain
    is_within = torch._C._current_graph_task_id() != NO_GRAPH
    if is_within:  # recomputed activations are a part of the running backward pass
        counters = []
    with ExitStack() as stack:
        seen = [each for each in losses if isinstance(each, torch.Tensor)]
        for counter in counters:
            stack.enter_context(counter.watch(seen))
        _plain(losses, *arguments, **options)
