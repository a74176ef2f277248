"""The work with DHT records in a world of cores: peers store and look up records at the scenario's rates.

As in `node.services.discovery`, a running peer signs its own records again before they expire. The seed
determines by name which peer stores or looks up which key, and when.
"""

from random import Random
from typing import Any

from dht.events import RecordsFound, RecordStored
from dht.keys import Key, record_key
from dht.messages import PROTOCOL as KADEMLIA
from dht.records import sign_record
from node.services.driver import Sends
from sim.events import PeerStopped, RecordGot, RecordPublished, RecordWanted
from sim.seeds import seeded_rng
from sim.worlds.life import Life, WorldEnvironment

PURPOSE = "sim"
VALUE_BYTES = 64
RENEWALS = 3
"""How often a record is renewed per lifetime, as in `node.services.discovery`."""


class _Entry:
    """One record: its publisher's life, and its expiry. `stored`: a peer keeps it."""

    __slots__ = ("expires", "number", "peer", "serial", "stored")

    def __init__(self, number: int, publisher: Life) -> None:
        self.number = number
        # A reference to the life would keep the cores of dead peers in memory.
        self.peer = publisher.peer
        self.serial = publisher.serial
        self.expires = 0.0
        self.stored = False


class _Request:
    """One store or lookup in progress."""

    __slots__ = ("begun", "entry", "expected", "quiet")

    def __init__(self, entry: _Entry, begun: float, *, expected: bool, quiet: bool) -> None:
        self.entry = entry
        self.begun = begun
        self.expected = expected
        self.quiet = quiet


class RecordsWork:
    """The part of a world that stores and looks up records."""

    def __init__(self, ground: WorldEnvironment) -> None:
        self._ground = ground
        self._settings = ground.scenario.records
        self._entries: list[_Entry] = []
        self._made = 0
        self._pending: dict[Life, dict[int, _Request]] = {}
        self._storing = seeded_rng(ground.seed, "stores")
        self._finding = seeded_rng(ground.seed, "lookups")
        ground.on(RecordStored, self._stored)
        ground.on(RecordsFound, self._found)
        ground.on(PeerStopped, self._stopped)
        self._after(self._storing, self._settings.stores_per_second, self._store_one)
        self._after(self._finding, self._settings.lookups_per_second, self._find_one)

    def _after(self, rng: Random, rate: float, action: Any) -> None:
        if rate > 0:
            self._ground.at(self._ground.now + rng.expovariate(rate), action)

    # Storing

    def _store_one(self) -> None:
        self._after(self._storing, self._settings.stores_per_second, self._store_one)
        life = self._ground.pick(self._storing)
        if life is None:
            return
        entry = _Entry(self._made, life)
        self._made += 1
        self._entries.append(entry)
        self._store(entry, life, quiet=False)
        renew_seconds = self._settings.lifetime_seconds / RENEWALS
        if renew_seconds > 0:
            self._ground.at(self._ground.now + renew_seconds, self._renew, entry, renew_seconds)

    def _renew(self, entry: _Entry, renew_seconds: float) -> None:
        life = self._publisher(entry)
        if life is not None and not life.leaving:
            self._store(entry, life, quiet=True)
            self._ground.at(self._ground.now + renew_seconds, self._renew, entry, renew_seconds)

    def _publisher(self, entry: _Entry) -> Life | None:
        """Return the life that stored the record, if it still runs."""
        life = self._ground.lives.get(entry.peer)
        return life if life is not None and life.serial == entry.serial else None

    def _store(self, entry: _Entry, life: Life, *, quiet: bool) -> None:
        now = self._ground.now
        entry.expires = now + self._settings.lifetime_seconds
        value = seeded_rng(self._ground.seed, "value", entry.number).randbytes(VALUE_BYTES)

        def store(core: Any, now: float) -> tuple[int, Sends]:
            # According to the peer's own clock, as in a node.
            wall = core.wall_offset + now
            sequence, expires = int(wall * 1000), int(wall + self._settings.lifetime_seconds)
            fact = sign_record(life.signer, _key(entry), value, sequence=sequence, expires=expires)
            self._ground.tell(life, RecordPublished(_key(entry), value, sequence))
            stored: tuple[int, Sends] = core.store(now, fact)
            return stored

        if not quiet:
            self._ground.tell(life, RecordWanted(entry.number, storing=True))
        self._order(life, _Request(entry, now, expected=True, quiet=quiet), store)

    def _stored(self, life: Life, event: RecordStored) -> None:
        request = self._taken(life, event.request)
        if request is None:
            return
        request.entry.stored = request.entry.stored or event.acknowledged > 0
        if not request.quiet:
            self._got(life, request, storing=True, copies=event.acknowledged, rounds=event.rounds)

    # Looking up

    def _find_one(self) -> None:
        self._after(self._finding, self._settings.lookups_per_second, self._find_one)
        entry = self._choose()
        life = self._ground.pick(self._finding)
        if entry is None or life is None:
            return
        self._ground.tell(life, RecordWanted(entry.number, storing=False))
        expected = self._is_there(entry, life)
        request = _Request(entry, self._ground.now, expected=expected, quiet=False)
        key = _key(entry)
        self._order(life, request, lambda core, now: core.find(now, key))

    def _choose(self) -> _Entry | None:
        """Return a random unexpired record; expired ones found on the way are dropped."""
        while self._entries:
            index = self._finding.randrange(len(self._entries))
            entry = self._entries[index]
            if entry.expires > self._ground.now:
                return entry
            self._entries[index] = self._entries[-1]
            self._entries.pop()
        return None

    def _is_there(self, entry: _Entry, life: Life) -> bool:
        """Return whether a peer confirmed that it keeps the record, the publisher is alive and reachable, and
        the peer that looks it up is in the DHT."""
        if not (entry.stored and life.entered) or self._publisher(entry) is None:
            return False
        reaches = self._ground.reaches
        return reaches(life.peer, entry.peer) and reaches(entry.peer, life.peer)

    def _found(self, life: Life, event: RecordsFound) -> None:
        request = self._taken(life, event.request)
        if request is not None:
            self._got(life, request, storing=False, copies=len(event.records), rounds=event.rounds)

    # Both

    def _order(self, life: Life, request: _Request, order: Any) -> None:
        def begin(core: Any, now: float) -> Sends:
            number, sends = order(core, now)
            self._pending.setdefault(life, {})[number] = request
            made: Sends = sends
            return made

        self._ground.command(life, KADEMLIA, begin)

    def _taken(self, life: Life, number: int) -> _Request | None:
        pending = self._pending.get(life)
        request = None if pending is None else pending.pop(number, None)
        if pending is not None and not pending:
            del self._pending[life]
        return request

    def _got(self, life: Life, request: _Request, *, storing: bool, copies: int, rounds: int) -> None:
        seconds = self._ground.now - request.begun
        self._ground.tell(
            life, RecordGot(request.entry.number, storing, copies, request.expected, seconds, rounds)
        )

    def _stopped(self, life: Life, event: PeerStopped) -> None:
        del event
        self._pending.pop(life, None)


def _key(entry: _Entry) -> Key:
    return record_key(PURPOSE, entry.number.to_bytes(8, "big"))
