"""Changes to an active run by its requester, and any node's questions about a run's state.

The requester signs a revision and sends it to every member; the committer acts on it (`node.runs.steering`).
The requester need not be in the run any more. A node that has no part in a run asks the members it knows of
for the run's state.
"""

from contextlib import suppress
from typing import Any, Protocol

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId, short_peer
from node.errors import RunFailed, Unreachable, UsageError
from node.protocols.manifest import Run
from node.protocols.revision import (
    PRIORITY,
    RevisionBody,
    check_revision,
    make_revision,
    read_revision,
    revised,
)
from node.protocols.run_file import GoalTable
from node.protocols.runs import Describe, Described, Reply, Revise
from node.runs.member import RunMember
from node.runs.steering import revision_name
from node.runs.stopping import STOP_SECONDS, Stopping
from node.runs.stopping import StoppingService as StoppingService
from partition.run.asks import Declined, Done
from partition.run.messages import REASON_LENGTH_MAX

ASKED_MAX = 64
"""Maximum number of swarm members, the first by peer id, that are asked for a run's state."""
ASKED_AT_ONCE_MAX = 16
ASK_SECONDS_MAX = 3.0
_FACT_BYTES_MAX = 512
NO_GOAL = GoalTable()


class RevisingService(StoppingService, Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    stopping: Stopping


class Revising:
    """The revisions of one node's runs."""

    def __init__(self, runs: RevisingService) -> None:
        self._runs = runs

    async def revise(self, text: str, changes: dict[str, Any]) -> dict[str, object]:
        """Change fields of `RevisionBody` in one of this node's own runs, for all its members; return how
        many members know.

        Raises UsageError if the run belongs to another peer or is in local mode, RunFailed if it is not
        active.
        """
        runs, run = self._runs, self._runs.stopping.find(text)
        if run.requester != runs.signer.peer:
            raise UsageError(
                f"run {text[:8]} was requested by {short_peer(run.requester)}, and only "
                "its requester may change it"
            )
        if run.manifest.local is not None:
            raise UsageError(
                f"run {text[:8]} is in local mode, where members train independently: it can only be stopped",
                f"`peerloom runs stop {text[:8]}`",
            )
        before = self._known(run)
        number = max(before.number + 1, int(runs.seams.swarm_clock.wall() * 1000))
        try:
            body = revised(before, number, changes)
        except ValueError as error:
            raise UsageError(f"revise: {error}") from None
        fact = make_revision(runs.signer, body)
        runs.seams.storage.write(revision_name(text), encode(fact))
        member = runs.members.get(run.id)
        if member is not None:
            member.revise(fact)
        delivery = runs.stopping.delivery(run)
        runs.start_task(runs.stopping.tell, Revise(fact), delivery, of=None)
        with trio.move_on_after(STOP_SECONDS):
            await delivery.over.wait()
        return {
            "run": text,
            "number": body.number,
            "steps": run.manifest.steps if body.steps is None else body.steps,
            "learning_rate": body.learning_rate,
            "priority": body.priority,
            "is_paused": body.is_paused,
            "goal": {"samples_per_second": body.samples_per_second, "seconds": body.goal_seconds}
            if body.samples_per_second
            else None,
            "told": delivery.told,
            "left": len(delivery.left),
        }

    def ask_for(self, run: Run, priority: int, deadline_minutes: int, goal: GoalTable = NO_GOAL) -> None:
        """Sign the priority, the deadline and the goal of a new run of this node, if they differ from the
        defaults."""
        if (priority, deadline_minutes, goal.samples_per_second) == (PRIORITY, 0, 0.0):
            return
        now = int(self._runs.seams.swarm_clock.wall() * 1000)
        deadline = now + deadline_minutes * 60_000 if deadline_minutes else 0
        body = RevisionBody(
            run.id,
            1,
            priority=priority,
            deadline_milliseconds=deadline,
            samples_per_second=goal.samples_per_second,
            goal_seconds=goal.seconds if goal.samples_per_second else 0,
        )
        fact = make_revision(self._runs.signer, body)
        self._runs.seams.storage.write(revision_name(run.text), encode(fact))

    def _known(self, run: Run) -> RevisionBody:
        """Return the newest revision, including one stored before a restart."""
        member = self._runs.members.get(run.id)
        if member is not None and member.steering.body is not None:
            return member.steering.body
        data = self._runs.seams.storage.read(revision_name(run.text))
        with suppress(RemoteProtocolError):
            if data is not None:
                fact: Fact = decode(data, Fact, bytes_max=_FACT_BYTES_MAX)
                return check_revision(self._runs.signer, run, fact)
        return RevisionBody(run.id, 1)

    async def take(self, sender: PeerId, fact: Fact) -> Reply:
        """Handle a revision that a peer passes on. Raises RemoteProtocolError."""
        runs = self._runs
        body = read_revision(fact)
        member = runs.members.get(body.run)
        if member is None:
            over = runs.archive.is_over(body.run)
            return Done() if over else Declined("no such run here")
        committer = member.plan.committer if member.plan is not None else None
        if member.revise(fact) and committer not in (None, runs.signer.peer, sender):
            # The committer has to act on it, but the sender may not know the committer.
            runs.start_task(self._pass_on, PeerId(committer or b""), fact, of=None)
        return Done()

    async def _pass_on(self, peer: PeerId, fact: Fact) -> None:
        with suppress(Unreachable):
            await self._runs.ask(peer, Revise(fact), ASK_SECONDS_MAX)

    # Descriptions of runs

    def describe(self, text: str) -> Reply:
        """Answer with a run's state as this node knows it."""
        for member in self._runs.members.values():
            if member.run.text == text:
                return _described(member)
        for record in self._runs.archive.records:
            if record.text == text:
                return Described(
                    model=record.model,
                    data=record.data,
                    requester=record.requester,
                    status=record.outcome,  # type: ignore[arg-type]  # of a run that is over
                    step=min(record.step, record.steps),
                    steps=record.steps,
                    loss=record.loss,
                    accuracy=record.accuracy,
                    detail=record.detail[:REASON_LENGTH_MAX],
                    weights=record.weights,
                )
        for local in self._runs.local.members.values():
            if local.run.text == text:
                manifest = local.run.manifest
                return Described(
                    model=manifest.model,
                    data=manifest.data,
                    requester=local.run.requester,
                    status="running",
                    step=min(local.step, manifest.steps),
                    steps=manifest.steps,
                )
        return Declined("no such run here")

    async def ask(self, text: str) -> Described:
        """Ask the members of the swarm for a run's state; return the answer of the member that has got
        furthest.

        Raises RunFailed if none of the members asked knows the run.
        """
        found: list[Described] = []
        limiter = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)

        async def ask(peer: PeerId) -> None:
            async with limiter:
                with suppress(Unreachable):
                    reply = await self._runs.ask(peer, Describe(text), ASK_SECONDS_MAX)
                    if isinstance(reply, Described):
                        found.append(reply)

        others = sorted(peer for peer in self._runs.live() if peer != self._runs.signer.peer)
        async with trio.open_nursery() as nursery:
            for peer in others[:ASKED_MAX]:
                nursery.start_soon(ask, peer)
        if not found:
            raise RunFailed(
                f"none of the swarm's members that were asked knows run {text[:8]}", "look: `peerloom runs`"
            )
        return max(found, key=lambda each: (each.status in ("done", "stopped", "failed"), each.step))


def _described(member: RunMember) -> Described:
    run, shown = member.steering.run, member.shown
    committed, evaluated = shown.committed, shown.evaluated
    state, reason = member.steering.shown(member.state, "")
    return Described(
        model=run.manifest.model,
        data=run.manifest.data,
        requester=run.requester,
        status=state,
        step=0 if committed is None else committed.step + 1,
        steps=run.manifest.steps,
        loss=None if committed is None else committed.loss,
        accuracy=None if evaluated is None else evaluated.accuracy,
        detail=reason,
    )
