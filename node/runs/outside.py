"""Runs of which this node is no longer a member, while their other members continue.

A node whose stage died, that was restarted or that was away for long learns of a plan without it, and leaves
the run. Until it is admitted again, it must still report how the run ends, and a requester must get the
result. So it regularly asks a few live members of the last plan it knows. A member that has ended the run
sends the end, as it does to any member that was away. The run's files stay, so that this continues after a
restart.
"""

from collections.abc import Callable, Collection
from typing import Any, Protocol

import trio

from crypto.identity import PeerId
from node.events import Event
from node.protocols.manifest import Run
from node.runs.announcements import run_ended
from node.runs.member import RunMember
from node.runs.recovery import forget_files
from node.runs.settings import RunServiceSettings
from node.seams import Seams
from partition.run.settings import RunSettings

ASK_SECONDS = 4.0
"""Seconds between two questions to members. Members still in the run answer with at most its newest plans."""
ASKED_AT_ONCE_MAX = 3
"""Number of members asked at once. After a run has ended any member can answer, so asking more would only
burden a large run."""
NOBODY_LEFT = "this node is no longer in the run, and no member is left that could report how it ended"
CROWDED_OUT = (
    "this node is no longer in the run, and stopped asking about it because of newer runs that it left"
)


class OutsideRuns(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    settings: RunSettings
    limits: RunServiceSettings
    members: dict[bytes, RunMember]
    live: Callable[[], Collection[PeerId]]
    publish: Callable[[Event], None]

    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...


class RunsOutside:
    """The former memberships of one node, by run. These runs are not in `OutsideRuns.members`, so the node
    does no work for them."""

    def __init__(self, runs: OutsideRuns, me: PeerId) -> None:
        self._runs = runs
        self._me = me
        self._members: dict[bytes, tuple[RunMember, trio.CancelScope]] = {}

    def follow(self, member: RunMember) -> None:
        """Start asking how the run of this former member ends."""
        self.drop(member.run.id)
        scope = trio.CancelScope()
        self._members[member.run.id] = member, scope
        self._runs.start_task(self._ask, member, scope, of=member.run)
        others = [run for run, (each, _) in self._members.items() if each.run.requester != self._me]
        if len(others) > self._runs.limits.outside_max:
            self.give_up(others[0], CROWDED_OUT)

    def drop(self, run: bytes) -> None:
        """Stop asking, because the run has ended or this node was admitted to it again."""
        _, scope = self._members.pop(run, (None, None))
        if scope is not None:
            scope.cancel()

    def give_up(self, run: bytes, reason: str) -> None:
        """Stop asking about another peer's run, and report that. The run may continue, and may admit this
        node again."""
        member, _ = self._members[run]
        self.drop(run)
        forget_files(self._runs.seams, member.run.text)
        self._runs.publish(
            run_ended(self._runs.seams.clock.wall(), member.run, "stopped", reason, "", is_here=False)
        )

    def has(self, run: bytes) -> bool:
        """Return whether this node waits for the end of the run."""
        return run in self._members

    @property
    def runs(self) -> list[Run]:
        """All runs whose end this node waits for."""
        return [member.run for member, _ in self._members.values()]

    def by_plan(self, plan: bytes) -> RunMember | None:
        """Return the former member whose last known plan has this hash."""
        return next((member for member, _ in self._members.values() if member.plan_hash == plan), None)

    def by_run(self, run: bytes) -> RunMember | None:
        """Return the former member of this run; None if this node does not wait for the run's end."""
        return self._members[run][0] if run in self._members else None

    def recall(self, run: bytes) -> RunMember | None:
        """Make a run's former member a member again, so that it can be ended. Return it, or None if there is
        none."""
        if run not in self._members:
            return None
        member, _ = self._members[run]
        self.drop(run)
        newcomer = self._runs.members.get(run)
        if newcomer is not None:  # a stage was being opened for a plan that can no longer be decided
            self._runs.start_task(newcomer.close_stage, of=None)
        self._runs.members[run] = member
        member.core.is_over = False
        return member

    async def _ask(self, member: RunMember, scope: trio.CancelScope) -> None:
        clock = self._runs.seams.clock
        seen_at, turn = clock.monotonic(), 0
        with scope:
            while clock.monotonic() - seen_at < self._runs.settings.silence_seconds_max:
                if others := member.core.others():
                    seen_at = clock.monotonic()
                    asked = {others[(turn + row) % len(others)] for row in range(ASKED_AT_ONCE_MAX)}
                    member.catch_up(sorted(asked))
                    turn += ASKED_AT_ONCE_MAX
                await trio.sleep(ASK_SECONDS)
        if scope.cancelled_caught or not self.has(member.run.id):
            return
        if member.run.requester != self._me:
            self.give_up(member.run.id, NOBODY_LEFT)
        elif self.recall(member.run.id) is not None:
            await member.end("failed", NOBODY_LEFT, "")
