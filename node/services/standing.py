"""Publishes this node's standing when it has changed by a step (`node.services.metadata`)."""

from collections.abc import Callable, Mapping, Sequence

import trio

from crypto.token_buckets import TokenBucket
from gossip.settings import PRESETS
from node.seams import Clock
from node.services.capacity import Capacity
from node.services.metadata import (
    CHANGES_KEPT,
    LOOK_SECONDS,
    AdvertisedStanding,
    change_seconds,
    machine_now,
    standing_now,
)


class StandingKeeper:
    """Keeps this node's published standing current. `look(told)` returns the standing, `tell` announces it,
    at a cost for all `live` members. `first` is the standing at the join."""

    def __init__(
        self,
        clock: Clock,
        preset: str,
        *,
        first: AdvertisedStanding,
        look: Callable[[AdvertisedStanding], AdvertisedStanding],
        tell: Callable[[], None],
        live: Callable[[], int],
    ) -> None:
        self.told = first
        self._clock = clock
        self._interval_seconds = PRESETS[preset].probe_interval_seconds
        self._look = look
        self._tell = tell
        self._live = live
        self._changes = TokenBucket(1.0, CHANGES_KEPT, CHANGES_KEPT, clock.monotonic())

    async def run(self) -> None:
        """Check the standing at intervals, until cancelled."""
        while True:
            self.look()
            await trio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Announce the standing if it has changed, unless it was announced too often."""
        now = self._clock.monotonic()
        found = self._look(self.told)
        if found == self.told:
            return
        left = self._changes.left(now)
        self._changes.tokens, self._changes.at = left, now
        self._changes.rate = 1 / change_seconds(self._interval_seconds, self._live())
        if self._changes.take(now):
            self.told = found
            self._tell()

    def tell_now(self) -> None:
        """Announce the standing immediately. This is for changes that happen once in a node's lifetime, and
        must not wait minutes behind changes of its load."""
        self._changes.take(self._clock.monotonic())
        self.told = self._look(self.told)
        self._tell()


def look_at(
    told: AdvertisedStanding | None,
    capacity: Capacity,
    words: Mapping[str, bool],
    slots_free: int,
    stages: Sequence[tuple[str, int]],
    *,
    is_measured: bool,
) -> AdvertisedStanding:
    """Return the standing of a node with this capacity. If not `is_measured`, the load counts as zero.

    `words` are capabilities and whether the node has them; `stages` are the (run, stage) pairs that it holds.
    """
    load, memory_bytes = 0.0, (capacity.memory_free_bytes, capacity.memory_total_bytes)
    if is_measured:
        load, free, total = machine_now(capacity.device, capacity.cores)
        memory_bytes = free, total
    capabilities = [word for word, holds in words.items() if holds]
    return standing_now(told, capabilities, load, memory_bytes, slots_free, stages)
