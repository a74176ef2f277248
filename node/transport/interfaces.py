"""The network interfaces of this machine, and which of their addresses others can probably use.

The system is queried at each call. The likely use of an interface is derived from its name, its carrier and
the default route, by conventions of Linux, macOS, container runtimes and VPNs. It is a guess, and evidence
overrides it (`address_policy`).
"""

import ipaddress
import re
import socket
from dataclasses import dataclass
from enum import IntEnum

import psutil

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_DOCUMENTATION: dict[int, str] = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses (RFC 5737, RFC 3849) that show the default route; nothing is sent."""
_BRIDGE = re.compile(
    r"docker\d*|br-[0-9a-f]{12}|veth.*|virbr\d+.*|vmnet\d+|vboxnet\d+|lxcbr\d+|lxdbr\d+|incusbr\d+|cni\d*"
    r"|cali.*|flannel.*|podman\d+|kube-.*|weave|cbr\d+|bridge1\d\d|vnic\d+|vEthernet.*"
)
"""Bridges and virtual cables of container runtimes and hypervisors. Every machine has the same addresses
there."""
_TUNNEL = re.compile(r"tun|tap|utun|wg|tailscale|zt|ppp|ipsec|nebula|nordlynx|proton|gpd|cscotun|svpn")
"""Name prefixes of VPN interfaces, which reach some machines but not others."""


class Use(IntEnum):
    """The probable use of an interface. The use through which others most likely reach this machine comes
    first."""

    DEFAULT_ROUTE = 0
    CABLE = 1
    TUNNEL = 2
    CONTAINERS = 3
    NO_CARRIER = 4
    LINK_LOCAL = 5
    LOOPBACK = 6


@dataclass(frozen=True)
class InterfaceAddress:
    """One address of an interface, and the network that it shares with other machines."""

    name: str
    host: Ip
    network: Network
    use: Use


def read_interfaces() -> tuple[InterfaceAddress, ...]:
    """Return the addresses of all interfaces that are up, without zones. The most likely to be of use to
    others come first. Within one use, interfaces are sorted by name, but the source of the default route
    comes first."""
    states = psutil.net_if_stats()
    sources = {_source_of_default_route(family) for family in _DOCUMENTATION}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        if state is None or not state.isup:
            continue
        # If the system has no flags, an interface that is up counts as having a carrier.
        has_carrier = not state.flags or "running" in state.flags.split(",")
        for entry in entries:
            if int(entry.family) not in _DOCUMENTATION:
                continue
            host = ipaddress.ip_address(entry.address.partition("%")[0])
            use = use_of(name, host, has_carrier=has_carrier, is_default=host in sources)
            found.append(InterfaceAddress(name, host, _network(host, entry.netmask), use))
    return tuple(
        sorted(
            found,
            key=lambda each: (
                each.use,
                each.name,
                each.host.version,
                each.host not in sources,
                int(each.host),
            ),
        )
    )


def use_of(name: str, host: Ip, *, has_carrier: bool, is_default: bool) -> Use:
    """Return the probable use of an interface with this name and address. A full-tunnel VPN has the default
    route but still counts as a tunnel, because neighbours on the cable are nearer."""
    if host.is_loopback:
        return Use.LOOPBACK
    if host.is_link_local:
        return Use.LINK_LOCAL
    if not has_carrier:
        return Use.NO_CARRIER
    if _TUNNEL.match(name):
        return Use.TUNNEL
    if is_default:
        return Use.DEFAULT_ROUTE
    return Use.CONTAINERS if _BRIDGE.fullmatch(name) else Use.CABLE


def _source_of_default_route(family: int) -> Ip | None:
    """Return this machine's source address for the default route; None if there is none."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_DOCUMENTATION[family], 9))
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None  # no route, or a kernel without this family


def _network(host: Ip, netmask: str | None) -> Network:
    """Return an address's network. An address without a mask, as on a point-to-point link, is a network of
    its own."""
    width: int = host.max_prefixlen
    if netmask:
        width = int(ipaddress.ip_address(netmask)).bit_count()
    return ipaddress.ip_network((str(host), width), strict=False)
