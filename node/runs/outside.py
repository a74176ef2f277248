"""Runs that this node asked for and is no member of any more: the others go on without it.

A requester that was restarted, or that was away for long, hears of a plan without it and leaves. Until it is
admitted again it still has to say how its run ends, and to have the result: it asks the living members of the
last plan it knows, and whoever of them has ended the run tells it, as any member that was away is told.
The files of the run stay, so that this goes on after another restart.
"""

from collections.abc import Callable, Collection
from typing import Any, Protocol

import trio

from crypto.identity import PeerId
from node.protocols.manifest import Run
from node.runs.member import RunMember
from node.seams import Seams
from partition.run.timeouts import SILENCE_SECONDS_MAX

ASK_SECONDS = 4.0
"""Between two questions to the members. Those that are in the run answer with at most its newest plans."""
NOBODY_LEFT = "this node was restarted, and no member of the run is left that could say how it ended"


class Service(Protocol):
    """What is needed of `node.runs.runs.Runs`."""

    seams: Seams
    members: dict[bytes, RunMember]
    live: Callable[[], Collection[PeerId]]

    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...


class OwnRunsOutside:
    """This node's, by run. A run here is not among `Service.members`, so nothing is done for it."""

    def __init__(self, runs: Service) -> None:
        self._runs = runs
        self._members: dict[bytes, tuple[RunMember, trio.CancelScope]] = {}

    def follow(self, member: RunMember) -> None:
        """Ask from now on how the run of this former member ends."""
        self.drop(member.run.id)
        scope = trio.CancelScope()
        self._members[member.run.id] = member, scope
        self._runs.start_task(self._ask, member, scope, of=member.run)

    def drop(self, run: bytes) -> None:
        """Ask no more: the run is over, or this node is admitted to it again."""
        _, scope = self._members.pop(run, (None, None))
        if scope is not None:
            scope.cancel()

    def has(self, run: bytes) -> bool:
        """Return whether the end of this run is waited for."""
        return run in self._members

    def by_plan(self, plan: bytes) -> RunMember | None:
        """Return the run in which this is the last plan that this node knows."""
        return next((member for member, _ in self._members.values() if member.plan_hash == plan), None)

    def recall(self, run: bytes) -> RunMember | None:
        """Return a run's former member as a member once more, so that it can be ended; None: it is none."""
        if run not in self._members:
            return None
        member, _ = self._members[run]
        self.drop(run)
        newcomer = self._runs.members.get(run)
        if newcomer is not None:  # a stage was being opened for a plan that cannot come about any more
            self._runs.start_task(newcomer.close_stage, of=None)
        self._runs.members[run] = member
        member.core.is_over = False
        return member

    async def _ask(self, member: RunMember, scope: trio.CancelScope) -> None:
        clock = self._runs.seams.clock
        seen_at = clock.monotonic()
        with scope:
            while clock.monotonic() - seen_at < SILENCE_SECONDS_MAX:
                if others := member.core.others():
                    seen_at = clock.monotonic()
                    member.catch_up(others)
                await trio.sleep(ASK_SECONDS)
        if not scope.cancelled_caught and self.recall(member.run.id) is not None:
            await member.end("failed", NOBODY_LEFT, "")
