"""The real `node.seams.LocalNetwork`: UDP multicast on the interfaces that a node listens on.

IPv4 uses a group of the local scope (RFC 2365, 239.255.0.0/16), IPv6 a transient group of the link (RFC 4291,
ff12::/16). Each interface and family has its own socket, so that no packet comes by an unwanted interface. A
node that listens only on loopback is heard only on loopback. `beacon` decides the content and time of
packets.
"""

import errno
import ipaddress
import socket
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from crypto.contact import ADDRESSES_MAX, Address, make_address
from node.forks import keep_from_children
from node.transport.address_policy import Place
from node.transport.beacon import BEACON_BYTES_MAX, HERE
from node.transport.interfaces import InterfaceAddress, read_interfaces
from node.transport.listen import dialable
from node.transport.sockets import FAULT_PAUSE_SECONDS, source_of_name

BEACON_PORT = 9746
"""The port of beacons, shared by all nodes of a machine and lower than the ports that nodes listen on."""
GROUP_4 = "239.255.112.76"
GROUP_6 = "ff12::7065:6572:6c6f:6f6d"
LINES_MAX = 16
"""Maximum number of interface and family pairs in use. A machine full of containers has hundreds of
interfaces on which nobody listens."""
LOOK_SECONDS = 20.0
"""Seconds between reads of the interfaces. A machine that has changed its network is found within this
time."""
LOOK_SECONDS_ALONE = 1.0
"""The same interval while there is only loopback. At boot the network comes up a little later than the
programs, and the first seconds' questions should still be heard."""
GATHER_SECONDS = 0.01
"""Seconds between reads of packets. Beacons are not urgent, and a turn of the event loop costs ten times as
much as a beacon."""
PACKETS_MAX = 256
"""Maximum number of packets that wait to be taken; further ones are dropped."""

_EVERYWHERE_6 = ipaddress.IPv6Address("::")
_MULTICAST_ALL = 49
"""Linux's number for IP_MULTICAST_ALL, which Python does not name. With the option off, a socket receives
only groups that it joined."""


@dataclass(frozen=True)
class Interface:
    """One interface in one address family; `host` is this machine's address on it."""

    name: str
    index: int
    host: str

    @property
    def family(self) -> int:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


def interfaces_of(hosts: Sequence[str]) -> tuple[Interface, ...]:
    """Return the interfaces that a node uses for beacons if it listens on `hosts` (IP literals): the
    interface of each host, or all except loopback for an unspecified host. If there is no other interface,
    loopback is used."""
    found: dict[tuple[str, int], Interface] = {}
    for each in read_interfaces():
        if any(_stands_for(place, each, alone=len(hosts) == 1) for place in hosts):
            interface = Interface(each.name, _index(each.name), str(each.host))
            found.setdefault((each.name, interface.family), interface)
    others = [each for each in found.values() if not ipaddress.ip_address(each.host).is_loopback]
    return tuple((others or list(found.values()))[:LINES_MAX])


def _stands_for(place: str, each: InterfaceAddress, *, alone: bool) -> bool:
    """Return whether a node that listens at `place` uses this address's interface for beacons."""
    host, _, zone = place.partition("%")
    listening = ipaddress.ip_address(host)
    if listening.is_unspecified:
        return listening.version == each.host.version or (alone and listening.version == 6)
    return listening == each.host and zone in ("", each.name)


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0  # gone in the meantime, so opening it will fail


class Multicast:
    """The driver of multicast; `run` must be running. `places` are the IP literals and ports on which the
    node listens."""

    def __init__(self, places: Sequence[Place], counters: Counter[str], *, port: int = BEACON_PORT) -> None:
        self._places = tuple(places)
        self._counters = counters
        self._port = port
        self._lines: dict[Interface, _Line] = {}
        self._packets: list[tuple[str, bytes]] = []
        self._stirred = trio.Event()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The announced addresses. Link-local ones come last, as the placeholder `HERE`; the packet's source
        shows which address is meant."""
        here = [
            make_address(HERE, port)
            for host, port in self._places
            if make_address(host, port).is_link_local or ipaddress.ip_address(host) == _EVERYWHERE_6
        ]
        return (*dialable(self._places)[: ADDRESSES_MAX - len(here)], *here)

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """The interfaces in use now."""
        return tuple(self._lines)

    def send(self, data: bytes) -> None:
        for line in self._lines.values():
            if not line.send(data):
                # A full buffer, or an interface that has just gone.
                self._counters["beacons_not_sent"] += 1

    async def take(self, until: float) -> list[tuple[str, bytes]]:
        if not self._packets:
            self._stirred = trio.Event()
            with trio.move_on_at(until):
                await self._stirred.wait()
        else:
            await trio.lowlevel.checkpoint()
        packets, self._packets = self._packets, []
        return packets

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. An interface that fails is counted and tried again."""
        async with trio.open_nursery() as nursery:
            try:
                self._look(nursery)
                task_status.started()
                while True:
                    await trio.sleep(LOOK_SECONDS_ALONE if self._awaits_others else LOOK_SECONDS)
                    self._look(nursery)
            finally:
                for line in self._lines.values():
                    line.close()
                self._lines.clear()

    @property
    def _awaits_others(self) -> bool:
        """Return whether the node needs an interface other than loopback and has none, for example because
        its only one has no carrier yet."""
        wants_others = any(not ipaddress.ip_address(host).is_loopback for host, _ in self._places)
        return wants_others and all(ipaddress.ip_address(line.host).is_loopback for line in self._lines)

    def _look(self, nursery: trio.Nursery) -> None:
        """Open new interfaces, and close those that have vanished."""
        present = interfaces_of([host for host, _ in self._places])
        for interface in [each for each in self._lines if each not in present]:
            self._lines.pop(interface).close()
        for interface in present:
            if interface in self._lines:
                continue
            try:
                line = _Line(interface, self._port)
            except OSError:
                self._counters["beacon_interfaces_failed"] += 1
                continue
            self._lines[interface] = line
            nursery.start_soon(self._receive, line)

    async def _receive(self, line: "_Line") -> None:
        while True:
            try:
                await line.readable()
                for _ in range(PACKETS_MAX):
                    self._arrived(*line.receive())
            except BlockingIOError:
                pass  # everything has been read
            except trio.ClosedResourceError:
                return
            except OSError:
                self._counters["datagrams_faulty_socket"] += 1
                await trio.sleep(FAULT_PAUSE_SECONDS)
            await trio.sleep(GATHER_SECONDS)

    def _arrived(self, data: bytes, source: str) -> None:
        if len(self._packets) >= PACKETS_MAX:
            self._counters["beacons_dropped"] += 1
            return
        self._packets.append((source, data))
        self._stirred.set()


class _Line:
    """One socket that has joined the group on one interface. Raises OSError if the interface is
    unavailable."""

    def __init__(self, interface: Interface, port: int) -> None:
        self._bare = socket.socket(interface.family, socket.SOCK_DGRAM)
        keep_from_children(self._bare)
        try:
            self._bare.setblocking(False)
            self._bare.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform != "linux":
                self._bare.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            join = self._join_6 if interface.family == socket.AF_INET6 else self._join_4
            self._target = join(interface, port)
        except BaseException:
            self._bare.close()
            raise

    def _join_4(self, interface: Interface, port: int) -> tuple[str | int, ...]:
        here = socket.inet_aton(interface.host)
        if sys.platform == "linux":
            self._bare.setsockopt(socket.IPPROTO_IP, _MULTICAST_ALL, 0)
        self._bare.bind((GROUP_4, port))
        self._bare.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, here)
        self._bare.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        # Send to this machine too, because other nodes may run on it.
        self._bare.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        self._bare.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP_4) + here)
        return GROUP_4, port

    def _join_6(self, interface: Interface, port: int) -> tuple[str | int, ...]:
        if not interface.index:
            raise OSError(errno.ENODEV, "no such interface")
        self._bare.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self._bare.bind((GROUP_6, port, 0, interface.index))
        self._bare.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, interface.index)
        self._bare.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 1)
        self._bare.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
        group = socket.inet_pton(socket.AF_INET6, GROUP_6) + struct.pack("@I", interface.index)
        self._bare.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
        return GROUP_6, port, 0, interface.index

    def send(self, data: bytes) -> bool:
        """Send without waiting; return whether the kernel took the packet."""
        try:
            self._bare.sendto(data, self._target)
        except OSError:
            return False
        return True

    async def readable(self) -> None:
        """Wait until something has come. Raises trio.ClosedResourceError."""
        if self._bare.fileno() < 0:
            raise trio.ClosedResourceError
        await trio.lowlevel.wait_readable(self._bare)

    def receive(self) -> tuple[bytes, str]:
        """Return the next packet and its source host. A packet above the size limit is cut, but still longer
        than allowed. Raises BlockingIOError if there is none."""
        data, source = self._bare.recvfrom(BEACON_BYTES_MAX + 1)
        return data, source_of_name(source)[0]

    def close(self) -> None:
        trio.lowlevel.notify_closing(self._bare)
        self._bare.close()
