"""Messages of a run's members about the next plan, and the vote that binds an acceptor.

Single-decree Paxos (Lamport 2001, "Paxos Made Simple") for each height of the chain. The plan to be followed
names the instance, with `fork` if a minority continues alone. The value is an encoded `Change`.
"""

from typing import Annotated

import msgspec
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import CHANGE_BYTES_MAX
from partition.plan.plan import NO_HASH, Count, Hash, Height, Peer, StepNumber

LINKS_MAX = 64
"""Changes that a member keeps; a member that missed more returns as a newcomer."""
LINKS_BYTES_MAX = 256 * 1024
"""Their total size, so that they fit one message; usual changes have some hundred bytes."""
AGREEMENT_BYTES_MAX = LINKS_BYTES_MAX + 16 * 1024
"""The longest message: a Decided of all links, with its fields."""
ROUNDS_AHEAD_MAX = 2**24
"""Largest raise of the round by one message: exhausting all rounds takes 2^39 messages, and half a year of
honest duels fits."""

Round = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Link = Annotated[bytes, msgspec.Meta(min_length=1, max_length=CHANGE_BYTES_MAX)]


class Ballot(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One attempt to have a value accepted; the higher round wins, and among equal rounds the higher peer
    id."""

    round: Round
    peer: Peer


class PlanMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base. `parent` is the hash of the plan to be followed, and names the height."""

    run: Hash
    parent: Hash
    fork: Hash = NO_HASH


class Prepare(PlanMessage, frozen=True, kw_only=True, tag="prepare"):
    """Proposer to acceptor (1a): promise to accept nothing below `ballot`."""

    ballot: Ballot


class Promised(PlanMessage, frozen=True, kw_only=True, tag="promised"):
    """Acceptor to proposer (1b): promised, with the value and ballot accepted before, if any."""

    ballot: Ballot
    accepted: Ballot | None = None
    value: Link | None = None


class PreemptedBallot(PlanMessage, frozen=True, kw_only=True, tag="outbid"):
    """Acceptor to proposer: `ballot` is refused, since a higher one is promised."""

    ballot: Ballot
    promised: Ballot


class Accept(PlanMessage, frozen=True, kw_only=True, tag="accept"):
    """Proposer to acceptor (2a): accept this value."""

    ballot: Ballot
    value: Link


class Accepted(PlanMessage, frozen=True, kw_only=True, tag="accepted"):
    """Acceptor to proposer (2b): accepted."""

    ballot: Ballot


class Decided(PlanMessage, frozen=True, kw_only=True, tag="decided"):
    """To all: these changes follow `parent`, in order. `whole`: the sender knows nothing before them."""

    links: Annotated[tuple[Link, ...], msgspec.Meta(max_length=LINKS_MAX)]
    whole: bool = False


class ChainHead(PlanMessage, frozen=True, kw_only=True, tag="head"):
    """A member's status, sent periodically. `parent` is the newest plan it knows.

    `fork` is that plan's, so it names the branch. `step` steps are committed, of `samples` samples in all;
    `hosts` is whether it could take a stage; `checkpoint_step` is that of its newest checkpoint. If it
    `asks`, a receiver that knows more answers.
    """

    height: Height
    step: StepNumber = 0
    samples: Count = 0
    hosts: bool = False
    checkpoint_step: StepNumber = 0
    asks: bool = True

    @property
    def plan(self) -> bytes:
        """The hash of the newest plan it knows."""
        return self.parent


AgreementMessage = Prepare | Promised | PreemptedBallot | Accept | Accepted | Decided | ChainHead

Sends = list[tuple[PeerId, AgreementMessage]]


def other_branch_wins(mine: ChainHead, theirs: ChainHead) -> bool:
    """Return whether their branch wins against mine: by more committed samples, then the higher step, then
    the lower name of its last fork, which no later plan changes, then the lower plan hash. Exactly one of two
    different heads wins, from either side."""
    ours, other = (mine.samples, mine.step), (theirs.samples, theirs.step)
    return other > ours or (other == ours and (theirs.fork, theirs.plan) < (mine.fork, mine.plan))


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """An acceptor's commitments in one instance, kept across restarts.

    `promise` and `accept` return the next vote; a repeat returns the same.
    """

    promised: Ballot | None = None
    accepted: Ballot | None = None
    value: Link | None = None

    def forbids(self, ballot: Ballot) -> bool:
        """Return whether a higher ballot is promised."""
        return self.promised is not None and ballot < self.promised

    def promise(self, ballot: Ballot) -> "Vote":
        """Return the vote after a Prepare that it allows."""
        return replace(self, promised=ballot)

    def accept(self, ballot: Ballot, value: bytes) -> "Vote":
        """Return the vote after an Accept that it allows; RemoteProtocolError if the ballot had another value
        before."""
        if ballot == self.accepted and value != self.value:
            raise RemoteProtocolError("two values at one ballot")
        return Vote(ballot, ballot, value)
