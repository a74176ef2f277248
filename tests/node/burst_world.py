"""Bursts of runs, submitted at the same time to providers that are all free. Virtual time, without nodes.

Requesters behave as nodes do: they ask all providers, and ask again after a contest and at intervals. The
greedy requester asks first and more often, for as many runs as there are providers, at priority 9. If it
`is_polite`, it submits as many runs but follows the protocol; its use is then the use of an honest requester
that wants more than the others.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from random import Random

from node.placement.turn_rows import PRIORITY, SlotWish
from node.placement.turns import CONTEST_SECONDS, PRIORITY_MAX, SENIOR_SECONDS, FairQueue
from node.placement.waiting import AGAIN_SECONDS_MAX, AGAIN_SHARE, GOSSIP_GRACE_SECONDS

GREEDY = "greedy"
RUN_SECONDS = 60.0
ALL_ASKED_SECONDS = 30.0
"""Seconds between two requests of a waiting run to all providers, full ones included. In between, the run
asks only providers with a free slot."""


@dataclass(frozen=True)
class Burst:
    """Parameters of a burst. Each of the `honest` requesters submits `runs` runs within a second; the greedy
    requester keeps `outstanding` runs submitted. If `are_seniors`, the providers have known the honest
    requesters for a long time.
    """

    seed: int
    providers: int = 20
    honest: int = 10
    runs: int = 10
    outstanding: int = 20
    has_fresh_keys: bool = False
    are_seniors: bool = True
    is_greedy_senior: bool = False
    network: bytes = b""
    is_polite: bool = False
    contest_seconds: float = CONTEST_SECONDS


@dataclass
class _Run:
    owner: str
    wish: SlotWish
    since: float
    asked_all: float = -ALL_ASKED_SECONDS
    place: int = -1
    begun: float = 0.0


@dataclass
class BurstWorld:
    """One burst. `begun` counts the runs of each requester that started while all honest requesters still had
    waiting runs. `seconds` is the slot time that each requester used until the last honest run began.
    """

    burst: Burst
    begun: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    held_seconds: float = 0.0
    """Slot seconds that the greedy requester used; `due_seconds` is its max-min fair share of all used
    slots."""
    due_seconds: float = 0.0

    def __post_init__(self) -> None:
        burst = self.burst
        self._rng = Random(burst.seed)
        self._numbers = count()
        self._providers = [
            FairQueue(
                1,
                bytes([number, burst.seed]),
                contest_seconds=burst.contest_seconds,
                has_seniors=burst.are_seniors,
            )
            for number in range(burst.providers)
        ]
        self._calendar: list[tuple[float, int, _Run]] = []
        self._served: list[_Run] = []
        self._running: Counter[str] = Counter()
        self._left = Counter({f"h{number}": burst.runs for number in range(burst.honest)})

    def play(self) -> "BurstWorld":
        """Advance time until the last honest run has begun."""
        for owner, runs in self._left.items():
            if self.burst.are_seniors:
                for turns in self._providers:
                    turns.met(self._key(owner, 0), SENIOR_SECONDS)
            for _ in range(runs):
                self._submit(owner, self._rng.random())
        for turns in self._providers if self.burst.is_greedy_senior else ():
            turns.met(self._key(GREEDY, 0), SENIOR_SECONDS)
        for _ in range(self.burst.outstanding):
            self._submit(GREEDY, self._rng.random() if self.burst.is_polite else 0.0)
        last = 0.0
        while self._left:
            now, _, run = heapq.heappop(self._calendar)
            self._charge(now - last)
            last = now
            if run.place < 0:
                self._ask(now, run)
                continue
            self._providers[run.place].end(now, run.wish.run)
            self._running[run.owner] -= 1
            if run.owner == GREEDY:
                self._submit(GREEDY, now)
        for run in self._served:
            self.seconds[run.owner] += round(min(now - run.begun, RUN_SECONDS))
        return self

    @property
    def share(self) -> float:
        """Return the greedy requester's use relative to the mean of the honest requesters. The ratio exceeds
        1 even in a fair world, because the greedy requester gets the slots that are left once the honest ones
        are satisfied.
        """
        honest = sum(self.seconds.values()) - self.seconds[GREEDY]
        return self.seconds[GREEDY] * self.burst.honest / honest

    @property
    def due_share(self) -> float:
        """Return the greedy requester's use relative to its max-min fair share, summed over all moments."""
        return self.held_seconds / self.due_seconds

    def _charge(self, seconds: float) -> None:
        wants = sorted(
            self._left[owner] + self._running[owner] for owner in {*self._left, *self._running} - {GREEDY}
        )
        slots, claimants = float(self._running.total()), len(wants) + 1
        for wanted in wants:
            slots -= min(wanted, slots / claimants)
            claimants -= 1
        self.due_seconds += slots * seconds
        self.held_seconds += self._running[GREEDY] * seconds

    def _key(self, owner: str, number: int) -> bytes:
        kind = number if owner == GREEDY and self.burst.has_fresh_keys else 0
        return f"{self.burst.seed}-{owner}-{kind}".encode().ljust(32, b".")

    def _submit(self, owner: str, now: float) -> None:
        number = next(self._numbers)
        key = self._key(owner, number)
        is_greedy = owner == GREEDY and not self.burst.is_polite
        wish = SlotWish(
            number.to_bytes(32, "big"),
            key,
            PRIORITY_MAX if is_greedy else PRIORITY,
            asker=key,
            network=self.burst.network if owner == GREEDY else b"",
        )
        self._at(now, _Run(owner, wish, now))

    def _at(self, at: float, run: _Run) -> None:
        heapq.heappush(self._calendar, (at, next(self._numbers), run))

    def _ask(self, now: float, run: _Run) -> None:
        asks_all = now - run.asked_all >= ALL_ASKED_SECONDS
        run.asked_all = now if asks_all else run.asked_all
        asked = [place for place, turns in enumerate(self._providers) if asks_all or not turns.is_full]
        contest_seconds = 0.0
        for place in self._rng.sample(asked, len(asked)):
            wait = self._providers[place].ask(now, run.wish)
            if wait is None:
                self._begin(now, run, place)
                return
            if wait.is_contested:
                contest_seconds = max(contest_seconds, wait.seconds or 0.0)
        again = 1.0
        if run.owner != GREEDY or self.burst.is_polite:
            again = max(GOSSIP_GRACE_SECONDS, min(AGAIN_SECONDS_MAX, AGAIN_SHARE * (now - run.since)))
        self._at(now + (contest_seconds + 0.02 if contest_seconds else again), run)

    def _begin(self, now: float, run: _Run, place: int) -> None:
        self._providers[place].begin(now, run.wish)
        for turns in self._providers:
            turns.withdraw(run.wish.asker, run.wish.run)
        run.place, run.begun = place, now
        self._served.append(run)
        self._running[run.owner] += 1
        self._at(now + RUN_SECONDS * self._rng.uniform(0.9, 1.1), run)
        if len(self._left) == self.burst.honest:
            self.begun[run.owner] += 1
        if run.owner != GREEDY:
            self._left[run.owner] -= 1
            if not self._left[run.owner]:
                del self._left[run.owner]
