"""A member as this peer sees it, and the events about its changes.

Only frozen values, for the caller to show, store or act on. `gossip.table` is the table behind them.
"""

import enum
from dataclasses import dataclass

from crypto.contact import NAME_LENGTH_MAX, Address
from crypto.identity import PeerId

METADATA_BYTES_MAX = 300
"""Maximum size of the opaque metadata, such as a capacity or a version, that travels with every alive
fact."""


class Status(enum.StrEnum):
    """The status of a member. At the same incarnation, a later value in this list overrides an earlier
    one."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True)
class Profile:
    """A member's description of itself: a name (up to 40 characters), addresses, and opaque metadata (up to
    300 bytes).

    All of it travels in one signed fact that fits into a datagram. Addresses that do not fit are left out
    from the end, so put the best ones first. About 240 bytes of addresses, four or more, always fit.

    Raises ValueError: the name is too long or unprintable, or the metadata too large.
    """

    name: str
    addresses: tuple[Address, ...]
    metadata: bytes = b""

    def __post_init__(self) -> None:
        if len(self.name) > NAME_LENGTH_MAX or not self.name.isprintable():
            raise ValueError(f"a member name has at most {NAME_LENGTH_MAX} printable characters")
        if len(self.metadata) > METADATA_BYTES_MAX:
            raise ValueError(f"metadata of {len(self.metadata)} bytes, at most {METADATA_BYTES_MAX} allowed")


@dataclass(frozen=True)
class SwarmMember:
    """One member at one moment.

    `since` is the time of its latest status change (monotonic seconds of this peer). `reason` says why it is
    suspect, dead or left ("no ack for 1.1 s, says lab-3"); it is empty if the member is alive. `accuser`
    signed that verdict. `found_through` is the peer that first named the member to us; None for this peer
    itself.
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
        """Whether the member is alive, or suspect and not yet declared dead."""
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
    """A member did not answer `accuser`; it still has time to refute."""

    peer: PeerId
    accuser: PeerId
    reason: str


@dataclass(frozen=True)
class MemberRefuted:
    """A suspected member has refuted the suspicion with a higher incarnation."""

    peer: PeerId
    incarnation: int


@dataclass(frozen=True)
class MemberDown:
    """A member was declared dead. It stays listed, with the reason."""

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
    that it answered in time, `seconds` the time that an answer takes."""

    peer: PeerId
    condition: Condition
    rate: float
    seconds: float
    reason: str


@dataclass(frozen=True)
class MemberRecovered:
    """A degraded member answers directly and in time again."""

    peer: PeerId


@dataclass(frozen=True)
class MemberLeft:
    """A member said goodbye."""

    peer: PeerId


@dataclass(frozen=True)
class MemberForgotten:
    """A member is no longer listed: it died or left long ago, or is now outside the scope."""

    peer: PeerId


@dataclass(frozen=True)
class NeighbourhoodLookupWanted:
    """This peer may lack neighbours; only in swarms that are divided into neighbourhoods. The driver of this
    core should look up the peers nearest to `key`, as in a DHT, and `join` through them."""

    key: bytes


@dataclass(frozen=True)
class CandidateFound:
    """An unknown peer that a member named must be probed at these addresses before it is listed."""

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
    """A broadcast by a user of `author`. Of two broadcasts under the same topic, the one with the higher
    `sequence` is newer."""

    author: PeerId
    topic: bytes
    sequence: int
    data: bytes


@dataclass(frozen=True)
class SelfAccused:
    """`accuser` suspected this peer or declared it dead; `incarnation` is the new incarnation that refutes
    this."""

    accuser: PeerId
    reason: str
    incarnation: int


@dataclass(frozen=True)
class OtherLifeHeard:
    """A fact signed with this peer's own key names a different life (start of a process): an earlier one, or
    a concurrent one. The driver of this core may check whether a process lives at these addresses."""

    addresses: tuple[Address, ...]


@dataclass(frozen=True)
class RivalFound:
    """Another process runs with this peer's key, as after copying a data folder: it has named this life.
    `started_milliseconds` is the Unix time of its start, by its own clock. If it `is_younger`, it must stop.
    Otherwise this peer must stop, and it no longer announces itself."""

    started_milliseconds: int
    name: str
    addresses: tuple[Address, ...]
    is_younger: bool


@dataclass(frozen=True)
class RivalOutlived:
    """This peer announces itself although a younger process with its key runs, or has just ended. The driver
    of this core must begin new sessions with each peer, because their packets may go to the other process."""


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
