"""Beacons: multicast packets by which nodes of one swarm on one local network find each other without
configured addresses.

A core without I/O; the sockets are in `multicast`. A newcomer asks and present nodes answer after a short
random pause. From then on each announces itself now and then, and the more nodes there are, the more rarely.
A beacon is only a hint: the dialled peer must prove its identity.

A beacon is encrypted and authenticated with a key derived from the swarm's secret. So garbage and other
swarms cost one MAC, and an outsider of a private swarm learns neither the swarm nor its members. A member may
send beacons in another's name, and recorded beacons may be replayed; each costs the receiver one dial. Unlike
multicast DNS (RFC 6762) this does not publish everything to everybody; its random pauses and its suppression
of duplicate answers (sections 5.2 and 7) are taken from there.
"""

import hashlib
import hmac
import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from crypto.contact import ADDRESSES_MAX, PLACE_LENGTH_MAX, Address, make_address, parse_address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PEER_ID_BYTES, PeerId
from crypto.token_buckets import Buckets, TokenBucket

HERE = "fe80::"
"""Placeholder for a link-local host, which stands for the packet's source. The real address would be useless
on another link, and on this link it is the packet's source anyway."""
BEACON_BYTES_MAX = 1_232
"""Maximum size of a beacon, as for any datagram: the smallest MTU of IPv6 without the headers."""
ASKING_SECONDS = (0.0, 1.0, 3.0, 7.0)
"""When a newcomer asks, in seconds after the start. Several questions are needed because packets get lost and
a waking network card takes seconds."""
PERIOD_SECONDS = 30.0
"""How often a node announces itself, give or take a quarter. A node that missed all answers to its questions
is found after this time."""
PERIOD_SECONDS_PER_NEIGHBOUR = 0.25
"""With many neighbours, the period is this long for each of them. Together the nodes send at most four
beacons a second."""
ANSWER_SECONDS = 0.2
ANSWER_SECONDS_PER_NEIGHBOUR = 0.02
"""Answers to one question are spread over ANSWER_SECONDS plus this time for each neighbour: about fifty
answers a second in a large network."""
ANSWERS_ENOUGH = 8
"""After this many answers from other nodes, this node's answer is not needed."""
SILENCE_SECONDS_MIN = 1.0
"""Least time between two beacons of this node, however often others ask."""
NEIGHBOURS_MAX = 1_024
"""Maximum number of neighbours remembered, the most recently heard ones. A single link is not expected to
have more."""
RETELL_SECONDS = 300.0
"""A neighbour that is still heard is reported again after this time, because it may have been away."""
NEWS_PER_MINUTE_MAX = 60
"""Maximum number of neighbours reported per minute, because each may cost a dial. Further ones are reported
when they are heard again."""
TOLD_MAX = 256
"""Maximum number of own addresses remembered from earlier beacons: enough for a laptop that was carried
through many networks."""
SOURCES_MAX = 256
SOURCE_PER_SECOND_MAX = 10.0
SOURCE_BURST_MAX = 40.0
"""Limits on the beacons read from one address; a machine may have forty nodes."""
TOTAL_PER_SECOND_MAX = 200.0
TOTAL_BURST_MAX = 400.0
"""Limits on the beacons read from all addresses together. At ten microseconds each, this rate takes two
thousandths of a core."""

_PURPOSE = b"peerloom/beacon/1"
_NONCE_BYTES = 12
_TAG_BYTES = 16


class Beacon(msgspec.Struct, frozen=True, array_like=True):
    """States that `peer` is here and reachable at `addresses`; if `asks`, others should answer."""

    asks: bool
    peer: Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=PLACE_LENGTH_MAX)], ...],
        msgspec.Meta(max_length=ADDRESSES_MAX),
    ]


@dataclass(frozen=True)
class NeighbourHeard:
    """A peer of the swarm claims to be on this network, with its addresses. Nothing about the peer is
    proved."""

    peer: PeerId
    addresses: tuple[Address, ...]


class BeaconSeal:
    """Turns beacons into packets and back with the secrets of a swarm. The first secret seals; any of them
    opens."""

    def __init__(self, secrets: Sequence[bytes], entropy: Callable[[int], bytes]) -> None:
        keys = [hmac.digest(secret, _PURPOSE, hashlib.sha256) for secret in secrets]
        self._ciphers = [ChaCha20Poly1305(key) for key in keys]
        self._entropy = entropy

    def seal(self, beacon: Beacon) -> bytes:
        nonce = self._entropy(_NONCE_BYTES)
        return nonce + self._ciphers[0].encrypt(nonce, encode(beacon), _PURPOSE)

    def open(self, data: bytes) -> Beacon | None:
        """Return the content of a packet; None if it belongs to another swarm.

        Raises:
            RemoteProtocolError: the packet is of this swarm, but not a beacon.
        """
        nonce, sealed = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        for cipher in self._ciphers:
            try:
                text = cipher.decrypt(nonce, sealed, _PURPOSE)
            except InvalidTag:
                continue
            beacon: Beacon = decode(text, Beacon, bytes_max=BEACON_BYTES_MAX)
            return beacon
        return None


class Beacons:
    """Decides when to send beacons and which to accept. `addresses` returns this node's present addresses."""

    def __init__(
        self,
        peer: PeerId,
        seal: BeaconSeal,
        rng: Random,
        counters: Counter[str],
        addresses: Callable[[], Sequence[Address]],
        now: float,
    ) -> None:
        self.events: list[NeighbourHeard] = []
        self._peer = peer
        self._seal = seal
        self._rng = rng
        self._counters = counters
        self._addresses = addresses
        # The addresses in this node's own beacons, which come back to it.
        self._told: set[str] = set()
        self._heard: OrderedDict[PeerId, _Neighbour] = OrderedDict()
        self._sources = Buckets[str](SOURCE_PER_SECOND_MAX, SOURCE_BURST_MAX, SOURCES_MAX)
        self._total = TokenBucket(TOTAL_PER_SECOND_MAX, TOTAL_BURST_MAX, TOTAL_BURST_MAX, now)
        self._news = TokenBucket(NEWS_PER_MINUTE_MAX / 60, NEWS_PER_MINUTE_MAX, NEWS_PER_MINUTE_MAX, now)
        self._questions = [now + seconds for seconds in ASKING_SECONDS]
        self._known_here: tuple[Address, ...] | None = None
        self._due = inf
        self._answer_due = inf
        self._answers = 0
        self._sent = -inf

    @property
    def deadline(self) -> float:
        """When to call `wake`, in monotonic seconds."""
        return min(self._due, self._answer_due, *self._questions[:1])

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table that other nodes can make grow."""
        return {
            "neighbours": (len(self._heard), NEIGHBOURS_MAX),
            "sources": (len(self._sources), SOURCES_MAX),
        }

    def receive(self, now: float, source: str, data: bytes) -> None:
        """Take one packet from the host `source`, as the network states it. Raises nothing; errors are
        counted."""
        if not _NONCE_BYTES + _TAG_BYTES < len(data) <= BEACON_BYTES_MAX:
            self._counters["beacons_refused_size"] += 1
            return
        if not (self._sources.of(source, now).take(now) and self._total.take(now)):
            self._counters["beacons_over_rate"] += 1
            return
        try:
            beacon = self._seal.open(data)
        except RemoteProtocolError:
            self._counters["beacons_refused_malformed"] += 1
            return
        if beacon is None:
            self._counters["beacons_of_others"] += 1
        elif beacon.peer != self._peer or not self._told.issuperset(beacon.addresses):
            # A beacon with this node's own id and a new address: this node has moved, or another node has its
            # key.
            self._counters["beacons_heard"] += 1
            self._hear(now, source, beacon)

    def wake(self, now: float) -> list[bytes]:
        """Return the multicast packet that is due, if any."""
        if self.deadline > now:
            return []
        here = self._look(now)
        asks = bool(self._questions) and self._questions[0] <= now
        while self._questions and self._questions[0] <= now:
            del self._questions[0]
        self._answer_due, self._sent = inf, now
        period = max(PERIOD_SECONDS, PERIOD_SECONDS_PER_NEIGHBOUR * len(self._heard))
        self._due = now + period * self._rng.uniform(0.75, 1.25)
        addresses = tuple(str(address.of(None)) for address in here)
        self._told.update(addresses)
        if len(self._told) > TOLD_MAX:
            self._told = set(addresses)
        self._counters["beacons_sent"] += 1
        return [self._seal.seal(Beacon(asks, self._peer, addresses[:ADDRESSES_MAX]))]

    def _look(self, now: float) -> tuple[Address, ...]:
        """Return this node's addresses. If they have changed, ask again like a newcomer, because the network
        may be new."""
        known, here = self._known_here, tuple(self._addresses())
        self._known_here = here
        if known is not None and known != here:
            self._questions = [now + seconds for seconds in ASKING_SECONDS]
        return here

    def _hear(self, now: float, source: str, beacon: Beacon) -> None:
        peer = PeerId(beacon.peer)
        addresses = _likely(beacon.addresses, source, peer)
        known = self._heard.pop(peer, None) or _Neighbour()
        self._heard[peer] = known
        if len(self._heard) > NEIGHBOURS_MAX:
            self._heard.popitem(last=False)
        is_old = now - known.told > RETELL_SECONDS
        # A neighbour's beacons differ slightly by interface. Only addresses that came through no interface
        # before are new.
        is_news = is_old or not known.addresses.issuperset(addresses)
        if addresses and is_news and self._news.take(now):
            known.addresses = frozenset(addresses) if is_old else known.addresses.union(addresses)
            known.told = now if is_old else known.told
            self.events.append(NeighbourHeard(peer, addresses))
        if beacon.asks:
            self._answer_to(now)
        elif self._answer_due < inf:
            self._answers += 1
            if self._answers >= ANSWERS_ENOUGH:
                self._answer_due = inf

    def _answer_to(self, now: float) -> None:
        if self._answer_due == inf:
            self._answers = 0
            spread = ANSWER_SECONDS + ANSWER_SECONDS_PER_NEIGHBOUR * len(self._heard)
            due = now + spread * self._rng.random()
            self._answer_due = max(due, self._sent + SILENCE_SECONDS_MIN)


@dataclass
class _Neighbour:
    """The addresses reported for a peer, and when, for at most RETELL_SECONDS. The limit on news bounds their
    number."""

    addresses: frozenset[Address] = frozenset()
    told: float = -inf


def _likely(texts: Sequence[str], source: str, peer: PeerId) -> tuple[Address, ...]:
    """Return the addresses to dial for a beacon. The packet's source comes first, whether the beacon names it
    or not, because only the source is known to work on this link.

    Only a packet over loopback may name loopback. A link-local address counts only if it is the packet's own
    source. It comes last, because the others work on every link.
    """
    addresses = []
    for text in texts:
        try:
            address = parse_address(text)
        except ValueError:
            continue  # a kind of address that a later version introduced
        if address.kind not in ("ip4", "ip6") or address.peer not in (None, peer):
            continue
        if address.is_link_local:
            if "%" not in source:
                continue
            address = make_address(source, address.port)
        addresses.append(address.of(peer))
    if not _is_loopback(source):
        addresses = [address for address in addresses if not _is_loopback(address.host)]
        if addresses and all(address.host != source for address in addresses):
            seen = make_address(source, addresses[0].port, peer)
            addresses += [] if seen.is_link_local else [seen]
    return tuple(sorted(addresses, key=lambda address: (address.is_link_local, address.host != source)))


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
