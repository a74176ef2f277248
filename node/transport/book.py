"""Where peers may be reached: what they claim, what we saw, and which of it comes first. No I/O.

An *observed* address is the source of an authentic datagram, a *proved* one answered a handshake
with that peer's key, a *claimed* one is hearsay. An observation grows stale, since the peer may have
moved without a word; then datagrams go to the other addresses as well.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from crypto.contact import ADDRESSES_MAX, Address
from crypto.identity import PeerId

PEERS_MAX = 4_096
"""Peers remembered, the latest used: a full SWIM scope, a routing table and room for lookups."""
OBSERVED_SECONDS = 120.0
"""Well above any probe period, so a peer that is alive keeps its observation fresh."""
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

    def __init__(self, *, peers_max: int = PEERS_MAX) -> None:
        self._peers_max = peers_max
        self._entries: OrderedDict[PeerId, _Entry] = OrderedDict()

    def claim(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Replace what is claimed of a peer; no addresses at all change nothing."""
        if addresses:
            self._entry(peer).claimed = tuple(address.of(None) for address in addresses[:ADDRESSES_MAX])

    def prove(self, peer: PeerId, address: Address) -> None:
        """The peer's key answered at this address."""
        self._entry(peer).proved = address.of(None)

    def observe(self, peer: PeerId, address: Address, now: float) -> None:
        """The peer's newest authentic datagram came from this address."""
        entry = self._entry(peer)
        entry.observed, entry.observed_at = address.of(None), now

    def for_stream(self, peer: PeerId) -> tuple[Address, ...]:
        """Addresses to dial, the likeliest first; empty for a peer never heard of."""
        entry = self._entries.get(peer, _NOTHING)
        return _distinct(entry.proved, entry.observed, *entry.claimed)

    def for_datagram(self, peer: PeerId, now: float) -> tuple[Address, ...]:
        """Where one datagram goes: a fresh observation alone, else a few addresses at once."""
        entry = self._entries.get(peer, _NOTHING)
        if entry.observed is not None and now - entry.observed_at <= OBSERVED_SECONDS:
            return (entry.observed,)
        everywhere = _distinct(entry.observed, entry.proved, *entry.claimed)
        return everywhere[:UNPROVEN_ADDRESSES_MAX]

    def _entry(self, peer: PeerId) -> _Entry:
        entry = self._entries.get(peer)
        if entry is not None:
            self._entries.move_to_end(peer)
            return entry
        entry = self._entries[peer] = _Entry()
        if len(self._entries) > self._peers_max:
            self._entries.popitem(last=False)
        return entry


def _distinct(*addresses: Address | None) -> tuple[Address, ...]:
    return tuple(dict.fromkeys(address for address in addresses if address is not None))
