"""The doorway: who stands in it has connected and has not yet shaken hands. Its places are few, and not kept.

A stranger may connect and say nothing, or drip, or come a thousand times; a limit that turned away the
newest would let it shut out everybody for as long as it likes. So the newest gets in, and who leaves for it
is of the source that takes up most room, the one that has stood there longest. An honest peer needs a few
trips, and is through before its turn comes.
"""

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

HALF_OPEN_MAX = 128
"""Each holds a socket and a task. With handshakes of 0.4 s over a slow path, 300 strangers a second crowd out
nobody, even if each has a source of its own."""
HOSTS_MAX = 4_096
"""Whose source is remembered: to find it costs as much as to take a connection from the kernel."""
_NETWORK_BYTES = 8
"""Of an IPv6 address what a household is given; of the rest it can have any."""


class Doorway:
    """Knows who is half-open, by source, and makes room."""

    def __init__(self, places_max: int = HALF_OPEN_MAX) -> None:
        self._places_max = places_max
        # By source those who stand there, longest first; each with what sends it away.
        self._standing: dict[bytes, dict[int, Callable[[], None]]] = {}
        self._entered = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def place(self, host: str, send_away: Callable[[], None]) -> Iterator[None]:
        """A place for somebody from `host` until the block ends, or `send_away` is called, once at most."""
        source = source_of(host)
        if self._count >= self._places_max:
            self._make_room()
        self._entered += 1
        number = self._entered
        self._standing.setdefault(source, {})[number] = send_away
        self._count += 1
        try:
            yield
        finally:
            self._leave(source, number)

    def _make_room(self) -> None:
        source = max(self._standing, key=lambda source: len(self._standing[source]))
        number, send_away = next(iter(self._standing[source].items()))
        # Its task ends when it has its turn; its place is free now.
        self._leave(source, number)
        send_away()

    def _leave(self, source: bytes, number: int) -> None:
        standing = self._standing.get(source, {})
        if standing.pop(number, None) is not None:
            self._count -= 1
            if not standing:
                del self._standing[source]


@lru_cache(maxsize=HOSTS_MAX)
def source_of(host: str) -> bytes:
    """Whom an address counts for: the address itself, or its network for IPv6. IPv4 within IPv6 as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return address.packed
    return address.ipv4_mapped.packed if address.ipv4_mapped else address.packed[:_NETWORK_BYTES]
