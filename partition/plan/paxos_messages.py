"""Messages of a run's members about the next plan, and the vote that binds an acceptor.

Single-decree Paxos (Lamport 2001, "Paxos Made Simple") for each height of the chain. An instance is
identified by the parent plan, and by `fork` if some members continue without a majority. The value is an
encoded `Change`.
"""

from typing import Annotated

import msgspec
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import CHANGE_BYTES_MAX
from partition.plan.plan import NO_HASH, Count, Hash, Height, Peer, StepNumber

LINKS_MAX = 64
"""Maximum number of changes that a member keeps. A member that missed more returns as a newcomer."""
LINKS_BYTES_MAX = 256 * 1024
"""Maximum total size of these changes, so that they fit into one message. Typical changes have some hundred
bytes."""
AGREEMENT_BYTES_MAX = LINKS_BYTES_MAX + 16 * 1024
"""Maximum size of a message: a Decided with all links, and its other fields."""
ROUNDS_AHEAD_MAX = 2**24
"""Maximum amount by which one message may raise the round. Exhausting all rounds then takes 2^39 messages,
and half a year of honest duels still fits."""

Round = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Link = Annotated[bytes, msgspec.Meta(min_length=1, max_length=CHANGE_BYTES_MAX)]


class Ballot(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One attempt to have a value accepted. The higher round wins; among equal rounds, the higher peer id."""

    round: Round
    peer: Peer


class PlanMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages. `parent` is the hash of the plan whose successor is decided, and so identifies
    the height."""

    run: Hash
    parent: Hash
    fork: Hash = NO_HASH


class Prepare(PlanMessage, frozen=True, kw_only=True, tag="prepare"):
    """Proposer to acceptor (1a): promise to accept nothing below `ballot`."""

    ballot: Ballot


class Promised(PlanMessage, frozen=True, kw_only=True, tag="promised"):
    """Acceptor to proposer (1b): the promise, with the value and ballot that the acceptor accepted before, if
    any."""

    ballot: Ballot
    accepted: Ballot | None = None
    value: Link | None = None


class PreemptedBallot(PlanMessage, frozen=True, kw_only=True, tag="outbid"):
    """Acceptor to proposer: `ballot` is refused, because a higher ballot is promised."""

    ballot: Ballot
    promised: Ballot


class Accept(PlanMessage, frozen=True, kw_only=True, tag="accept"):
    """Proposer to acceptor (2a): accept this value."""

    ballot: Ballot
    value: Link


class Accepted(PlanMessage, frozen=True, kw_only=True, tag="accepted"):
    """Acceptor to proposer (2b): the value is accepted."""

    ballot: Ballot


class Decided(PlanMessage, frozen=True, kw_only=True, tag="decided"):
    """To all members: these changes follow `parent`, in order. `whole`: the sender has no changes before
    them."""

    links: Annotated[tuple[Link, ...], msgspec.Meta(max_length=LINKS_MAX)]
    whole: bool = False


class ChainHead(PlanMessage, frozen=True, kw_only=True, tag="head"):
    """A member's status, sent periodically. `parent` is the newest plan that it knows.

    `fork` is that plan's fork, so it identifies the branch. `step` steps are committed, which are `samples`
    samples in all. `hosts`: the sender has or opens a stage. `checkpoint_step` is the step of its newest
    checkpoint. `asks`: a receiver that knows more should answer.
    """

    height: Height
    step: StepNumber = 0
    samples: Count = 0
    hosts: bool = False
    checkpoint_step: StepNumber = 0
    asks: bool = True

    @property
    def plan(self) -> bytes:
        """The hash of the newest plan that the sender knows."""
        return self.parent


AgreementMessage = Prepare | Promised | PreemptedBallot | Accept | Accepted | Decided | ChainHead

Sends = list[tuple[PeerId, AgreementMessage]]


def other_branch_wins(mine: ChainHead, theirs: ChainHead) -> bool:
    """Return whether their branch wins over mine. The order is: more committed samples, then the higher step,
    then the lower name of the latest fork, which no later plan changes, then the lower plan hash. Exactly one
    of two different heads wins, and both sides agree which."""
    ours, other = (mine.samples, mine.step), (theirs.samples, theirs.step)
    return other > ours or (other == ours and (theirs.fork, theirs.plan) < (mine.fork, mine.plan))


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """An acceptor's commitments in one instance, kept across restarts.

    `promise` and `accept` return the vote after a message; repeating the message returns the same vote.
    """

    promised: Ballot | None = None
    accepted: Ballot | None = None
    value: Link | None = None

    def forbids(self, ballot: Ballot) -> bool:
        """Return whether a higher ballot is promised."""
        return self.promised is not None and ballot < self.promised

    def promise(self, ballot: Ballot) -> "Vote":
        """Return the vote after a Prepare that this vote allows."""
        return replace(self, promised=ballot)

    def accept(self, ballot: Ballot, value: bytes) -> "Vote":
        """Return the vote after an Accept that this vote allows. Raises RemoteProtocolError if the ballot had
        a different value before."""
        if ballot == self.accepted and value != self.value:
            raise RemoteProtocolError("one ballot has two values")
        return Vote(ballot, ballot, value)
