"""Passes messages about a run's plan in force, and news of links, to the part of the member that handles
them.

`partition.run.dispatch` decides which part that is. Not here: finding the member that a message is for
(`node.runs.inbox`).
"""

from typing import Any, Protocol

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.protocols.notices import Notice
from node.protocols.runs import Revised, Saved
from node.runs.checkpointing import CheckpointKeeper
from node.runs.context import RunService
from node.runs.duties import Duties
from node.runs.stage import StageHosting
from partition.plan.plan import Plan
from partition.run.dispatch import Role, role_of
from partition.run.member import Member
from partition.run.messages import check_sender
from partition.steps.frames import OpenedFrame
from partition.steps.messages import Open


class ReceivingMember(Protocol):
    """The part of `node.runs.member.RunMember` that this file uses."""

    core: Member
    hosting: StageHosting
    duties: Duties
    keeping: CheckpointKeeper

    @property
    def plan(self) -> Plan | None: ...
    def act(self) -> None: ...


class MemberMessages:
    """Handles the messages of one member."""

    def __init__(self, member: ReceivingMember, service: RunService) -> None:
        self._member = member
        self._me = service.signer.peer
        self._clock = service.seams.clock

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """Handle a pipeline message of the plan in force, or a message about the chain. Raises
        RemoteProtocolError."""
        member, duties = self._member, self._member.duties
        duties.stall.heard(now, sender)
        if isinstance(message, Notice | Saved | Revised):
            self._on_told(now, sender, message)
            return
        match role_of(message):
            case Role.MEMBER:
                member.core.receive(now, sender, message)
                member.act()
            case Role.COMMITTER if duties.committer is not None:
                duties.committer.receive(now, sender, message)
            case Role.STAGE:
                if isinstance(message, Open) and duties.training is not None:
                    duties.training.open(sender, message)
                if member.hosting.replica is not None:
                    member.hosting.replica.receive(now, sender, message)

    async def take_frame(self, sender: PeerId, frame: OpenedFrame) -> None:
        """Handle a frame of the plan in force; the frame's stream waits meanwhile. Raises
        RemoteProtocolError."""
        self._member.duties.stall.heard(self._clock.monotonic(), sender)
        await self._member.hosting.take(sender, frame)

    def revise(self, fact: Fact) -> bool:
        """Handle the requester's revision of the run; return whether it is newer than the known one. Raises
        RemoteProtocolError."""
        member, duties = self._member, self._member.duties
        return duties.steering.take(fact, member.core.state, duties.committer, member.plan, self._me)

    def _on_told(self, now: float, sender: PeerId, message: Notice | Saved | Revised) -> None:
        member, plan = self._member, self._member.plan
        if plan is None:
            return
        if isinstance(message, Revised):
            self.revise(message.revision)
        elif isinstance(message, Notice):
            check_sender(plan, sender, message)
            member.duties.reports.hear(message)
            member.core.heard(now)
        elif plan.committer == self._me:
            member.keeping.saved(plan, sender, message)
        else:
            raise RemoteProtocolError("a saved stage was reported to a peer that is not the run's committer")

    def reconnected(self, peer: PeerId) -> None:
        """Handle a new link to `peer` in place of a broken one."""
        member, plan = self._member, self._member.plan
        if plan is not None and peer in plan.roster:
            member.core.catch_up([peer])
            member.act()
        if member.hosting.replica is not None:
            member.hosting.replica.reconnected(peer)
        if member.duties.training is not None:
            member.duties.training.reconnected(peer)
        if member.core.commits and member.plan is not None:
            member.duties.steering.tell(member.plan, self._me, peer)

    def member_suspected(self, peer: PeerId) -> None:
        """Handle the suspicion that a member may be dead."""
        committer, plan = self._member.duties.committer, self._member.plan
        if committer is not None and plan is not None and plan.stage_of(peer) is not None:
            committer.suspect(peer)
