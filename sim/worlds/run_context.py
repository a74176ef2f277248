"""The common context of all members of one run in a world of cores."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.run.provider import StageProvider
from partition.run.settings import RunSettings
from sim.observers import Broken
from sim.scenario import Training
from sim.worlds.factories import Cores
from sim.worlds.integer_stage import Truth
from sim.worlds.run_messages import Question
from sim.worlds.streams import Answer, Ground, Streams


@dataclass(frozen=True)
class Setting:
    """`pool` are the peers that may be members, the requester first. `alive` says for each peer that another
    one's membership core has told of whether it lives."""

    number: int
    run: bytes
    training: Training
    seed: int
    pool: tuple[PeerId, ...]
    cores: Cores
    truth: Truth
    ground: Ground
    streams: Streams
    publish: Callable[[PeerId, Any], None]
    name: Callable[[PeerId], str]
    alive: Callable[[PeerId], Mapping[PeerId, bool]]
    slowness: Callable[[PeerId], float]
    put: Callable[[PeerId, PeerId, Question, Answer], None]
    """Hands a question of the first peer to the second."""
    counters: Counter[str]
    provider: Callable[[PeerId], StageProvider]
    settings: RunSettings
    first: Plan | None = None
    """The plan that the run began with, once it has."""

    @property
    def requester(self) -> PeerId:
        return self.pool[0]

    @property
    def tie_breaker(self) -> PeerId | None:
        """The member with which half of the voters decide, if the run has one."""
        return self.requester if self.training.on_lost_quorum == "requester" else None

    def check_loss(self, step: int, loss: float) -> None:
        """Raises Broken where a committed step has another loss than in the undisturbed run."""
        if loss != self.truth.loss(step):
            raise Broken(
                "sums", f"step {step} of run {self.number} has loss {loss}, not {self.truth.loss(step)}"
            )
