"""The addresses of peers, claimed and observed, and the order in which to try them.

No I/O.

An *observed* address is the source of an authentic datagram, a *proved* one answered a handshake with that
peer's key, and a *claimed* one is hearsay. An observation becomes stale, because the peer may have moved
silently. Then datagrams go to the other addresses as well, a few different ones each time, so that the
working address in a long list is found. Hearsay can name any number of peers, so it displaces only hearsay.
If there are too many peers that have answered, a new one displaces a peer of the source that has most of
them. `address_policy` decides which claims are tried, and in what order. Each claim is tried a few times,
then ever more rarely.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from crypto.contact import ADDRESSES_MAX, Address
from crypto.crowds import Crowd
from crypto.identity import PeerId
from crypto.token_buckets import Buckets, prefix_of
from node.transport.address_policy import AddressPolicy

PEERS_MAX = 4_096
"""Maximum number of peers remembered that have answered: enough for a full SWIM scope, a routing table and
lookups."""
HEARSAY_MAX = 2_048
"""Maximum number of peers known only from hearsay; the most recently named are kept. Such a peer is contacted
soon or never."""
OBSERVED_SECONDS = 120.0
"""How long an observation is fresh. This is well above any probe period, so a live peer keeps its observation
fresh."""
REORDER_SECONDS = OBSERVED_SECONDS / 4
"""Least time between two moves of a peer to the end of its source's order. Moving it at each packet would
cost too much."""
UNPROVEN_ADDRESSES_MAX = 3
"""A datagram goes to at most this many unproven addresses, so we never amplify more than threefold."""
PROVED_MAX = 4
"""Maximum number of addresses remembered at which a peer answered: two networks times two address
families."""
ROTATE_SECONDS = 0.4
"""After this time datagrams go to different unproven addresses. Datagrams sent within it form one burst and
go to the same addresses. A handshake is repeated after 0.5 s, so each repetition tries different
addresses."""
TRIES_MAX = 6
"""Number of bursts of datagrams to one claimed address before further bursts must wait. Each wait is twice as
long as the previous one."""
TRY_AGAIN_SECONDS = 1.0
TRY_AGAIN_SECONDS_MAX = 64.0
TRIED_MAX = 16
"""Maximum number of addresses of one peer whose attempts are counted: its current claims, and earlier
ones."""
HOST_TRIES_PER_SECOND = 20.0
HOST_TRIES_BURST = 60.0
"""Limit on datagrams to the claimed addresses of one host, over all the peers that are said to be there. So a
crowd of invented peers cannot aim this node at a victim. A lecture hall behind one router still needs only
seconds."""
HOSTS_TRIED_MAX = 4_096


@dataclass(slots=True)
class _Tries:
    """The number of bursts sent to an address that has not answered, and the time of the latest one."""

    count: int = 0
    at: float = 0.0
    has_failed: bool = False
    """Whether the last attempt is known to have failed; used for connections only."""

    def is_due(self, now: float) -> bool:
        return now - self.at < ROTATE_SECONDS or self.is_rested(now)

    def is_rested(self, now: float) -> bool:
        over, since = self.count - TRIES_MAX, now - self.at
        return over < 0 or since >= min(TRY_AGAIN_SECONDS_MAX, TRY_AGAIN_SECONDS * 2.0 ** min(over, 16))


@dataclass(slots=True)
class _Entry:
    claimed: tuple[Address, ...] = ()
    hinted: tuple[Address, ...] = ()
    # The most recently proved first.
    proved: tuple[Address, ...] = ()
    preferred: Address | None = None
    observed: Address | None = None
    observed_at: float = 0.0
    turn: int = 0
    turned_at: float = -ROTATE_SECONDS
    tries: dict[Address, _Tries] = field(default_factory=dict)
    dials: dict[Address, _Tries] = field(default_factory=dict)
    """Attempts per address for connections, which may come through where datagrams are lost."""


_NOTHING = _Entry()
_UNTRIED = _Tries()


class AddressBook:
    """The addresses of each peer, within limits. `now` is monotonic seconds."""

    def __init__(self, policy: AddressPolicy | None = None) -> None:
        self.policy = policy or AddressPolicy()
        self._hosts = Buckets[str](HOST_TRIES_PER_SECOND, HOST_TRIES_BURST, HOSTS_TRIED_MAX)
        self._met: dict[PeerId, _Entry] = {}
        self._crowd: Crowd[PeerId] = Crowd()
        self._hearsay: OrderedDict[PeerId, _Entry] = OrderedDict()

    def claim(self, peer: PeerId, addresses: Sequence[Address], *, is_hint: bool = False) -> None:
        """Replace a peer's claims about itself or, with `is_hint`, other peers' claims about it. An empty
        list changes nothing."""
        if not addresses:
            return
        entry = self._met.get(peer) or self._hearsay.setdefault(peer, _Entry())
        claimed = _distinct(*(address.of(None) for address in addresses[:ADDRESSES_MAX]))
        if is_hint:
            entry.hinted = claimed
        else:
            entry.claimed = claimed
        if peer in self._hearsay:
            self._hearsay.move_to_end(peer)
            if len(self._hearsay) > HEARSAY_MAX:
                self._hearsay.popitem(last=False)

    def prove(self, peer: PeerId, address: Address) -> None:
        """Note that the peer's key answered at this address."""
        entry, place = self._met.get(peer) or self._meet(peer, address), address.of(None)
        if entry.proved[:1] != (place,):
            entry.proved = _distinct(place, *entry.proved)[:PROVED_MAX]
            self.policy.met(place.host)
            entry.turn = 0
        entry.tries.pop(place, None)
        entry.dials.pop(place, None)

    def observe(self, peer: PeerId, address: Address, now: float) -> None:
        """Note that the peer's newest authentic datagram came from this address."""
        entry = self._met.get(peer) or self._meet(peer, address)
        if entry.observed is None or now - entry.observed_at > REORDER_SECONDS:
            self._crowd.add(peer, _source(address))
        place = address.of(None)
        if entry.observed != place:
            self.policy.met(place.host)
            entry.turn = 0
            entry.tries.pop(place, None)
        entry.observed, entry.observed_at = place, now

    def failed(self, peer: PeerId, address: Address) -> None:
        """Note that the peer did not answer a handshake at this address: its other addresses come first from
        now on."""
        entry, place = self._entry(peer), address.of(None)
        if entry.preferred == place:
            entry.preferred = None
        if place in entry.dials:
            entry.dials[place].has_failed = True
        if entry is not _NOTHING and len(entry.proved) > 1 and place in entry.proved:
            entry.proved = (*(each for each in entry.proved if each != place), place)

    def answered(self, peer: PeerId, circuit: Address) -> None:
        """Note that the peer was reached by this circuit, and reset the count of attempts to dial it."""
        self._entry(peer).dials.pop(circuit.of(None), None)

    def known(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses where the peer has answered, the latest first, and then its claims that may be
        tried. The result is meant for the next start, which dials these addresses without checking them
        again."""
        entry = self._entry(peer)
        claimed = (each for each in self._claimed(entry) if not each.kind.startswith("dns"))
        return _distinct(*entry.proved, entry.observed, *claimed)

    def seen(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses where the peer has answered, the latest first, and the source of its
        datagrams, but no claims."""
        entry = self._entry(peer)
        return _distinct(*entry.proved, entry.observed)

    def answered_at(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses where the peer has answered a dial, the latest first. The source of its
        datagrams is included only if the peer claims that address itself, because behind a router the source
        may not be dialable."""
        entry = self._entry(peer)
        return _distinct(*entry.proved, entry.observed if entry.observed in entry.claimed else None)

    def host_of(self, peer: PeerId) -> str | None:
        """Return the host where the peer was last seen; None if it was not."""
        entry = self._met.get(peer, _NOTHING)
        if entry.observed is not None:
            return entry.observed.host
        return entry.proved[0].host if entry.proved else None

    def observed(self, peer: PeerId) -> Address | None:
        """Return the source of the peer's latest authentic datagram."""
        return self._met.get(peer, _NOTHING).observed

    def heard_at(self, peer: PeerId) -> float:
        """Return when the latest authentic datagram of this peer arrived; minus infinity if none has."""
        entry = self._met.get(peer, _NOTHING)
        return -inf if entry.observed is None else entry.observed_at

    def at(self, address: Address) -> list[PeerId]:
        """Return the peers whose latest packets came from this address."""
        place = address.of(None)
        return [peer for peer, entry in self._met.items() if entry.observed == place]

    def paths(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the likeliest address of the peer on each network that this machine shares with it, except
        container networks. Return none if this machine is on only one network."""
        found: dict[str, Address] = {}
        if len(self.policy.networks) < 2:
            return ()
        for address in self.for_stream(peer):
            network = self.policy.network_of(address)
            if network is not None:
                found.setdefault(network, address)
        return tuple(found.values())

    def prefer(self, peer: PeerId, address: Address) -> None:
        """Dial the peer at this address first, until that fails: its streams were the fastest there."""
        entry = self._entry(peer)
        if entry is not _NOTHING:
            entry.preferred = address.of(None)

    def preferred(self, peer: PeerId) -> Address | None:
        """Return the preferred address, unless it has failed since."""
        return self._entry(peer).preferred

    def knows(self, peer: PeerId) -> bool:
        """Return whether any address of the peer is known."""
        return self._entry(peer) is not _NOTHING

    def for_stream(self, peer: PeerId) -> tuple[Address, ...]:
        """Return addresses to dial, the likeliest first; none for an unknown peer."""
        entry = self._entry(peer)
        return _distinct(entry.preferred, *entry.proved, entry.observed, *self._claimed(entry))

    def may_dial(self, peer: PeerId, address: Address, now: float) -> bool:
        """Record an attempt to connect to an address of the peer; return whether it is allowed. An address
        where the peer was seen is always allowed; a claimed address only as often as datagrams may go
        there."""
        entry, place = self._entry(peer), address.of(None)
        if place in entry.proved or place == entry.observed:
            return True
        if entry is _NOTHING:  # for example a relay that only a peer behind it has named
            return self.policy.is_near(place) or self._hosts.of(place.host, now).take(now)
        tries = entry.dials.get(place, _UNTRIED)
        if tries.count and not tries.has_failed and now - tries.at < ROTATE_SECONDS:
            return True  # several conversations with one peer may begin simultaneously
        if not tries.is_rested(now):
            return False
        if not self.policy.is_near(place) and not self._hosts.of(place.host, now).take(now):
            return False
        entry.dials.pop(place, None)
        entry.dials[place] = _Tries(tries.count + 1, now)
        if len(entry.dials) > TRIED_MAX:
            del entry.dials[next(iter(entry.dials))]
        return True

    def circuits(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the circuits by which a peer claims to be reachable, except those that must not be tried."""
        return tuple(each for each in self._claimed(self._entry(peer)) if each.relay is not None)

    def for_datagram(self, peer: PeerId, now: float) -> tuple[Address, ...]:
        """Return the addresses for one datagram: only the observed address if it is fresh, otherwise several
        addresses.

        Addresses where the peer was seen always come first; the others take turns.
        """
        entry = self._entry(peer)
        if entry.observed is not None and now - entry.observed_at <= OBSERVED_SECONDS:
            return (entry.observed,)
        seen = _distinct(entry.observed, *entry.proved)
        claimed = [each for each in self._claimed(entry) if each not in seen and each.relay is None]
        claimed = [each for each in claimed if entry.tries.get(each, _UNTRIED).is_due(now)]
        first, others = seen[:1], [*seen[1:], *claimed]
        room = UNPROVEN_ADDRESSES_MAX - len(first)
        if len(others) > room:
            if now - entry.turned_at >= ROTATE_SECONDS:
                entry.turn, entry.turned_at = entry.turn + room, now
            begin = (entry.turn - room) % len(others)
            others = [*others[begin:], *others[:begin]][:room]
        return (*first, *self._try(entry, others, now))

    def _try(self, entry: _Entry, addresses: Iterable[Address], now: float) -> tuple[Address, ...]:
        """Record datagrams to these addresses, and return the addresses without those on hosts that have
        received too many."""
        tried = []
        for address in addresses:
            tries = entry.tries.get(address)
            is_of_burst = tries is not None and now - tries.at < ROTATE_SECONDS
            if address not in entry.proved and not is_of_burst:
                if not self.policy.is_near(address) and not self._hosts.of(address.host, now).take(now):
                    continue
                tries = entry.tries.pop(address, None) or _Tries()
                tries.count, tries.at = tries.count + 1, now
                entry.tries[address] = tries
                if len(entry.tries) > TRIED_MAX:
                    del entry.tries[next(iter(entry.tries))]
            tried.append(address)
        return tuple(tried)

    def _claimed(self, entry: _Entry) -> list[Address]:
        """Return the admitted addresses among those that the peer and others claim, in the order to try
        them."""
        said = _distinct(*entry.claimed, *entry.hinted)
        return sorted(filter(self.policy.admits, said), key=self.policy.closeness)

    def _entry(self, peer: PeerId) -> _Entry:
        return self._met.get(peer) or self._hearsay.get(peer, _NOTHING)

    def _meet(self, peer: PeerId, address: Address) -> _Entry:
        """Return the entry of a peer that has answered from this address, making one if there is none."""
        source = _source(address)
        if len(self._met) >= PEERS_MAX:
            gone = next(iter(self._crowd.greedier(source) or self._crowd.equals(source)))
            self._crowd.remove(gone)
            del self._met[gone]
        entry = self._met[peer] = self._hearsay.pop(peer, _Entry())
        self._crowd.add(peer, source)
        return entry


def _source(address: Address) -> bytes:
    return address.host.encode() if address.kind.startswith("dns") else prefix_of(address.host)


def _distinct(*addresses: Address | None) -> tuple[Address, ...]:
    return tuple(dict.fromkeys(address for address in addresses if address is not None))
