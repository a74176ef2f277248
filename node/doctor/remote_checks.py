"""Checks of the path between this machine and another one: name, connection, handshake, identity, datagrams
and their size, latency, and dial-back.

They use a fresh identity, so that a running node's state is not disturbed.
"""

import os
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from crypto.contact import Address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId, short_peer
from crypto.sessions.packets import payload_bytes_max
from dht.work import find_seed
from node.cli.status import reachable_text
from node.doctor.local_checks import DATAGRAM_BYTES, FaultFound, Scene, own_peer
from node.doctor.steps import Skipped, Steps
from node.errors import StreamClosed, Unreachable, WrongPeer
from node.seams import RealClock
from node.services.autonat import MESSAGE_BYTES_MAX, PROTOCOL, Echo, ask_dial_back
from node.storage.folder import IDENTITY_NAME
from node.storage.keys import STATIC_BYTES, STATIC_NAME
from node.transport.handshake import error_reason
from node.transport.network import RealNetwork

_now = RealClock().monotonic
CONNECT_SECONDS = 5.0
ECHO_ATTEMPTS = 3
ROUND_TRIPS = 5
DIAL_BACK_SECONDS = 30.0


@dataclass
class RemoteChecks:
    """The checks of one address. Later checks need the results of earlier ones."""

    address: Address
    scene: Scene
    network: RealNetwork
    hosts: list[str] = field(default_factory=list)
    peer: PeerId | None = None
    echoes: int = 0
    is_connected: bool = False
    has_datagrams: bool = False

    def met(self) -> PeerId:
        """Return the peer that answered."""
        if self.peer is None:
            raise Skipped("nobody shook hands")
        return self.peer


async def look_there(steps: Steps, scene: Scene, address: Address) -> None:
    """Run all checks of one address."""
    visit = RemoteChecks(address, scene, _stranger(scene))
    await steps.check("name", partial(_name, visit))
    await steps.check("connect", partial(_connect, visit))
    async with trio.open_nursery() as nursery:
        await nursery.start(visit.network.run)
        await steps.check("handshake", partial(_handshake, visit))
        await steps.check("peer id", partial(_peer_id, visit))
        await steps.check("swarm", partial(_swarm, visit))
        await steps.check("datagram", partial(_datagram, visit))
        await steps.check("datagram size", partial(_datagram_size, visit))
        await steps.check("latency", partial(_latency, visit))
        await steps.check("dial back", partial(_dial_back, visit), seconds=DIAL_BACK_SECONDS)
        nursery.cancel_scope.cancel()


def _stranger(scene: Scene) -> RealNetwork:
    """Return a network with a fresh identity. It uses the node's own ports, unless a node holds them, so that
    these ports are dialled back."""
    listen = scene.config.listen
    ports = {} if scene.status is not None else scene.ports
    places = [(address.host, ports.get(address, 0)) for address in listen.addresses]
    return RealNetwork(
        Identity(find_seed(os.urandom, scene.config.swarm.work_bits)),
        os.urandom(STATIC_BYTES),
        scene.config.swarm.name,
        clock=RealClock(),
        entropy=os.urandom,
        listen=places,
        announce=listen.announce,
        keys=scene.keys(),
        work_bits=scene.config.swarm.work_bits,
    )


async def _name(visit: RemoteChecks) -> str:
    address = visit.address
    if address.kind in ("ip4", "ip6"):
        visit.hosts = [address.host]
        raise Skipped(f"{address.host} is a number")
    families = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}
    try:
        found = await trio.socket.getaddrinfo(
            address.host, address.port, family=families[address.kind], type=socket.SOCK_STREAM
        )
    except socket.gaierror:
        raise FaultFound(
            f"no machine is known by the name {address.host}", "is it spelt right? try its number"
        ) from None
    visit.hosts = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return f"{address.host} is {', '.join(visit.hosts)}"


async def _connect(visit: RemoteChecks) -> str:
    if not visit.hosts:
        raise Skipped("no number for the name")
    port, begun = visit.address.port, _now()
    with trio.move_on_after(CONNECT_SECONDS):
        try:
            stream = await trio.open_tcp_stream(visit.address.host, port)
        except OSError as error:
            raise _not_connected(visit, error) from None
        await stream.aclose()
        visit.is_connected = True
        return f"TCP port {port} answers after {(_now() - begun) * 1000:.1f} ms"
    raise FaultFound(
        f"nothing comes back from port {port} within {CONNECT_SECONDS:g} s",
        f"is the machine on? let TCP port {port} through its firewall and router",
    )


def _not_connected(visit: RemoteChecks, error: OSError) -> FaultFound:
    causes: Sequence[BaseException] = [error.__cause__ or error]
    if isinstance(error.__cause__, BaseExceptionGroup):
        causes = error.__cause__.exceptions
    if any(isinstance(each, ConnectionRefusedError) for each in causes):
        what = f"{visit.hosts[0]} is up, but nothing listens on port {visit.address.port}"
        return FaultFound(what, "start a node there, and look at the port that it says")
    return FaultFound(
        f"no way there: {error_reason(causes[0])}",
        "are both machines on one network, or both on the internet?",
    )


async def _handshake(visit: RemoteChecks) -> str:
    if not visit.is_connected:
        await trio.lowlevel.checkpoint()
        raise Skipped("no connection")
    begun = _now()
    try:
        visit.peer = await visit.network.identify(visit.address.of(None))
    except Unreachable as error:
        swarm = visit.scene.config.swarm
        key = " with the same key file" if swarm.key_file is not None else ""
        remedy = f"is it a node of swarm '{swarm.name}'{key}? a private one answers no outsider"
        raise FaultFound(error.detail, remedy) from None
    return f"a node answers after {(_now() - begun) * 1000:.1f} ms"


async def _peer_id(visit: RemoteChecks) -> str:
    await trio.lowlevel.checkpoint()
    found, wanted = visit.met(), visit.address.peer
    if visit.scene.status is None and found == own_peer(visit.scene.folder):
        raise FaultFound(
            f"{short_peer(found)} is this node's own identity, and no node runs here",
            f"is its data folder a copy, or this one? on the copy: rm {IDENTITY_NAME} {STATIC_NAME}",
        )
    if wanted is None:
        return f"{short_peer(found)}; the address names none"
    if found != wanted:
        raise FaultFound(
            f"wanted {short_peer(wanted)}, found {short_peer(found)}",
            "another node has that address now: ask its owner for the new one",
        )
    return f"{short_peer(found)}, as the address says"


async def _swarm(visit: RemoteChecks) -> str:
    await trio.lowlevel.checkpoint()
    visit.met()
    swarm = visit.scene.config.swarm
    if swarm.key_file is not None:
        return f"'{swarm.name}', and it has the key: else it would not have answered"
    return f"'{swarm.name}': a handshake holds only within one swarm"


async def _datagram(visit: RemoteChecks) -> str:
    seconds = await _echo(visit, 16)
    if seconds is None:
        port = visit.address.port
        raise FaultFound("no datagram came back", f"let UDP port {port} through, there and here, both ways")
    visit.has_datagrams = True
    return f"there and back in {seconds * 1000:.1f} ms"


async def _datagram_size(visit: RemoteChecks) -> str:
    await _expect_datagrams(visit)
    if await _echo(visit, _filling_bytes()) is None:
        raise FaultFound(
            f"a datagram of {DATAGRAM_BYTES:,} bytes did not come back",
            "some link on the way takes no whole packets: set its MTU to 1,280 or more",
        )
    return f"{DATAGRAM_BYTES:,} bytes come back whole"


async def _latency(visit: RemoteChecks) -> str:
    await _expect_datagrams(visit)
    taken = [seconds for _ in range(ROUND_TRIPS) if (seconds := await _echo(visit, 16)) is not None]
    if not taken:
        raise FaultFound("no datagram came back")
    lost = ROUND_TRIPS - len(taken)
    told = f"{statistics.median(taken) * 1000:.2f} ms there and back, the middle of {len(taken)}"
    return told + (f"; {lost} lost" if lost else "")


async def _expect_datagrams(visit: RemoteChecks) -> None:
    await trio.lowlevel.checkpoint()
    visit.met()
    if not visit.has_datagrams:
        raise Skipped("no datagram comes back")


async def _echo(visit: RemoteChecks, filling_bytes: int) -> float | None:
    """Return the seconds of one round trip, or None if there is no answer. Messages that arrive by stream do
    not count."""
    peer, network = visit.met(), visit.network
    inbox = network.inbox(PROTOCOL)
    for _ in range(ECHO_ATTEMPTS):
        visit.echoes += 1
        begun = _now()
        by_stream = _streams(network)
        network.send(peer, PROTOCOL, encode(Echo(True, visit.echoes, bytes(filling_bytes))))
        until = begun + visit.scene.echo_seconds
        while _now() < until:
            for sender, data in await inbox.take(until):
                is_ours = sender == peer and _number(data) == visit.echoes
                if is_ours and _streams(network) == by_stream:
                    return _now() - begun
    return None


def _streams(network: RealNetwork) -> int:
    """Return how many messages were sent or received by stream, because they were too long for a datagram or
    datagrams cannot be used."""
    return sum(network.counters.get(name, 0) for name in ("messages_by_stream", "streams_served"))


def _number(data: bytes) -> int | None:
    """Return the number in an echo that has come back, or None."""
    try:
        echo: Echo = decode(data, Echo, bytes_max=MESSAGE_BYTES_MAX)
    except RemoteProtocolError:
        return None
    return None if echo.asks else echo.number


def _filling_bytes() -> int:
    """Return the number of filling bytes that makes a whole datagram as long as it may be."""
    room = payload_bytes_max(PROTOCOL)
    return room - (len(encode(Echo(True, 2**8, bytes(room)))) - room)


async def _dial_back(visit: RemoteChecks) -> str:
    peer = visit.met()
    if visit.scene.status is not None:
        # The running node holds its ports, and has asked other nodes itself.
        found = visit.scene.status.get("reachability")
        text = "nobody was asked yet" if found is None else reachable_text(found)
        if found is not None and found["reachable"] is False and not found.get("relays"):
            raise FaultFound(f"reachable: {text}", _OPEN)
        raise Skipped(f"the running node has its ports; it says: reachable: {text}")
    try:
        report = await ask_dial_back(visit.network, RealClock(), peer)
    except (WrongPeer, Unreachable) as error:
        raise Skipped(f"it could not be asked: {error.detail}") from None
    except (StreamClosed, RemoteProtocolError) as error:
        raise FaultFound(f"it was asked, and gave no answer: {error}") from None
    if not report.outcomes:
        raise Skipped("it serves too many others just now; ask again in a minute")
    closed = [f"{address.short} ({reason})" for address, reason in report.outcomes if reason]
    if closed:
        raise FaultFound(f"it cannot dial this machine at {', '.join(closed)}", _OPEN)
    return f"it reaches this machine at {', '.join(address.short for address in report.worked)}"


_OPEN = "let TCP and UDP of this port through firewall and router, and --announce HOST:PORT if it differs"
