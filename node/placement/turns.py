"""The order in which requesters get one provider's slots: a sans-IO core.

If all slots are taken, a requester waits: it asks again regularly, and learns how many runs are ahead and
when a slot may be free. A freed slot is held briefly for the next requester. The order is start-time fair
queueing (Goyal, Vin and Cheng 1996) over requesters. Next is the requester whose use, in proportion to its
weight, will be least once it has been served; among equals, the one that has waited longest. Only this node's
own measurements count: the seconds in its slots, and the weight that receipts give. Priorities and deadlines
are claims, so they only order the runs of one requester.

Keys cost nothing, so a new key must gain nothing. A returning requester starts at the `level`, which is the
use that the latest served requester had when its service began, so absence earns no credit. A key is a
newcomer until it was served, has contributed, or was listed here as a live member for SENIOR_SECONDS. It
starts at the median use, or at the level if that is higher. All newcomers and their first runs count together
as one requester, the last among equals, and all requesters that contributed nothing count together with the
weight STRANGERS_WEIGHT. If there are only newcomers, the keys of one network count as one requester, while
each key of a local network counts by itself.

With `contest_seconds`, a free slot does not go to whoever asks first. A run waits for this long after its
first request, while others may ask too, and then the order above decides. Otherwise a requester that asks all
free providers a moment before the others would get a run at each of them, which is more than its share,
because each provider counts only its own service. A served run makes room for another requester's run if its
own requester has used a quantum more than its share, and for a run of its own requester with a higher
priority. So the number and the weights of the other requesters bound how long a requester waits.

Not here: leases on disk (`slots`), and the release of a slot after `Preempt`.
"""

import heapq
import struct
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from blake3 import blake3

from node.placement.turn_rows import RequesterUse, ServedRun, SlotWish, WaitingRun

AGE_SECONDS = 3_600.0
"""Waiting time after which a run gains one priority level, relative to its requester's other runs."""
FORGET_SECONDS = 120.0
"""A run that has not asked again for this long is dropped from the queue."""
HOLD_SECONDS_MAX = 35.0
"""Maximum seconds that a free slot is held for the next run; requesters ask again within half a minute."""
HOLD_FACTOR = 1.5
"""How long a slot is held for a run, as a multiple of the time between its requests."""
USUAL_SECONDS = 60.0
"""Assumed duration of a run while none has ended yet."""
QUANTUM_SECONDS = 600.0
"""Minimum seconds that a run keeps its slot before another requester's run may take it. This is long
compared with a handover, which takes seconds, and short compared with a run that would keep all others out
for hours."""
SAME_TIME_SECONDS = 1.0
"""Requesters that came within this time count as simultaneous, and a lot decides. Otherwise a requester that
submits many runs would come before others everywhere."""
DEBT_SECONDS_MAX = 3_600.0
"""Maximum excess use, divided by a requester's weight, that counts against it. So a requester that used an
idle machine for a day is not kept out for a day by later ones."""
NEWCOMER_SECONDS = 60.0
"""A key stays a newcomer until a run of its own has ended and it was served for this long. Otherwise a second
of service for each of many keys would turn all of them into requesters."""
STRANGERS_WEIGHT = 8.0
"""Common weight of all requesters that contributed nothing: as much as one that contributed most. So keys
that take turns cannot crowd out contributors."""
SENIOR_SECONDS = 600.0
"""A key that was listed for this long counts by itself. A key that is made for one run is not listed that
long, and keeping many keys listed takes as many members that answer probes."""
CONTEST_SECONDS = 2.0
"""The value of `contest_seconds` if there are contests. Requesters that submit within the same second have
asked all providers by then, and the delay is short compared with the minutes that a run takes."""
CONTEST_HOLD_SECONDS = 3.0
"""A run that has asked once is expected to ask again within this time after the contest; meanwhile it asks
other providers."""
_NEWCOMERS = b"newcomers"
GROUPS_MAX = 1_024
"""Maximum number of networks of newcomers that are distinguished."""
_PHASE = struct.Struct(">d")
WAITING_MAX = 1_024
REQUESTERS_MAX = 4_096
SERVED_MAX = 16
"""Number of ended runs whose time in a slot is remembered; waiting runs are expected to take the median."""
PRIORITY_MAX = 9


@dataclass(frozen=True)
class Wait:
    """No slot is available now. `ahead` runs are before this one, and a slot may be free in `seconds`, None
    if unknown. `used` is the requester's use, in seconds divided by its weight, beyond that of the requester
    here that used least. `is_contested`: a slot is free, and other runs may still ask for it."""

    ahead: int
    seconds: float | None
    used: float = 0.0
    is_contested: bool = False


@dataclass(frozen=True)
class Preempt:
    """Hand over this run's stage, because its requester has used more than its share while another waits. If
    `is_own`, a run of the same requester with a higher priority waits."""

    run: bytes
    is_own: bool = False


_Rank = tuple[float, float, float, float, bytes, float, float, bytes, int]


@dataclass
class FairQueue:
    """The queue of one provider with this number of `slots`. `name` is unique among providers. `has_seniors`
    returns whether any member has been listed for SENIOR_SECONDS."""

    slots: int
    name: bytes = b""
    contest_seconds: float = 0.0
    has_seniors: bool = False
    events: list[Preempt] = field(default_factory=list)
    _waiting: dict[bytes, WaitingRun] = field(default_factory=dict)
    _serving: dict[bytes, ServedRun] = field(default_factory=dict)
    _accounts: dict[bytes, RequesterUse] = field(default_factory=dict)
    _groups: dict[bytes, RequesterUse] = field(default_factory=dict)
    _strangers: RequesterUse = field(default_factory=lambda: RequesterUse(weight=STRANGERS_WEIGHT))
    _level: float = 0.0
    _contest_at: float = -inf
    """When the current contest began. All requesters that come during it count as having come at this
    time."""
    _knows_some: bool = False
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=SERVED_MAX))

    # Requests and slots

    def ask(self, now: float, wish: SlotWish, *, is_contested: bool = True) -> Wait | None:
        """Return None if the run may have a slot now, else how it waits. After None, the caller calls `begin`
        or `drop`. Without `is_contested`, the run need not let others ask first."""
        self._settle(now)
        if wish.run in self._serving:
            return None
        row = self._waiting.get(wish.run)
        if row is None:
            if len(self._waiting) >= WAITING_MAX:
                return Wait(len(self._waiting), None)
            self._arrive(now, wish)
            row = self._waiting[wish.run] = WaitingRun(wish, now, now)
        else:
            row.interval_seconds, row.asked, row.wish = now - row.asked, now, wish
        before = self._before(now, row)
        place, free = len(before), self.slots - len(self._serving)
        ahead = [each for each in before if self._is_patient(now, each)]
        left = row.since + self.contest_seconds - now
        if free and left > 0.0 and is_contested and not self._account(wish.requester).has_given:
            return Wait(place, left, is_contested=True)
        if len(ahead) < free:
            return None
        self._preempt(now, row, is_next=not ahead)
        return Wait(place, self._estimate(now, row, place), self._beyond_least(wish.requester))

    def begin(self, now: float, wish: SlotWish) -> None:
        """Record that the run has a slot from now on."""
        self._settle(now)
        if wish.run in self._serving:
            return
        row = self._waiting.pop(wish.run, None)
        if row is None:
            self._arrive(now, wish)
        account = self._account(wish.requester)
        account.tag, account.since = self._start(account), now
        if account.is_new and account.group is not None:
            self._groups[account.group].since = now
        self._level = max(self._level, account.tag)
        risen = wish.priority if row is None else self._risen(now, row)
        held = now if row is None or row.inherited is None else row.inherited
        group = account.group if account.is_new else None
        self._serving[wish.run] = ServedRun(wish, now, now, held, risen, group)

    def end(self, now: float, run: bytes) -> None:
        """Record that the run has given its slot back."""
        self._settle(now)
        row = self._serving.pop(run, None)
        if row is not None and not row.is_preempted:
            self._took.append(now - row.begun)
            account = self._account(row.wish.requester)
            account.is_known = account.is_known or account.served >= NEWCOMER_SECONDS
            self._knows_some = self._knows_some or account.is_known

    def keep(self, now: float, running: Collection[bytes]) -> None:
        """End all served runs except these: the provider's slots are authoritative."""
        for run in [run for run in self._serving if run not in running]:
            self.end(now, run)

    def surplus(self) -> list[bytes]:
        """Return the served runs that exceed the current number of slots: those of the requester that used
        most, and among them those with the lowest priority."""
        rows = sorted(self._serving.values(), key=lambda row: (-self._used(row), row.risen, row.wish.run))
        return [row.wish.run for row in rows[: max(0, len(rows) - self.slots)]]

    def drop(self, run: bytes) -> None:
        """Remove a run from the queue, because it wants no slot here any more."""
        self._waiting.pop(run, None)

    @property
    def is_full(self) -> bool:
        """Whether all slots are taken."""
        return len(self._serving) >= self.slots

    def withdraw(self, asker: bytes, run: bytes | None = None) -> None:
        """Remove a run, or all runs, whose latest request came from `asker`."""
        rows = self._waiting.values()
        for wish in [r.wish for r in rows if r.wish.asker == asker and run in (None, r.wish.run)]:
            self.drop(wish.run)

    def progress(self, run: bytes, seconds_left: float | None) -> None:
        """Record how long a run will still need its slot, judging from its steps; None if not known."""
        if run in self._serving:
            self._serving[run].seconds_left = seconds_left

    def weigh(self, requester: bytes, weight: float) -> None:
        """Set a requester's weight, which reflects its contributions to this provider."""
        account = self._account(requester)
        account.weight = max(1e-6, weight)
        self._knows_some = self._knows_some or account.has_given
        account.phase = self._phase(account.weight)

    def met(self, requester: bytes, seconds: float) -> None:
        """Record for how long a requester has been listed here as a live member."""
        if seconds >= SENIOR_SECONDS:
            account = self._account(requester)
            account.is_known = self._knows_some = True

    # Shares

    def used(self, now: float, requester: bytes) -> float:
        """Return a requester's counted use: its start plus its seconds in slots divided by its weight."""
        self._settle(now)
        return self._start(self._account(requester))

    def _settle(self, now: float) -> None:
        """Charge the use until now, and drop runs that no longer ask."""
        for row in self._serving.values():
            seconds = max(0.0, now - row.charged)
            row.charged = max(row.charged, now)
            account = self._account(row.wish.requester)
            account.served += seconds
            account.tag += seconds / account.weight
            if row.group is not None and row.group in self._groups:
                self._groups[row.group].tag += seconds
            if not account.has_given:
                self._strangers.tag += seconds / STRANGERS_WEIGHT
        for run in [run for run, row in self._waiting.items() if now - row.asked > FORGET_SECONDS]:
            del self._waiting[run]

    def _arrive(self, now: float, wish: SlotWish) -> None:
        """Start a requester that neither waits nor is served at the level, or at its former use if that is
        more."""
        if now - self._contest_at >= self.contest_seconds:
            self._contest_at = now
        requester, here = wish.requester, self._here()
        account = self._account(requester)
        accounts = [self._accounts[each] for each in here if each in self._accounts]
        if not account.has_given and all(each.has_given for each in accounts):
            self._strangers.tag = self._within_debt(self._strangers.tag)
        if requester in here:
            return
        is_cold = not (self._knows_some or self.has_seniors)
        account.is_founder = account.is_founder or (is_cold and not wish.network)
        if not account.is_founder:
            account.group = account.group or (wish.network if is_cold else _NEWCOMERS)
        if account.is_new and account.group is not None:
            group = self._group(account.group)
            if not any(each.is_new and each.group == account.group for each in accounts):
                group.tag, group.since = self._within_debt(max(group.tag, self._median)), self._contest_at
        account.tag, account.since = self._within_debt(self._start(account)), self._contest_at

    def _group(self, name: bytes) -> RequesterUse:
        if name not in self._groups:
            while len(self._groups) >= GROUPS_MAX:
                del self._groups[min(self._groups, key=lambda each: self._groups[each].tag)]
            self._groups[name] = RequesterUse(lot=blake3(name + self.name).digest(8))
        return self._groups[name]

    def _here(self) -> set[bytes]:
        """Return the requesters that wait or are served."""
        waiting = {row.wish.requester for row in self._waiting.values()}
        return waiting | {row.wish.requester for row in self._serving.values()}

    def _within_debt(self, tag: float) -> float:
        return min(max(tag, self._level), self._level + DEBT_SECONDS_MAX)

    @property
    def _median(self) -> float:
        """The (lower) median use of requesters that were served here."""
        tags = sorted(account.tag for account in self._accounts.values() if account.served)
        return tags[(len(tags) - 1) // 2] if tags else 0.0

    def _start(self, account: RequesterUse) -> float:
        """Return a requester's start; a newcomer is never ahead of its group of newcomers."""
        if account.is_new and account.group is not None:
            return max(account.tag, self._group(account.group).tag)
        return account.tag

    def _account(self, requester: bytes) -> RequesterUse:
        if requester not in self._accounts:
            while len(self._accounts) >= REQUESTERS_MAX:
                # A forgotten requester starts again as a newcomer, so forget the one that was served least,
                # which loses least.
                del self._accounts[min(self._accounts, key=lambda each: self._accounts[each].served)]
            lot = blake3(requester + self.name).digest(8)
            self._accounts[requester] = RequesterUse(phase=self._phase(1.0), lot=lot)
        return self._accounts[requester]

    def _used(self, row: ServedRun) -> float:
        return self._start(self._account(row.wish.requester))

    def _beyond_least(self, requester: bytes) -> float:
        least = min(self._start(self._account(each)) for each in self._here())
        return max(0.0, self._start(self._account(requester)) - least)

    # Order

    def _before(self, now: float, asking: WaitingRun) -> list[WaitingRun]:
        """Return the runs that get a slot before this one, in no order."""
        own: dict[bytes, list[WaitingRun]] = {}
        for row in self._waiting.values():
            own.setdefault(row.wish.requester, []).append(row)
        usual = self._usual or USUAL_SECONDS
        coming = dict.fromkeys(own, 0.0)
        of_groups, of_strangers = dict.fromkeys(self._groups, 0.0), 0.0
        for each in self._serving.values():
            rest = max(0.0, usual - (now - each.begun))
            requester = each.wish.requester
            if requester in coming:
                coming[requester] += rest
            if each.group in of_groups:
                of_groups[each.group] += rest
            of_strangers += 0.0 if self._account(requester).has_given else rest / STRANGERS_WEIGHT
        ranks: dict[bytes, _Rank] = {}
        for requester, rows in own.items():
            account = self._account(requester)
            came = account.since // SAME_TIME_SECONDS
            of_group, group_finish = (came, account.lot), -inf
            if account.is_new and account.group is not None:
                group = self._group(account.group)
                is_last = account.group == _NEWCOMERS
                of_group = inf if is_last else group.since // SAME_TIME_SECONDS, group.lot
                group_finish = group.tag + of_groups.get(account.group, 0.0) + usual * account.phase
            least = -inf if account.has_given else self._strangers.tag + of_strangers
            if len(rows) > 1:
                rows.sort(key=lambda row: self._own_rank(now, row))
            for number, row in enumerate(rows):
                before = coming[requester] + usual * (number + account.phase)
                own_finish = account.tag + before / account.weight
                finish = max(own_finish, group_finish)
                swap = -1.0 if row.inherited is not None and self._is_patient(now, row) else 0.0
                of_all = max(finish, least)
                rank = (swap, of_all, finish, *of_group, own_finish, came, account.lot, number)
                ranks[row.wish.run] = rank
        mine = ranks[asking.wish.run]
        return [self._waiting[run] for run, rank in ranks.items() if rank < mine]

    def _own_rank(self, now: float, row: WaitingRun) -> tuple[float, float, float, bytes]:
        """Return the sort key among one requester's runs."""
        return (-self._risen(now, row), row.wish.deadline, row.since, row.wish.run)

    def _phase(self, weight: float) -> float:
        """Return the fraction of a run, 0 to 1, that is charged before it is served. It is the same for equal
        weights, so that waiting time decides between them, and different at each provider."""
        digest = blake3(_PHASE.pack(weight) + self.name).digest(4)
        return int.from_bytes(digest, "big") / 2**32

    @property
    def _usual(self) -> float | None:
        return sorted(self._took)[len(self._took) // 2] if self._took else None

    @staticmethod
    def _risen(now: float, row: WaitingRun) -> float:
        """Return the priority to which a run has risen by waiting; it keeps that priority while it is
        served."""
        return row.wish.priority + (now - row.since) // AGE_SECONDS

    def _is_patient(self, now: float, row: WaitingRun) -> bool:
        """Return whether the run is expected to ask again soon: it has done so before, or another run was
        made to give up its slot for it."""
        if row.made_room and now - row.asked <= HOLD_SECONDS_MAX:
            return True
        if self.contest_seconds and now - row.since <= self.contest_seconds + CONTEST_HOLD_SECONDS:
            return True
        return row.interval_seconds > 0 and now - row.asked <= min(
            HOLD_SECONDS_MAX, HOLD_FACTOR * row.interval_seconds
        )

    # Waiting

    def _estimate(self, now: float, row: WaitingRun, place: int) -> float | None:
        """Return when the waiting run at this position may have a slot; None if unknown. It assumes that
        served runs take their stated remaining time, and each run ahead the recent usual time. If fair shares
        give the run a slot sooner, that time is returned."""
        usual = self._usual
        found = self._replay(now, place, usual)
        needs = [self._quantum_left(now, row, each) for each in self._serving.values()]
        due = min(needs, default=inf) + place * max(usual or 0.0, QUANTUM_SECONDS)
        seconds = min(inf if found is None else found, due)
        return None if seconds == inf else seconds

    def _replay(self, now: float, place: int, usual: float | None) -> float | None:
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

    def _quantum_left(self, now: float, row: WaitingRun, served: ServedRun) -> float:
        """Return in how many seconds a served run must make room for a waiting one, if both requesters
        continue as now: once it had its quantum, and its requester has used as much as the other will have
        after a quantum. inf if both runs have the same requester."""
        mine, theirs = self._account(row.wish.requester), self._account(served.wish.requester)
        if mine is theirs:
            return inf
        to_go = self._lead(mine, theirs) + QUANTUM_SECONDS / mine.weight
        return max(0.0, QUANTUM_SECONDS - (now - served.held), to_go * theirs.weight)

    def _lead(self, mine: RequesterUse, theirs: RequesterUse) -> float:
        """Return how much more one requester has used than the other. Use that counts for a whole group puts
        its members behind other requesters, but not behind each other."""
        if mine.is_new and theirs.is_new and mine.group == theirs.group:
            return mine.tag - theirs.tag
        stands = [self._start(mine), self._start(theirs)]
        if mine.has_given != theirs.has_given:
            of = 0 if theirs.has_given else 1
            stands[of] = max(stands[of], self._strangers.tag)
        return stands[0] - stands[1]

    def _preempt(self, now: float, row: WaitingRun, *, is_next: bool) -> None:
        """Make a served run give up its slot for a waiting one: a run of the same requester with lower
        priority, or, if the waiting run `is_next`, a run whose requester has had its share. At most one run
        gives up its slot at a time."""
        if any(each.is_preempted for each in self._serving.values()):
            return
        wish, rows = row.wish, self._serving.values()
        own = [each for each in rows if each.wish.requester == wish.requester and each.risen < wish.priority]
        if own:
            served = min(own, key=lambda each: (each.risen, each.wish.run))
            row.inherited = served.held
        else:
            done = [each for each in rows if self._quantum_left(now, row, each) <= 0.0]
            if not done or not is_next:
                return
            served = min(done, key=lambda each: (-self._used(each), each.risen, each.wish.run))
        served.is_preempted = row.made_room = True
        self.events.append(Preempt(served.wish.run, is_own=bool(own)))
