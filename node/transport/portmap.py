"""Asks the router for a port that leads here: NAT-PMP (RFC 6886) and PCP (RFC 6887), a core without I/O.

Both protocols use the same port of the router. Trying them in turn shows which one the router speaks. A
mapping is renewed every minute, because a rebooted router has forgotten it and says so only when asked. Not
here: the socket, and finding the router (`portmap_driver`).
"""

import ipaddress
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

ROUTER_PORT = 5_351
LIFETIME_SECONDS = 600
"""Lifetime of a mapping, and so how long it can outlive a killed node."""
REFRESH_SECONDS = 60.0
"""Seconds between renewals. A renewal takes three packets, and a reboot of the router is noticed within this
time."""
FIRST_WAIT_SECONDS = 0.25
TRIES_MAX = 6
"""The first wait, and the number of requests. Each further wait is twice as long, as in the RFCs. That makes
eight seconds, with three tries of each protocol; most routers that have not answered by then never do."""
LATER_SECONDS = 600.0
"""How long to wait before a silent or refusing router is asked again. Its settings may have changed."""
ANSWER_BYTES_MAX = 1_100
"""Maximum size of an answer: PCP's limit. NAT-PMP has shorter answers."""
EXTERNAL_PORT_MIN = 1_024
"""Lowest external port that is accepted. Others do not dial lower ports: see
`address_policy.CLAIMED_PORT_MIN`."""

Outcome = Literal["asking", "mapped", "no answer", "refused"]
_UDP, _TCP = 17, 6
_PMP_OPCODES = {_UDP: 1, _TCP: 2}
_PMP_REASONS = {2: "not authorised", 3: "the router has no address itself", 4: "no more mappings"}
_PCP_REASONS = {
    2: "not authorised",
    3: "a malformed request",
    8: "no more mappings",
    11: "the requested address is not available",
    12: "there is another router in between",
    13: "too many mappings",
}
_UNSUPPORTED_VERSION = 1
_PCP_HEADER = struct.Struct(">BBHI16s")
_PCP_ANSWER = struct.Struct(">BBBBII12x")
_PCP_MAP = struct.Struct(">12sB3xHH16s")


@dataclass(frozen=True)
class PortMapping:
    """The router forwards TCP for `host`:`port` to this node, and also UDP if it `has_udp`."""

    host: str
    port: int
    has_udp: bool
    protocol: Literal["pcp", "nat-pmp", "upnp"]


@dataclass
class _Grant:
    port: int
    until: float


class PortMapper:
    """The mappings of one port at one router. Call `wake` at `deadline`, and `receive` with what the router
    sends; both return packets to send to the router. `host` is this machine's address towards the router;
    `now` is monotonic seconds."""

    def __init__(self, host: str, port: int, entropy: Callable[[int], bytes], now: float) -> None:
        self._host = ipaddress.IPv4Address(host)
        self._port = port
        self._nonce = entropy(12)
        self._version: int | None = None
        self._tries = 0
        self._is_asking = True
        self._external = ""
        self._grants: dict[int, _Grant] = {}
        self._answered: set[int] = set()
        self.reason = ""
        """Why the router refused, as text for people."""
        self.deadline = now

    @property
    def mapping(self) -> PortMapping | None:
        """The mapping that the router currently grants; None if there is none."""
        tcp, udp = self._grants.get(_TCP), self._grants.get(_UDP)
        if tcp is None or not self._external:
            return None
        has_udp = udp is not None and udp.port == tcp.port
        return PortMapping(self._external, tcp.port, has_udp, "pcp" if self._version == 2 else "nat-pmp")

    @property
    def outcome(self) -> Outcome:
        if self.mapping is not None:
            return "mapped"
        if self._is_asking:
            return "asking"
        return "refused" if self.reason else "no answer"

    def wake(self, now: float) -> list[bytes]:
        """Ask, or ask again."""
        if now < self.deadline:
            return []
        for transport in [each for each, grant in self._grants.items() if grant.until <= now]:
            del self._grants[transport]
        if not self._is_asking:
            self._is_asking, self._tries, self._answered = True, 0, set()
        if self._tries >= TRIES_MAX:
            self._is_asking, self._version = False, None
            self.deadline = min(now + LATER_SECONDS, *(each.until for each in self._grants.values()), inf)
            return []
        self.deadline = now + FIRST_WAIT_SECONDS * 2**self._tries
        self._tries += 1
        return self._requests()

    def end(self) -> list[bytes]:
        """Remove the granted mappings."""
        if self._version == 2:
            return [self._pcp(transport, 0, 0) for transport in self._grants]
        return [self._pmp(transport, 0, 0) for transport in self._grants]

    def receive(self, now: float, data: bytes) -> list[bytes]:
        """Process an answer, and ignore anything else. The driver ensures that it comes from the router."""
        if len(data) > ANSWER_BYTES_MAX or len(data) < 8 or not data[1] & 0x80:
            return []
        if data[0] == 0:
            return self._receive_pmp(now, data)
        if data[0] == 2:
            self._receive_pcp(now, data)
        return []

    # --- requests ------------------------------------------------------------------------------------

    def _requests(self) -> list[bytes]:
        version = self._version if self._version is not None else (2, 0)[(self._tries - 1) % 2]
        wanted = self._grants[_TCP].port if _TCP in self._grants else self._port
        if version == 2:
            return [self._pcp(transport, wanted, LIFETIME_SECONDS) for transport in (_TCP, _UDP)]
        mapped = [self._pmp(transport, wanted, LIFETIME_SECONDS) for transport in (_TCP, _UDP)]
        return [bytes((0, 0)), *mapped]

    def _pmp(self, transport: int, wanted: int, seconds: int) -> bytes:
        return struct.pack(">BBHHHI", 0, _PMP_OPCODES[transport], 0, self._port, wanted, seconds)

    def _pcp(self, transport: int, wanted: int, seconds: int) -> bytes:
        any_host = _mapped(ipaddress.IPv4Address(0))
        header = _PCP_HEADER.pack(2, 1, 0, seconds, _mapped(self._host))
        return header + _PCP_MAP.pack(self._nonce, transport, self._port, wanted, any_host)

    # --- answers -------------------------------------------------------------------------------------

    def _receive_pmp(self, now: float, data: bytes) -> list[bytes]:
        opcode, (result,) = data[1] & 0x7F, struct.unpack_from(">H", data, 2)
        if result == _UNSUPPORTED_VERSION:
            # A router that knows only NAT-PMP answers PCP requests in this way.
            if self._version is None and self._is_asking:
                self._version = 0
                return self._requests()
            return []
        transport = {1: _UDP, 2: _TCP}.get(opcode)
        if opcode == 0 and result == 0 and len(data) >= 12:
            self._external = str(ipaddress.IPv4Address(data[8:12]))
        elif transport is not None and len(data) >= 16:
            inner, port, seconds = struct.unpack_from(">HHI", data, 8)
            if inner != self._port:
                return []
            self._granted(now, transport, port, seconds if result == 0 else 0)
        if result:
            self.reason = _PMP_REASONS.get(result, f"NAT-PMP error {result}")
            self._answered.update((_TCP, _UDP) if opcode == 0 else () if transport is None else (transport,))
        self._version = 0
        self._settle(now)
        return []

    def _receive_pcp(self, now: float, data: bytes) -> None:
        if len(data) < _PCP_ANSWER.size:
            return
        _, opcode, _, result, seconds, _ = _PCP_ANSWER.unpack_from(data)
        if result == _UNSUPPORTED_VERSION or opcode != 0x81:
            return
        if len(data) < _PCP_ANSWER.size + _PCP_MAP.size:
            return
        nonce, transport, inner, port, host = _PCP_MAP.unpack_from(data, _PCP_ANSWER.size)
        if nonce != self._nonce or inner != self._port or transport not in (_TCP, _UDP):
            return
        if result:
            self.reason = _PCP_REASONS.get(result, f"PCP error {result}")
            seconds = 0
        elif (there := ipaddress.IPv6Address(host).ipv4_mapped) is not None:
            self._external = str(there)
        self._version = 2
        self._granted(now, transport, port, seconds)
        self._settle(now)

    def _granted(self, now: float, transport: int, port: int, seconds: int) -> None:
        self._answered.add(transport)
        self._grants.pop(transport, None)
        if seconds and port >= EXTERNAL_PORT_MIN:
            self._grants[transport] = _Grant(port, now + seconds)

    def _settle(self, now: float) -> None:
        """Record whether all requests were answered, and when to ask again."""
        is_over = self._answered >= {_TCP, _UDP} and (self._external or self.reason)
        if not self._is_asking or not is_over:
            return
        self._is_asking = False
        if self._grants:
            self.reason = "" if self.mapping is not None else self.reason
            shortest = min(each.until - now for each in self._grants.values())
            self.deadline = now + max(1.0, min(REFRESH_SECONDS, shortest / 2))
        else:
            self._version = None
            self.deadline = now + LATER_SECONDS


def _mapped(host: ipaddress.IPv4Address) -> bytes:
    """Return an IPv4-mapped IPv6 address, as PCP requires."""
    return bytes(10) + b"\xff\xff" + host.packed
