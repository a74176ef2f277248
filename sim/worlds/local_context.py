"""The shared parts of a simulated run in local mode, and a member's view of its run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from crypto.facts import Fact
from crypto.identity import PeerId
from partition.run.local.seat import SeatedHead
from partition.run.local_settings import LocalSettings
from sim.scenario.model import LocalTraining
from sim.worlds.life import Life
from sim.worlds.local_rounds import RoundTable
from sim.worlds.local_truth import LocalTruth


@dataclass(frozen=True)
class CountedState:
    """The state of a stage as its counts of steps, samples and rounds."""

    step: int = 0
    samples: int = 0
    rounds: int = 0


@dataclass
class LocalDisk:
    """A peer's disk: its part in the run, the latest state of its own stage, and copies of other members'
    stages, by stage."""

    stage: int = 0
    is_training: bool = True
    chain: tuple[Fact, ...] = ()
    members: tuple[PeerId, ...] = ()
    is_saved: bool = False
    own: CountedState | None = None
    copies: dict[int, CountedState] = field(default_factory=dict)


@dataclass(frozen=True)
class Beginning:
    """How a life in the run begins. `inviter` is the peer that asked it to take part. `is_resumed`: it took
    part before a restart, together with the `known` members. `carried` are the states of the stages that it
    holds as a head that replaces a lost one."""

    stage: int = 0
    is_training: bool = True
    chain: tuple[Fact, ...] = ()
    inviter: PeerId | None = None
    is_resumed: bool = False
    known: tuple[PeerId, ...] = ()
    carried: Mapping[int, CountedState] | None = None


class Attachment:
    """A stream between a head and the holder of one stage. `detach` is called when it breaks."""

    def __init__(
        self, head: PeerId, holder: PeerId, stage: int, detach: Callable[["Attachment"], None]
    ) -> None:
        self.head, self.holder, self.stage = head, holder, stage
        self.seated = SeatedHead(head, self.end)
        self.is_open = True
        self._detach = detach

    def end(self) -> None:
        """Break the stream; both ends are notified."""
        if self.is_open:
            self.is_open = False
            self._detach(self)


class RunSurroundings(Protocol):
    """A run as one of its members sees it. `local_now` and `wall` are the times of the peer's own clock."""

    name: bytes
    pool: tuple[PeerId, ...]
    requester: PeerId
    training: LocalTraining
    settings: LocalSettings
    truth: LocalTruth
    rounds: RoundTable
    attachments: set[Attachment]

    def local_now(self, peer: PeerId) -> float: ...
    def wall(self, peer: PeerId) -> float: ...
    def rng(self, peer: PeerId) -> Random: ...
    def disk(self, peer: PeerId) -> LocalDisk: ...
    def sleep(self, seconds: float, resume: Callable[[Any], None]) -> None: ...
    def when_awake(self, peer: PeerId, action: Callable[[], None]) -> None: ...
    def slowness(self, peer: PeerId) -> float: ...
    def command(self, life: Life, protocol: str, order: Callable[[Any, float], Any]) -> None: ...
    def detached(self, attachment: Attachment) -> None: ...

    def has_slot(self, peer: PeerId) -> bool:
        """Return whether a peer offers its slot."""

    def is_gone(self, peer: PeerId) -> bool:
        """Return whether a peer's host reports that no process listens there."""

    def loss(self, step: int) -> float:
        """Return the held-out loss at `step`."""

    def ask(
        self,
        asker: PeerId,
        peer: PeerId,
        question: tuple[Any, ...],
        seconds: float,
        done: Callable[[Any], None],
    ) -> None:
        """Send a request to the member on a different peer; `done` receives the answer, or None if there is
        none."""

    def succeed(self, peer: PeerId, carried: Mapping[int, CountedState]) -> None:
        """Begin a holder's next part in the run, now as the head of its column."""

    def counted(self, head: PeerId, step: int, holders: Sequence[PeerId]) -> None:
        """Record that a head has made a step with these holders of the other stages."""

    def averaged(self, peer: PeerId, stage: int, members: int) -> None:
        """Record that a stage became the mean of `members` members."""

    def left(self, peer: PeerId, reason: str) -> None:
        """Record that a member cannot continue, while the others do."""
