"""Asks one router for a port by UPnP: the sockets for `upnp`, and renewals.

It speaks only to the router, at the given address, and follows no redirect. Each exchange is bounded in time
and bytes. A mapping lasts ten minutes if the router supports that. As with the other protocols (`portmap`),
it is renewed every minute and removed at the end.
"""

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass

import h11
import trio

from node.seams import Clock
from node.transport.portmap import (
    EXTERNAL_PORT_MIN,
    LATER_SECONDS,
    LIFETIME_SECONDS,
    REFRESH_SECONDS,
    Outcome,
    PortMapping,
)
from node.transport.upnp import (
    ANSWER_BYTES_MAX,
    CONFLICT,
    DESCRIPTION_BYTES_MAX,
    HEAD_BYTES_MAX,
    PERMANENT_ONLY,
    SEARCH_BYTES_MAX,
    SSDP_GROUP,
    SSDP_PORT,
    ControlPoint,
    UpnpFault,
    answer,
    call,
    control_point,
    external_host,
    location,
    mapping_arguments,
    search,
    unmapping_arguments,
)

SEARCH_SECONDS = 2.5
"""Time limit of a search. Routers answer within one second, as the search requests, or within two."""
SEARCHES = 2
"""Number of search packets sent within that time, because datagrams may be lost."""
EXCHANGE_SECONDS = 5.0
"""Time limit of one call."""
ANSWERS_MAX = 16
"""Maximum number of answers to a search that are read: a router sends one for each of its services, or
more."""
PORTS_TRIED = 3
"""Number of ports to request in turn if other machines have the earlier ones."""
_CHUNK_BYTES = 2**14
_FAILURES = (UpnpFault, OSError, h11.ProtocolError, trio.TooSlowError, trio.BrokenResourceError)
"""Exceptions that a call to a router may raise."""


@dataclass(frozen=True)
class _Granted:
    port: int
    transports: tuple[str, ...]


class UpnpMapper:
    """The mapping of one port. Call `act` at `deadline`. `host` is this machine's address towards the
    router."""

    def __init__(
        self,
        router: str,
        host: str,
        port: int,
        clock: Clock,
        ssdp_port: int = SSDP_PORT,
        search_seconds: float = SEARCH_SECONDS,
    ) -> None:
        self._search_seconds = search_seconds
        self._router = router
        self._host = host
        self._port = port
        self._clock = clock
        self._ssdp_port = ssdp_port
        self._point: ControlPoint | None = None
        self._granted: _Granted | None = None
        self._is_for_ever = False
        self._until = 0.0
        self.mapping: PortMapping | None = None
        self.outcome: Outcome = "asking"
        self.reason = ""
        """Why the router refused, as text for people."""
        self.deadline = clock.monotonic()

    async def act(self) -> None:
        """Request or renew the mapping. If that fails, find the router's control point again."""
        try:
            if self._point is not None:
                with suppress(*_FAILURES):
                    await self._map(self._point)
                    return
            point = await self._find()
            if point is None:
                self._fail("no answer", "")
                return
            self._point = point
            await self._map(point)
        except UpnpFault as fault:
            self._fail("refused", str(fault))
        except _FAILURES:
            self._fail("refused", "it broke off a call by UPnP")

    async def end(self) -> None:
        """Remove the granted mappings."""
        granted, self._granted = self._granted, None
        if granted is not None and self._point is not None:
            for transport in granted.transports:
                with suppress(*_FAILURES):
                    arguments = unmapping_arguments(transport, granted.port)
                    await self._call(self._point, "DeletePortMapping", arguments)

    def _fail(self, outcome: Outcome, reason: str) -> None:
        """Record a failure. A granted mapping holds until its lease is over, even if a renewal fails."""
        now = self._clock.monotonic()
        self.deadline = now + (LATER_SECONDS if self._granted is None else REFRESH_SECONDS)
        if self.mapping is not None and now < self._until:
            self.deadline = min(self.deadline, self._until)
            return
        self.mapping = None
        self.outcome, self.reason = outcome, reason

    # --- requests ------------------------------------------------------------------------------------

    async def _find(self) -> ControlPoint | None:
        """Return the router's control point; None if it does not speak UPnP. Raises UpnpFault."""
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            await asking.bind((self._host, 0))
            asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
            found: tuple[int, str] | None = None
            faults: list[UpnpFault] = []
            for _ in range(SEARCHES):
                targets = [self._router]
                if not ipaddress.IPv4Address(self._router).is_loopback:
                    targets.append(SSDP_GROUP)
                for target in targets:
                    with suppress(OSError):
                        await asking.sendto(search(), (target, self._ssdp_port))
                with trio.move_on_after(self._search_seconds / SEARCHES):
                    found = await self._answered(asking, faults)
                if found is not None:
                    break
        if found is None:
            if faults:
                raise faults[-1]
            return None
        port, path = found
        status, document = await self._exchange(port, "GET", path, DESCRIPTION_BYTES_MAX)
        if status != 200:
            raise UpnpFault(f"HTTP status {status}")
        return control_point(document, self._router, port, path)

    async def _answered(
        self, asking: trio.socket.SocketType, faults: list[UpnpFault]
    ) -> tuple[int, str] | None:
        """Wait for the router's answer, which names the location of its description. Answers of other hosts
        are ignored. Errors in other answers of the router go to `faults`."""
        while len(faults) < ANSWERS_MAX:
            with suppress(ConnectionRefusedError):
                data, source = await asking.recvfrom(SEARCH_BYTES_MAX + 1)
                if source[0] == self._router:
                    try:
                        return location(data, self._router)
                    except UpnpFault as fault:
                        faults.append(fault)
        return None

    async def _map(self, point: ControlPoint) -> None:
        began = self._clock.monotonic()
        texts = await self._call(point, "GetExternalIPAddress", ())
        host = external_host(texts)
        port = await self._add(point, "tcp", self._granted.port if self._granted else self._port)
        if self._granted is None or self._granted.port != port:
            self._granted = _Granted(port, ("tcp",))
        has_udp = False
        with suppress(UpnpFault):
            has_udp = await self._add(point, "udp", port, tries=1) == port
        if has_udp:
            self._granted = _Granted(port, ("tcp", "udp"))
        self.mapping = PortMapping(host, port, has_udp, "upnp")
        # A permanent mapping counts as valid for the same time, because the router may have been rebooted.
        self._until = began + LIFETIME_SECONDS
        self.outcome, self.reason = "mapped", ""
        self.deadline = self._clock.monotonic() + REFRESH_SECONDS

    async def _add(self, point: ControlPoint, transport: str, port: int, tries: int = PORTS_TRIED) -> int:
        """Map a port, or a later one if another machine has it. Raises UpnpFault."""
        for outer in range(max(port, EXTERNAL_PORT_MIN), max(port, EXTERNAL_PORT_MIN) + tries):
            seconds = 0 if self._is_for_ever else LIFETIME_SECONDS
            try:
                await self._add_one(point, transport, outer, seconds)
            except UpnpFault as fault:
                if fault.code == PERMANENT_ONLY and seconds:
                    self._is_for_ever = True
                    await self._add_one(point, transport, outer, 0)
                elif fault.code == CONFLICT and outer - port < tries - 1:
                    continue
                else:
                    raise
            return outer
        raise UpnpFault("other machines have all the tried ports", CONFLICT)

    async def _add_one(self, point: ControlPoint, transport: str, outer: int, seconds: int) -> None:
        arguments = mapping_arguments(transport, outer, self._port, self._host, seconds)
        await self._call(point, "AddPortMapping", arguments)

    # --- HTTP ----------------------------------------------------------------------------------------

    async def _call(
        self, point: ControlPoint, action: str, arguments: tuple[tuple[str, object], ...]
    ) -> dict[str, str]:
        """Make one call and return its results. Raises UpnpFault."""
        body = call(point, action, arguments)
        headers = [
            ("Content-Type", 'text/xml; charset="utf-8"'),
            ("Content-Length", str(len(body))),
            ("SOAPAction", f'"{point.service}#{action}"'),
        ]
        status, document = await self._exchange(
            point.port, "POST", point.path, ANSWER_BYTES_MAX, headers, body
        )
        return answer(status, document)

    async def _exchange(
        self,
        port: int,
        method: str,
        path: str,
        bytes_max: int,
        headers: list[tuple[str, str]] | None = None,
        body: bytes = b"",
    ) -> tuple[int, bytes]:
        """Send one request to the router and return its answer. Raises UpnpFault, OSError, h11.ProtocolError,
        trio.TooSlowError, trio.BrokenResourceError."""
        talk = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        common = [("Host", f"{self._router}:{port}"), ("Connection", "close"), ("User-Agent", "peerloom")]
        request = h11.Request(method=method, target=path, headers=[*common, *(headers or ())])
        with trio.fail_after(EXCHANGE_SECONDS), trio.socket.socket() as link:
            await link.bind((self._host, 0))
            await link.connect((self._router, port))
            stream = trio.SocketStream(link)
            await stream.send_all(talk.send(request) + (talk.send(h11.Data(data=body)) if body else b""))
            await stream.send_all(talk.send(h11.EndOfMessage()))
            status, document = 0, bytearray()
            while True:
                event = talk.next_event()
                if event is h11.NEED_DATA:
                    talk.receive_data(await stream.receive_some(_CHUNK_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    document += event.data
                    if len(document) > bytes_max:
                        raise UpnpFault(f"it sent more than {bytes_max >> 10} KiB")
                elif isinstance(event, h11.EndOfMessage):
                    return status, bytes(document)
                elif isinstance(event, h11.ConnectionClosed):
                    raise UpnpFault("it broke off a call by UPnP")
