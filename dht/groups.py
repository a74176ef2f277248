"""Address groups: limits on how much any one owner of addresses can influence a choice of peers.

Ids are free but addresses are not. An attacker computes 20 ids next to a key in a fraction of a second, but
they all have addresses in one network. A group is a network as it is assigned to one owner: a /24 of IPv4 or
a /48 of IPv6. The limit is a preference, not a ban, so in a swarm within one network all peers count. Peers
of local networks, where many honest neighbours share a network, have no group unless the settings say so.
"""

import ipaddress
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Protocol, TypeVar

from crypto.contact import PARSED_MAX, parse_address
from crypto.crowds import network_of
from crypto.identity import PeerId
from crypto.token_buckets import HOSTS_MAX, prefix_of

_LOCAL = tuple(
    ipaddress.ip_network(text)
    for text in (
        "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10",
        "::1/128", "fc00::/7", "fe80::/10",
    )
)  # fmt: skip
"""Loopback, private (RFC 1918, RFC 4193), link-local, and carrier-grade NAT (RFC 6598) networks."""


class Grouped(Protocol):
    """Any object with a group; None means that the object is in no group and is never limited."""

    @property
    def group(self) -> bytes | None: ...


Member = TypeVar("Member", bound=Grouped)


@lru_cache(maxsize=HOSTS_MAX)
def source_of(host: str | None) -> bytes:
    """Return the smallest range of addresses that one owner has, for a host: an IPv4 address or 64 bits of an
    IPv6 address. Returns b"" for an unknown host or a host name."""
    if host is None:
        return b""
    try:
        return prefix_of(host)
    except ValueError:
        return b""


@lru_cache(maxsize=HOSTS_MAX)
def is_local(host: str) -> bool:
    """Return whether a host is in a network that can be reached only from inside."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in _LOCAL)


@lru_cache(maxsize=PARSED_MAX)
def _claimed_host(texts: tuple[str, ...]) -> str | None:
    """Return the first host among claimed addresses that this version can read; None if there is none."""
    for text in texts:
        try:
            return parse_address(text).host
        except ValueError:
            continue
    return None


@lru_cache(maxsize=HOSTS_MAX)
def _group_of(host: str | None, groups_local: bool) -> bytes | None:
    source = source_of(host)
    if host is None or not source or (not groups_local and is_local(host)):
        return None
    return network_of(source)


@dataclass(slots=True)
class Origins:
    """The addresses of peers. The shell sets `host_of`, which returns the host at which a peer was seen. If
    `host_of` is absent (peers are reached by ids alone) or returns None, the peer's own claim counts.
    """

    groups_local: bool
    host_of: Callable[[PeerId], str | None] = lambda _peer: None

    def group(self, peer: PeerId, texts: tuple[str, ...]) -> bytes | None:
        """Return the address group of a peer that claims to be at `texts`; None if it has none."""
        return _group_of(self.host_of(peer) or _claimed_host(texts), self.groups_local)

    def source(self, peer: PeerId, texts: tuple[str, ...]) -> tuple[bytes, bool]:
        """Return a peer's source (see `source_of`; b"" if unknown), and whether that source has a quota."""
        source = source_of(host := self.host_of(peer) or _claimed_host(texts))
        return source, not source or _group_of(host, self.groups_local) is not None


def is_crowded(members: Collection[Grouped], group_max: int) -> bool:
    """Return whether any group has more than `group_max` of these members."""
    groups = [member.group for member in members if member.group is not None]
    if len(groups) <= group_max or len({*groups}) == len(groups):
        return False  # the usual case, and five times faster than counting
    return max(Counter(groups).values()) > group_max


def spread(members: Sequence[Member], count: int, group_max: int) -> list[Member]:
    """Return the first `count` members in their order, at most `group_max` from each group. If that yields
    too few, allow `group_max` more from each group until there are enough.
    """
    seen: Counter[bytes] = Counter()
    ranked = []
    for place, member in enumerate(members):
        turn = 0
        if member.group is not None:
            turn = seen[member.group] // group_max
            seen[member.group] += 1
        ranked.append((turn, place))
    return [members[place] for place in sorted(place for _, place in sorted(ranked)[:count])]


def crowding_one(members: Collection[Member], group: bytes | None, group_max: int) -> Member | None:
    """Return the last member of the largest group if it should make room for a newcomer of `group`, else
    None. The largest group must have more than `group_max` members, and after the loss still be at least as
    large as the newcomer's group with the newcomer in it."""
    groups = [member.group for member in members if member.group is not None]
    if len(groups) <= group_max or len({*groups}) == len(groups):
        return None  # the usual case, checked before the slower count
    sizes = Counter(groups)
    largest, size = max(sizes.items(), key=itemgetter(1), default=(b"", 0))
    if size <= group_max or size <= (0 if group is None else sizes[group]) + 1:
        return None
    return [member for member in members if member.group == largest][-1]
