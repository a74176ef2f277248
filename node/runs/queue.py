"""The queue for this node's slots: the shell around `node.placement.turns.Turns`.

It counts what each requester used here; what its node gave, by receipts, gives it a larger share. It says how
long a run that is served will still take, and has one that is to make room handed over.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, Protocol

from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from node.placement.leases import about
from node.placement.slots import Slots
from node.placement.turns import Turns, Wait, Wish
from node.protocols.manifest import Run
from node.protocols.revision import check_revision
from node.runs.member import RunMember
from node.runs.receipts import Receipts
from node.runs.vacating import of_runs, vacate
from node.seams import Seams
from partition.run.asks import WAIT_SECONDS_MAX, Declined

MADE_ROOM_OWN = "another run of its requester, of higher priority, waits for this slot"
MADE_ROOM = "another requester waits for this slot, and this one has had its share"
USED_SECONDS_MIN = 30.0
"""What was used beyond others is told from so much on."""


class Service(Protocol):
    """What is needed of `node.runs.runs.Runs`."""

    seams: Seams
    signer: Signer
    members: dict[bytes, RunMember]
    slots: Slots
    receipts: Receipts

    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...


class Queue:
    """One node's, with so many slots."""

    def __init__(self, runs: Service, slots: int) -> None:
        self._runs = runs
        self._turns = Turns(slots, runs.signer.peer)

    def ask(self, asker: PeerId, run: Run, revision: Fact | None) -> Declined | None:
        """Return None where the run may have a slot now, else how it waits, as long as `asker` is there.

        Raises RemoteProtocolError: a revision that is not its requester's.
        """
        now, wish = self._now, replace(self._wish(run, revision), asker=asker)
        self._look(now)
        self._turns.weigh(run.requester, self._runs.receipts.weight(run.requester))
        found = self._turns.ask(now, wish)
        for event in self._turns.events:
            reason = MADE_ROOM_OWN if event.is_own else MADE_ROOM
            self._runs.start_task(vacate, self._runs, reason, of_runs({event.run}), of=None)
        self._turns.events.clear()
        return None if found is None else declined(found)

    def begin(self, run: Run, revision: Fact | None) -> None:
        """A slot is promised to the run."""
        self._runs.receipts.begun(run.id)
        self._turns.begin(self._now, self._wish(run, revision))

    def withdraw(self, asker: PeerId, run: bytes | None = None) -> None:
        """Drop a run, or all for which `asker` asked: it gave up, has its slots elsewhere, or is gone."""
        self._turns.withdraw(asker, run)

    def resize(self, slots: int) -> list[bytes]:
        """Have so many slots from now on; the runs that are served beyond them."""
        self._turns.slots = self._runs.slots.count = slots
        self._look(self._now)
        return self._turns.surplus()

    @property
    def _now(self) -> float:
        return self._runs.seams.clock.monotonic()

    def _wish(self, run: Run, revision: Fact | None) -> Wish:
        if revision is None:
            return Wish(run.id, run.requester)
        body = check_revision(self._runs.signer, run, revision)
        seconds = body.deadline_milliseconds / 1000 - self._runs.seams.swarm_clock.wall()
        deadline = self._now + seconds if body.deadline_milliseconds else inf
        return Wish(run.id, run.requester, body.priority, deadline)

    def _look(self, now: float) -> None:
        """Take in what has happened since the last time."""
        self._turns.keep(now, self._runs.slots.taken())
        for member in self._runs.members.values():
            self._turns.progress(member.run.id, _seconds_left(member))
        for run, seconds in self._runs.slots.lapsing().items():
            self._turns.progress(run, seconds)


def _seconds_left(member: RunMember) -> float | None:
    """Return what a run still takes as its newest step went, None before its first."""
    committed = member.shown.committed
    if committed is None:
        return None
    return max(0, member.steering.steps - committed.step - 1) * committed.seconds


def declined(wait: Wait) -> Declined:
    """Return what a requester that waits is told: "busy", and what is known of how long."""
    ahead = f"busy: {wait.ahead} wait before it" if wait.ahead else "busy"
    if wait.used >= USED_SECONDS_MIN:
        ahead += f", its requester used {about(wait.used)} more than the one that used least, for its weight"
    seconds = None if wait.seconds is None else min(WAIT_SECONDS_MAX, round(wait.seconds))
    return Declined(ahead, seconds)
