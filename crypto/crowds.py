"""Eviction from bounded tables that unknown peers share, so that no source can fill a table alone.

The table itself is elsewhere; a `Crowd` indexes its members by source and by network. A source is the result
of `token_buckets.prefix_of` (an IPv4 address, or 64 bits of an IPv6 address); its network is the enclosing
/24 or /48. The source with the most members loses one. Networks are compared only if the sources are equally
large, because a local network of many honest peers looks like one owner of many addresses.
"""

import ipaddress
from collections.abc import Collection, Hashable
from functools import lru_cache
from typing import Generic, TypeVar

SOURCES_MAX = 4_096
"""Number of sources for which `is_local` is cached."""

Member = TypeVar("Member", bound=Hashable)

_NETWORK_BYTES = {4: 3, 8: 6}
"""Length of a network's prefix, keyed by the length of a source: a /24 of IPv4 or a /48 of IPv6, the usual
allocations."""


def network_of(source: bytes) -> bytes:
    """Return the network that contains a source. A source of any other length is its own network."""
    return source[: _NETWORK_BYTES.get(len(source), len(source))]


_LOCAL = tuple(
    ipaddress.ip_network(text)
    for text in ("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
                 "192.168.0.0/16", "::/64", "fc00::/7", "fe80::/10")
)  # fmt: skip
"""Addresses of this machine and of local networks. An outsider cannot hold many of them."""


@lru_cache(maxsize=SOURCES_MAX)
def is_local(source: bytes) -> bool:
    """Return whether a source is this machine or on a local network. A source of any other length is not."""
    if len(source) not in _NETWORK_BYTES:
        return False
    address = ipaddress.ip_address(source if len(source) == 4 else source + bytes(8))
    return any(address in network for network in _LOCAL if network.version == address.version)


class Groups(Generic[Member]):
    """Members in groups, oldest first. Each call takes constant time."""

    def __init__(self) -> None:
        self._group_of: dict[Member, bytes] = {}
        self._groups: dict[bytes, dict[Member, None]] = {}
        self._by_size: dict[int, dict[bytes, None]] = {}
        self._size_of_largest = 0

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, member: object) -> bool:
        return member in self._group_of

    def add(self, member: Member, group: bytes) -> None:
        """Add a member to a group as its newest, and remove the member from its former group."""
        self.remove(member)
        self._group_of[member] = group
        members = self._groups.setdefault(group, {})
        members[member] = None
        self._resize(group, len(members) - 1, len(members))

    def remove(self, member: Member) -> None:
        """Remove a member, if it is present."""
        group = self._group_of.pop(member, None)
        if group is None:
            return
        members = self._groups[group]
        del members[member]
        if not members:
            del self._groups[group]
        self._resize(group, len(members) + 1, len(members))

    def group(self, member: Member) -> bytes:
        """Return the group of a member."""
        return self._group_of[member]

    def size(self, group: bytes) -> int:
        """Return the number of members of a group."""
        return len(self._groups.get(group, ()))

    @property
    def size_of_largest(self) -> int:
        return self._size_of_largest

    def members(self, group: bytes | None = None) -> Collection[Member]:
        """Return the members of a group, or of all groups, the oldest first."""
        return self._group_of.keys() if group is None else self._groups.get(group, {}).keys()

    def largest(self) -> Collection[Member]:
        """Return the members of the largest group, the oldest first; among equals, the group that has been
        largest for longest."""
        groups = self._by_size.get(self._size_of_largest)
        return self.members(next(iter(groups))) if groups else ()

    def _resize(self, group: bytes, before: int, after: int) -> None:
        if before:
            del self._by_size[before][group]
            if not self._by_size[before]:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, {})[group] = None
        # A size changes by one. So if no group has the previous largest size any more, this group is the
        # largest.
        if after > self._size_of_largest or self._size_of_largest not in self._by_size:
            self._size_of_largest = after


class Crowd(Generic[Member]):
    """The members of one bounded table, by source and network. It has no limit of its own: the table's owner
    asks it which member to evict."""

    def __init__(self) -> None:
        self._sources: Groups[Member] = Groups()
        self._networks: Groups[Member] = Groups()

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, member: object) -> bool:
        return member in self._sources

    def add(self, member: Member, source: bytes) -> None:
        """Add a member, or move it to a different source."""
        self._sources.add(member, source)
        self._networks.add(member, network_of(source))

    def remove(self, member: Member) -> None:
        """Remove a member, if it is present."""
        self._sources.remove(member)
        self._networks.remove(member)

    def source(self, member: Member) -> bytes:
        """Return the source of a member."""
        return self._sources.group(member)

    def size(self, source: bytes) -> int:
        """Return how many members are from this source."""
        return self._sources.size(source)

    def members(self, source: bytes) -> Collection[Member]:
        """Return the members from this source, the oldest first."""
        return self._sources.members(source)

    def greedier(self, source: bytes) -> Collection[Member]:
        """Return the members of the largest source, if it has more members than `source` would have with one
        more. If it has equally many, return the members of the largest network by the same rule. Otherwise
        return none. The oldest come first."""
        own = self._sources.size(source) + 1
        if self._sources.size_of_largest > own:
            return self._sources.largest()
        own_network = self._networks.size(network_of(source)) + 1
        if self._sources.size_of_largest == own and self._networks.size_of_largest > own_network:
            return self._networks.largest()
        return ()

    def equals(self, source: bytes) -> Collection[Member]:
        """Return the eviction candidates for one more member from `source`, when `greedier` has found none.
        They are the members of `source` (or its network) if that is the largest, else those of the largest.
        The oldest come first."""
        for groups, group in ((self._sources, source), (self._networks, network_of(source))):
            if groups.size_of_largest > 1:
                is_own = groups.size(group) == groups.size_of_largest
                return groups.members(group) if is_own else groups.largest()
        return self._sources.members()
