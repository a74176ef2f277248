"""The context that all members of one run in a world of cores share."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.run.provider import StageProvider
from partition.run.settings import RunSettings
from sim.observers import Broken
from sim.scenario import TrainingScenario
from sim.worlds.factories import Cores
from sim.worlds.integer_stage import Truth
from sim.worlds.run_messages import Question
from sim.worlds.streams import Answer, StreamEnvironment, Streams


@dataclass(frozen=True)
class Setting:
    """The shared context. `pool` has the possible members, the requester first. `alive` holds, for each peer,
    which others are alive according to its membership core."""

    number: int
    run: bytes
    training: TrainingScenario
    seed: int
    pool: tuple[PeerId, ...]
    cores: Cores
    truth: Truth
    ground: StreamEnvironment
    streams: Streams
    publish: Callable[[PeerId, Any], None]
    name: Callable[[PeerId], str]
    alive: Callable[[PeerId], Mapping[PeerId, bool]]
    slowness: Callable[[PeerId], float]
    put: Callable[[PeerId, PeerId, Question, Answer], None]
    """Delivers a request of the first peer to the second."""
    counters: Counter[str]
    provider: Callable[[PeerId], StageProvider]
    settings: RunSettings
    first: Plan | None = None
    """The first plan of the run, once it has begun."""

    @property
    def requester(self) -> PeerId:
        return self.pool[0]

    @property
    def tie_breaker(self) -> PeerId | None:
        """Return the member that breaks a tie of the voters, if the run has one."""
        return self.requester if self.training.on_lost_quorum == "requester" else None

    def check_loss(self, step: int, loss: float) -> None:
        """Raise Broken if a committed step's loss differs from the undisturbed run."""
        if loss != self.truth.loss(step):
            raise Broken(
                "sums", f"step {step} of run {self.number} has loss {loss} instead of {self.truth.loss(step)}"
            )
