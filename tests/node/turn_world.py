"""Requesters that compete for the slots of providers, in virtual time and without nodes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from node.placement.turn_rows import PRIORITY, SlotWish
from node.placement.turns import FairQueue

TICK_SECONDS = 30.0


@dataclass
class Requester:
    """A requester that keeps `outstanding` runs of `run_seconds` submitted, `runs` in all. `keys` gives the
    key of each run.
    """

    name: str
    run_seconds: float = 600.0
    outstanding: int = 1
    runs: int = 1_000_000
    weight: float = 1.0
    priority: int = PRIORITY
    has_fresh_keys: bool = False
    keys_kept: int = 1
    begins_at: float = 0.0

    def keys(self) -> Iterator[bytes]:
        """Yield the key of each run in turn."""
        for number in count():
            kind = number if self.has_fresh_keys else number % self.keys_kept
            yield f"{self.name}/{kind}".encode().ljust(32, b".")


@dataclass
class _Run:
    wish: SlotWish
    owner: Requester
    left: float
    since: float
    place: int | None = None


@dataclass
class World:
    """Simulates the competition. `played` is the slot-seconds of each requester, `waits` its longest wait for
    a slot, `begun` the number of times that it took a slot.
    """

    slots: list[int]
    requesters: list[Requester]
    seed: int = 1
    played: Counter[str] = field(default_factory=Counter)
    waits: dict[str, float] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    counted_from: float = 0.0

    def play(self, seconds: float) -> "World":
        """Advance by this much time, or until a requester has submitted all its runs."""
        rng = Random(self.seed)
        providers = [FairQueue(slots, bytes([number])) for number, slots in enumerate(self.slots)]
        keys = {each.name: each.keys() for each in self.requesters}
        left = {each.name: each.runs for each in self.requesters}
        runs: list[_Run] = []
        for tick in range(int(seconds / TICK_SECONDS)):
            now = tick * TICK_SECONDS
            self._compute(now, runs, providers)
            runs = [run for run in runs if run.left > 0]
            present = [each for each in self.requesters if now >= each.begins_at]
            for each in present:
                open_now = sum(run.owner is each for run in runs)
                for _ in range(min(left[each.name], each.outstanding - open_now)):
                    left[each.name] -= 1
                    runs.append(self._submit(now, each, next(keys[each.name]), providers, rng))
            if any(all(run.owner is not each for run in runs) for each in present):
                break
            for run in rng.sample(runs, len(runs)):
                if run.place is None:
                    self._ask(now, run, providers, rng)
            self._make_room(now, runs, providers)
        return self

    def _compute(self, now: float, runs: list[_Run], providers: list[FairQueue]) -> None:
        for run in runs:
            if run.place is not None:
                run.left -= TICK_SECONDS
                if now > self.counted_from:
                    self.played[run.owner.name] += int(TICK_SECONDS)
                if run.left <= 0:
                    providers[run.place].end(now, run.wish.run)

    @staticmethod
    def _submit(now: float, each: Requester, key: bytes, providers: list[FairQueue], rng: Random) -> _Run:
        for turns in providers:
            turns.weigh(key, each.weight)
        wish = SlotWish(rng.randbytes(32), key, each.priority, asker=key)
        return _Run(wish, each, each.run_seconds * rng.uniform(0.9, 1.1), now)

    def _make_room(self, now: float, runs: list[_Run], providers: list[FairQueue]) -> None:
        for place, turns in enumerate(providers):
            for event in turns.events:
                for run in runs:
                    if run.wish.run == event.run and run.place == place:
                        turns.end(now, event.run)
                        self.preempted[run.owner.name] += 1
                        run.place, run.since = None, now
            turns.events.clear()

    def _ask(self, now: float, run: _Run, providers: list[FairQueue], rng: Random) -> None:
        name = run.owner.name
        self.waits[name] = max(self.waits.get(name, 0.0), now - run.since)
        for place in rng.sample(range(len(providers)), len(providers)):
            if providers[place].ask(now, run.wish) is None:
                providers[place].begin(now, run.wish)
                self.begun[name] += 1
                run.place = place
                for other in providers[:place] + providers[place + 1 :]:
                    other.withdraw(run.wish.asker, run.wish.run)
                return
