"""One attempt of a proposer (`partition.plan.paxos_proposer`), and the change that it may propose."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.chain import Chain, follow, forked
from partition.plan.change import Change, encode_change
from partition.plan.paxos_messages import Accept, Ballot, Prepare, Promised, Sends, Vote
from partition.plan.plan import NO_HASH, Plan
from partition.plan.quorum import Instance


@dataclass
class Proposal:
    """One attempt. `best` is the best vote among the promises; `value` is set once all members are asked to
    accept. The first member in `promised` and `accepted` is this member itself."""

    instance: Instance
    ballot: Ballot
    best: Vote
    promised: list[PeerId]
    value: bytes | None = None
    accepted: list[PeerId] = field(default_factory=list)

    def promised_value(self, message: Promised) -> bytes | None:
        """Return the value that was accepted before, according to a promise; None if there was none. Raises
        RemoteProtocolError if it cannot have been accepted."""
        if message.value is None and message.accepted is None:
            return None
        if message.value is None or message.accepted is None or message.accepted > self.ballot:
            raise RemoteProtocolError("a promise reports a value that cannot have been accepted")
        return message.value

    def promise(self, sender: PeerId, message: Promised) -> None:
        """Take a promise, and keep the vote with the highest accepted ballot. Late promises change
        nothing."""
        if self.value is not None or sender in self.promised:
            return
        self.promised.append(sender)
        best, other = self.best.accepted, message.accepted
        if other is not None and (best is None or best < other):
            self.best = Vote(None, other, message.value)

    def accept(self, sender: PeerId) -> None:
        """Take an acceptance. Raises RemoteProtocolError if no value was sent to be accepted."""
        if self.value is None:
            raise RemoteProtocolError("an acceptance came before the value was sent")
        if sender not in self.accepted:
            self.accepted.append(sender)

    def questions(self, names: dict[str, bytes]) -> Sends:
        """Return the question of the present phase, for each member that has not answered it."""
        seats = self.instance.committee
        if self.value is None:
            asked = Prepare(**names, ballot=self.ballot)
            return [(peer, asked) for peer in seats if peer not in self.promised]
        again = Accept(**names, ballot=self.ballot, value=self.value)
        return [(peer, again) for peer in seats if peer not in self.accepted]


def value_of(head: Plan, instance: Instance, change: Change | None) -> bytes | None:
    """Return the encoded change after `head` for this instance; None if no valid plan follows from it."""
    if change is None:
        return None
    if instance.fork == NO_HASH:
        value = encode_change(replace(change, fork=NO_HASH))
    else:
        value = encode_change(forked(head, change, instance.members))
    try:
        follow(head, value)
    except RemoteProtocolError:
        return None
    return value


def names_of(chain: Chain, instance: Instance) -> dict[str, bytes]:
    """Return the fields that identify, in a message, the decision after the head of `chain` in this
    instance."""
    return {"run": chain.head.run, "parent": chain.head_hash, "fork": instance.fork}


def check_value(head: Plan, instance: Instance, value: bytes) -> None:
    """Check that an encoded change can follow `head` and belongs to the instance. Raises RemoteProtocolError
    if not."""
    _, change = follow(head, value)
    if change.fork != instance.fork:
        raise RemoteProtocolError("a change belongs to another fork")


def check_same_chain(chain: Chain, genesis: Plan) -> None:
    """Check that a stored chain of plans belongs to the run and branch of `genesis`. Raises ValueError if
    not."""
    if chain.head.run != genesis.run:
        raise ValueError("the stored chain of plans belongs to another run")
    place = genesis.height - chain.plans[0].height
    if 0 <= place < len(chain.plans) and chain.plans[place] != genesis:
        raise ValueError(f"the stored chain of plans has a different plan at height {genesis.height}")
