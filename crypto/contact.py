"""Addresses of peers as multiaddrs (a subset).

Addresses are `[/ip6zone/ZONE]/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT[/p2p/PEER]` (the multiformats multiaddr
specification). People may type `HOST:PORT` or `[IPV6]:PORT`. One port number serves TCP and UDP.

A node that cannot be dialled is reached through a relay (libp2p's circuit relay v2). Its address, a circuit,
is `ADDRESS-OF-RELAY/p2p/RELAY/p2p-circuit[/p2p/PEER]`.

An IPv6 link-local address (RFC 4291, section 2.5.6) is valid on one link only, and a machine may have several
links: the zone, an interface of this machine, names the link. It means nothing on other machines.
"""

import ipaddress
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, parse_peer, peer_text

PORT_MAX = 65_535
ADDRESSES_MAX = 8
"""Maximum number of addresses in one contact: enough for a few interfaces with two address families each.
More would only be spam."""
ADDRESS_LENGTH_MAX = 200
"""Maximum number of characters in an address. A circuit through an IPv6 relay has 181."""
PLACE_LENGTH_MAX = 160
"""Maximum number of characters in an address that is not a circuit."""
NAME_LENGTH_MAX = 40
PARSED_MAX = 4_096
"""Number of addresses whose parsed form is cached, because each is received from many peers."""

CIRCUIT = "/p2p-circuit"
"""The part of a circuit that stands between its relay and the peer behind the relay."""
_HOST_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_DNS_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
"""Host names as in RFC 1123, and also underscores, which occur in names of services."""
_LINK_LOCAL = re.compile(r"fe[89ab][0-9a-f]:")
"""The prefix fe80::/10, in the form in which addresses are written here."""
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
"""Interface names that Linux allows."""


@dataclass(frozen=True)
class Address:
    """One dialable endpoint. `peer` is the peer expected there; None accepts any peer.

    `host` has only one valid spelling, so equal endpoints compare equal; a zone follows a `%`. The host and
    port of a circuit are those of its `relay`.
    """

    kind: str
    host: str
    port: int
    peer: PeerId | None = None
    relay: PeerId | None = None

    def __str__(self) -> str:
        suffix = f"/p2p/{peer_text(self.peer)}" if self.peer is not None else ""
        if self.relay is not None:
            suffix = f"/p2p/{peer_text(self.relay)}{CIRCUIT}{suffix}"
        host, _, zone = self.host.partition("%")
        prefix = f"/ip6zone/{zone}" if zone else ""
        return f"{prefix}/{self.kind}/{host}/tcp/{self.port}{suffix}"

    @property
    def short(self) -> str:
        """The short form for people, `host:port`; the full text of a circuit."""
        if self.relay is not None:
            return str(self)
        return f"[{self.host}]:{self.port}" if self.kind == "ip6" else f"{self.host}:{self.port}"

    def of(self, peer: PeerId | None) -> "Address":
        """Return the same endpoint with a different expected peer."""
        return self if self.peer == peer else replace(self, peer=peer)

    @property
    def of_relay(self) -> "Address":
        """Return the address of a circuit's relay. Any other address is returned unchanged."""
        return self if self.relay is None else Address(self.kind, self.host, self.port, self.relay)

    def through(self, peer: PeerId | None) -> "Address":
        """Return the circuit to `peer` through the relay at this address. The relay's own `peer` must be
        known."""
        return Address(self.kind, self.host, self.port, peer, self.peer)

    @property
    def is_link_local(self) -> bool:
        """Whether this is an IPv6 address that is valid on one link only. Dialling it requires a zone."""
        return self.kind == "ip6" and _LINK_LOCAL.match(self.host) is not None


@lru_cache(maxsize=PARSED_MAX)
def parse_address(text: str) -> Address:
    """Parse a multiaddr or `host:port`.

    Raises:
        ValueError: with a reason that a person can read.
    """
    if len(text) > ADDRESS_LENGTH_MAX:
        raise ValueError(f"an address has at most {ADDRESS_LENGTH_MAX} characters")
    return _parse_multiaddr(text) if text.startswith("/") else _parse_typed(text)


def make_address(host: str, port: int, peer: PeerId | None = None) -> Address:
    """Make an address from a bare host (IPv4, IPv6 with its zone if it has one, or DNS name) and a port."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return Address("dns", host, port, peer)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        # RFC 5952, section 5, recommends this form; Python uses it only from 3.13 on.
        return Address("ip6", f"::ffff:{ip.ipv4_mapped}", port, peer)
    return Address(f"ip{ip.version}", str(ip), port, peer)


def _parse_multiaddr(text: str) -> Address:
    there, is_circuit, behind = text.partition(CIRCUIT)
    if is_circuit:
        relay = _parse_multiaddr(there)
        if relay.peer is None or relay.relay is not None or not re.fullmatch(r"(/p2p/[^/]+)?", behind):
            raise ValueError("a circuit is RELAY/p2p/ID/p2p-circuit, with /p2p/PEER at most behind it")
        return relay.through(parse_peer(behind.removeprefix("/p2p/")) if behind else None)
    parts, zone = text[1:].split("/"), ""
    if parts[0] == "ip6zone" and parts[2:3] == ["ip6"]:
        zone, parts = f"%{parts[1]}", parts[2:]
    if len(parts) not in (4, 6) or parts[2] not in ("tcp", "udp"):
        raise ValueError("want /ip4/HOST/tcp/PORT, with /p2p/PEER at most behind it")
    kind, host, _, port_text = parts[:4]
    if kind not in _HOST_KINDS:
        raise ValueError(f"'{kind}' is not one of {' '.join(_HOST_KINDS)}")
    if "%" in host:
        raise ValueError("a zone stands before its address: /ip6zone/ZONE/ip6/HOST/tcp/PORT")
    peer = None
    if len(parts) == 6:
        if parts[4] != "p2p":
            raise ValueError(f"'{parts[4]}' cannot follow a port; want p2p")
        peer = parse_peer(parts[5])
    if not kind.startswith("ip"):
        _check_name(host)
        return Address(kind, host, _parse_port(port_text), peer)
    return _ip_address(kind, host + zone, _parse_port(port_text), peer)


def _parse_typed(text: str) -> Address:
    match = re.fullmatch(r"\[([^\]]*)\]:(.*)|([^:]*):([^:]*)", text)
    if match is None:
        raise ValueError("want HOST:PORT, or [IPV6]:PORT, or a multiaddr such as /ip4/10.0.0.5/tcp/9747")
    if match[1] is not None:
        return _ip_address("ip6", match[1], _parse_port(match[2]), None)
    address = make_address(match[3], _parse_port(match[4]))
    if address.kind == "dns":
        _check_name(address.host)
    return address


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= PORT_MAX):
        raise ValueError(f"port must be 1-{PORT_MAX}")
    return int(text)


def _ip_address(kind: str, host: str, port: int, peer: PeerId | None) -> Address:
    address = make_address(host, port, peer)
    if address.kind != kind:
        raise ValueError(f"'{host}' is not an IPv{kind[-1]} address")
    _, has_zone, zone = host.partition("%")
    if has_zone and not (_ZONE.fullmatch(zone) and address.is_link_local):
        raise ValueError(f"'{host}': only a link-local address has a zone, the name of an interface")
    return address


def _check_name(host: str) -> None:
    if not _DNS_NAME.fullmatch(host):
        raise ValueError(f"'{host}' is not a host name")


def parse_addresses(texts: tuple[str, ...], peer: PeerId) -> tuple[Address, ...]:
    """Parse the addresses that a peer claims for itself. A claim for a different peer raises
    RemoteProtocolError. Link-local addresses are left out, because they mean nothing on our links."""
    addresses = []
    for text in texts:
        try:
            address = parse_address(text)
        except ValueError as error:
            raise RemoteProtocolError(f"a contact with a malformed address: {error}") from None
        if address.peer not in (None, peer):
            raise RemoteProtocolError("a contact with another peer's address")
        if not address.is_link_local:
            addresses.append(address.of(peer))
    return tuple(addresses)
