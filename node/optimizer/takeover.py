"""Takes over the state of another peer: fetches it, checks it, tests it on own data, and puts it in place.

The test needs the user's `own_loss`. A state whose loss is worse than the own state's by more than a bound is
refused, and the next state is tried.

Not here: when a peer takes over a state, and of which step (`node.optimizer.position`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from crypto.identity import PeerId
from gossip.claims import LikelySteps
from node.averaging.loss_bound import is_within, loss_max
from node.averaging.snapshot import Snapshot
from node.optimizer.layout import Layout
from node.optimizer.session import Pending, TrainingSession
from node.optimizer.state import check_state, put_state, size_of

STATE_SECONDS_MAX = 600.0
"""Time limit for one attempt to catch up. A state of many gigabytes takes minutes over a slow link."""
TRIED_MAX = 4
"""Maximum number of states tried in one attempt. Each needs a call of `own_loss`."""
POLL_SECONDS = 0.02


class Takeover:
    """Takes over states for one optimizer."""

    def __init__(
        self,
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        counts: Mapping[str, torch.Tensor],
        own_loss: Callable[[], float] | None,
    ) -> None:
        """Call `own_loss` for the initial values. Raises its errors."""
        self._layout = layout
        self._optimizers = optimizers
        self._counts = counts
        self._own_loss = own_loss
        self._first = self._loss() if own_loss is not None else 0.0
        self._pending: Pending[Snapshot] | None = None
        self._begun = 0.0
        self.lasted_seconds = 0.0
        """How long the latest attempt took, over all calls."""
        self._refused: set[PeerId] = set()
        self._tries = 0
        self._fault = ""
        self.refused_count = 0
        """The number of states refused because of their loss."""

    def train(self, layout: Layout, counts: Mapping[str, torch.Tensor]) -> None:
        """From now on, use other trained tensors."""
        self._layout, self._counts = layout, counts

    def take(
        self, session: TrainingSession, likely: LikelySteps, may_wait: Callable[[float, float], bool]
    ) -> Snapshot | str | None:
        """Replace the own state by a state of a likely step, and return it. If there is none, keep the own
        state and return the reason. Return None if the state is still on its way; a later call may return it.
        `may_wait` is called repeatedly with the seconds since this call began, and since the state was first
        requested."""
        called = time.perf_counter()
        check = partial(check_state, layout=self._layout, counts=self._counts)
        while True:
            if self._pending is None:
                self._begun = self._begun or called
                self._pending = session.fetch(
                    likely, bytes_max=size_of(self._layout), check=check, passed_over=frozenset(self._refused)
                )
            while not self._pending.is_over:
                now = time.perf_counter()
                if now - self._begun > STATE_SECONDS_MAX:
                    return self._give_up("no state arrived in time")
                if not may_wait(now - called, now - self._begun):
                    return None
                self._pending.wait(POLL_SECONDS)
            found, self._pending = self._pending.outcome(), None
            if isinstance(found, str):
                return self._give_up(found)
            if self._own_loss is None:
                put_state(found, self._layout, self._optimizers, self._counts)
                self._end()
                return found
            try:
                self._fault = self._try(found)
            except Exception as error:  # a user's function may raise anything
                self._end()
                return f"own_loss failed, so no state was taken: {type(error).__name__}: {error}"
            if not self._fault:
                self._end()
                return found
            self.refused_count += 1
            self._refused.update(found.holders)
            self._tries += 1
            if self._tries >= TRIED_MAX:
                return self._give_up("")

    def cancel(self) -> None:
        """Cancel the request for a state."""
        if self._pending is not None:
            self._pending.cancel()
        self._end()

    def _give_up(self, reason: str) -> str:
        reason = self._fault or reason
        self.cancel()
        return reason

    def _end(self) -> None:
        if self._begun:
            self.lasted_seconds = time.perf_counter() - self._begun
        self._pending, self._begun = None, 0.0
        self._refused, self._tries, self._fault = set(), 0, ""

    def _try(self, found: Snapshot) -> str:
        """Put a state in place if its loss is within the bound. Return the reason for a refusal, or ""."""
        own = _Kept(self._layout, self._optimizers, self._counts)
        loss, limit = float("nan"), loss_max(self._first, self._loss())
        try:
            put_state(found, self._layout, self._optimizers, self._counts)
            loss = self._loss()
        finally:
            if not is_within(loss, limit):
                own.put_back()
        if is_within(loss, limit):
            return ""
        return f"the state of others was refused: its loss on own data is {loss:.4g}, above {limit:.4g}"

    def _loss(self) -> float:
        assert self._own_loss is not None
        with torch.no_grad():
            return float(self._own_loss())


class _Kept:
    """A copy of the own state while another one is tested."""

    def __init__(
        self,
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        counts: Mapping[str, torch.Tensor],
    ) -> None:
        tensors = [*(slot.tensor for slot in layout.slots), *counts.values()]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        # References suffice: a taken state replaces the tensors in an optimizer's memory, and does not write
        # into them.
        self._memories = [
            (
                each,
                {
                    slot.tensor: dict(each.state[slot.tensor])
                    for slot in layout.slots
                    if slot.tensor in each.state
                },
            )
            for each in optimizers
        ]

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, kept in self._tensors:
                tensor.copy_(kept)
        for optimizer, memory in self._memories:
            for tensor, _ in self._tensors:
                optimizer.state.pop(tensor, None)
            optimizer.state.update(memory)
