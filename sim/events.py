"""Events of a simulated world that no core learns of itself: frozen, in the past tense.

A world publishes these beside what its cores learn (`gossip.member`, `dht.events`), all through
`sim.observers`. The subject is the peer an event is published under; where it concerns the whole world, that
is None.
"""

from dataclasses import dataclass

from crypto.identity import PeerId


@dataclass(frozen=True)
class PeerStarted:
    """The peer runs, for the first time or again. `remembers`: its disk is that of its earlier life."""

    region: str
    remembers: bool


@dataclass(frozen=True)
class PeerStopped:
    """The peer is gone; `why` is crash (without a word), leave (it said goodbye), or what took it along."""

    why: str


@dataclass(frozen=True)
class PeerFrozen:
    """The peer stands still for so long: nothing leaves, what comes waits, its timers fire late."""

    seconds: float


@dataclass(frozen=True)
class PeerSlowed:
    """The peer's computing takes `factor` times as long from now on; 1 is the usual."""

    factor: float


@dataclass(frozen=True)
class ReachabilityJudged:
    """Another peer has tried to dial the peer back: whether it considers itself reachable, None while it does
    not know; of how many that tried."""

    reachable: bool | None
    asked: int


@dataclass(frozen=True)
class NetworkSplit:
    """Nothing passes between these sides any more; whoever is in none is with its like."""

    sides: tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True)
class NetworkHealed:
    """All can reach each other again."""


@dataclass(frozen=True)
class RecordWanted:
    """The peer began to store (`found` is None) or to look for a record of this key."""

    key: int
    storing: bool


@dataclass(frozen=True)
class RecordPublished:
    """The peer signed a record: now, and with the same key and value again before it expires."""

    key: bytes
    value: bytes
    sequence: int


@dataclass(frozen=True)
class RecordGot:
    """The outcome of a store or a lookup: `copies` stored or records found, in these seconds and rounds.

    `expected`: whether a live publisher's unexpired record was there to be found.
    """

    key: int
    storing: bool
    copies: int
    expected: bool
    seconds: float
    rounds: int


@dataclass(frozen=True)
class PlanAdopted:
    """The peer, a member of `run`, takes the plan of this height to be in force."""

    run: bytes
    height: int
    plan: bytes
    parent: bytes


@dataclass(frozen=True)
class BranchLeft:
    """The peer leaves the branch of the run that it was on: another one goes on."""

    run: bytes


@dataclass(frozen=True)
class PathOpened:
    """The peer has a path to another one: direct, punched, or relayed."""

    peer: PeerId
    way: str


@dataclass(frozen=True)
class PlaceFound:
    """A relay keeps a place for the peer: others reach it there."""

    relay: PeerId


@dataclass(frozen=True)
class PlaceLost:
    """The place at a relay is lost."""

    relay: PeerId


@dataclass(frozen=True)
class RouterRebooted:
    """The router before the peer has forgotten every mapping."""


@dataclass(frozen=True)
class SamplesCounted:
    """In its copy of this stage the peer applied the committed step; its sums held these micro-batches."""

    run: bytes
    plan: bytes
    step: int
    stage: int
    microbatches: tuple[int, ...]


@dataclass(frozen=True)
class StepCommitted:
    """The committer of a plan committed a step: per stage which replica counts which micro-batches."""

    run: bytes
    plan: bytes
    height: int
    step: int
    counted: tuple[tuple[tuple[PeerId, tuple[int, ...]], ...], ...]
    loss: float


@dataclass(frozen=True)
class RunEnded:
    """The peer holds the run for ended: done, failed or stopped, and why."""

    run: bytes
    outcome: str
    reason: str


@dataclass(frozen=True)
class AnswerEnded:
    """An answer that the peer asked a service for is over: of so many tokens, each the right one or not, over
    `moves` further routes; `pause_seconds` is the longest time between two tokens."""

    service: bytes
    outcome: str
    tokens: int
    is_right: bool
    moves: int
    first_seconds: float
    pause_seconds: float
    seconds: float


@dataclass(frozen=True)
class Averaged:
    """The peer says that this attempt at averaging succeeded with exactly these in it; `digest` is of the
    result."""

    round: bytes
    attempt: int
    entered: tuple[PeerId, ...]
    digest: bytes
