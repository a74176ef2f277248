"""Whose turn it is at this node's slots: the shell around `node.placement.turns.Turns`.

It counts what each requester used here, and what its node did for this node's own runs, which gives it a
larger share. It says how long a run that is served will still take, and has one that is to make room handed
over.
"""

from collections.abc import Callable
from math import inf
from typing import Any, Protocol

from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from node.placement.slots import Slots
from node.placement.turns import Turns, Wait, Wish
from node.protocols.manifest import Run
from node.protocols.revision import check_revision
from node.runs.member import RunMember
from node.runs.vacating import of_runs, vacate
from node.seams import Seams

FULL_SHARE_SECONDS = 3_600.0
"""Stage-seconds that a peer's node computed for this node's runs that double its share here."""
WEIGHT_MAX = 8.0
"""A share is at most so many times a stranger's: who helps a lot does not shut all others out."""
SERVERS_MAX = 4_096
MADE_ROOM = "a run of higher priority waits for this slot"


class Service(Protocol):
    """What is needed of `node.runs.runs.Runs`."""

    seams: Seams
    signer: Signer
    members: dict[bytes, RunMember]
    slots: Slots

    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...


class Queue:
    """One node's, with so many slots."""

    def __init__(self, runs: Service, slots: int) -> None:
        self._runs = runs
        self._turns = Turns(slots)
        self._served: dict[PeerId, float] = {}
        self._counted_at: float | None = None

    def ask(self, run: Run, revision: Fact | None) -> str | None:
        """Return None where the run may have a slot now, else how it waits, for a person.

        Raises RemoteProtocolError: a revision that is not its requester's.
        """
        now, wish = self._now, self._wish(run, revision)
        self._look(now)
        found = self._turns.ask(now, wish)
        for event in self._turns.events:
            self._runs.start_task(vacate, self._runs, MADE_ROOM, of_runs({event.run}), of=None)
        self._turns.events.clear()
        return None if found is None else wait_text(found)

    def begin(self, run: Run, revision: Fact | None) -> None:
        """A slot is promised to the run."""
        self._turns.begin(self._now, self._wish(run, revision))

    @property
    def _now(self) -> float:
        return self._runs.seams.clock.monotonic()

    def _wish(self, run: Run, revision: Fact | None) -> Wish:
        if revision is None:
            return Wish(run.id, run.requester)
        body = check_revision(self._runs.signer, run, revision)
        seconds = body.deadline_milliseconds / 1000 - self._runs.seams.clock.wall()
        deadline = self._now + seconds if body.deadline_milliseconds else inf
        return Wish(run.id, run.requester, body.priority, deadline)

    def _look(self, now: float) -> None:
        """Take in what has happened since the last time."""
        self._turns.keep(now, self._runs.slots.taken())
        for member in self._runs.members.values():
            self._turns.progress(member.run.id, _seconds_left(member))
        before, self._counted_at = self._counted_at, now
        for peer, stages in self._stages_served().items():
            if peer in self._served or len(self._served) < SERVERS_MAX:
                served = self._served.get(peer, 0.0) + stages * (0.0 if before is None else now - before)
                self._served[peer] = served
                self._turns.weigh(peer, min(WEIGHT_MAX, 1.0 + served / FULL_SHARE_SECONDS))

    def _stages_served(self) -> dict[PeerId, int]:
        """Return who holds how many stages of this node's own runs."""
        found: dict[PeerId, int] = {}
        me = self._runs.signer.peer
        for member in self._runs.members.values():
            if member.run.requester == me and member.plan is not None:
                for stage in member.plan.stages:
                    for peer in stage.replicas:
                        if peer != me:
                            found[PeerId(peer)] = found.get(PeerId(peer), 0) + 1
        return found


def _seconds_left(member: RunMember) -> float | None:
    """Return what a run still takes as its newest step went, None before its first."""
    committed = member.shown.committed
    if committed is None:
        return None
    return max(0, member.steering.steps - committed.step - 1) * committed.seconds


def wait_text(wait: Wait) -> str:
    """Return what a requester is told that has to wait: "busy", and what is known of how long."""
    ahead = f"{wait.ahead} wait before it" if wait.ahead else ""
    free = "" if wait.seconds is None else f"a slot is free in about {wait.seconds:.0f} s"
    said = "; ".join(part for part in (ahead, free) if part)
    return f"busy: {said}" if said else "busy"
