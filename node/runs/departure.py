"""This node's departure from a run that continues without it: its part is handed over, or dropped
immediately.

Either way the run gets a new plan in which this node has no part. The wait for that plan has a time limit.
"""

from collections.abc import Callable
from typing import Protocol

import trio

from crypto.identity import PeerId
from node.protocols.manifest import Run
from node.runs.context import RunService
from node.runs.duties import Duties
from node.runs.stage import StageHosting
from partition.plan.plan import Plan
from partition.run.member import Member


class DepartingMember(Protocol):
    """The part of `node.runs.member.RunMember` that this file uses."""

    run: Run
    core: Member
    hosting: StageHosting
    duties: Duties

    @property
    def plan(self) -> Plan | None: ...
    def act(self) -> None: ...
    def absent(self, peer: PeerId, reason: str) -> None: ...


class Departure:
    """The departure of one member. `gone` ends its tasks."""

    def __init__(
        self,
        member: DepartingMember,
        service: RunService,
        start_task: Callable[..., None],
        gone: Callable[[], None],
    ) -> None:
        self._member = member
        self._service = service
        self._start_task = start_task
        self._gone = gone
        self._me = service.signer.peer
        self._looked = trio.Event()

    def look(self) -> None:
        """Wake the tasks that wait for the departure, because a new plan is in force or the run has ended
        here."""
        self._looked.set()
        self._looked = trio.Event()

    async def leave(self) -> bool:
        """Hand over this node's part before it leaves, within a time limit. Return whether that succeeded."""
        member = self._member
        if member.plan is None or member.core.is_over:
            return True
        member.core.between.leave(self._service.seams.clock.monotonic())
        member.act()
        return await self._until_out(self._service.settings.leave_seconds_max)

    async def drop(self, reason: str) -> None:
        """Close the stage immediately. This node keeps voting for a short time, so that the others can
        replan."""
        member = self._member
        if member.core.is_over or member.core.is_dropped:
            return
        member.core.is_dropped = True
        member.duties.stop()
        member.duties.committer = None
        await member.hosting.end()
        member.absent(self._me, "it dropped the run")
        self._start_task(self._go, reason)

    async def _go(self, reason: str) -> None:
        await self._until_out(self._service.settings.drop_seconds_max)
        self._member.core.is_over = True
        self._member.core.ended("stopped")
        await self._service.ended(self._member, "stopped", reason, "", is_here=False)
        self._gone()

    async def _until_out(self, seconds: float) -> bool:
        """Wait for a plan without this node; return whether it came in time."""
        member = self._member
        with trio.move_on_after(seconds):
            while not member.core.is_over and member.plan is not None and self._me in member.plan.roster:
                await self._looked.wait()
            return True
        return False
