"""The rounds of an optimizer with local steps. Its tensors are copied and averaged in the background, and the
difference is then added to the tensors, which were trained meanwhile.

Not here: when a round is held, and with which state (`node.optimizer.wrapper`).
"""

from collections.abc import Mapping, Sequence

import torch

from gossip.averaging.robust.reduction import Vector
from gossip.averaging.strategies import Strategy
from node.averaging.rounds import RoundWish
from node.optimizer.layout import Layout
from node.optimizer.moments import keep_above_zero, moments_of
from node.optimizer.plugins import strategy_maker
from node.optimizer.session import Exchanged, Pending, TrainingSession
from node.optimizer.settings import Settings
from node.optimizer.trained import TrainedTensors


class LocalRounds:
    """The rounds of one optimizer, one after the other. `strategy` computes the change from each round;
    without a strategy, the change is the difference from the mean."""

    def __init__(
        self, settings: Settings, trained: TrainedTensors, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._settings = settings
        self._trained = trained
        self._optimizers = optimizers
        self._make_strategy = strategy_maker(settings.strategy, settings.local_steps or 1, settings.codec)
        self.strategy: Strategy | None = None
        self._pending: Pending[Exchanged] | None = None
        self.sent = trained.tensors
        """The layout of the newest round's vector."""
        self._moments: list[tuple[str, torch.Tensor]] = []
        self._steps_since_copy = 0
        self._steps_since_round = 0
        self._samples_since_round = 0

    def start_afresh(self) -> None:
        """From now on, use other trained tensors. A round with the previous ones is given up."""
        self.sent = self._trained.tensors
        self._moments = []
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def begin_strategy(self, state: Mapping[str, Vector] | None = None) -> None:
        """Begin the strategy with the present values, and with another peer's strategy state if there is
        one."""
        lossy = self._settings.codec in ("int8", "int4")
        if self._settings.local_steps is None or (self._settings.strategy == "average" and not lossy):
            return
        vector = self._trained.tensors.empty()
        self._trained.tensors.copy_out(vector)
        self.strategy = self._make_strategy(vector)
        if state:
            try:
                self.strategy.load(state)
            except (KeyError, ValueError):  # the other peer's state is incomplete
                self.strategy = self._make_strategy(vector)

    def stepped(self, samples: int) -> None:
        """Count a step that was made here."""
        self._steps_since_copy += 1
        self._steps_since_round += 1
        self._samples_since_round += samples

    @property
    def is_due(self) -> bool:
        """Return whether it is time for the next round."""
        return self._steps_since_round >= (self._settings.local_steps or 1)

    @property
    def is_under_way(self) -> bool:
        """Return whether a round has begun whose result was not used yet."""
        return self._pending is not None

    @property
    def is_passed_over(self) -> bool:
        """Return whether a further round is due with this step while one is under way."""
        return self._steps_since_round % (self._settings.local_steps or 1) == 0

    def put_off(self) -> None:
        """Restart the count of steps until the next round."""
        self._steps_since_round = 0

    def copy(self) -> Vector:
        """Return the vector for a round that begins now, in the layout `sent`."""
        self.sent = self._trained.tensors
        if self._settings.average_moments:
            self._moments = moments_of(self._trained.parameters, self._optimizers)
            self.sent = Layout(
                [*((slot.name, slot.tensor) for slot in self._trained.tensors.slots), *self._moments]
            )
        vector = self.sent.empty()
        self.sent.copy_out(vector)
        return vector

    def begin(self, session: TrainingSession, vector: Vector, wanted: RoundWish, damping: float) -> None:
        """Begin a round with a copy that was made just now."""
        is_by_samples = self._settings.weighting == "samples"
        weight = float(max(1, self._samples_since_round)) if is_by_samples else 1.0
        self._steps_since_copy = self._steps_since_round = self._samples_since_round = 0
        self._pending = session.exchange(
            vector, weight, wanted, self.strategy, lambda: self._steps_since_copy, damping
        )

    def wait(self, timeout_seconds: float) -> None:
        """Wait for the round that is under way."""
        if self._pending is not None:
            self._pending.wait(timeout_seconds)

    def cancel(self) -> None:
        """Give up the round that is under way; it ends a moment later."""
        if self._pending is not None:
            self._pending.cancel()

    def use_finished(self) -> Exchanged | str | None:
        """Add the change from a finished round to the tensors. Return the round's outcome, or None if no
        round has finished."""
        if self._pending is None or not self._pending.is_over:
            return None
        outcome, self._pending = self._pending.outcome(), None
        if not isinstance(outcome, str) and outcome.difference is not None:
            if self._steps_since_copy == 0 and outcome.taken is not None:
                self.sent.copy_in(outcome.taken)
            else:
                self.sent.add(outcome.difference)
            keep_above_zero(self._moments)
        return outcome
