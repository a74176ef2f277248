"""Events of a simulated world that no core reports: frozen, in the past tense.

A world publishes these through `sim.observers`, together with the events of its cores (`gossip.member`,
`dht.events`). "The peer" in a docstring is the peer under which an event is published. It is None if the
event concerns the whole world.
"""

from dataclasses import dataclass

from crypto.identity import PeerId


@dataclass(frozen=True)
class PeerStarted:
    """The peer started, for the first time or again. `remembers`: it has the disk of its previous process."""

    region: str
    remembers: bool


@dataclass(frozen=True)
class PeerStopped:
    """The peer stopped. `why` is crash (without a goodbye), leave (with a goodbye), or another cause."""

    why: str


@dataclass(frozen=True)
class PeerFrozen:
    """The peer is frozen for `seconds`: it sends nothing, messages wait, and its timers fire late."""

    seconds: float


@dataclass(frozen=True)
class PeerSlowed:
    """The peer's computing takes `factor` times as long from now on; 1 is normal."""

    factor: float


@dataclass(frozen=True)
class ReachabilityJudged:
    """The peer judged, from the dial-backs of `asked` peers, whether it is reachable (None: unknown)."""

    reachable: bool | None
    asked: int


@dataclass(frozen=True)
class NetworkSplit:
    """No message passes between these sides any more. All peers that are in none of them form one further
    side."""

    sides: tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True)
class NetworkHealed:
    """All peers can reach each other again."""


@dataclass(frozen=True)
class RecordWanted:
    """The peer began to store (`found` is None) or to look up a record with this key."""

    key: int
    storing: bool


@dataclass(frozen=True)
class RecordPublished:
    """The peer signed a record. It signs the same key and value again before the record expires."""

    key: bytes
    value: bytes
    sequence: int


@dataclass(frozen=True)
class RecordGot:
    """The outcome of a store or a lookup: the number of `copies` stored or records found, the seconds and the
    rounds.

    `expected`: whether a live publisher had an unexpired record that could be found.
    """

    key: int
    storing: bool
    copies: int
    expected: bool
    seconds: float
    rounds: int


@dataclass(frozen=True)
class PlanAdopted:
    """The peer, a member of `run`, considers the plan of this height to be in force."""

    run: bytes
    height: int
    plan: bytes
    parent: bytes


@dataclass(frozen=True)
class BranchLeft:
    """The peer leaves its branch of the run for a different branch."""

    run: bytes


@dataclass(frozen=True)
class PathOpened:
    """The peer has opened a path to a second peer: direct, punched, or relayed."""

    peer: PeerId
    way: str


@dataclass(frozen=True)
class PlaceFound:
    """A relay has given the peer a place, through which other peers reach it."""

    relay: PeerId


@dataclass(frozen=True)
class PlaceLost:
    """The peer has lost its place at a relay."""

    relay: PeerId


@dataclass(frozen=True)
class RouterRebooted:
    """The router in front of the peer has forgotten all its mappings."""


@dataclass(frozen=True)
class SamplesCounted:
    """The peer applied the committed step to its copy of this stage; its sums included these
    micro-batches."""

    run: bytes
    plan: bytes
    step: int
    stage: int
    microbatches: tuple[int, ...]


@dataclass(frozen=True)
class StepCommitted:
    """The committer of a plan committed a step. For each stage: which replica counts which micro-batches."""

    run: bytes
    plan: bytes
    height: int
    step: int
    counted: tuple[tuple[tuple[PeerId, tuple[int, ...]], ...], ...]
    loss: float


@dataclass(frozen=True)
class RunEnded:
    """The peer considers the run ended (done, failed or stopped), for the reason `why`."""

    run: bytes
    outcome: str
    reason: str


@dataclass(frozen=True)
class ColumnStepped:
    """The peer, a head in local mode, has made this step with its column of `holders`, which served as its
    stages."""

    run: bytes
    step: int
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class StageAveraged:
    """The peer's copy of a stage in local mode became the mean of the copies of this many `members`."""

    run: bytes
    stage: int
    members: int


@dataclass(frozen=True)
class LocalRunEnded:
    """A run in local mode ended for the peer: done, failed, or left. `weights` names its result."""

    run: bytes
    outcome: str
    reason: str
    weights: str


@dataclass(frozen=True)
class AnswerEnded:
    """An answer that the peer requested from a service has ended: its number of tokens, whether each was
    right, and how often it moved to a new route (`moves`). `pause_seconds` is the longest time between two
    tokens."""

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
    """The peer reports that this averaging attempt succeeded with exactly these members. `digest` is the hash
    of the result."""

    round: bytes
    attempt: int
    entered: tuple[PeerId, ...]
    digest: bytes
