"""The gradients that an optimizer with a target batch has gathered for its next step."""

from collections.abc import Mapping, Sequence

import torch

from crypto.identity import PeerId
from gossip.averaging.robust.reduction import Vector
from gossip.roster import Report
from node.averaging.rounds import Round
from node.optimizer.batch import BatchSamples
from node.optimizer.session import TrainingSession
from node.optimizer.trained import TrainedTensors


class GatheredGradients:
    """The gradients of one peer, of `samples` samples; those of others are estimated separately."""

    def __init__(self, trained: TrainedTensors) -> None:
        self._trained = trained
        self._sum: Vector | None = None
        self.samples = 0
        self._others = BatchSamples()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added since the last step."""
        return self._sum is None

    def add(self, gradients: Sequence[torch.Tensor | None], samples: int) -> None:
        """Add the mean gradients of this many samples."""
        parameters = self._trained.parameters
        if self._sum is None:
            self._sum = parameters.empty()
            self._sum.fill(0)
        parameters.add_scaled(self._sum, gradients, float(samples))
        self.samples += samples

    def mean(self) -> Vector:
        """Return the mean gradient over all samples."""
        assert self._sum is not None
        mean: Vector = self._sum / self._sum.dtype.type(self.samples)
        return mean

    def total(self, step: int, target: int, awaited: Mapping[PeerId, Report]) -> int:
        """Return how many samples this peer and all at the same step have gathered."""
        return self._others.total(self.samples, step, target, awaited)

    def completed(self, made: Round, session: TrainingSession | None, weighting: str) -> None:
        """Note the round that averaged the gradients."""
        self._others.completed(made, self.samples, session, weighting)

    def drop(self) -> int:
        """Begin anew; return how many samples are dropped."""
        dropped, self._sum, self.samples = self.samples, None, 0
        return dropped
