"""Events of a simulated world that no core reports: frozen, in the past tense.

A world publishes these beside its cores' events (`gossip.member`, `dht.events`), all through `sim.observers`.
The subject is the peer under which an event is published; it is None where the event concerns the whole
world.
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
    """The peer stopped; `why` is crash (without a word), leave (with a goodbye), or the cause."""

    why: str


@dataclass(frozen=True)
class PeerFrozen:
    """The peer is frozen for so long: it sends nothing, messages wait, its timers fire late."""

    seconds: float


@dataclass(frozen=True)
class PeerSlowed:
    """The peer's computing takes `factor` times as long from now on; 1 is the usual."""

    factor: float


@dataclass(frozen=True)
class ReachabilityJudged:
    """The peer judged by dial-backs of others whether it is reachable (None: not known yet), and of how
    many."""

    reachable: bool | None
    asked: int


@dataclass(frozen=True)
class NetworkSplit:
    """No message passes between these sides any more; peers in none of them form one further side."""

    sides: tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True)
class NetworkHealed:
    """All can reach each other again."""


@dataclass(frozen=True)
class RecordWanted:
    """The peer began to store (`found` is None) or to look up a record of this key."""

    key: int
    storing: bool


@dataclass(frozen=True)
class RecordPublished:
    """The peer signed a record: now, and again with the same key and value before it expires."""

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
    """The peer leaves its branch of the run for another one."""

    run: bytes


@dataclass(frozen=True)
class PathOpened:
    """The peer has a path to another one: direct, punched, or relayed."""

    peer: PeerId
    way: str


@dataclass(frozen=True)
class PlaceFound:
    """A relay grants the peer a place, where others reach it."""

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
    """The peer applied the committed step in its copy of this stage; its sums held these micro-batches."""

    run: bytes
    plan: bytes
    step: int
    stage: int
    microbatches: tuple[int, ...]


@dataclass(frozen=True)
class StepCommitted:
    """The committer of a plan committed a step: per stage, which replica counts which micro-batches."""

    run: bytes
    plan: bytes
    height: int
    step: int
    counted: tuple[tuple[tuple[PeerId, tuple[int, ...]], ...], ...]
    loss: float


@dataclass(frozen=True)
class RunEnded:
    """The peer considers the run ended: done, failed or stopped, and why."""

    run: bytes
    outcome: str
    reason: str


@dataclass(frozen=True)
class ColumnStepped:
    """The peer, a head in local mode, has made this step with its column: `holders` worked as its stages."""

    run: bytes
    step: int
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class StageAveraged:
    """The peer's copy of a stage in local mode is the mean of so many members."""

    run: bytes
    stage: int
    members: int


@dataclass(frozen=True)
class LocalRunEnded:
    """A run in local mode is over for the peer: done, failed, or left; `weights` names its result."""

    run: bytes
    outcome: str
    reason: str
    weights: str


@dataclass(frozen=True)
class AnswerEnded:
    """An answer that the peer requested from a service is over: its number of tokens, whether each was right,
    and over how many further routes (`moves`); `pause_seconds` is the longest time between two tokens."""

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
    """The peer reports that this attempt at averaging succeeded with exactly these members; `digest` is of
    the result."""

    round: bytes
    attempt: int
    entered: tuple[PeerId, ...]
    digest: bytes
