"""Copies of the state for peers that join late: when a copy is made, and its content."""

import time
from collections.abc import Mapping, Sequence

import torch

from gossip.averaging.strategies import Strategy
from gossip.roster import Report
from node.averaging.offered import SNAPSHOT_SECONDS
from node.optimizer.layout import Layout
from node.optimizer.session import TrainingSession
from node.optimizer.state import copy_state, outer_arrays

COPY_PAUSES = 9.0
"""The pause between copies, as a multiple of the duration of the previous copy. So even if peers ask at each
step, copies take at most a tenth of the time."""


class Handout:
    """Hands out the state of one optimizer. The training thread calls it while no tensor is being changed."""

    def __init__(
        self,
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        counts: Mapping[str, torch.Tensor],
        local_steps: int | None,
    ) -> None:
        self._layout = layout
        self._optimizers = optimizers
        self._counts = counts
        # With a target batch, a peer that has the state of an earlier step is immediately behind.
        self._good_seconds = 0.0 if local_steps is None else SNAPSHOT_SECONDS
        self._next_at = 0.0
        self._is_left_behind = False

    def train(self, layout: Layout, counts: Mapping[str, torch.Tensor]) -> None:
        """From now on, use other trained tensors."""
        self._layout, self._counts = layout, counts

    def made_step(self, step: int, reports: Sequence[Report], members: int) -> None:
        """Record the step after `step`, made with a round of this many members, including this one. Peers
        that missed it, or have just joined, need this state, and there may be no later step at which to copy
        it.
        """
        behind = sum(not report.has_state or report.step.equals(step) for report in reports)
        self._is_left_behind = behind >= members

    def share(
        self, session: TrainingSession, step: int, rounds: int, lineage: bytes, strategy: Strategy | None
    ) -> None:
        """Make a copy if a peer waits for it, or was left behind by the latest step."""
        is_wanted = self._is_left_behind or session.wants_state(step)
        if is_wanted and time.perf_counter() >= self._next_at:
            self._is_left_behind = False
            self._make(session, step, rounds, lineage, strategy, self._good_seconds)

    def share_first(
        self, session: TrainingSession, step: int, rounds: int, lineage: bytes, strategy: Strategy | None
    ) -> None:
        """Copy this peer's initial state, which is handed out until its first step."""
        self._make(session, step, rounds, lineage, strategy, 0.0)

    def _make(
        self,
        session: TrainingSession,
        step: int,
        rounds: int,
        lineage: bytes,
        strategy: Strategy | None,
        good_seconds: float,
    ) -> None:
        begun = time.perf_counter()
        outer = {} if strategy is None else strategy.state()
        arrays = copy_state(self._layout, self._optimizers, self._counts) | outer_arrays(outer)
        session.offer(step, rounds, lineage, arrays, good_seconds)
        ended = time.perf_counter()
        self._next_at = ended + COPY_PAUSES * (ended - begun)
