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
    """The gradients of this peer, from `samples` samples. The samples of other peers are estimated."""

    def __init__(self, trained: TrainedTensors) -> None:
        self._trained = trained
        self._sum: Vector | None = None
        self.samples = 0
        self._others = BatchSamples()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was added since the previous step."""
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
        """Return the number of samples gathered by this peer and all peers at the same step."""
        return self._others.total(self.samples, step, target, awaited)

    def completed(self, made: Round, session: TrainingSession | None, weighting: str) -> None:
        """Record the round that averaged the gradients."""
        self._others.completed(made, self.samples, session, weighting)

    def drop(self) -> int:
        """Discard the gradients; return how many samples are lost."""
        dropped, self._sum, self.samples = self.samples, None, 0
        return dropped
