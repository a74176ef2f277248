"""Dials peers. It decides which of a peer's addresses are tried, how often, and how many in parallel.

The result is a connection after its handshake, or a path. Not here: the race itself (`racing`), the address
book, and what a connection is for (`greeting`).
"""

import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio

from crypto.contact import Address
from crypto.identity import PeerId, short_peer
from node.errors import Unreachable
from node.transport.address_book import AddressBook
from node.transport.handshake import Credentials, SecuredTransport, dial
from node.transport.multiplexed import MultiplexedPath
from node.transport.paths import Paths
from node.transport.racing import ATTEMPT_DELAY_SECONDS, race
from node.transport.sockets import address_of

PREFERRED_DELAY_SECONDS = 2.0
"""Head start of the address that was measured as fastest. It may seem slow now only because our own data
fills the path there."""

Reached = SecuredTransport | MultiplexedPath


async def first_of(
    addresses: Sequence[Address],
    attempt: Callable[[Address], Awaitable[Reached]],
    delay_seconds: float = ATTEMPT_DELAY_SECONDS,
) -> Reached:
    """Race the addresses, return the first result, and close the other connections. Other paths stay open.
    Raises Unreachable."""
    first, *others = await race(addresses, attempt, delay_seconds)
    for other in others:
        if isinstance(other, SecuredTransport):
            other.transport.socket.close()
    return first


class Dialer:
    """The dialer of one node. `resolve` looks up names like `trio.socket.getaddrinfo`."""

    def __init__(
        self,
        credentials: Credentials,
        book: AddressBook,
        paths: Paths,
        resolve: Callable[..., Awaitable[Sequence[Any]]] = trio.socket.getaddrinfo,
    ) -> None:
        self._credentials = credentials
        self._book = book
        self._paths = paths
        self._resolve = resolve

    async def reach_peer(self, peer: PeerId, *, is_bare: bool = False) -> Reached:
        """Try the peer's addresses, in parallel if they are slow, and then its circuits unless `is_bare`.
        Raises Unreachable with the most informative failure."""
        addresses = [each for each in self._book.for_stream(peer) if each.relay is None or not is_bare]
        if not addresses:
            raise Unreachable("unknown", f"no address of {short_peer(peer)} is known")
        is_preferred = self._book.preferred(peer) is not None
        delay_seconds = PREFERRED_DELAY_SECONDS if is_preferred else ATTEMPT_DELAY_SECONDS
        with self._paths.seeking(peer):
            return await first_of(addresses, partial(self.attempt, peer), delay_seconds)

    async def reach_again(self, peer: PeerId) -> None:
        """Make a new path to a peer through any of its relays. Raises Unreachable."""
        circuits = self._book.circuits(peer)
        if not circuits:
            raise Unreachable("unknown", f"{short_peer(peer)} has announced no relay")
        await first_of(circuits, partial(self.attempt, peer))

    async def attempt(self, peer: PeerId, address: Address) -> Reached:
        """Dial one of the peer's addresses, unless its dial limit is reached. Raises Unreachable."""
        # A peer may claim a name that resolves to an address which it may not claim.
        there = await self._look_up(address) if address.kind.startswith("dns") else (address,)
        there = [each for each in there if self._book.may_dial(peer, each, trio.current_time())]
        if not there:
            detail = f"{address.short} was dialled too often without an answer; try again in a minute"
            raise Unreachable("timeout", detail)
        try:
            found = await first_of([each.of(peer) for each in there], self.reach)
        except Unreachable:
            for each in dict.fromkeys((address, *there)):
                self._book.failed(peer, each)
            raise
        if isinstance(found, MultiplexedPath) and found.address is not None:
            self._book.answered(peer, found.address)
        return found

    async def reach(self, address: Address) -> Reached:
        """Connect to one address and shake hands, or go through a relay. Raises Unreachable."""
        if address.relay is not None:
            return await self._paths.through(address)
        return SecuredTransport(address, *await dial(address, self._credentials))

    async def _look_up(self, name: Address) -> list[Address]:
        """Resolve a claimed name to the addresses that may be tried. Raises Unreachable."""
        try:
            found = await self._resolve(name.host, name.port, type=socket.SOCK_STREAM)
        except OSError:
            raise Unreachable("unknown", f"no machine is known by the name {name.host}") from None
        addresses = dict.fromkeys(address_of(each[4]) for each in found)
        admitted = [each for each in addresses if self._book.policy.admits(each)]
        return admitted if name.relay is None else [each.of(name.relay).through(None) for each in admitted]
