"""Addresses of simulated peers: those that each peer knows of itself, and those that others see. No I/O.

Each peer has its own network (a /24). Behind a NAT it knows only its inner address. Others see an outer
address, which the peer learns only from them, and at which it may or may not be reachable.
"""

from crypto.contact import PORT_MAX, Address
from crypto.identity import PeerId

PORT = 9747
"""The port on which all peers listen."""
_PORTS_OUT = range(49_152, PORT_MAX + 1)
"""Source ports of connections (RFC 6335); they never include the port on which peers listen."""


def outer_address(number: int, peer: PeerId) -> Address:
    """Return the address at which others see the peer with this number, counted from 0. Below 65,535, no two
    peers are in the same network."""
    place = number + 1
    return Address("ip4", f"10.{place >> 8 & 255}.{place & 255}.{1 + (place >> 16)}", PORT, peer)


def inner_address(number: int, peer: PeerId) -> Address:
    """Return the inner address of the peer with this number, behind its NAT."""
    place = number + 1
    return Address("ip4", f"192.168.{place >> 8 & 255}.{place & 255}", PORT, peer)


class Home:
    """The addresses of one peer: it knows itself by `own`, and others see it at `outside`."""

    def __init__(self, number: int, peer: PeerId, *, is_inside: bool) -> None:
        self.outside = outer_address(number, peer)
        self.own = inner_address(number, peer) if is_inside else self.outside
        self._connections = 0

    def source(self) -> Address:
        """Return the source address of a new connection of this peer, as others see it."""
        port = _PORTS_OUT[self._connections % len(_PORTS_OUT)]
        self._connections += 1
        return Address("ip4", self.outside.host, port)


class Homes:
    """The homes of all peers of one simulation, in the order of their first start."""

    def __init__(self) -> None:
        self._of: dict[PeerId, Home] = {}
        self._at: dict[tuple[str, int], PeerId] = {}

    def settle(self, peer: PeerId, *, is_inside: bool) -> Home:
        """Return the home of a peer, which it keeps across restarts. `is_inside`: behind a NAT."""
        home = self._of.get(peer)
        if home is None:
            home = self._of[peer] = Home(len(self._of), peer, is_inside=is_inside)
            self._at[home.outside.host, home.outside.port] = peer
        return home

    def outside(self, peer: PeerId) -> Address | None:
        """Return the outer address of a peer; None if it has never run."""
        home = self._of.get(peer)
        return None if home is None else home.outside

    def peer_at(self, address: Address) -> PeerId | None:
        """Return the peer at an outer address; None if there has never been one."""
        return self._at.get((address.host, address.port))
