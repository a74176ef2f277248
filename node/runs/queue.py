"""The queue for this node's slots: the shell around `node.placement.turns.FairQueue`.

It counts each requester's use of this node. A requester whose node contributed more, according to receipts,
gets a larger share. The queue estimates how long a served run will still take, and hands over a run that must
make room.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from math import ceil, inf
from typing import Any, Protocol

from crypto.crowds import is_local, network_of
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from crypto.registers import Budget, Register
from crypto.token_buckets import prefix_of
from node.placement.contest import CONTEST_MEMBERS_MIN
from node.placement.leases import about
from node.placement.seniority import Seniority
from node.placement.slots import LeaseSlots
from node.placement.turn_rows import SlotWish
from node.placement.turns import CONTEST_SECONDS, HOLD_SECONDS_MAX, WAITING_MAX, FairQueue, Wait
from node.protocols.manifest import Run
from node.protocols.revision import check_revision
from node.runs.member import RunMember
from node.runs.receipts import Receipts
from node.runs.vacating import of_runs, vacate
from node.seams import Seams
from partition.run.asks import WAIT_SECONDS_MAX, Declined

MADE_ROOM_OWN = "a run of the same requester with higher priority waits for this slot"
MADE_ROOM = "another requester waits for this slot, and this run's requester has had its share"
CONTESTED = "busy: other runs may still ask for its free slot"
USED_SECONDS_MIN = 30.0
"""Minimum excess use, in seconds, that is mentioned to a waiting requester."""


class QueueService(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    signer: Signer
    members: dict[bytes, RunMember]
    slots: LeaseSlots
    receipts: Receipts
    live: Callable[[], Collection[PeerId]]

    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...


WAITING = Budget(WAITING_MAX, WAITING_MAX // 4, WAITING_MAX // 2, HOLD_SECONDS_MAX, HOLD_SECONDS_MAX, 2.0)
"""Requesters ask again within half a minute; a run whose requester does not may be displaced. A run that was
asked for only once, as invented runs are, may be displaced after two seconds by one of a requester that has
no waiting run yet."""


class _WaitingRun:
    """A waiting run, and the time of its latest request."""

    def __init__(self, run: bytes, asker: PeerId, now: float) -> None:
        self.run = run
        self.asker = asker
        self.silent_since = now
        """See `crypto.registers.PlaceHolder`."""


class Queue:
    """One node's queue for its slots."""

    def __init__(self, runs: QueueService, slots: int) -> None:
        self._runs = runs
        self._turns = FairQueue(slots, runs.signer.peer)
        self._seniority = Seniority(runs.signer.peer)
        self._waiting: dict[bytes, _WaitingRun] = {}
        self._places: Register[_WaitingRun] = Register(WAITING)

    def members_changed(self) -> None:
        """Update the list of members and the times when they were first seen."""
        self._seniority.look(self._now, self._runs.live())

    def ask(
        self, asker: PeerId, run: Run, revision: Fact | None, *, is_contested: bool = True
    ) -> Declined | None:
        """Return None if the run may have a slot now, else a refusal that describes its wait; it waits while
        `asker` is alive. `is_contested`: other runs get the chance to ask first, which a run that has already
        begun need not grant.

        Raises RemoteProtocolError for a revision that the requester did not sign.
        """
        now, wish = self._now, replace(self._wish(run, revision), asker=asker)
        self._look(now)
        if not self._enter(now, asker, run.id):
            return Declined("busy: too many runs wait")
        self._turns.weigh(run.requester, self._runs.receipts.weight(run.requester))
        self._turns.met(run.requester, self._seniority.seconds(now, run.requester))
        is_contested = is_contested and run.requester != self._runs.signer.peer
        found = self._turns.ask(now, wish, is_contested=is_contested)
        for event in self._turns.events:
            reason = MADE_ROOM_OWN if event.is_own else MADE_ROOM
            self._runs.start_task(vacate, self._runs, reason, of_runs({event.run}), of=None)
        self._turns.events.clear()
        if found is None:
            self._leave(run.id)
            return None
        return declined(found)

    def begin(self, run: Run, revision: Fact | None) -> None:
        """Record that a slot is promised to the run."""
        self._leave(run.id)
        self._runs.receipts.begun(run.id)
        self._turns.begin(self._now, self._wish(run, revision))

    def withdraw(self, asker: PeerId, run: bytes | None = None) -> None:
        """Remove one run, or all runs, of `asker` from the queue, because it gave up, has its slots
        elsewhere, or is gone."""
        for each in [each for each in self._waiting.values() if each.asker == asker]:
            if run in (None, each.run):
                self._leave(each.run)
        self._turns.withdraw(asker, run)

    def resize(self, slots: int) -> list[bytes]:
        """Set the number of slots; return the served runs that exceed it."""
        self._turns.slots = self._runs.slots.count = slots
        self._look(self._now)
        return self._turns.surplus()

    def _enter(self, now: float, asker: PeerId, run: bytes) -> bool:
        """Return whether the run may wait. Runs that were not asked for again are removed to make room."""
        row = self._waiting.get(run)
        if row is not None:
            row.silent_since, row.asker = now, asker
            self._places.credit(row)
            return True
        row = _WaitingRun(run, asker, now)
        host = self._runs.seams.network.host_of(asker)
        evicted = self._places.admit(now, row, asker, prefix_of(host) if host is not None else asker)
        if evicted is None:
            return False
        for each in evicted:
            self._leave(each.run)
            self._turns.drop(each.run)
        self._waiting[run] = row
        return True

    def _leave(self, run: bytes) -> None:
        row = self._waiting.pop(run, None)
        if row is not None:
            self._places.leave(row)

    @property
    def _now(self) -> float:
        return self._runs.seams.clock.monotonic()

    def _wish(self, run: Run, revision: Fact | None) -> SlotWish:
        if revision is None:
            return SlotWish(run.id, run.requester, network=self._network(run.requester))
        body = check_revision(self._runs.signer, run, revision)
        seconds = body.deadline_milliseconds / 1000 - self._runs.seams.swarm_clock.wall()
        deadline = self._now + seconds if body.deadline_milliseconds else inf
        return SlotWish(run.id, run.requester, body.priority, deadline, network=self._network(run.requester))

    def _network(self, peer: PeerId) -> bytes:
        host = self._runs.seams.network.host_of(peer)
        source = b"" if host is None else prefix_of(host)
        return b"" if is_local(source) else network_of(source)

    def _look(self, now: float) -> None:
        """Update the queue with all changes since the previous call."""
        is_crowded = len(self._runs.live()) >= CONTEST_MEMBERS_MIN
        self._turns.contest_seconds = CONTEST_SECONDS if is_crowded else 0.0
        self._turns.has_seniors = self._seniority.has_any(now)
        self._turns.keep(now, self._runs.slots.taken())
        for member in self._runs.members.values():
            self._turns.progress(member.run.id, _seconds_left(member))
        for run, seconds in self._runs.slots.lapsing().items():
            self._turns.progress(run, seconds)


def _seconds_left(member: RunMember) -> float | None:
    """Return the seconds that a run still takes at the speed of its newest step; None before its first
    step."""
    committed = member.shown.committed
    if committed is None:
        return None
    return max(0, member.steering.steps - committed.step - 1) * committed.seconds


def declined(wait: Wait) -> Declined:
    """Return the refusal for a waiting requester: "busy", and the expected wait if known."""
    if wait.is_contested:
        return Declined(CONTESTED, ceil(wait.seconds or 0.0), is_contested=True)
    ahead = f"busy: {wait.ahead} wait before it" if wait.ahead else "busy"
    if wait.used >= USED_SECONDS_MIN:
        ahead += (
            f", its requester used {about(wait.used)} more, for its weight, than the "
            "requester that used least"
        )
    seconds = None if wait.seconds is None else min(WAIT_SECONDS_MAX, round(wait.seconds))
    return Declined(ahead, seconds)
