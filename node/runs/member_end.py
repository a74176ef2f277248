"""Ends a run on this node, whoever decided it: the result is kept or fetched, the stage is closed, and the
runs service is told.

Not here: deciding the outcome, and telling the other members (`partition.run.run_end`).
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import trio

from crypto.facts import Fact
from crypto.identity import PeerId
from node.protocols.manifest import Run
from node.runs.completion import CollectedStages, fetch_result
from node.runs.context import RunService
from node.runs.duties import Duties
from node.runs.stage import StageHosting
from node.waker import Waker
from partition.plan.plan import Plan
from partition.run.member import Member


class EndingMember(Protocol):
    """The part of `node.runs.member.RunMember` that this file uses."""

    run: Run
    core: Member
    hosting: StageHosting
    duties: Duties
    stopped_by: Fact | None
    is_over_for_all: bool
    is_driven: bool

    def act(self) -> None: ...
    def absent(self, peer: PeerId, reason: str) -> None: ...


class MemberEnd:
    """The end of one member. `gone` ends its tasks, and wakes the tasks that wait for its departure."""

    def __init__(
        self, member: EndingMember, service: RunService, waker: Waker, gone: Callable[[], None]
    ) -> None:
        self.collected = CollectedStages(service, member.run, member.hosting.export)
        self._member = member
        self._service = service
        self._waker = waker
        self._gone = gone
        self._start_task = partial(service.start_task, of=member.run)

    async def keep_result(self, plan: Plan) -> None:
        """Keep the result from the stages that were handed over under this plan."""
        await self.collected.keep(plan, self._member.core.end, self._member.duties.best.detail)
        self._member.act()

    async def end(
        self, outcome: str, detail: str, weights: str, *, source: PeerId | None = None, refusal: str = ""
    ) -> None:
        """End the run here: fetch the result from `source` unless there is a `refusal`, close the stage, and
        announce the end. Without a source the result is already here."""
        member, core = self._member, self._member.core
        if core.is_over:
            return
        core.is_over = True
        member.is_over_for_all = core.end.is_told or source is not None or member.stopped_by is not None
        missing = refusal
        if outcome == "done" and source is not None and not missing:
            missing = await fetch_result(self._service, member.run, source, weights)
        await member.hosting.end()
        core.ended(outcome)
        is_here = outcome == "done" and not missing
        await self._service.ended(member, outcome, missing or detail, weights, is_here=is_here)
        self._gone()
        member.duties.stop()

    async def forget(self) -> None:
        """Close the stage and forget the run, which continues elsewhere."""
        await self._member.hosting.end()
        self._service.forgotten(self._member)
        self._gone()

    async def fail(self, reason: str) -> None:
        """End after an unexpected failure. If another node commits, the run continues without this one."""
        member, core = self._member, self._member.core
        if not (core.is_over or core.end.is_told):
            if core.commits:
                core.end.finish(self._service.seams.clock.monotonic(), "failed", reason, "")
                member.act()
                if not member.is_driven:
                    self._start_task(self._tell_failure, reason)
                return
            member.absent(self._service.signer.peer, reason)
        core.is_over = False  # an end that failed half way is repeated
        await self.end("failed", reason, "")

    async def _tell_failure(self, reason: str) -> None:
        """Send the end to the others although this member's driver itself has failed, within a time limit."""
        core = self._member.core
        core.close()
        with trio.move_on_after(self._service.settings.end_seconds_max):
            while not core.is_over:
                await self._waker.wake_when_due(core)
                self._member.act()
        await self.end("failed", reason, "")
