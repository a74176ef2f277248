"""Routers that translate addresses packet by packet, like those of the laboratory (`tests.lab.nat`). No I/O.

Mapping and filtering are named as in RFC 4787. A packet has a transport, a source and a destination; each of
the last two is a host and a port. `RoutedSite.leave` returns a packet's source as seen outside, and `enter`
its destination inside, if it arrives. A mapping closes after some time without traffic. A router that reboots
drops all mappings and then assigns different ports. An IPv6 firewall filters packets but does not translate
addresses.

Not modelled: running out of ports, and the orderly closing of connections.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Transport = Literal["tcp", "udp"]
Endpoint = tuple[str, int]
"""A host and a port."""
Preset = Literal[
    "none",
    "home",
    "symmetric",
    "cone",
    "carrier",
    "blocked",
    "firewall6",
    "short",
    "two-hours",
    "half-minute",
]
"""Types of sites, named as in the laboratory. In addition: homes with the timeouts of RFC 5382 and of
measured routers (TCP two hours, UDP 60 s), and homes with 30 s for both."""

HOME_SECONDS = 300.0
SHORT_SECONDS = 50.0
CARRIER_SECONDS = 60.0
TCP_SECONDS = 7_440.0
"""RFC 5382 REQ-5: two hours and four minutes."""
PORTS = 20_000
"""Number of ports that a router assigns, starting at its base, if it does not keep the inner port."""
PORT_BASE = 20_000
_KEPT_MAX = 4_096
"""Number of mappings of one router beyond which expired ones are dropped."""
_SPREAD = 7_919
"""A prime that does not divide PORTS, so that ports assigned one after the other are not neighbours."""


@dataclass(frozen=True)
class RouterBehaviour:
    """How a router translates. A mapping expires after `udp_seconds` or `tcp_seconds` without traffic."""

    mapping: Literal["independent", "dependent", "none"] = "independent"
    """independent: an inner endpoint has one outer port for all destinations. dependent: it has one for each
    destination. none: addresses and ports are not translated."""
    filtering: Literal["independent", "address and port"] = "address and port"
    """Whether every host may send to a mapping, or only endpoints that were sent to."""
    has_hairpin: bool = False
    has_udp: bool = True
    udp_seconds: float = HOME_SECONDS
    tcp_seconds: float = TCP_SECONDS


HOME = RouterBehaviour()
SYMMETRIC = RouterBehaviour(mapping="dependent")
FIREWALL = RouterBehaviour(mapping="none")
PRESETS: dict[Preset, tuple[RouterBehaviour, ...]] = {
    "none": (),
    "home": (HOME,),
    "symmetric": (SYMMETRIC,),
    "cone": (RouterBehaviour(filtering="independent", has_hairpin=True),),
    "carrier": (HOME, RouterBehaviour(udp_seconds=CARRIER_SECONDS, tcp_seconds=CARRIER_SECONDS)),
    "blocked": (RouterBehaviour(has_udp=False),),
    "firewall6": (SYMMETRIC,),
    "short": (RouterBehaviour(udp_seconds=SHORT_SECONDS, tcp_seconds=SHORT_SECONDS),),
    "two-hours": (RouterBehaviour(udp_seconds=60.0, tcp_seconds=7_200.0),),
    "half-minute": (RouterBehaviour(udp_seconds=30.0, tcp_seconds=30.0),),
}
"""The routers of each type of site, the one nearest to the machines first."""


@dataclass
class _Mapping:
    inner: Endpoint
    remotes: dict[Endpoint, float]
    """The endpoints that were sent to, and the time of the latest packet to each."""
    used: float


class SimRouter:
    """One router with the outer host `host`."""

    def __init__(self, translation: RouterBehaviour, host: str) -> None:
        self.translation = translation
        self.host = host
        self._generation = 0
        self._given = 0
        self._ports: dict[tuple[Transport, Endpoint, Endpoint | None], int] = {}
        self._mappings: dict[tuple[Transport, str, int], _Mapping] = {}

    def __len__(self) -> int:
        return len(self._mappings)

    def leave(self, transport: Transport, inner: Endpoint, to: Endpoint, now: float) -> Endpoint | None:
        """Return a packet's translated source address; None if the router drops it."""
        if transport == "udp" and not self.translation.has_udp:
            return None
        outer = self._outer(transport, inner, to, now)
        key = transport, *outer
        mapping = self._living(key, now)
        if mapping is None:
            mapping = self._mappings[key] = _Mapping(inner, {}, now)
            self._make_room(now)
        mapping.inner, mapping.used, mapping.remotes[to] = inner, now, now
        return outer

    def enter(self, transport: Transport, source: Endpoint, to: Endpoint, now: float) -> Endpoint | None:
        """Return the inner destination of a packet; None if it is dropped."""
        if transport == "udp" and not self.translation.has_udp:
            return None
        mapping = self._living((transport, *to), now)
        if mapping is None:
            return None
        if self.translation.filtering != "independent":
            last = mapping.remotes.get(source)
            if last is None or now - last > self._seconds(transport):
                return None
            mapping.remotes[source] = now
        mapping.used = now
        return mapping.inner

    def seen(self, transport: Transport, inner: Endpoint, now: float) -> Endpoint | None:
        """Return the outer endpoint of an inner one; None if it has no mapping now, or a different one for
        each destination."""
        if self.translation.mapping == "none":
            return inner
        port = self._ports.get((transport, inner, None))
        if port is None or self._living((transport, self.host, port), now) is None:
            return None
        return self.host, port

    def reboot(self) -> None:
        """Forget all mappings; later ones get different ports."""
        self._generation += 1
        self._ports.clear()
        self._mappings.clear()

    def _outer(self, transport: Transport, inner: Endpoint, to: Endpoint, now: float) -> Endpoint:
        if self.translation.mapping == "none":
            return inner
        is_dependent = self.translation.mapping == "dependent"
        key = transport, inner, to if is_dependent else None
        port = self._ports.get(key)
        if port is None or (is_dependent and self._living((transport, self.host, port), now) is None):
            self._given += 1
            place = self._given * _SPREAD + self._generation * PORTS // 2
            port = self._ports[key] = PORT_BASE + place % PORTS
        return self.host, port

    def _living(self, key: tuple[Transport, str, int], now: float) -> _Mapping | None:
        mapping = self._mappings.get(key)
        if mapping is not None and now - mapping.used > self._seconds(key[0]):
            del self._mappings[key]
            return None
        return mapping

    def _seconds(self, transport: Transport) -> float:
        return self.translation.udp_seconds if transport == "udp" else self.translation.tcp_seconds

    def _make_room(self, now: float) -> None:
        if len(self._mappings) > _KEPT_MAX:
            for key in list(self._mappings):
                self._living(key, now)
            kept = {(key[0], key[2]) for key in self._mappings}
            self._ports = {key: port for key, port in self._ports.items() if (key[0], port) in kept}


class RoutedSite:
    """A site of machines behind zero or more routers, the nearest first. `hosts` are the outer hosts of the
    routers; the internet sees the site at the last of them."""

    def __init__(self, name: str, translations: Sequence[RouterBehaviour], hosts: Sequence[str]) -> None:
        self.name = name
        self.routers = [SimRouter(each, host) for each, host in zip(translations, hosts, strict=True)]

    @property
    def outside(self) -> str:
        """The host at which the internet sees the site."""
        return self.routers[-1].host

    def leave(self, transport: Transport, inner: Endpoint, to: Endpoint, now: float) -> Endpoint | None:
        """Return a packet's source address as seen from the internet; None if it is dropped on the way."""
        source: Endpoint | None = inner
        for router in self.routers:
            if source is not None:
                source = router.leave(transport, source, to, now)
        return source

    def enter(self, transport: Transport, source: Endpoint, to: Endpoint, now: float) -> Endpoint | None:
        """Return the inner destination of a packet from the internet; None if it is dropped on the way."""
        place: Endpoint | None = to
        for router in reversed(self.routers):
            if place is not None:
                place = router.enter(transport, source, place, now)
        return place

    def turn(self, transport: Transport, inner: Endpoint, to: Endpoint, now: float) -> Endpoint | None:
        """Return the destination, by a hairpin, of a packet from inside to the site's own outer address."""
        source = self.leave(transport, inner, to, now)
        if source is None or not all(router.translation.has_hairpin for router in self.routers):
            return None
        return self.enter(transport, source, to, now)

    def place(self, transport: Transport, inner: Endpoint, now: float) -> Endpoint | None:
        """Return the endpoint at which the internet sees a machine now; None if it has no mapping, or no
        single one."""
        place: Endpoint | None = inner
        for router in self.routers:
            place = None if place is None else router.seen(transport, place, now)
        return place

    def lets_in(self, transport: Transport, inner: Endpoint, now: float) -> bool:
        """Return whether any host on the internet may now send to the machine's outer endpoint."""
        is_free = all(router.translation.filtering == "independent" for router in self.routers)
        return is_free and self.place(transport, inner, now) is not None

    def reboot(self) -> None:
        """Reboot all routers of the site."""
        for router in self.routers:
            router.reboot()
