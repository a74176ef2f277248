"""A member as this peer sees it, and the events about its changes.

Only frozen values that a shell shows, stores or acts on. `gossip.table` is the table behind them.
"""

import enum
from dataclasses import dataclass

from crypto.contact import NAME_LENGTH_MAX, Address
from crypto.identity import PeerId

METADATA_BYTES_MAX = 300
"""Size limit of opaque metadata, such as a capacity or a version, that travels with every alive fact."""


class Status(enum.StrEnum):
    """The status held of a member. At one incarnation a later value in this list overrides an earlier one."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True)
class Profile:
    """A member's description of itself: a name (40 letters), addresses, and opaque metadata (300 bytes).

    All of it travels in one signed fact of a datagram's size. Addresses that do not fit are left out from the
    end (about 240 bytes, four or more, always fit). Put the best first.

    Raises ValueError: the name is too long or unprintable, or the metadata too large.
    """

    name: str
    addresses: tuple[Address, ...]
    metadata: bytes = b""

    def __post_init__(self) -> None:
        if len(self.name) > NAME_LENGTH_MAX or not self.name.isprintable():
            raise ValueError(f"a member name has at most {NAME_LENGTH_MAX} printable letters")
        if len(self.metadata) > METADATA_BYTES_MAX:
            raise ValueError(f"metadata of {len(self.metadata)} bytes, at most {METADATA_BYTES_MAX} allowed")


@dataclass(frozen=True)
class SwarmMember:
    """One member at one moment.

    `since` is the time of its last status change (monotonic seconds of this peer). `reason` says why it is
    suspect, dead or left ("no ack for 1.1 s, says lab-3"), empty for alive; `accuser` signed that verdict.
    `found_through` first told us of it, None for this peer itself.
    """

    peer: PeerId
    name: str
    addresses: tuple[Address, ...]
    metadata: bytes
    status: Status
    incarnation: int
    since: float
    reason: str
    accuser: PeerId | None
    found_through: PeerId | None

    @property
    def live(self) -> bool:
        """Whether it is alive, or suspect and not yet declared dead."""
        return self.status in (Status.ALIVE, Status.SUSPECT)


@dataclass(frozen=True)
class MemberUp:
    """A member is new, or returned after it was dead or had left."""

    peer: PeerId
    name: str
    addresses: tuple[Address, ...]
    metadata: bytes
    incarnation: int
    found_through: PeerId


@dataclass(frozen=True)
class MemberChanged:
    """A live member has a new name, new addresses or new metadata."""

    peer: PeerId
    name: str
    addresses: tuple[Address, ...]
    metadata: bytes
    incarnation: int


@dataclass(frozen=True)
class MemberSuspected:
    """A member did not answer `accuser`; it has time to refute."""

    peer: PeerId
    accuser: PeerId
    reason: str


@dataclass(frozen=True)
class MemberRefuted:
    """A suspected member refuted by a higher incarnation."""

    peer: PeerId
    incarnation: int


@dataclass(frozen=True)
class MemberDown:
    """A member is declared dead; it stays listed, with the reason."""

    peer: PeerId
    accuser: PeerId
    reason: str


class Condition(enum.StrEnum):
    """Why a live member counts as degraded."""

    LATE = "late"
    NO_PATH = "no path"


@dataclass(frozen=True)
class MemberDegraded:
    """A live member answers this peer late, or only through others. `rate` is the share of the latest probes
    that it answered in time, `seconds` the time of an answer."""

    peer: PeerId
    condition: Condition
    rate: float
    seconds: float
    reason: str


@dataclass(frozen=True)
class MemberRecovered:
    """A degraded member itself answers in time again."""

    peer: PeerId


@dataclass(frozen=True)
class MemberLeft:
    """A member said goodbye."""

    peer: PeerId


@dataclass(frozen=True)
class MemberForgotten:
    """A member is no longer listed: it was dead or had left long ago, or is now outside of the scope."""

    peer: PeerId


@dataclass(frozen=True)
class NeighbourhoodLookupWanted:
    """This peer may miss neighbours. Only in swarms of neighbourhoods: the driver of this core should look up
    the peers nearest to `key`, as a DHT does, and `join` through them."""

    key: bytes


@dataclass(frozen=True)
class CandidateFound:
    """A stranger that a member named must be probed, at these addresses, before it is listed."""

    peer: PeerId
    addresses: tuple[Address, ...]
    introducer: PeerId


@dataclass(frozen=True)
class FactsRefused:
    """Facts that `sender` passed on earlier are forged or malformed."""

    sender: PeerId
    reason: str


@dataclass(frozen=True)
class BroadcastHeard:
    """A broadcast by a user of `author`; of two under a topic the higher `sequence` is newer."""

    author: PeerId
    topic: bytes
    sequence: int
    data: bytes


@dataclass(frozen=True)
class SelfAccused:
    """`accuser` suspected this peer or declared it dead; `incarnation` is the new one that refutes it."""

    accuser: PeerId
    reason: str
    incarnation: int


@dataclass(frozen=True)
class OtherLifeHeard:
    """A fact of this peer's own key names another life: an earlier one, or a concurrent one. The driver of
    this core may check whether it lives at these addresses."""

    addresses: tuple[Address, ...]


@dataclass(frozen=True)
class RivalFound:
    """Another process runs with this peer's key, as after copying a data folder: it has named this life.
    `started_milliseconds` is the unix time of its start by its own clock. If it `is_younger` it must stop.
    Otherwise this peer must, and no longer announces itself."""

    started_milliseconds: int
    name: str
    addresses: tuple[Address, ...]
    is_younger: bool


@dataclass(frozen=True)
class RivalOutlived:
    """This peer announces itself beside a younger process with its key, or after it. The driver of this core
    begins new sessions with each peer, since their packets may go to the other process."""


Event = (
    MemberUp
    | MemberChanged
    | MemberSuspected
    | MemberRefuted
    | MemberDown
    | MemberLeft
    | MemberForgotten
    | SelfAccused
    | RivalFound
    | RivalOutlived
    | OtherLifeHeard
    | NeighbourhoodLookupWanted
    | CandidateFound
    | FactsRefused
    | BroadcastHeard
    | MemberDegraded
    | MemberRecovered
)
