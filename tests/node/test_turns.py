"""Fair queueing for a provider's slots: shares, priorities, no starvation, and many simultaneous
requesters."""

import heapq
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.placement.turn_rows import PRIORITY, SlotWish
from node.placement.turns import AGE_SECONDS, FORGET_SECONDS, QUANTUM_SECONDS, FairQueue, Preempt, Wait

SEEDS = int(os.environ.get("PEERLOOM_TURNS_SEEDS", "1"))
"""Number of seeds; `make soak` takes 50."""
SHARES_OFF_MAX = 0.1
RUNS_OFF_MAX = 6
"""Number of runs by which a share may be off, in addition to a tenth of the share, because runs are
indivisible and each provider sees only its own queue."""
RUNS_OFF_USUAL = 2
"""The same in most queues."""
USUAL_SHARE_MIN = 0.7
EARLY_MAX = 4
"""Number of less urgent runs that may end before the last urgent one begins. A slot is reserved only for a
requester that asked twice; until then any requester gets it."""
A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def run_id(number: int) -> bytes:
    return number.to_bytes(32, "big")


def shares(weights: Mapping[bytes, float], slots: int = 2, hours: float = 30.0) -> dict[bytes, float]:
    """Return each requester's slot-seconds at a provider where all requesters always want more."""
    turns, rng, now, number = FairQueue(slots), Random(7), 0.0, 0
    for requester, weight in weights.items():
        turns.weigh(requester, weight)
    serving: list[tuple[float, bytes, bytes]] = []
    wanting = {requester: run_id(number := number + 1) for requester in weights}
    got: Counter[bytes] = Counter()
    while now < hours * 3600:
        now += 10
        while serving and serving[0][0] <= now:
            turns.end(now, heapq.heappop(serving)[1])
        for requester in rng.sample(list(weights), len(weights)):
            wish = SlotWish(wanting[requester], requester)
            if turns.ask(now, wish) is None:
                seconds = rng.choice([300.0, 600.0, 1_200.0])
                turns.begin(now, wish)
                heapq.heappush(serving, (now + seconds, wish.run, requester))
                got[requester] += int(seconds)
                wanting[requester] = run_id(number := number + 1)
    return dict(got)


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 3)])
def test_requesters_that_always_want_more_get_weighted_shares(weights: tuple[int, ...]) -> None:
    got = shares(dict(zip((A, B, C), map(float, weights), strict=True)))
    total = sum(got.values())
    for requester, weight in zip((A, B, C), weights, strict=True):
        fair = total * weight / sum(weights)
        assert abs(got[requester] - fair) <= 0.1 * fair


def test_a_requesters_higher_priority_preempts_its_own_run() -> None:
    turns = FairQueue(1)
    low, other, urgent = (
        SlotWish(run_id(1), A, priority=3),
        SlotWish(run_id(2), B),
        SlotWish(run_id(3), A, priority=7),
    )
    assert turns.ask(0.0, low) is None
    turns.begin(0.0, low)
    assert isinstance(turns.ask(1.0, other), Wait)
    assert turns.events == [], "another requester's run was preempted before its quantum was over"
    assert isinstance(turns.ask(2.0, urgent), Wait)
    assert turns.events == [Preempt(low.run, is_own=True)]
    turns.ask(3.0, urgent)
    assert len(turns.events) == 1, "the run was preempted several times"
    turns.end(4.0, low.run)
    assert isinstance(turns.ask(4.0, other), Wait), "the released slot was given to a different requester"
    assert turns.ask(4.1, urgent) is None
    turns.begin(4.1, urgent)
    assert turns.used(104.1, A) == pytest.approx(104, rel=0.01), (
        "the quantum did not hold for the high priority"
    )
    turns.events.clear()
    turns.ask(QUANTUM_SECONDS - 1.0, other)
    assert turns.events == []
    turns.ask(QUANTUM_SECONDS + 5.0, other)
    assert turns.events == [Preempt(urgent.run)], "swapping runs of one requester began a new quantum"


def test_no_priority_or_deadline_overtakes_another_requesters_run() -> None:
    turns = FairQueue(1)
    turns.begin(0.0, SlotWish(run_id(1), C, priority=0))
    first, second = SlotWish(run_id(2), A, priority=0), SlotWish(run_id(3), B, priority=9, deadline=1.0)
    for now in (1.0, 10.0):
        turns.ask(now, first)
        turns.ask(now, second)
    assert turns.events == []
    turns.end(11.0, run_id(1))
    assert isinstance(turns.ask(11.0, second), Wait)
    assert turns.ask(11.0, first) is None, "the run that has waited longest did not get the slot"


def test_expected_waiting_times_come_from_progress_or_shares() -> None:
    turns = FairQueue(2)
    for number, left in ((1, 40.0), (2, 90.0)):
        turns.begin(0.0, SlotWish(run_id(number), A))
        turns.progress(run_id(number), left)
    assert turns.ask(0.0, SlotWish(run_id(3), B)) == Wait(0, 40.0)
    assert turns.ask(1.0, SlotWish(run_id(4), C)) == Wait(1, 90.0)
    assert turns.ask(1.0, SlotWish(run_id(5), C)) == Wait(2, 3 * QUANTUM_SECONDS - 1)
    turns.progress(run_id(1), None)
    assert turns.ask(1.0, SlotWish(run_id(3), B)) == Wait(0, QUANTUM_SECONDS - 1)
    alone = FairQueue(1)
    alone.begin(0.0, SlotWish(run_id(1), A))
    assert alone.ask(0.0, SlotWish(run_id(2), A)) == Wait(0, None), (
        "an end was predicted although the length of its own run is unknown"
    )


def test_a_slot_is_reserved_only_for_a_run_that_asked_repeatedly() -> None:
    turns = FairQueue(1)
    turns.begin(0.0, SlotWish(run_id(1), A))
    first, second = SlotWish(run_id(2), B), SlotWish(run_id(3), C)
    turns.ask(1.0, first)
    turns.ask(2.0, second)
    turns.end(3.0, run_id(1))
    assert turns.ask(3.0, second) is None, "a run that asked only once has a slot reserved"
    turns.ask(4.0, first)
    assert isinstance(turns.ask(5.0, second), Wait), "no slot is reserved for the run that asked twice"
    assert turns.ask(5.0 + FORGET_SECONDS, second) is None


def test_a_requesters_run_with_the_earlier_deadline_goes_first() -> None:
    turns = FairQueue(1)
    turns.begin(0.0, SlotWish(run_id(1), A))
    later, sooner = SlotWish(run_id(2), B, deadline=900.0), SlotWish(run_id(3), B, deadline=800.0)
    for now in (1.0, 2.0):
        turns.ask(now, later)
        assert turns.ask(now, sooner) == Wait(0, QUANTUM_SECONDS - now)
    turns.end(3.0, run_id(1))
    assert isinstance(turns.ask(3.0, later), Wait)
    assert turns.ask(3.0, sooner) is None


def test_a_waiting_run_rises_above_its_requesters_later_ones() -> None:
    turns, now, humble = FairQueue(1), 0.0, SlotWish(run_id(0), B, priority=0)
    turns.begin(now, SlotWish(run_id(1), B, priority=9))
    for number in range(2, 10_000):
        now += 30.0
        if turns.ask(now, humble) is None:
            break
        turns.end(now, run_id(number - 1))
        urgent = SlotWish(run_id(number), B, priority=9)
        turns.ask(now, urgent)
        if turns.ask(now + 0.1, humble) is None:
            break
        turns.begin(now + 0.2, urgent)
    assert now <= 10 * AGE_SECONDS + 60


def test_a_run_that_waited_long_is_not_preempted_again() -> None:
    turns, humble = FairQueue(1), SlotWish(run_id(0), B, priority=0)
    turns.begin(0.0, SlotWish(run_id(1), B, priority=9))
    for hour in range(11):
        for seconds in range(0, 3600, 60):
            turns.ask(hour * AGE_SECONDS + seconds, humble)
    now = 11 * AGE_SECONDS
    turns.end(now, run_id(1))
    assert turns.ask(now, humble) is None
    turns.begin(now, humble)
    assert isinstance(turns.ask(now + 1, SlotWish(run_id(2), B, priority=9)), Wait)
    assert turns.events == []


def test_an_estimate_multiplies_runs_ahead_by_past_durations() -> None:
    turns = FairQueue(1)
    for number in range(3):
        turns.begin(100.0 * number, SlotWish(run_id(number), A))
        turns.end(100.0 * number + 60, run_id(number))
    turns.begin(300.0, SlotWish(run_id(3), A))
    assert turns.ask(310.0, SlotWish(run_id(4), B)) == Wait(0, 50.0)
    turns.progress(run_id(3), 20.0)
    assert turns.ask(310.0, SlotWish(run_id(4), B)) == Wait(0, 20.0)
    assert turns.ask(311.0, SlotWish(run_id(5), C)) == Wait(1, 80.0)


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(0, 3), st.sampled_from([1, 3, 9])),
        min_size=1,
        max_size=25,
    ),
    slots=st.integers(1, 3),
    weights=st.tuples(*[st.sampled_from([1.0, 2.0, 8.0])] * 4),
)
@settings(max_examples=25, deadline=None)
def test_later_urgent_runs_starve_no_run(
    arrivals: list[tuple[int, int, int, int]], slots: int, weights: tuple[float, ...]
) -> None:
    """A round takes ten minutes. A preempted run asks again for its remaining time, as its committer does."""
    turns, pending, served = FairQueue(slots), dict[int, tuple[SlotWish, int]](), dict[int, int]()
    for number, weight in enumerate(weights):
        turns.weigh(bytes([number]) * 32, weight)
    arrivals = sorted(arrivals)
    work = sum(row[3] for row in arrivals)
    last = arrivals[-1][0] + 60 + -(-work // slots) + len(arrivals)
    for round_ in range(last + 1):
        now = 600.0 * round_
        for number, (at, priority, requester, rounds) in enumerate(arrivals):
            if at == round_:
                pending[number] = SlotWish(run_id(number), bytes([requester]) * 32, priority), rounds
        for number in list(served):
            served[number] -= 1
            if not served[number]:
                turns.end(now, run_id(number))
                del served[number], pending[number]
        for beat in range(0, 600, 30):
            for number, (wish, _) in pending.items():
                if number not in served and turns.ask(now + beat, wish) is None:
                    turns.begin(now + beat, wish)
                    served[number] = pending[number][1]
            for event in turns.events:
                number = int.from_bytes(event.run, "big")
                turns.end(now + beat, event.run)
                pending[number] = pending[number][0], served.pop(number)
            turns.events.clear()
            assert len(served) <= slots
    assert not pending, f"{len(pending)} of {len(arrivals)} runs still wait after {last} rounds"


@given(
    slots=st.integers(1, 4),
    calls=st.lists(
        st.tuples(st.floats(0, 100), st.sampled_from(["ask", "end", "drop"]), st.integers(0, 9)), max_size=80
    ),
)
@settings(max_examples=60, deadline=None)
def test_slots_are_neither_overbooked_nor_idle(slots: int, calls: list[tuple[float, str, int]]) -> None:
    turns, now, serving = FairQueue(slots), 0.0, set[int]()
    for seconds, call, number in calls:
        now += seconds
        wish = SlotWish(run_id(number), bytes([number % 3]) * 32, priority=number)
        if call == "ask":
            if turns.ask(now, wish) is None and number not in serving:
                turns.begin(now, wish)
                serving.add(number)
        elif call == "end":
            turns.end(now, wish.run)
            serving.discard(number)
        else:
            turns.drop(wish.run)
        assert len(serving) <= slots
    now += 1_000
    if len(serving) < slots:
        assert turns.ask(now, SlotWish(run_id(99), A)) is None, (
            "the slot is still reserved although no other requester has asked for long"
        )


# Many requesters and providers


@dataclass
class World:
    """Requesters that each want `need` of the providers simultaneously, all or none, and ask again until they
    have them. The rules are those of `node.placement.leases`, as an event queue.
    """

    rng: Random
    providers: int
    turns: list[FairQueue] = field(default_factory=list)
    leased: list[dict[bytes, float]] = field(default_factory=list)
    waited: dict[bytes, float] = field(default_factory=dict)
    got: Counter[bytes] = field(default_factory=Counter)
    calendar: list[tuple[float, int, bytes]] = field(default_factory=list)
    served: list[tuple[SlotWish, float, float, bool]] = field(default_factory=list)
    all_want_until: float = inf

    def __post_init__(self) -> None:
        self.turns = [FairQueue(1 + number % 2, bytes([number])) for number in range(self.providers)]
        self.leased = [{} for _ in self.turns]

    def play(self, submissions: int, requesters: int) -> float:
        """Have all requesters submit simultaneously. Return when the last run ended."""
        wishes = {}
        for number in range(submissions):
            run, requester = run_id(number), bytes([number % requesters]) * 32
            wishes[run] = SlotWish(run, requester)
            heapq.heappush(self.calendar, (self.rng.random(), number, run))
        running: dict[bytes, list[int]] = {}
        count, now = submissions, 0.0
        while self.calendar:
            now, _, run = heapq.heappop(self.calendar)
            assert now < 6 * 3600, f"{len(wishes) - len(self.waited)} runs wait for ever"
            if run in running:
                for place in running.pop(run):
                    del self.leased[place][run]
                    self.turns[place].end(now, run)
                continue
            count += 1
            taken = self._try(now, wishes[run])
            if taken is None:
                heapq.heappush(self.calendar, (now + self.rng.uniform(2.0, 30.0), count, run))
                continue
            seconds = self.rng.uniform(20.0, 120.0)
            self.waited[run], running[run] = now, taken
            self.got[wishes[run].requester] += len(taken) * int(seconds)
            heapq.heappush(self.calendar, (now + seconds, count, run))
        return now

    def drain(
        self, weights: Mapping[bytes, float], submissions: int, priorities: Sequence[int] = (PRIORITY,)
    ) -> dict[bytes, tuple[float, float]]:
        """Have requesters simultaneously submit one-minute runs, each requester with its weight, and with
        these priorities in turn. Return two values for each: its slot-seconds, and its share of the
        slot-seconds that were served while all had waiting runs. A preempted run is served again from the
        start.
        """
        for turns in self.turns:
            for requester, weight in weights.items():
                turns.weigh(requester, weight)
        wishes = self._submit(weights, submissions, priorities)
        running, waiting, count = dict[bytes, tuple[int, int, float]](), dict(wishes), len(wishes)
        while waiting or running:
            now, number, run = heapq.heappop(self.calendar)
            if run in waiting:
                count += 1
                place = self._one(now, wishes[run])
                if place is None:
                    heapq.heappush(self.calendar, (now + self.rng.uniform(2.0, 30.0), count, run))
                else:
                    running[run] = place, count, now
                    heapq.heappush(self.calendar, (now + self.rng.uniform(55.0, 65.0), count, run))
                    del waiting[run]
                for other in self._to_make_room():
                    waiting[other] = wishes[other]
                    self._over(now, wishes[other], *running.pop(other), is_whole=False)
                    count += 1
                    heapq.heappush(self.calendar, (now + self.rng.uniform(2.0, 30.0), count, other))
                if place is not None and wishes[run].requester not in {w.requester for w in waiting.values()}:
                    self.all_want_until = min(self.all_want_until, now)
            elif run in running and running[run][1] == number:
                self._over(now, wishes[run], *running.pop(run), is_whole=True)
        return self._compare(weights)

    def _submit(
        self, weights: Mapping[bytes, float], submissions: int, priorities: Sequence[int]
    ) -> dict[bytes, SlotWish]:
        whole, wishes = sum(weights.values()), dict[bytes, SlotWish]()
        for requester, weight in weights.items():
            for number in range(round(submissions * weight / whole)):
                run = run_id(len(wishes))
                priority = priorities[number % len(priorities)]
                wishes[run] = SlotWish(run, requester, priority, asker=requester)
                heapq.heappush(self.calendar, (self.rng.random(), len(wishes), run))
        return wishes

    def _to_make_room(self) -> list[bytes]:
        runs = [event.run for turns in self.turns for event in turns.events]
        for turns in self.turns:
            turns.events.clear()
        return runs

    def _compare(self, weights: Mapping[bytes, float]) -> dict[bytes, tuple[float, float]]:
        got, whole = dict.fromkeys(weights, 0.0), sum(weights.values())
        for wish, begun, ended, _ in self.served:
            got[wish.requester] += max(0.0, min(ended, self.all_want_until) - begun)
        total = sum(got.values())
        return {r: (got[r], total * weight / whole) for r, weight in weights.items()}

    def _over(self, now: float, wish: SlotWish, place: int, _: int, begun: float, *, is_whole: bool) -> None:
        self.turns[place].end(now, wish.run)
        self.served.append((wish, begun, now, is_whole))

    def _one(self, now: float, wish: SlotWish) -> int | None:
        """Ask all providers in some order until one serves the run."""
        for place in self.rng.sample(range(self.providers), self.providers):
            if self.turns[place].ask(now, wish) is None:
                self.turns[place].begin(now, wish)
                for turns in self.turns[:place] + self.turns[place + 1 :]:
                    turns.withdraw(wish.asker, wish.run)
                return place
        return None

    def _try(self, now: float, wish: SlotWish) -> list[int] | None:
        need = self.rng.choice([1, 1, 2])
        taken: list[int] = []
        for place in self.rng.sample(range(self.providers), self.providers):
            turns = self.turns[place]
            if turns.ask(now, wish) is None:
                turns.begin(now, wish)
                self.leased[place][wish.run] = now
                assert len(self.leased[place]) <= turns.slots, "two leases for one slot"
                taken.append(place)
            if len(taken) == need:
                break
        if len(taken) == need:
            for turns in self.turns:
                turns.drop(wish.run)
            return taken
        for place in taken:
            del self.leased[place][wish.run]
            self.turns[place].end(now, wish.run)
        return None


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_of_a_hundred_submissions_is_served_in_the_end(seed: int) -> None:
    world = World(Random(seed), 20)
    world.play(submissions=100, requesters=10)
    assert len(world.waited) == 100
    assert max(world.waited.values()) < 1_800


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param((1, 1), marks=pytest.mark.slow),
        pytest.param((1, 1, 1), marks=pytest.mark.slow),
        pytest.param((1, 2), marks=pytest.mark.slow),
        (1, 2, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_queue_of_a_hundred_drains_by_the_shares_of_its_requesters(
    seed: int, weights: tuple[int, ...]
) -> None:
    """There are 20 nodes with 30 slots. Each node serves three or four runs, and sees only its own queue."""
    assert runs_off(seed, weights) <= RUNS_OFF_MAX


@cache
def runs_off(seed: int, weights: tuple[int, ...]) -> float:
    """Return by how many runs, beyond a tenth of it, the worst share of a drained queue is off."""
    off = World(Random(seed), 20).drain(dict(zip((A, B, C), map(float, weights), strict=False)), 100)
    return max((abs(seconds - fair) - SHARES_OFF_MAX * fair) / 60.0 for seconds, fair in off.values())


@pytest.mark.skipif(SEEDS < 10, reason="needs many seeds: PEERLOOM_TURNS_SEEDS=50")
def test_most_queues_drain_close_to_the_shares_of_their_requesters() -> None:
    worst = [runs_off(seed, (1, 2, 3)) for seed in range(SEEDS)]
    assert sum(each <= RUNS_OFF_USUAL for each in worst) >= USUAL_SHARE_MIN * SEEDS


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_queue_drains_by_priority_and_within_it_by_shares(seed: int) -> None:
    """Half of each requester's runs are urgent. They go first, and each requester gets its share of both
    kinds."""
    world = World(Random(seed), 20)
    off = world.drain(dict.fromkeys((A, B, C), 1.0), 100, priorities=(7, 5))
    urgent = max(begun for wish, begun, _, _ in world.served if wish.priority == 7)
    early = sum(is_whole and ended <= urgent for w, _, ended, is_whole in world.served if w.priority == 5)
    assert early <= EARLY_MAX, f"{early} runs ended before the last urgent one began, at {urgent:.0f} s"
    for seconds, fair in off.values():
        assert abs(seconds - fair) <= SHARES_OFF_MAX * fair + 60.0 * RUNS_OFF_MAX, off
