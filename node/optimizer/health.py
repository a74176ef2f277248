"""The reasons why a peer contributes nothing to its run: values that are not finite, or several failed rounds
in a row.

A vector that is not finite would make the round of the whole group fail. So it is not sent, and the status
says so until the vector is finite again.
"""

import time
from collections.abc import Sequence

import torch

from gossip.averaging.robust.reduction import Vector
from node.optimizer.layout import Layout
from node.optimizer.trained import listed

FAILURES_MIN = 2
"""Number of failed rounds in a row from which the status reports them, because a single round fails now and
then."""
ENDS = "a checkpoint that is loaded ends that, or this script started again, which takes the run's state"


class Health:
    """The faults of one peer, and since when they last. Times are of `time.monotonic`."""

    def __init__(self) -> None:
        self._sick = ""
        self._ends = ""
        self._sick_at = 0.0
        self._batches = 0
        self._failures = 0
        self._failed_at = 0.0
        self._error = ""

    def has_finite(self, layout: Layout, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return whether these gradients may be sent. Remembers the names of gradients that are not
        finite."""
        there = [gradient for gradient in gradients if gradient is not None]
        if not there or all(bool(norm.isfinite()) for norm in torch._foreach_norm(there)):
            return self._is_well()
        names = [
            slot.name
            for slot, gradient in zip(layout.slots, gradients, strict=True)
            if gradient is not None and not bool(gradient.isfinite().all())
        ]
        if not names:  # each is finite, but their norm overflows
            return self._is_well()
        self._batches += 1
        own = [slot.name for slot in layout.slots if not bool(slot.tensor.isfinite().all())]
        if own:
            self._is_sick(f"its parameters are not finite ({listed(own)})", ENDS)
        else:
            text = f"its gradients are not finite ({listed(names)}; {self._batches} batches, left out)"
            self._is_sick(text, "a batch whose gradients are finite ends that")
        return False

    def is_finite(self, layout: Layout, vector: Vector) -> bool:
        """Return whether these tensors, written into a vector, may be sent. Remembers the names of tensors
        that are not finite."""
        flat = torch.from_numpy(vector)
        if bool(flat.sum().isfinite()) or bool(flat.isfinite().all()):
            return self._is_well()
        names = [slot.name for slot in layout.slots if not bool(flat[slot.begin : slot.end].isfinite().all())]
        self._is_sick(f"its tensors are not finite ({listed(names)})", ENDS)
        return False

    def averaged(self) -> None:
        """Record that a round has succeeded here."""
        self._failures = 0

    def failed(self, error: str) -> None:
        """Record that a round has failed here."""
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures += 1
        self._error = error

    def sickness(self) -> str:
        """Return why this peer sends nothing, since when, and what ends that; else empty."""
        if not self._sick:
            return ""
        seconds = time.monotonic() - self._sick_at
        return f"this peer brings nothing for {seconds:.0f} s: {self._sick}; {self._ends}"

    def failures(self) -> str:
        """Return how many rounds in a row have failed, and the reason of the latest failure; empty if there
        were few."""
        if self._failures < FAILURES_MIN:
            return ""
        seconds = time.monotonic() - self._failed_at
        return f"{self._failures} rounds in a row failed here in {seconds:.0f} s, the last: {self._error}"

    def _is_well(self) -> bool:
        self._sick, self._batches = "", 0
        return True

    def _is_sick(self, text: str, ends: str) -> None:
        if not self._sick:
            self._sick_at = time.monotonic()
        self._sick, self._ends = text, ends
