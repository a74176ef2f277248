"""The order in which requesters get one provider's slots: a sans-IO core.

A requester that finds all slots taken waits: it asks again, and is told how many are before it and when a
slot may be free. A slot that becomes free is kept for a moment for whoever is next. Next is the run with the
highest priority; among equals that of the requester who will have used the least for its weight once it was
served (a finish tag of start-time fair queueing), then the one with the earliest deadline, then the one that
has waited longest. What is used at a high priority counts for more, so it is bought with one's own share; and
a run that waits rises, so none waits for ever.

Each provider has a queue of its own, and counts beside what it served itself the runs that were served
elsewhere, as their requesters tell. Who says nothing of it is not charged, and gains ELSEWHERE_RUNS_MAX runs
by it once at most. What is served counts with the rest of a usual run as soon as it has begun. Each provider
counts another part of a run before it is served: so of requesters that few of them ever serve twice, each
gets its share over all of them.

It knows nothing of leases on disk (`slots`) nor of who gives the slot back when `Preempt` says so.
"""

import heapq
import struct
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from blake3 import blake3

AGE_SECONDS = 3_600.0
"""A run that waits rises by one priority in so long: above all that came after it within ten hours. Among
equals it is the shares that let nobody wait for ever; a shorter time would override them."""
FORGET_SECONDS = 120.0
"""A run that has not asked again for so long waits no more."""
HOLD_SECONDS_MAX = 35.0
"""A free slot is kept so long at most for whoever is next: requesters ask again within half a minute."""
HOLD_FACTOR = 1.5
"""The hold as a multiple of the time between two requests of the same requester."""
USUAL_SECONDS = 60.0
"""What a run is taken to need where none has ended yet."""
HALF_LIFE_SECONDS = 24 * 3600.0
"""What was used counts half after a day: an absence is not saved up, nor is a feast held against one for
ever."""
ELSEWHERE_RUNS_MAX = 4.0
"""What was served elsewhere puts a requester back by so many usual runs at most, against the one with the
least of it for its weight: honest ones lose so much once to one that says nothing, and nobody starves."""
_PHASE = struct.Struct(">d")
WAITING_MAX = 1_024
REQUESTERS_MAX = 4_096
SERVED_MAX = 16
"""Runs whose time in a slot is remembered; a run that waits is expected to take their median."""
PRIORITY = 5
PRIORITY_MAX = 9


@dataclass(frozen=True)
class Wish:
    """What a run wants: one slot. `deadline` is in the clock of the caller, inf for none; `asker` is the peer
    that asks for it."""

    run: bytes
    requester: bytes
    priority: int = PRIORITY
    deadline: float = inf
    asker: bytes = b""


@dataclass(frozen=True)
class Wait:
    """No slot now: `ahead` are before it, and one may be free in `seconds`, None where nobody knows."""

    ahead: int
    seconds: float | None


@dataclass(frozen=True)
class Preempt:
    """Have this run's stage handed over: a run of higher priority waits."""

    run: bytes


@dataclass
class _Waiting:
    wish: Wish
    since: float
    asked: float
    interval_seconds: float = 0.0
    made_room: bool = False


@dataclass
class _Serving:
    wish: Wish
    charged: float
    begun: float
    risen: float
    seconds_left: float | None = None
    is_preempted: bool = False


@dataclass
class _Account:
    used: float = 0.0
    weight: float = 1.0
    phase: float = 0.0
    at: float = 0.0
    elsewhere: float = 0.0


@dataclass
class Turns:
    """One provider's, with `slots` of them. `name` tells providers apart, no two alike."""

    slots: int
    name: bytes = b""
    events: list[Preempt] = field(default_factory=list)
    _waiting: dict[bytes, _Waiting] = field(default_factory=dict)
    _serving: dict[bytes, _Serving] = field(default_factory=dict)
    _accounts: dict[bytes, _Account] = field(default_factory=dict)
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=SERVED_MAX))

    # What a provider is asked

    def ask(self, now: float, wish: Wish) -> Wait | None:
        """Return None where the run may have a slot now: `begin` follows, or `drop`; else how it waits."""
        self._settle(now)
        if wish.run in self._serving:
            return None
        row = self._waiting.get(wish.run)
        if row is None:
            if len(self._waiting) >= WAITING_MAX:
                return Wait(len(self._waiting), None)
            row = self._waiting[wish.run] = _Waiting(wish, now, now)
        else:
            row.interval_seconds, row.asked, row.wish = now - row.asked, now, wish
        order = self._order(now)
        place = order.index(wish.run)
        free = self.slots - len(self._serving)
        ahead = [run for run in order[:place] if self._is_held(now, run)]
        if len(ahead) < free:
            return None
        self._preempt(wish)
        return Wait(place, self._estimate(now, place))

    def begin(self, now: float, wish: Wish) -> None:
        """The run has a slot from now on."""
        self._settle(now)
        row = self._waiting.pop(wish.run, None)
        risen = wish.priority if row is None else self._risen(now, row)
        self._serving.setdefault(wish.run, _Serving(wish, now, now, risen))

    def end(self, now: float, run: bytes) -> None:
        """The run has given its slot back."""
        self._settle(now)
        row = self._serving.pop(run, None)
        if row is not None and not row.is_preempted:
            self._took.append(now - row.begun)

    def keep(self, now: float, running: Collection[bytes]) -> None:
        """End all runs but these: what the provider's slots say counts."""
        for run in [run for run in self._serving if run not in running]:
            self.end(now, run)

    def surplus(self) -> list[bytes]:
        """Return the runs that are served beyond the slots there are now, those of the lowest priority."""
        rows = sorted(self._serving.values(), key=lambda row: (row.risen, -self._share(row), row.wish.run))
        return [row.wish.run for row in rows[: max(0, len(rows) - self.slots)]]

    def drop(self, run: bytes) -> None:
        """The run wants no slot here any more."""
        self._waiting.pop(run, None)

    def withdraw(
        self, now: float, asker: bytes, run: bytes | None = None, *, is_served: bool = False
    ) -> None:
        """Drop a run, or all, for which `asker` asked last; one that `is_served` elsewhere is charged as a
        usual run, to the asker where it did not wait here."""
        rows = self._waiting.values()
        gone = [row.wish for row in rows if row.wish.asker == asker and run in (None, row.wish.run)]
        for wish in gone:
            self.drop(wish.run)
        if is_served and run is not None:
            (wish,) = gone or [Wish(run, asker)]
            self._charge(now, wish, 0.0, elsewhere=self._usual or USUAL_SECONDS)

    def progress(self, run: bytes, seconds_left: float | None) -> None:
        """Note how long a run will still need its slot, as its steps go; None for not known."""
        if run in self._serving:
            self._serving[run].seconds_left = seconds_left

    def weigh(self, requester: bytes, weight: float) -> None:
        """Give a requester a share of so many times another's, for what it has done for this provider."""
        account = self._account(requester)
        account.weight = max(1e-6, weight)
        account.phase = self._phase(account.weight)

    # Shares

    def used(self, now: float, requester: bytes) -> float:
        """Return the slot-seconds that count for a requester, for its weight."""
        self._settle(now)
        account = self._account(requester)
        return account.used / account.weight

    def _settle(self, now: float) -> None:
        """Charge what was used until now, and forget who waits no more."""
        for row in self._serving.values():
            seconds = max(0.0, now - row.charged)
            row.charged = max(row.charged, now)
            self._charge(now, row.wish, seconds)
        for run in [run for run, row in self._waiting.items() if now - row.asked > FORGET_SECONDS]:
            del self._waiting[run]

    def _charge(self, now: float, wish: Wish, seconds: float, *, elsewhere: float = 0.0) -> None:
        account, price = self._account(wish.requester), 2.0 ** (wish.priority - PRIORITY)
        account.used = _halved(account.used, now - account.at) + seconds * price
        account.elsewhere = _halved(account.elsewhere, now - account.at) + elsewhere
        account.at = max(account.at, now)

    def _account(self, requester: bytes) -> _Account:
        if requester not in self._accounts:
            while len(self._accounts) >= REQUESTERS_MAX:
                del self._accounts[min(self._accounts, key=lambda each: self._accounts[each].used)]
            self._accounts[requester] = _Account(phase=self._phase(1.0))
        return self._accounts[requester]

    # Order

    def _order(self, now: float) -> list[bytes]:
        rows, usual = self._waiting, self._usual or USUAL_SECONDS
        requesters = {row.wish.requester for row in rows.values()}
        elsewhere = {requester: self._used_elsewhere(requester) for requester in requesters}
        least = min(elsewhere.values(), default=0.0)
        most = ELSEWHERE_RUNS_MAX * usual
        behind = {requester: min(most, used - least) for requester, used in elsewhere.items()}
        return sorted(rows, key=lambda run: self._rank(now, rows[run], usual, behind))

    def _used_elsewhere(self, requester: bytes) -> float:
        """Return the slot-seconds that count as used at others, for a requester's weight."""
        account = self._account(requester)
        return account.elsewhere / account.weight

    def _rank(
        self, now: float, row: _Waiting, usual: float, behind: Mapping[bytes, float]
    ) -> tuple[float, float, float, float, bytes]:
        wish, account = row.wish, self._account(row.wish.requester)
        rows = (each for each in self._serving.values() if each.wish.requester == wish.requester)
        coming = sum(max(0.0, usual - (now - each.begun)) for each in rows)
        finish = (account.used + coming + usual * account.phase) / account.weight + behind[wish.requester]
        return (-self._risen(now, row), finish, wish.deadline, row.since, wish.run)

    def _phase(self, weight: float) -> float:
        """Return the part of a run, 0 to 1, that counts before it is served: the same for equal weights, so
        that their deadlines decide, and another at each provider."""
        digest = blake3(_PHASE.pack(weight) + self.name).digest(4)
        return int.from_bytes(digest, "big") / 2**32

    @property
    def _usual(self) -> float | None:
        return sorted(self._took)[len(self._took) // 2] if self._took else None

    @staticmethod
    def _risen(now: float, row: _Waiting) -> float:
        """Return the priority to which a run has risen by waiting; it keeps it while it is served."""
        return row.wish.priority + (now - row.since) // AGE_SECONDS

    def _is_held(self, now: float, run: bytes) -> bool:
        """Return whether a free slot is kept for this run, which is before another that asks."""
        return self._is_patient(now, self._waiting[run])

    @staticmethod
    def _is_patient(now: float, row: _Waiting) -> bool:
        """Whether it is to be expected that the run asks again soon: it has done so before, or another was
        made to give its slot up for it."""
        if row.made_room and now - row.asked <= HOLD_SECONDS_MAX:
            return True
        return row.interval_seconds > 0 and now - row.asked <= min(
            HOLD_SECONDS_MAX, HOLD_FACTOR * row.interval_seconds
        )

    def _estimate(self, now: float, place: int) -> float | None:
        """Return when the waiting run at this place may have a slot: if what is served takes what it
        says is left, and each before it what runs here took lately. None where one of these is not known."""
        usual = self._usual
        free = [0.0] * (self.slots - len(self._serving))
        for row in self._serving.values():
            left = row.seconds_left
            if left is None and usual is not None:
                left = max(0.0, usual - (now - row.begun))
            if left is None:
                return None
            free.append(left)
        heapq.heapify(free)
        if place >= len(free) and usual is None:
            return None
        for _ in range(place):
            heapq.heappush(free, heapq.heappop(free) + (inf if usual is None else usual))
        return None if free[0] == inf else free[0]

    def _preempt(self, wish: Wish) -> None:
        """Where a run of lower priority is served, have it make room; once for each slot that is needed."""
        if any(row.is_preempted for row in self._serving.values()):
            return
        lower = [row for row in self._serving.values() if row.risen < wish.priority]
        if lower:
            row = min(lower, key=lambda each: (each.risen, -self._share(each), each.wish.run))
            row.is_preempted = True
            self._waiting[wish.run].made_room = True
            self.events.append(Preempt(row.wish.run))

    def _share(self, row: _Serving) -> float:
        account = self._account(row.wish.requester)
        return account.used / account.weight


def _halved(used: float, seconds: float) -> float:
    """Return what is left of what was used so long ago."""
    return used * float(0.5 ** (max(0.0, seconds) / HALF_LIFE_SECONDS))
