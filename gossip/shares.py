"""The share of a filling member list that one source may have: an introducer, or the network a member came
from.

The network is the one from which the member's packets really come; a claimed address proves nothing.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

from crypto.identity import PeerId
from crypto.token_buckets import prefix_of
from gossip.messages import MEMBERS_MAX, AliveFact
from gossip.table import MemberRow

SHARES = 4
"""Once the list is half full, one source may have at most one part in this many. A source is an introducer,
or a network (an IPv4 address, a /64) of members without an introducer. Before that, an honest first seed may
name a thousand members."""
SHARE_MIN = 64
"""Number of members that one source may always have, however short the list is."""

HostOf = Callable[[PeerId], str | None]


class Shares:
    """The sources of at most `most` members. `host_of` returns the host from which a peer's packets come,
    None if it is unknown. Without `host_of`, as in simulators, claimed addresses are believed."""

    __slots__ = ("_most", "host_of")

    def __init__(self, most: int) -> None:
        self._most = most
        self.host_of: HostOf | None = None

    def allow(self, rows: Iterable[MemberRow], listed: int, said: AliveFact, introducer: PeerId) -> bool:
        """Return whether the source of a newcomer has less than its share of `rows`. `listed` is the number
        of rows."""
        if listed < self._most // 2:
            return True
        source = self._source(said, introducer)
        found = sum(
            self._source(row.said, row.found_through) == source
            for row in rows
            if row.found_through is not None
        )
        return found < max(SHARE_MIN, self._most // SHARES)

    def _source(self, said: AliveFact, found_through: PeerId) -> object:
        if found_through != said.peer:
            return found_through
        if self.host_of is not None:
            host = self.host_of(said.peer)
            return None if host is None else network_of(host)
        if not said.profile.addresses:
            return found_through
        address = said.profile.addresses[0]
        return address.host if address.kind == "dns" else network_of(address.host)


network_of = lru_cache(maxsize=MEMBERS_MAX)(prefix_of)
