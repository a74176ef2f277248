"""A world of Kademlia cores alone: the DHT under churn, splits and attack, without the help of membership.

`sim.worlds.cores` runs SWIM in addition to Kademlia; SWIM reports deaths at once and costs most of the
events. Here a node must detect deaths itself, so these figures are for the harder case, and hours of a
thousand nodes take minutes. The population is constant: when a node stops, a node with a new id starts
without any contacts.

Attackers are cores of other classes, chosen by node number (`tests.dht.liars`). The world decides the address
at which a node is seen, so no node can claim one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from crypto.contact import make_address
from crypto.facts import Signer
from crypto.identity import PeerId
from dht.capabilities import ADVERT_VERSION, Advert, Query
from dht.events import CapabilitiesFound, Joined, NodesFound, RecordsFound, RecordStored
from dht.kademlia import Kademlia, Sends
from dht.keys import Key, node_number, record_key
from dht.messages import PROTOCOL
from dht.records import sign_record
from dht.routing import Contact
from dht.settings import KademliaSettings
from sim.engine import Engine
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import EPOCH_SECONDS
from sim.seeds import HashSigner, draw, seeded_peer, seeded_rng
from sim.worlds.timers import Agenda

SWARM = "table"
JOINED_THROUGH = 3
"""Number of peers that a newcomer knows, as from a short seed list."""
GIGABYTE = 10**9

MakeCore = Callable[..., Kademlia]


@dataclass
class Found:
    """One lookup: whether the record existed, whether it was found, how long that took, and in how many
    rounds."""

    at: float
    is_found: bool
    is_forged: bool
    is_newest: bool
    seconds: float
    rounds: int


@dataclass
class Entry:
    """One record that the world stored: its publisher, and its newest sequence number."""

    key: Key
    publisher: PeerId
    sequence: int
    expires: float
    value: bytes
    is_stored: bool = False


@dataclass
class Life:
    """One node from its start to its end."""

    number: int
    peer: PeerId
    core: Kademlia
    since: float
    has_joined: bool = False
    offers: Advert | None = None


@dataclass
class Figures:
    """The figures of a simulated world."""

    found: list[Found] = field(default_factory=list)
    stores: list[tuple[float, int, int, float]] = field(default_factory=list)
    """The time, the number of holders, the number of nodes tried, and the duration."""
    replicas: list[tuple[float, list[int]]] = field(default_factory=list)
    """The time, and the number of live holders of each record."""
    stale: list[float] = field(default_factory=list)
    """The share of dead contacts in all tables, one value per sample."""
    recall: list[float] = field(default_factory=list)
    hunts: list[tuple[float, int, int, float]] = field(default_factory=list)
    """Seconds, nodes found, how many of them are running with the wanted advert, and the share of `count`
    that these are."""
    unended: int = 0


class TableWorld:
    """A world of nodes started at the same time, from `seed`. `median_seconds` is the median time a node
    stays, inf without churn.
    """

    def __init__(
        self,
        nodes: int,
        seed: int,
        *,
        median_seconds: float = math.inf,
        settings: KademliaSettings | None = None,
        loss: float = 0.02,
        latency_seconds: float = 0.05,
        core_of: Callable[[int], MakeCore] = lambda _number: Kademlia,
        host_of: Callable[[int], str] | None = None,
        advert_of: Callable[[int, Random], Advert] | None = None,
        signer_of: Callable[[int, PeerId], Signer] | None = None,
    ) -> None:
        model = NetworkModel(nearest_seconds=latency_seconds, farthest_seconds=latency_seconds, loss=loss)
        self.seed = seed
        self.settings = settings or KademliaSettings()
        self.links = SimLinks(model, seed)
        self.engine = Engine(self.links, publish=self._learnt)
        self.figures = Figures()
        self.lives: dict[PeerId, Life] = {}
        self.entries: list[Entry] = []
        self.hosts: dict[PeerId, str] = {}
        self.handled: dict[PeerId, int] = {}
        self._agenda = Agenda()
        self._mean_seconds = median_seconds / math.log(2)
        self._core_of = core_of
        self._host_of = host_of or _own_network
        self._advert_of = advert_of
        self._signer_of = signer_of or (lambda _number, peer: HashSigner(peer, SWARM, seed))
        self._rng = seeded_rng(seed, "table")
        self._waiting: dict[tuple[PeerId, int], Callable[[Any], None]] = {}
        self._next = 0
        for _ in range(nodes):
            self.begin(acquainted=True)
        self._acquaint()

    @property
    def now(self) -> float:
        return self.engine.now

    # Lives.

    def begin(self, *, acquainted: bool = False, peer: PeerId | None = None, endless: bool = False) -> Life:
        """Add a node that joins through others unless it is `acquainted`."""
        number = self._next
        self._next += 1
        peer = peer or seeded_peer(self.seed, number)
        self.links.place(peer, number)
        self.hosts[peer] = self._host_of(number)
        signer = self._signer_of(number, peer)
        address = make_address(self.hosts[peer], 9747)
        core = self._core_of(number)(signer, self.settings, seeded_rng(self.seed, "core", number), (address,))
        core.wall_offset = EPOCH_SECONDS
        core.origins.host_of = self.hosts.get
        life = Life(number, peer, core, self.now, has_joined=acquainted)
        introducers = self._some(JOINED_THROUGH)
        self.lives[peer] = life
        self.engine.add(peer, core, protocol=PROTOCOL, at=self.now)
        if not acquainted:
            self.engine.call(self.now, peer, lambda node, now: node.join(now, introducers), protocol=PROTOCOL)
        if self._advert_of is not None:
            self._offer(life)
        if not endless and self._mean_seconds < math.inf:
            self.at(self.now + self._rng.expovariate(1 / self._mean_seconds), self._end, life)
        return life

    def _end(self, life: Life) -> None:
        self.kill(life.peer)
        self.begin()

    def kill(self, peer: PeerId) -> None:
        """Stop a node without a goodbye."""
        self.engine.kill(peer, self.now)
        del self.lives[peer]
        for place in [place for place in self._waiting if place[0] == peer]:
            del self._waiting[place]

    def _some(self, count: int) -> list[PeerId]:
        joined = [peer for peer, life in self.lives.items() if life.has_joined]
        return self._rng.sample(joined, min(count, len(joined)))

    def _acquaint(self) -> None:
        """Give the first nodes the tables that they would have after running for long."""
        peers = sorted(self.lives, key=node_number)
        for place, peer in enumerate(peers):
            table = self.lives[peer].core.table
            known: dict[int, None] = {}
            reach = self.settings.k
            while reach < len(peers):
                window = range(max(0, place - reach), min(len(peers), place + reach))
                known.update(dict.fromkeys(self._rng.sample(window, min(2 * self.settings.k, len(window)))))
                reach *= 4
            known.update(
                dict.fromkeys(self._rng.sample(range(len(peers)), min(8 * self.settings.k, len(peers))))
            )
            for other in known:
                contact = Contact(peers[other], (f"{self.hosts[peers[other]]}:9747",))
                contact.group = self.lives[peer].core.origins.group(peers[other], contact.addresses)
                table.answered(0.0, contact)
            self.lives[peer].core.upkeep.begin(self._rng.uniform(-self.settings.refresh_seconds, 0.0))

    # Actions.

    def at(self, time: float, action: Callable[..., object], *arguments: Any) -> None:
        """Schedule an action at an instant."""
        self._agenda.at(time, lambda: _do(action, arguments))
        self.engine.halt(self._agenda.due)

    def run(self, until: float) -> None:
        """Run all events up to an instant."""
        while (due := self._agenda.due) <= until:
            self.engine.run(due)
            self._agenda.do_first()
        self.engine.run(until)

    def every(self, rate: float, until: float, action: Callable[[], None]) -> None:
        """Repeat an action `rate` times a second on average, until an instant."""
        rng = seeded_rng(self.seed, "every", str(rate), action.__name__)

        def again() -> None:
            action()
            plan()

        def plan() -> None:
            due = self.now + rng.expovariate(rate)
            if due < until:
                self.at(due, again)

        plan()

    def store(
        self,
        life: Life | None = None,
        *,
        key: Key | None = None,
        entry: Entry | None = None,
        lasts: float = 14_400.0,
    ) -> Entry | None:
        """Have `node`, or a random node, store a record, or a newer version of the record of `entry`."""
        life = life or self.pick()
        if life is None:
            return None
        wall = EPOCH_SECONDS + self.now
        if entry is None:
            key = key or record_key(SWARM, len(self.entries).to_bytes(8, "big"))
            entry = Entry(key, life.peer, 0, 0.0, b"")
            self.entries.append(entry)
        entry.sequence += 1
        entry.expires = self.now + lasts
        entry.value = draw(self.seed, "value", entry.key, entry.sequence)
        made, begun = entry, self.now

        def order(core: Kademlia, now: float) -> tuple[int, Sends]:
            fact = sign_record(
                core.signer, made.key, made.value, sequence=made.sequence, expires=int(wall + lasts)
            )
            return core.store(now, fact)

        def ended(event: RecordStored) -> None:
            made.is_stored = made.is_stored or event.acknowledged > 0
            self.figures.stores.append((begun, event.acknowledged, event.tried, self.now - begun))

        self.order(life, order, ended)
        return entry

    def look(self, life: Life | None = None, *, entry: Entry | None = None, paths: int = 1) -> None:
        """Have `node`, or a random node, look for the record of `entry`, or a random record."""
        life = life or self.pick()
        live = [each for each in self.entries if each.is_stored and each.expires > self.now]
        if life is None or not live:
            return
        sought = entry or live[self._rng.randrange(len(live))]
        begun, sequence = self.now, sought.sequence
        self.figures.unended += 1

        def ended(event: RecordsFound) -> None:
            self.figures.unended -= 1
            own = [each for each in event.records if each.publisher == sought.publisher]
            genuine = [
                each for each in own if each.value == draw(self.seed, "value", sought.key, each.sequence)
            ]
            newest = any(each.sequence >= sequence for each in genuine)
            forged = len(genuine) < len(own)
            self.figures.found.append(
                Found(begun, bool(genuine), forged, newest, self.now - begun, event.rounds)
            )

        self.order(life, lambda core, now: core.find(now, sought.key, paths=paths), ended)

    def measure_recall(self) -> None:
        """Return how many of the 20 nearest live nodes a lookup of a random key names."""
        life = self.pick()
        if life is None:
            return
        key = record_key("recall", self._rng.randbytes(8))
        place, count = int.from_bytes(key, "big"), self.settings.k

        def ended(event: NodesFound) -> None:
            others = (peer for peer in self.lives if peer != life.peer)
            nearest = sorted(others, key=lambda peer: node_number(peer) ^ place)[:count]
            self.figures.recall.append(len({*event.peers} & {*nearest}) / max(1, len(nearest)))

        self.order(life, lambda core, now: core.locate(now, key), ended)

    def hunt(self, query: Query, life: Life | None = None) -> None:
        """Have `node`, or a random node, search by capability."""
        life = life or self.pick()
        if life is None:
            return
        begun, asker = self.now, life.peer

        def ended(event: CapabilitiesFound) -> None:
            true = [
                offer
                for offer in event.offers
                if (other := self.lives.get(offer.peer)) is not None and other.offers == offer.advert
            ]
            there = sum(
                life.offers is not None and query.fits(life.offers)
                for life in self.lives.values()
                if life.peer != asker
            )
            share = len(true) / max(1, min(query.count, there))
            self.figures.hunts.append((self.now - begun, len(event.offers), len(true), share))

        self.order(life, lambda core, now: core.hunt(now, query), ended)

    def _offer(self, life: Life) -> None:
        assert self._advert_of is not None
        advert = self._advert_of(life.number, seeded_rng(self.seed, "advert", life.number))
        life.offers = advert
        delay_seconds = self._rng.uniform(0.0, 60.0) if not self.now else 5.0
        self.at(self.now + delay_seconds, self._advertise, life)

    def _advertise(self, life: Life) -> None:
        if self.lives.get(life.peer) is life:
            self.engine.command(
                life.peer, lambda core, now: core.advertise(now, life.offers), protocol=PROTOCOL
            )

    def pick(self) -> Life | None:
        """Return a random node that has joined and whose core is honest."""
        for _ in range(64):
            life = self.lives[self._rng.choice(list(self.lives))] if self.lives else None
            if life is not None and life.has_joined and type(life.core) is Kademlia:
                return life
        return None

    def sample(self) -> None:
        """Count the replicas of all live records, and the dead contacts in all tables."""
        held: dict[tuple[Key, PeerId], int] = {}
        wall = EPOCH_SECONDS + self.now
        contacts = dead = 0
        for life in self.lives.values():
            for record in life.core.records:
                if wall < record.expires and type(life.core) is Kademlia:
                    place = record.key, record.publisher
                    held[place] = held.get(place, 0) + 1
            for contact in life.core.table:
                contacts += 1
                dead += contact.peer not in self.lives
        counts = [
            held.get((entry.key, entry.publisher), 0) for entry in self.entries if entry.expires > self.now
        ]
        self.figures.replicas.append((self.now, counts))
        self.figures.stale.append(dead / max(1, contacts))

    def holders(self, entry: Entry) -> dict[PeerId, int]:
        """Return the live nodes that hold a record, and the sequence number that each holds."""
        kept = {peer: life.core.records.kept(entry.key, entry.publisher) for peer, life in self.lives.items()}
        return {peer: record.sequence for peer, record in kept.items() if record is not None}

    # Cores.

    def order(
        self, life: Life, order: Callable[[Kademlia, float], tuple[int, Sends]], ended: Callable[[Any], None]
    ) -> None:
        """Have a node act; `ended` receives the event that ends the action."""

        def begin(core: Any, now: float) -> Sends:
            number, sends = order(core, now)
            self._waiting[life.peer, number] = ended
            return sends

        if self.lives.get(life.peer) is life:
            self.engine.command(life.peer, begin, protocol=PROTOCOL)

    def _learnt(self, now: float, peer: PeerId, event: Any) -> None:
        del now
        if isinstance(event, Joined):
            if peer in self.lives:
                self.lives[peer].has_joined = True
            return
        request = getattr(event, "request", None)
        ended = None if request is None else self._waiting.pop((peer, request), None)
        if ended is not None:
            ended(event)


def grind(seed: int, key: Key, count: int, tries: int) -> list[PeerId]:
    """Return the `count` ids nearest to a key among `tries` invented ones, as an attacker generates them."""
    place = int.from_bytes(key, "big")
    made = [PeerId(draw(seed, "ground", number)[:32]) for number in range(tries)]
    nearest = sorted((node_number(peer) ^ place, peer) for peer in made)
    return [peer for _, peer in nearest[:count]]


def _do(action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Call an action of the agenda and discard its result."""
    action(*arguments)


def _own_network(number: int) -> str:
    """Put each node in its own /24 of public addresses."""
    place = number + 1
    return f"{20 + (place >> 16)}.{place >> 8 & 255}.{place & 255}.1"


def some_advert(number: int, rng: Random) -> Advert:
    """Return the offer of a node in a mixed swarm: a tenth of nodes have GPUs, memory ranges from 2 to 128
    GB, and there are three regions.
    """
    device = "cuda" if rng.random() < 0.1 else "cpu"
    memory = rng.choice((2, 8, 8, 16, 32, 128)) * GIGABYTE
    region = rng.choice(("eu-west", "us-east", "asia"))
    return Advert(ADVERT_VERSION, device, memory, 1e9 * (1 + number % 7), True, region)
