"""Where peers may be reached: what they claim, what we saw, and which of it comes first. No I/O.

An *observed* address is the source of an authentic datagram, a *proved* one answered a handshake
with that peer's key, a *claimed* one is hearsay. An observation grows stale, since the peer may have
moved without a word; then datagrams go to the other addresses as well.

Hearsay can name any number of peers, so it pushes out only hearsay. Peers that answered from an address push
out those of the source that has most of them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from crypto.contact import ADDRESSES_MAX, Address
from crypto.crowds import Crowd
from crypto.identity import PeerId
from crypto.token_buckets import prefix_of

PEERS_MAX = 4_096
"""Peers remembered that have answered: a full SWIM scope, a routing table and room for lookups."""
HEARSAY_MAX = 2_048
"""Peers that are only claimed to be somewhere, the latest named: they are asked at once, or never."""
OBSERVED_SECONDS = 120.0
"""Well above any probe period, so a peer that is alive keeps its observation fresh."""
REORDER_SECONDS = OBSERVED_SECONDS / 4
"""A peer goes behind the others of its source no more often: at each packet that would cost too much."""
UNPROVEN_ADDRESSES_MAX = 3
"""A datagram goes to at most so many unproven addresses, so we never amplify more than threefold."""


@dataclass(slots=True)
class _Entry:
    claimed: tuple[Address, ...] = ()
    proved: Address | None = None
    observed: Address | None = None
    observed_at: float = 0.0


_NOTHING = _Entry()


class AddressBook:
    """Addresses by peer, bounded; `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._met: dict[PeerId, _Entry] = {}
        self._crowd: Crowd[PeerId] = Crowd()
        self._hearsay: OrderedDict[PeerId, _Entry] = OrderedDict()

    def claim(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Replace what is claimed of a peer; no addresses at all change nothing."""
        if not addresses:
            return
        entry = self._met.get(peer) or self._hearsay.setdefault(peer, _Entry())
        entry.claimed = tuple(address.of(None) for address in addresses[:ADDRESSES_MAX])
        if peer in self._hearsay:
            self._hearsay.move_to_end(peer)
            if len(self._hearsay) > HEARSAY_MAX:
                self._hearsay.popitem(last=False)

    def prove(self, peer: PeerId, address: Address) -> None:
        """The peer's key answered at this address."""
        entry = self._met.get(peer) or self._meet(peer, address)
        entry.proved = address.of(None)

    def observe(self, peer: PeerId, address: Address, now: float) -> None:
        """The peer's newest authentic datagram came from this address."""
        entry = self._met.get(peer) or self._meet(peer, address)
        if entry.observed is None or now - entry.observed_at > REORDER_SECONDS:
            self._crowd.add(peer, _source(address))
        entry.observed, entry.observed_at = address.of(None), now

    def host_of(self, peer: PeerId) -> str | None:
        """Return the host where the peer was seen last; None if it was not."""
        entry = self._met.get(peer, _NOTHING)
        seen = entry.observed or entry.proved
        return None if seen is None else seen.host

    def at(self, address: Address) -> list[PeerId]:
        """Those whose packets came from there last."""
        place = address.of(None)
        return [peer for peer, entry in self._met.items() if entry.observed == place]

    def for_stream(self, peer: PeerId) -> tuple[Address, ...]:
        """Addresses to dial, the likeliest first; empty for a peer never heard of."""
        entry = self._entry(peer)
        return _distinct(entry.proved, entry.observed, *entry.claimed)

    def for_datagram(self, peer: PeerId, now: float) -> tuple[Address, ...]:
        """Return where one datagram goes: a fresh observation alone, else a few addresses at once."""
        entry = self._entry(peer)
        if entry.observed is not None and now - entry.observed_at <= OBSERVED_SECONDS:
            return (entry.observed,)
        everywhere = _distinct(entry.observed, entry.proved, *entry.claimed)
        return everywhere[:UNPROVEN_ADDRESSES_MAX]

    def _entry(self, peer: PeerId) -> _Entry:
        return self._met.get(peer) or self._hearsay.get(peer, _NOTHING)

    def _meet(self, peer: PeerId, address: Address) -> _Entry:
        """The entry of a peer that has answered from there for the first time."""
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
