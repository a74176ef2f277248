"""Decides for hole punching what this node's outer address is, which addresses to dial, and how often. A core
without I/O; `now` is monotonic seconds.

Two routers that drop unsolicited packets both open from inside when both nodes dial simultaneously, each at
the address and port at which the other is seen from outside. This works if a router uses one outer port for
all destinations (endpoint-independent mapping, RFC 4787), or filters nothing. A peer's offer must not make
this node a scanner: see `admit`.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from crypto.contact import Address, parse_address
from crypto.identity import PeerId
from crypto.token_buckets import Buckets, TokenBucket
from node.transport.punch_messages import CANDIDATES_MAX

Transport = Literal["tcp", "udp"]
TRANSPORTS: tuple[Transport, ...] = ("tcp", "udp")
Kind = Literal["", "none", "alike", "unlike"]
"""How observers see this node: "" if unknown, "none" (not translated) at its own address, "alike" at one
outer address, "unlike" at several."""
RETRY_SECONDS = 1.0
"""Pause before the second attempt with one peer. The first may fail because both peers are busy starting."""
PAUSE_SECONDS = 60.0
PAUSE_SECONDS_MAX = 3_600.0
"""Pause before the third attempt, and its limit. The pause doubles with each further failure, because routers
rarely change."""
ANSWER_PAUSE_SECONDS = 3.0
"""Least time between two accepted offers of one peer: an attempt takes this long. Dials are also bounded for
each host."""
PEERS_MAX = 1_024
HOST_TRIES_PER_SECOND, HOST_TRIES_BURST = 1 / 60, 4.0
"""How often addresses at one host are dialled, whichever peer offers them. Several peers may be behind one
router."""
HOSTS_MAX = 1_024
ALL_TRIES_PER_SECOND, ALL_TRIES_BURST = 1.0, 64.0
"""How often hosts are dialled in all. A node that joins a swarm meets some tens of peers behind routers
within a moment, and later one now and then. Peers with many ids and addresses cannot cause more dials."""
PEER_TRIES_PER_SECOND, PEER_TRIES_BURST = 2 / 15, 8.0
"""How often the offers of one peer cause dials: two attempts at all the addresses that it may offer, and as
many again a minute later. So no peer uses up the common limit."""
NAMED_TRIES_PER_SECOND, NAMED_TRIES_BURST = 4 / 60, 4.0
"""How often one peer's offers through one introducer cause dials. All offers through one introducer share a
limit as large as that of the introducer's own offers, and separate from it."""
INTRODUCED_PER_SECOND, INTRODUCED_BURST = 1 / 15, 8.0
"""How often one peer may ask for introductions."""
TARGET_INTRODUCED_PER_SECOND, TARGET_INTRODUCED_BURST = 4 / 15, 16.0
"""How often one peer is introduced to others: four times as often, so that a single asker does not use up the
limit."""
PAIR_INTRODUCED_PER_SECOND, PAIR_INTRODUCED_BURST = 1 / 60, 2.0
"""How often one peer may ask for the same target. A failed attempt is repeated after a second, and only
rarely after that."""
PAIRS_MAX = 4_096
ALL_INTRODUCED_PER_SECOND, ALL_INTRODUCED_BURST = 2.0, 16.0
"""Limit on all introductions. Each costs two streams for seconds, and a dozen messages."""
SENT_PER_BYTE_MAX = 3
"""Bytes that this node sends, for each byte of an offer, to all hosts together that have not yet proved to be
its peer (as in QUIC, RFC 9000, section 8.1). Three knocks and three SYNs to a host of each IP version take
3,114 bytes. One knock and three SYNs to each host of the longest list take 2,796, which is less than the
shortest offer allows. A host that accepts a connection also gets one flight of a handshake (1,224 bytes),
because it has answered, and flights do not fit in addition to the knocks."""
SYNS_BYTES = {"ip4": 3 * 60, "ip6": 3 * 80}
"""Size of the packets that dial one host, with all headers. They are repeated by the kernel, or by this node
after a refusal."""
HEADERS_BYTES = {"ip4": 28, "ip6": 48}
"""Size of the IP and UDP headers of a datagram."""
OBSERVERS_MAX = 3
"""Maximum number of observers. Two show whether all see the same address."""
OBSERVED_SECONDS = 900.0
REST_SECONDS, REST_SECONDS_MAX = 10.0, 3_600.0
"""How long a host that could not be asked is left alone, and the limit. The time doubles with each further
failure."""
RESTS_MAX = 256
"""Maximum number of such hosts remembered, the latest. A peer was met at each of them."""


@dataclass
class _Tries:
    next_at: float = -inf
    answers_at: float = -inf
    comes_at: float = -inf
    failed: int = 0


class PunchBudget:
    """Decides which peers may be dialled, and when."""

    def __init__(self, admits: Callable[[Address], bool]) -> None:
        self._admits = admits
        self._tries: OrderedDict[PeerId, _Tries] = OrderedDict()
        self._hosts = Buckets[str](HOST_TRIES_PER_SECOND, HOST_TRIES_BURST, HOSTS_MAX)
        self._shares = Buckets[PeerId](PEER_TRIES_PER_SECOND, PEER_TRIES_BURST, PEERS_MAX)
        self._told = Buckets[PeerId](PEER_TRIES_PER_SECOND, PEER_TRIES_BURST, PEERS_MAX)
        self._named = Buckets[tuple[PeerId, PeerId]](NAMED_TRIES_PER_SECOND, NAMED_TRIES_BURST, PAIRS_MAX)
        self._all = TokenBucket(ALL_TRIES_PER_SECOND, ALL_TRIES_BURST, ALL_TRIES_BURST, -inf)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table that other peers can make grow."""
        return {
            "peers": (len(self._tries), PEERS_MAX),
            "hosts": (len(self._hosts), HOSTS_MAX),
            "shares": (len(self._shares), PEERS_MAX),
            "told": (len(self._told), PEERS_MAX),
            "named": (len(self._named), PAIRS_MAX),
        }

    def may_start(self, peer: PeerId, now: float) -> bool:
        """Return whether an attempt may begin, and record it."""
        tries = self._of(peer)
        if now < tries.next_at:
            return False
        later = min(PAUSE_SECONDS * 2.0 ** (tries.failed - 1), PAUSE_SECONDS_MAX)
        tries.next_at = now + (later if tries.failed else RETRY_SECONDS)
        return True

    def may_answer(self, peer: PeerId, now: float) -> bool:
        """Return whether a peer's offer may be accepted, and record it."""
        tries = self._of(peer)
        if now < tries.answers_at:
            return False
        tries.answers_at = now + ANSWER_PAUSE_SECONDS
        return True

    def may_come(self, teller: PeerId, now: float) -> bool:
        """Return whether this node may accept an introduction by `teller` to another peer, and record it. It
        does not count as an offer of either peer."""
        tries = self._of(teller)
        if now < tries.comes_at:
            return False
        tries.comes_at = now + ANSWER_PAUSE_SECONDS
        return True

    def ended(self, peer: PeerId, *, worked: bool) -> None:
        """Note that an attempt is over."""
        tries = self._of(peer)
        tries.failed = 0 if worked else min(tries.failed + 1, 10)

    def lost(self, peer: PeerId, now: float) -> None:
        """Allow a new attempt immediately, because a punched path was lost. The limits for hosts stay."""
        tries = self._of(peer)
        if not tries.failed:
            tries.next_at, tries.answers_at = min(tries.next_at, now), min(tries.answers_at, now)

    def admit(
        self,
        peer: PeerId,
        offered: Sequence[str],
        now: float,
        paid: Collection[str] = (),
        teller: PeerId | None = None,
    ) -> list[Address]:
        """Return the addresses of a peer's offer that may be dialled. Only valid claims count (see
        `AddressPolicy.admits`: no port below 1024, no loopback, no private network except this node's own),
        one for each host, within the limits of this peer, of all peers, and of the host. Addresses in `paid`
        are counted already, because the same attempt dials them by the other transport. An offer through a
        `teller` counts against the teller's introductions, because the teller may have invented the peer."""
        found: dict[str, Address] = {}
        for text in offered[:CANDIDATES_MAX]:
            try:
                address = parse_address(text).of(None)
            except ValueError:
                continue
            if address.kind not in ("ip4", "ip6") or address.relay is not None or not self._admits(address):
                continue
            if address.host in found:
                continue
            if address.host in paid or self._may_dial(peer, teller, address.host, now):
                found[address.host] = address
        return list(found.values())

    def _may_dial(self, peer: PeerId, teller: PeerId | None, host: str, now: float) -> bool:
        if teller is None:
            shares = [self._all, self._shares.of(peer, now)]
        else:
            shares = [self._all, self._told.of(teller, now), self._named.of((teller, peer), now)]
        if min(share.left(now) for share in shares) < 1.0 or not self._hosts.of(host, now).take(now):
            return False
        return all(share.take(now) for share in shares)

    def _of(self, peer: PeerId) -> _Tries:
        tries = self._tries.setdefault(peer, _Tries())
        self._tries.move_to_end(peer)
        if len(self._tries) > PEERS_MAX:
            self._tries.popitem(last=False)
        return tries


class OfferAllowance:
    """The bytes, with headers, that this node may still send to all addresses of one offer of `offer_bytes`.
    An answer alone does not lift the limit for a host, because an uninvolved machine also accepts or refuses
    connections. The peer has to prove its identity there."""

    def __init__(self, offer_bytes: int) -> None:
        self._left = SENT_PER_BYTE_MAX * offer_bytes
        self._spent: dict[str, int] = {}
        self._proved: set[str] = set()

    def take(self, address: Address, count: int) -> bool:
        """Return whether this many bytes may be sent to an address, and count them."""
        return self._take([(address.host, count)])

    def take_datagrams(self, addresses: Sequence[Address], payload_bytes: int) -> bool:
        """Return whether a datagram of this size may be sent to each address, and count them."""
        return self._take([(each.host, payload_bytes + HEADERS_BYTES[each.kind]) for each in addresses])

    def _take(self, costs: Sequence[tuple[str, int]]) -> bool:
        counted = [(host, count) for host, count in costs if host not in self._proved]
        needed = sum(count for _, count in counted)
        if needed > self._left:
            return False
        self._left -= needed
        for host, count in counted:
            self._spent[host] = self._spent.get(host, 0) + count
        return True

    def proved(self, address: Address) -> None:
        """Note that the offer's peer has proved its identity at an address, so bytes to its host no longer
        count."""
        self._proved.add(address.host)
        self._left += self._spent.pop(address.host, 0)


class IntroductionBudget:
    """Decides which peers this node introduces to each other."""

    def __init__(self) -> None:
        self._askers = Buckets[PeerId](INTRODUCED_PER_SECOND, INTRODUCED_BURST, PEERS_MAX)
        self._targets = Buckets[PeerId](TARGET_INTRODUCED_PER_SECOND, TARGET_INTRODUCED_BURST, PEERS_MAX)
        self._pairs = Buckets[tuple[PeerId, PeerId]](
            PAIR_INTRODUCED_PER_SECOND, PAIR_INTRODUCED_BURST, PAIRS_MAX
        )
        self._all = TokenBucket(ALL_INTRODUCED_PER_SECOND, ALL_INTRODUCED_BURST, ALL_INTRODUCED_BURST, -inf)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table that other peers can make grow."""
        return {
            "askers": (len(self._askers), PEERS_MAX),
            "targets": (len(self._targets), PEERS_MAX),
            "pairs": (len(self._pairs), PAIRS_MAX),
        }

    def may_introduce(self, asker: PeerId, target: PeerId, now: float) -> bool:
        """Record that a peer asks for another peer; return whether this node should introduce them."""
        if self._askers.of(asker, now).left(now) < 1.0:
            return False  # refused before it can fill the other tables
        buckets = (
            self._askers.of(asker, now),
            self._targets.of(target, now),
            self._pairs.of((asker, target), now),
            self._all,
        )
        return min(bucket.left(now) for bucket in buckets) >= 1.0 and all(
            bucket.take(now) for bucket in buckets
        )


class ObserverRests:
    """Hosts that did not answer as observers, so they are left alone for a while."""

    def __init__(self) -> None:
        self._rests: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rests)

    def failed(self, host: str, now: float) -> None:
        """Note that a host did not answer."""
        _, last = self._rests.pop(host, (0.0, REST_SECONDS / 2))
        rest_seconds = min(2 * last, REST_SECONDS_MAX)
        self._rests[host] = now + rest_seconds, rest_seconds
        if len(self._rests) > RESTS_MAX:
            self._rests.popitem(last=False)

    def answered(self, host: str) -> None:
        """Note that a host answered."""
        self._rests.pop(host, None)

    def may_ask(self, host: str, now: float) -> bool:
        """Return whether a host may be dialled."""
        return now >= self._rests.get(host, (now, 0.0))[0]


@dataclass
class SeenPlaces:
    """The outer addresses of this node, by transport and IP version, with the latest answer of each
    observer."""

    _seen: dict[tuple[Transport, int], OrderedDict[PeerId, tuple[float, Address, bytes]]] = field(
        default_factory=dict
    )

    def note(
        self, now: float, observer: PeerId, transport: Transport, address: Address, network: bytes
    ) -> None:
        """Record the address at which an observer in this network sees this node."""
        kept = self._seen.setdefault((transport, _family(address)), OrderedDict())
        kept.pop(observer, None)
        kept[observer] = now, address.of(None), network
        while len(kept) > OBSERVERS_MAX:
            kept.popitem(last=False)

    def forget(self) -> None:
        """Forget all answers, because this node has moved to a different network."""
        self._seen.clear()

    def place(self, transport: Transport, now: float, family: int = 4) -> Address | None:
        """Return the outer address; None if there is none or observers contradict each other."""
        seen = self._by_network(transport, family, now)
        return next(iter(seen.values())) if len(seen) == 1 else self.agreed_place(transport, now, family)

    def agreed_place(self, transport: Transport, now: float, family: int = 4) -> Address | None:
        """Return the outer address that observers in several networks see; None if they do not agree on a
        host. The port is the one most of them saw, or else the latest."""
        agreed = self._agreed(transport, family, now)
        return max(reversed(agreed), key=agreed.count) if agreed else None

    def kind(self, transport: Transport, now: float, own: Callable[[str], bool], family: int = 4) -> Kind:
        """Return how the router translates. `own` returns whether a host is this machine. One observer is not
        enough, and one liar among three changes nothing."""
        agreed = self._agreed(transport, family, now)
        if not agreed:
            return ""
        if own(agreed[0].host):
            return "none"
        return "alike" if len(set(agreed)) < len(agreed) else "unlike"

    def is_settled(self, now: float, family: int = 4) -> bool:
        """Return whether observers agree for TCP. If not, a further observer is worth asking."""
        agreed = self._agreed("tcp", family, now)
        return len(set(agreed)) < len(agreed)

    def text(self, now: float, own: Callable[[str], bool]) -> str:
        """Return the known state for people; empty if nothing is known."""
        found = self._family_text(now, own, 4), self._family_text(now, own, 6)
        return "; IPv6: ".join(found) if all(found) else found[0] or (found[1] and f"IPv6: {found[1]}")

    def _family_text(self, now: float, own: Callable[[str], bool], family: int) -> str:
        found: dict[Kind, list[str]] = {}
        for transport in TRANSPORTS:
            found.setdefault(self.kind(transport, now, own, family), []).append(transport.upper())
        parts = [f"{' and '.join(found[kind])} {_TEXTS[kind]}" for kind in _TEXTS if kind in found]
        return ", ".join(parts)

    def _agreed(self, transport: Transport, family: int, now: float) -> list[Address]:
        """Return the answers of observers in different networks that name the same host; empty if
        no two do."""
        seen = list(self._by_network(transport, family, now).values())
        hosts = [address.host for address in seen]
        return [address for address in seen if hosts.count(address.host) > 1]

    def _by_network(self, transport: Transport, family: int, now: float) -> dict[bytes, Address]:
        """Return the latest answer from each network, the oldest first."""
        found: dict[bytes, Address] = {}
        for at, address, network in self._seen.get((transport, family), OrderedDict()).values():
            if now - at <= OBSERVED_SECONDS:
                found.pop(network, None)
                found[network] = address
        return found


_TEXTS: dict[Kind, str] = {
    "none": "not translated",
    "alike": "translated alike for all peers, so hole punching can work",
    "unlike": "translated to a different port for each peer, so peers behind a router need a relay",
}


def _family(address: Address) -> int:
    return 6 if address.kind == "ip6" else 4
