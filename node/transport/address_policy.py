"""Decides which addresses to announce, and which to try in what order, with evidence before guesses. No I/O.

An address at which a peer has really reached this node, or from which this node reached a peer, comes before
any guess based on the names and link states of interfaces. Among claimed addresses, those of a network that
this machine shares come first, and those of its own container bridges last.

Peers must not be able to use their claims to make this node a scanner. A claimed address is tried only at a
port of 1024 or above, and never on loopback or on the link-local network of a machine that has a better one.
In a private network it is tried only if this machine has an address there or has met a peer there.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from crypto.contact import ADDRESSES_MAX, Address, make_address
from node.transport.interfaces import InterfaceAddress, Ip, Network, Use

Place = tuple[str, int]
"""Where a node listens: an IP literal and a port."""

CLAIMED_PORT_MIN = 1_024
"""Lowest port of a claimed address that is tried. Lower ports belong to system services, and an unknown peer
must not make us write to them."""
CONFIRMED_FIRST = 2
"""Number of addresses confirmed by others that come directly after the best own address: one for each
family."""
EVIDENCE_MAX = 16
"""Maximum number of own addresses remembered as reached; a machine usually uses fewer."""

PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)
"""RFC 1918, the shared address space of carriers and of some VPNs (RFC 6598), and unique local IPv6 (RFC
4193)."""
_NEVER = tuple(
    ipaddress.ip_network(text) for text in ("0.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4", "::/128", "ff00::/8")
)
_SHARED, _ROUTED, _VPN, _OTHER_FAMILY, _BRIDGED, _UNUSED, _RELAYED = range(7)
_CLOSENESS = {
    Use.DEFAULT_ROUTE: _SHARED,
    Use.CABLE: _SHARED,
    Use.LOOPBACK: _SHARED,
    Use.TUNNEL: _VPN,
    Use.CONTAINERS: _BRIDGED,
    Use.LINK_LOCAL: _BRIDGED,
    Use.NO_CARRIER: _UNUSED,
}


@lru_cache(maxsize=4_096)
def ip_of(host: str) -> Ip | None:
    """Parse a host as an IP address, with IPv4-mapped IPv6 as IPv4; None for a name."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped


def is_global(host: str) -> bool:
    """Return whether a host is a public internet address."""
    there = ip_of(host)
    if there is None:
        return False
    return there.is_global and not any(there in block for block in PRIVATE if block.version == there.version)


class AddressPolicy:
    """The rules for own and claimed addresses. `places` are where this node listens. Before the first `look`
    no interface is known."""

    def __init__(self) -> None:
        self.places: tuple[Place, ...] = ()
        self._interfaces: tuple[InterfaceAddress, ...] = ()
        self._uses: dict[Ip, Use] = {}
        # Own addresses that peers reached or were reached from, the latest last (a dict keeps the order).
        self._reached: dict[Ip, None] = {}
        self._routed: set[Network] = set()
        # Whether this node announces only loopback; in that case peers may claim loopback too.
        self._is_of_one_machine = True

    def look(self, places: Sequence[Place], interfaces: Sequence[InterfaceAddress]) -> None:
        """Update this node's listening places and the machine's interfaces."""
        self.places = tuple(places)
        self._interfaces = tuple(interfaces)
        self._uses = {each.host: each.use for each in interfaces}
        self._reached = {host: None for host in self._reached if host in self._uses}
        self._is_of_one_machine = all(host.is_loopback for host, _ in self._listening())

    # --- evidence ----------------------------------------------------------------------------------

    def reached(self, own: str, other: str) -> None:
        """Record that this node, at its own host `own`, and a peer at the host `other` have reached each
        other."""
        here, there = ip_of(own), ip_of(other)
        if here is None or there is None or there in self._uses or here not in self._uses:
            return
        self._reached.pop(here, None)
        self._reached[here] = None
        if len(self._reached) > EVIDENCE_MAX:
            del self._reached[next(iter(self._reached))]

    def met(self, host: str) -> None:
        """Record that a peer has proved its identity at this host. If the host is in a private network that
        this machine is not in, such networks are evidently routed from here."""
        there = ip_of(host)
        if there is not None and self._shares(there) is None:
            self._routed.update(_blocks_of(there))

    # --- own addresses -----------------------------------------------------------------------------

    @property
    def listening(self) -> frozenset[tuple[Ip, int]]:
        """Every host and port at which this node listens, including those beyond the limit of announced
        addresses."""
        return frozenset(self._listening())

    def own(
        self, announced: Sequence[Address] = (), confirmed: Sequence[Address] = ()
    ) -> tuple[Address, ...]:
        """Return the addresses to announce, best first, at most ADDRESSES_MAX. If `announced` is given, only
        that. Otherwise the addresses where this node listens, with those that others have `confirmed` after
        the best one.

        Loopback is announced only if there is nothing else, and link-local IPv6 never, because it is
        meaningless on other machines.
        """
        if announced:
            return tuple(announced)[:ADDRESSES_MAX]
        found = [make_address(str(host), port) for host, port in self._listening()]
        usable = [each for each in found if not _is_loopback(each)] or found
        first, others = confirmed[:CONFIRMED_FIRST], confirmed[CONFIRMED_FIRST:]
        return tuple(dict.fromkeys((*usable[:1], *first, *usable[1:], *others)))[:ADDRESSES_MAX]

    def for_others(self, told: Iterable[Address]) -> Address | None:
        """Return the first of the announced addresses `told` that works on another machine; None if there are
        only loopback, container bridges and interfaces without a carrier."""
        for address in told:
            host = ip_of(address.host)
            if host is None or host in self._reached:
                return address
            if self._uses.get(host, Use.CABLE) <= Use.TUNNEL and not host.is_loopback:
                return address
        return None

    def _listening(self) -> list[tuple[Ip, int]]:
        """Return each host and port at which this node listens: first those that were reached, then by the
        kind of interface.

        Among interfaces of one kind, the second address of an interface and family comes behind the first
        addresses of all others. So an interface with a dozen IPv6 addresses cannot push out the only address
        of another interface.
        """
        found: list[tuple[tuple[bool, Use, int], Ip, int]] = []
        for host, port in self.places:
            place = ip_of(host)
            assert place is not None
            seen: Counter[tuple[str, int]] = Counter()
            present = [each for each in self._interfaces if self._stands_for(place, each.host)]
            for each in present:
                if not (each.host.version == 6 and each.host.is_link_local):
                    kind = each.name, each.host.version
                    rank = each.host not in self._reached, each.use, seen[kind]
                    found.append((rank, each.host, port))
                    seen[kind] += 1
            if not present and not place.is_unspecified and not (place.version == 6 and place.is_link_local):
                use = Use.LOOPBACK if place.is_loopback else Use.CABLE
                found.append(((True, use, 0), place, port))
        found.sort(key=lambda each: (each[0], each[1].version, int(each[1])))
        return [(host, port) for _, host, port in found]

    def _stands_for(self, place: Ip, host: Ip) -> bool:
        """Return whether listening at `place` covers `host`; a single place `::` covers both families."""
        if not place.is_unspecified:
            return place == host
        return place.version == host.version or (place.version == 6 and len(self.places) == 1)

    # --- addresses of other peers ------------------------------------------------------------------

    def is_own(self, address: Address) -> bool:
        """Return whether this node itself listens there."""
        there = ip_of(address.host)
        if there is None:
            return False
        for host, port in self.places:
            place = ip_of(host)
            if port != address.port or place is None:
                continue
            if place == there:
                return True
            if self._stands_for(place, there) and (there in self._uses or there.is_loopback):
                return True
        return False

    def admits(self, address: Address) -> bool:
        """Return whether this node may write to an address that a peer claims for itself or another peer."""
        if not self.places:
            return True  # nothing is sent before the start
        if address.port < CLAIMED_PORT_MIN or self.is_own(address):
            return False
        there = ip_of(address.host)
        if there is None:
            return True  # a name is checked once it is resolved
        if any(there in block for block in _NEVER if block.version == there.version):
            return False
        if there.is_loopback:
            return self._is_of_one_machine
        if there.is_link_local:
            # An address with a zone is the source of a beacon, because peers cannot claim one.
            return self._has_only_link_local if there.version == 4 else "%" in address.host
        blocks = _blocks_of(there)
        return not blocks or self.is_near(address) or any(block in self._routed for block in blocks)

    def is_near(self, address: Address) -> bool:
        """Return whether an address belongs to this machine, or to a network that it shares."""
        there = ip_of(address.host)
        return there is not None and self._shares(there) is not None

    @property
    def networks(self) -> frozenset[str]:
        """The names of the interfaces that may lead to other machines."""
        return frozenset(each.name for each in self._interfaces if each.use <= Use.TUNNEL)

    def network_of(self, address: Address) -> str | None:
        """Return the name of the interface whose network contains an address; None if no shared network does,
        or only a container network."""
        there = None if address.relay is not None else ip_of(address.host)
        near = [each for each in self._interfaces if there is not None and there in each.network]
        return next((each.name for each in near if each.use <= Use.TUNNEL), None)

    def closeness(self, address: Address) -> int:
        """Return a rank for how likely an address can be reached from here; lower is likelier."""
        if address.relay is not None:
            return _RELAYED
        there = ip_of(address.host)
        if there is None:
            return _ROUTED
        use = self._shares(there)
        if use is not None:
            return _CLOSENESS[use]
        return _ROUTED if there.version in self._families else _OTHER_FAMILY

    def _shares(self, there: Ip) -> Use | None:
        """Return the kind of the interface whose network contains an address; None if there is none."""
        uses = [each.use for each in self._interfaces if there in each.network]
        for each in self._interfaces:
            # A point-to-point VPN gives its machines addresses from one block, but each address is a network
            # of its own.
            if each.use is Use.TUNNEL and set(_blocks_of(there)) & set(_blocks_of(each.host)):
                uses.append(Use.TUNNEL)
        return min(uses, default=None)

    @property
    def _has_only_link_local(self) -> bool:
        others = [each.use for each in self._interfaces if each.host.version == 4]
        return Use.LINK_LOCAL in others and not any(use <= Use.TUNNEL for use in others)

    @property
    def _families(self) -> set[int]:
        return {each.host.version for each in self._interfaces if each.use < Use.LINK_LOCAL}


def _blocks_of(host: Ip) -> list[Network]:
    return [block for block in PRIVATE if block.version == host.version and host in block]


def _is_loopback(address: Address) -> bool:
    host = ip_of(address.host)
    return host is not None and host.is_loopback
