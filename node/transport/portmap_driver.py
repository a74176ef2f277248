"""Keeps a port of the local router mapped to this node while the node runs. It drives `portmap`, and also
`upnp_driver` if the router speaks neither protocol of `portmap`.

It does so only if this node listens on a private IPv4 address towards its router; otherwise no mapping is
needed. A router that is itself behind another router grants a port at an address that nobody can dial; it is
shown but not announced.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

import trio

from crypto.contact import Address, make_address
from node.seams import Clock
from node.transport.address_policy import is_global
from node.transport.network import RealNetwork
from node.transport.portmap import ANSWER_BYTES_MAX, ROUTER_PORT, PortMapper, PortMapping
from node.transport.upnp_driver import UpnpMapper
from node.waker import Waker

END_SECONDS = 2.0
"""Time limit for removing the mapping when the node leaves."""
LOOK_SECONDS = 5.0
"""Seconds between checks whether this machine has moved to another network."""
_ROUTES = "/proc/net/route"
_ROUTES_BYTES = 2**16
_UP_GATEWAY = 0x3


@dataclass(frozen=True)
class PortMappingState:
    """The outcome of asking a router. `router` is empty if there is none."""

    router: str = ""
    outcome: str = ""
    mapping: PortMapping | None = None
    reason: str = ""

    @property
    def address(self) -> Address | None:
        """The mapped address at which others reach this node; None if it has none."""
        if self.mapping is None or not is_global(self.mapping.host):
            return None
        return make_address(self.mapping.host, self.mapping.port)

    @property
    def text(self) -> str:
        """The state as text for people; empty while nothing is known."""
        if self.mapping is not None:
            there, name = f"{self.mapping.host}:{self.mapping.port}", self.mapping.protocol.upper()
            if self.address is None:
                return f"{self.router} maps {there} ({name}), but is itself behind another router"
            only = "" if self.mapping.has_udp else ", TCP alone"
            return f"{self.router} maps {there} to this node ({name}{only})"
        if self.outcome == "refused":
            return f"{self.router} maps no port: {self.reason}"
        if self.outcome == "no answer":
            return f"{self.router} does not answer PCP, NAT-PMP or UPnP"
        return ""


def find_router() -> str | None:
    """Return this machine's default IPv4 router; None if there is none, or if it is unknown (on systems other
    than Linux)."""
    with suppress(OSError, ValueError, IndexError):
        with open(_ROUTES) as file:
            lines = file.read(_ROUTES_BYTES).splitlines()[1:]
        for line in lines:
            _, target, router, flags, *_ = line.split()
            if target == "00000000" and int(flags, 16) & _UP_GATEWAY == _UP_GATEWAY:
                return socket.inet_ntoa(int(router, 16).to_bytes(4, "little"))
    return None


def _state(router: str, core: PortMapper, upnp: UpnpMapper) -> PortMappingState:
    """Return the joint state of both drivers: the mapping if there is one, else the refusal."""
    asked: tuple[PortMapper | UpnpMapper, ...] = (core, upnp)
    is_upnp = upnp.outcome in ("mapped", "refused") or core.outcome == "no answer"
    if core.outcome != "mapped" and is_upnp:
        asked = (upnp,)
    return PortMappingState(router, asked[0].outcome, asked[0].mapping, asked[0].reason)


class _Mapping:
    """The conversation of a core with one router. `changed` is set when its outcome changes."""

    def __init__(self, asking: trio.socket.SocketType, core: PortMapper, clock: Clock) -> None:
        self._asking = asking
        self._core = core
        self._clock = clock
        self._waker = Waker(clock, lambda: core.deadline)
        self._outcome = core.outcome
        self.changed = trio.Event()

    async def keep_asking(self) -> NoReturn:
        """Send due requests. Raises OSError."""
        while True:
            await self._act(await self._waker.wake_when_due(self._core))

    async def listen(self) -> NoReturn:
        """Receive the router's answers. Raises OSError."""
        while True:
            data = b""
            with suppress(ConnectionRefusedError):
                data = await self._asking.recv(ANSWER_BYTES_MAX + 1)
            await self._act(self._core.receive(self._clock.monotonic(), data))
            self._waker.stir()

    async def send(self, packets: Sequence[bytes]) -> None:
        """Send packets to the router. Raises OSError."""
        for packet in packets:
            with suppress(ConnectionRefusedError):  # an error from an earlier request: nothing listens there
                await self._asking.send(packet)

    async def _act(self, packets: Sequence[bytes] | None) -> None:
        await self.send(packets or ())
        if self._core.outcome != self._outcome:
            self._outcome = self._core.outcome
            self.changed.set()


class PortMappingDriver:
    """The driver. `state` is the outcome so far."""

    def __init__(
        self,
        network: RealNetwork,
        clock: Clock,
        entropy: Callable[[int], bytes],
    ) -> None:
        self._network = network
        self._clock = clock
        self._entropy = entropy
        self.state = PortMappingState()

    async def run(self) -> None:
        """Run until cancelled; then remove the mapping."""
        while True:
            router = find_router()
            if router is not None:
                try:
                    await self._ask(router)
                except* OSError:
                    pass
            self._tell(PortMappingState())
            await trio.sleep(LOOK_SECONDS)

    async def _ask(self, router: str) -> None:
        """Run until this machine is in another network. Raises OSError, or a group of them."""
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            # Connect the socket, so that packets from other hosts do not arrive.
            await asking.connect((router, ROUTER_PORT))
            host = asking.getsockname()[0]
            listening = [each for each in self._network.addresses if each.host == host]
            if not listening or is_global(host):
                return
            core = PortMapper(host, listening[0].port, self._entropy, self._clock.monotonic())
            upnp = UpnpMapper(router, host, listening[0].port, self._clock)
            mapping = _Mapping(asking, core, self._clock)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(mapping.keep_asking)
                    nursery.start_soon(mapping.listen)
                    while find_router() == router:
                        with trio.move_on_after(LOOK_SECONDS):
                            await mapping.changed.wait()
                        mapping.changed = trio.Event()
                        is_due = upnp.deadline <= self._clock.monotonic() and not is_global(router)
                        if is_due and core.outcome in ("no answer", "refused"):
                            await upnp.act()
                        self._tell(_state(router, core, upnp))
                    nursery.cancel_scope.cancel()
            finally:
                with trio.move_on_after(END_SECONDS, shield=True):
                    await mapping.send(core.end())
                    await upnp.end()

    def _tell(self, state: PortMappingState) -> None:
        if state != self.state:
            self.state = state
            self._network.map_to(state.address)
            self._network.translation = replace(self._network.translation, mapping=state.text)
