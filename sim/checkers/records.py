"""Invariants of the DHT's records: no record is forged, and stored records are found."""

from crypto.identity import PeerId
from dht.events import RecordsFound
from sim.checkers.checker import Checker
from sim.events import RecordGot, RecordPublished
from sim.observers import Observation, World
from sim.scenario import Scenario

_MISSES_OF = 200
"""Minimum number of lookups against which the misses are counted during a run, so that a few early misses
mean nothing."""
_LOOKUPS_MIN = 20
"""Minimum number of lookups for a meaningful share at the end."""


class RecordsAreGenuine(Checker):
    """Check that each record found was published by its author with that sequence and value. It covers only
    keys under which the world itself published."""

    name = "forged-record"

    def __init__(self) -> None:
        super().__init__()
        self._published: dict[bytes, dict[tuple[PeerId | None, int], bytes]] = {}
        self.handlers = {RecordPublished: self._see_published, RecordsFound: self._see_found}

    def _see_published(self, observed: Observation, _world: World) -> None:
        event = observed.event
        self._published.setdefault(event.key, {})[observed.peer, event.sequence] = event.value

    def _see_found(self, observed: Observation, world: World) -> None:
        published = self._published.get(observed.event.key)
        if published is None:
            return
        for record in observed.event.records:
            value = published.get((record.publisher, record.sequence))
            if value != record.value or record.key != observed.event.key:
                who = "nobody" if observed.peer is None else world.name(observed.peer)
                what = "never published" if value is None else "published with a different value"
                raise self.broken(
                    f"{who} found a record of {world.name(record.publisher)} under "
                    f"{observed.event.key.hex()[:8]} with sequence {record.sequence}, which it {what}"
                )


class RecordsAreFound(Checker):
    """Check that at least the scenario's share of lookups find a record that was stored. Counting begins once
    the swarm has started and all records were republished, because each newcomer becomes responsible for
    records that only republishing brings to it."""

    name = "lost-records"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._share = scenario.checks.found_share
        self._from_seconds = scenario.start.spread_seconds + scenario.records.republish_seconds
        self._looked = 0
        self._missed = 0
        self.handlers = {RecordGot: self._see_got}

    def _see_got(self, observed: Observation, _world: World) -> None:
        event = observed.event
        if event.storing or not event.expected or observed.time < self._from_seconds:
            return
        self._looked += 1
        if event.copies == 0:
            self._missed += 1
            self._judge(max(self._looked, _MISSES_OF))

    def end(self, _world: World) -> None:
        if self._looked >= _LOOKUPS_MIN:
            self._judge(self._looked)

    def _judge(self, of: int) -> None:
        if self._missed > (1 - self._share) * of + 1e-9:
            raise self.broken(
                f"{self._missed} of {self._looked} lookups missed an existing record; "
                f"a share of {self._share:g} must find it"
            )
