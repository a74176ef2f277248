"""Addresses of simulated peers: those that each knows of itself, and those that others see. Pure.

Each peer has a network of its own (a /24). Behind a translator it knows only its inner address. Others see an
outer one, which it learns only from them, and at which it may or may not be reachable.
"""

from crypto.contact import PORT_MAX, Address
from crypto.identity import PeerId

PORT = 9747
"""The port on which all listen."""
_PORTS_OUT = range(49_152, PORT_MAX + 1)
"""Source ports of connections (RFC 6335): never those on which peers listen."""


def outer_address(number: int, peer: PeerId) -> Address:
    """Return where others see the peer of this number, counted from 0: no two in one network below 65,535."""
    place = number + 1
    return Address("ip4", f"10.{place >> 8 & 255}.{place & 255}.{1 + (place >> 16)}", PORT, peer)


def inner_address(number: int, peer: PeerId) -> Address:
    """Return the inner address of the peer of this number, behind its translator."""
    place = number + 1
    return Address("ip4", f"192.168.{place >> 8 & 255}.{place & 255}", PORT, peer)


class Home:
    """The addresses of one peer: `own` is the one that it knows, `outside` the one that others see."""

    def __init__(self, number: int, peer: PeerId, *, is_inside: bool) -> None:
        self.outside = outer_address(number, peer)
        self.own = inner_address(number, peer) if is_inside else self.outside
        self._connections = 0

    def source(self) -> Address:
        """Return the source of a new connection of this peer, as others see it."""
        port = _PORTS_OUT[self._connections % len(_PORTS_OUT)]
        self._connections += 1
        return Address("ip4", self.outside.host, port)


class Homes:
    """The homes of all peers of one simulation, in the order of their first start."""

    def __init__(self) -> None:
        self._of: dict[PeerId, Home] = {}
        self._at: dict[tuple[str, int], PeerId] = {}

    def settle(self, peer: PeerId, *, is_inside: bool) -> Home:
        """The home of a peer, for all its lives; `is_inside`: behind a translator."""
        home = self._of.get(peer)
        if home is None:
            home = self._of[peer] = Home(len(self._of), peer, is_inside=is_inside)
            self._at[home.outside.host, home.outside.port] = peer
        return home

    def outside(self, peer: PeerId) -> Address | None:
        """Return the outer address of a peer that has ever run."""
        home = self._of.get(peer)
        return None if home is None else home.outside

    def peer_at(self, address: Address) -> PeerId | None:
        """Return the peers that have ever run."""
        return self._at.get((address.host, address.port))
