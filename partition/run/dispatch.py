"""Dispatch of a run's messages: to the member whose plan they name, and to the part of the member that
handles them.

Members learn of a decision at different times, so a message may arrive before its plan is in force here. The
committer's first messages and reports of absent members are kept until then. The member and its roles check
who may send which message.
"""

from collections import deque
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.paxos_messages import AgreementMessage
from partition.plan.plan import Plan
from partition.run.messages import Absent, RunMessage
from partition.steps.messages import CommitterMessage, ReplicaMessage

EARLY_MAX = 256
"""Maximum number of messages kept for plans that are decided but not yet stored here."""
Early = CommitterMessage | Absent
"""Messages that are kept for a plan that is decided, but not yet in force here."""


class Role(Enum):
    """The part of a member that handles a message. STAGE: its replica; an Open goes to its feeder too."""

    MEMBER = auto()
    COMMITTER = auto()
    STAGE = auto()


def role_of(message: object) -> Role:
    """Return which part of a member handles this message."""
    if isinstance(message, ReplicaMessage):
        return Role.COMMITTER
    return Role.MEMBER if isinstance(message, AgreementMessage | RunMessage) else Role.STAGE


class Planned(Protocol):
    """A member of a run."""

    @property
    def plan(self) -> Plan | None: ...


M = TypeVar("M", bound=Planned)
E = TypeVar("E")


class Dispatch(Generic[M, E]):
    """The members of one node, keyed by the hash of the plan in force. `early` has the waiting messages: the
    sender, the plan's hash, and the message in the driver's form."""

    def __init__(self) -> None:
        self.plans: dict[bytes, M] = {}
        self.early: deque[tuple[PeerId, bytes, E]] = deque(maxlen=EARLY_MAX)

    def follow(self, plan: bytes, member: M) -> list[tuple[PeerId, E]]:
        """Hand messages of this plan to `member`, and no longer those of the member's previous plan. Return
        the messages that came too early, to be delivered again."""
        self.forget(member)
        self.plans[plan] = member
        late = [(sender, message) for sender, name, message in self.early if name == plan]
        if late:
            self.early = deque((row for row in self.early if row[1] != plan), maxlen=EARLY_MAX)
        return late

    def forget(self, member: object) -> None:
        """Hand no more messages to this member."""
        self.plans = {plan: other for plan, other in self.plans.items() if other is not member}

    def find(self, sender: PeerId, plan: bytes) -> M | None:
        """Return the member that a message of this plan is for; None if this plan is not in force.

        Raises:
            RemoteProtocolError: `sender` is not in the run.
        """
        member = self.plans.get(plan)
        if member is not None and member.plan is not None and sender not in member.plan.roster:
            raise RemoteProtocolError("a message of a run came from a peer that is not in the run")
        return member

    def keep(self, sender: PeerId, plan: bytes, message: E) -> None:
        """Keep a message until its plan is in force. If there are too many, the oldest is dropped."""
        self.early.append((sender, plan, message))
