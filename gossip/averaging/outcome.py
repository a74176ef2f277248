"""The outcome of an averaging attempt, and how long its members wait for each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.averaging.robust.reduction import Vector


@dataclass(frozen=True)
class Patience:
    """How long a member waits, in seconds. `gossip.averaging.pace` computes these times from measurements.

    `scatter_seconds`: for all senders, from the start. `commit_seconds`: additional time for the other
    owners' have-sets. `gather_seconds`: for all parts, once the commit is known. `stall_seconds`: for the
    next chunk of any sender or owner. `ask_seconds`: between requests for missing data. `agree_seconds`: for
    the others to declare the same result, or send their evidence. `linger_seconds`: for passing on data after
    this member is done. `unheard_seconds`: for the first message of each member, no matter how much data it
    has to send.
    """

    scatter_seconds: float = 30.0
    commit_seconds: float = 10.0
    gather_seconds: float = 30.0
    stall_seconds: float = 10.0
    ask_seconds: float = 1.0
    linger_seconds: float = 30.0
    agree_seconds: float = 2.0
    unheard_seconds: float = inf


class Reason(StrEnum):
    """The reason why this member averaged nothing."""

    OWNER_LOST = "a member that reduces was lost"
    TOO_FEW = "fewer than two members' tensors arrived everywhere"
    NO_HAVE_SETS = "not all members that reduce said what they hold"
    INCOMPLETE = "not all reduced parts arrived"
    CONTRADICTED = "a member that reduces signed two results"
    NOT_FINITE = "the mean is not finite"
    ALONE = "nobody else to average with"
    FINISHED = "the others finished without this peer"
    CANCELLED = "cancelled here"


@dataclass(frozen=True)
class Averaged:
    """Success. `shares` gives each contributor's fraction of the total weight; the shares add up to 1.

    A member that came too late gets the mean of the others, and is missing in `shares`. `digest` identifies
    the commit and the bytes, and is equal on all members that succeed. `vector` is read-only.
    """

    vector: Vector
    shares: Mapping[PeerId, float]
    digest: bytes


@dataclass(frozen=True)
class NotAveraged:
    """Nothing was averaged, and the old tensors stay. `suspects` are the peers to leave out of the next
    attempts, because their data did not arrive here in time. `withdrew` are the peers that withdrew or became
    unreachable; another member may have caused that."""

    reason: Reason
    suspects: tuple[PeerId, ...] = ()
    withdrew: tuple[PeerId, ...] = ()

    def __str__(self) -> str:
        return self.reason.value


@dataclass(frozen=True)
class Equivocation:
    """Two different facts of one author with the same purpose in one attempt: proof of a lie."""

    author: PeerId
    purpose: str
    first: Fact
    second: Fact
