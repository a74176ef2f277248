"""Checks of this machine: the data folder, keys, clock, ports, IPv4 and IPv6, UDP, the local network, the
compute devices."""

import importlib.metadata
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import trio

from crypto.contact import Address, parse_address
from crypto.identity import SEED_BYTES, Identity, PeerId, short_peer
from node.cli.client import ask
from node.cli.render import short_id
from node.config import Config
from node.doctor.steps import Skipped, Steps, in_thread
from node.errors import NoNode, PeerloomError
from node.paths import short_path
from node.seams import RealClock
from node.services.capacity import find_device
from node.services.torch_extra import cannot_compute
from node.stages.fences import REMEDY, try_fences
from node.stages.sandbox import Fenced
from node.storage.folder import FOLDER_MARKS, IDENTITY_NAME, FolderStorage
from node.storage.folder_lock import find_holder
from node.storage.keys import STATIC_BYTES, STATIC_NAME, read_key
from node.storage.ownership import close_folder
from node.storage.swarm_keys import load_swarm_keys
from node.text import CLOCK_REMEDY, clock_text, counted, open_ports_text, way_text
from node.transport.listen import bind_all, dialable
from node.transport.multicast import BEACON_PORT, GROUP_4, GROUP_6, Multicast, interfaces_of

_now = RealClock().monotonic
_NO_NODE = "no node runs here"

DISK_FREE_BYTES_MIN = 2**30
"""Free disk space for blobs and checkpoints of a small model. With less, a node starts but does not keep them
for long."""
MEMORY_FREE_BYTES_MIN = 2**30
CLOCK_SECONDS_MIN = 1_750_000_000
"""The middle of 2025. A machine with an earlier time has probably lost its clock battery."""
CLOCK_SECONDS_MAX = 4_102_444_800
"""The year 2100."""
CLOCK_APART_SECONDS_MAX = 60.0
"""Maximum difference between the clocks of this machine and of its data folder's file system, which may be on
another machine."""
ANSWER_SECONDS = 3.0
NAMED_MAX = 4
"""Maximum number of peers without a direct path that one line of the report names; the others are counted."""
DATAGRAM_BYTES = 1_232
MULTICAST_SECONDS = 1.0
"""How long to wait for packets to come back over every interface of this machine."""


class FaultFound(PeerloomError):
    """A check found a fault."""

    exit_code = 6


@dataclass
class Scene:
    """The findings so far. `status` and `peers` are those of the node that holds the data folder, if there is
    one."""

    config: Config
    beacon_port: int = BEACON_PORT
    status: dict[str, Any] | None = None
    peers: dict[str, Any] | None = None
    ports: dict[Address, int] = field(default_factory=dict)
    echo_seconds: float = 1.0
    """A datagram to another node that is not answered after this long counts as lost, and is sent once
    more."""
    try_fences: Callable[[str], Fenced] = try_fences
    """Finds the fences of a process that computes on this device."""

    @property
    def folder(self) -> Path:
        return self.config.data_dir

    def keys(self) -> tuple[bytes, ...]:
        """Return the keys of the swarm; empty if they are unreadable, which an earlier check has reported."""
        try:
            key_file = self.config.swarm.key_file
            return () if key_file is None else load_swarm_keys(key_file)
        except PeerloomError:
            return ()


async def look_here(steps: Steps, scene: Scene) -> None:
    """Run all checks of this machine."""
    await steps.check("data folder", partial(in_thread, partial(_folder, scene.folder)))
    await steps.check("lock", partial(_lock, scene))
    await steps.check("identity", partial(in_thread, partial(_identity, scene)))
    await steps.check("swarm key", partial(in_thread, partial(_swarm_key, scene.config)))
    await steps.check("clock", partial(in_thread, partial(_clock, scene)))
    for address in scene.config.listen.addresses:
        await steps.check(f"port {address.short}", partial(_port, scene, address))
    await steps.check("addresses", partial(_addresses, scene))
    await steps.check("ipv4", partial(_family, "127.0.0.1"))
    await steps.check("ipv6", partial(_family, "::1"))
    await steps.check("udp", _udp)
    await steps.check("datagrams", partial(_datagrams, scene))
    await steps.check("router", partial(_router, scene))
    await steps.check("reachable", partial(_reachable, scene))
    await steps.check("paths", partial(_paths, scene))
    await steps.check("local network", partial(_local, scene))
    await steps.check("computing", partial(in_thread, partial(_computing, scene.config)))
    await steps.check("fences", partial(in_thread, partial(_fences, scene)))


def _folder(folder: Path) -> str:
    other = "give the node another folder: `peerloom --data-dir DIR`"
    place = folder
    while not place.exists():
        place = place.parent
    if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
        raise FaultFound(f"{short_path(place)} is not writable", other)
    if not place.is_dir():
        raise FaultFound(f"{short_path(place)} is no folder", other)
    free_bytes = shutil.disk_usage(place).free
    free = f"{free_bytes / 2**30:.1f} GB free"
    if free_bytes < DISK_FREE_BYTES_MIN:
        raise FaultFound(f"{short_path(place)} has {free}", f"make room there, or {other}")
    if place != folder:
        return f"{short_path(folder)} will be made at the first start, {free}"
    close_folder(folder, FOLDER_MARKS)
    with _probe(folder) as probe:
        os.pwrite(probe, b"ok", 0)
        if os.pread(probe, 2, 0) != b"ok":
            raise FaultFound(f"{short_path(folder)} does not keep what is written", other)
    return f"{short_path(folder)}, writable, {free}"


@contextmanager
def _probe(folder: Path) -> Iterator[int]:
    """Yield a new file in the data folder, and remove it at the end. Existing files are not written to."""
    path = folder / f"doctor-{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


async def _lock(scene: Scene) -> str:
    holder = await in_thread(partial(find_holder, scene.folder))
    if holder is None:
        return "free"
    holder = holder or "of an unknown number"
    try:
        scene.status = await in_thread(partial(ask, scene.folder, "status", seconds=ANSWER_SECONDS))
        scene.peers = await in_thread(partial(ask, scene.folder, "peers", seconds=ANSWER_SECONDS))
    except NoNode as error:
        raise FaultFound(
            f"process {holder} holds it, and no node answers: {error.what}",
            f"is it stopped or very busy? to end it: kill {holder}",
        ) from None
    return f"held by this node, which runs and answers (process {holder})"


def _identity(scene: Scene) -> str:
    folder = scene.folder
    for alert in scene.status["alerts"] if scene.status is not None else ():
        if alert["kind"] == "identity_shared":
            raise FaultFound(
                alert["text"], f"on the copy: rm {IDENTITY_NAME} {STATIC_NAME} in its data folder"
            )
    peer = own_peer(folder)
    if peer is None:
        raise Skipped("made at the first start")
    return f"{short_peer(peer)}, readable by this user only"


def own_peer(folder: Path) -> PeerId | None:
    """Return the peer whose keys are in the folder, or None if there are none yet. Raises UsageError if they
    are unusable."""
    if not folder.is_dir():
        return None
    storage = FolderStorage(folder)
    seed = read_key(storage, IDENTITY_NAME, SEED_BYTES)
    read_key(storage, STATIC_NAME, STATIC_BYTES)
    return None if seed is None else Identity(seed).peer


def _swarm_key(config: Config) -> str:
    if config.swarm.key_file is None:
        raise Skipped(f"swarm '{config.swarm.name}' is open to all who know its name")
    count = len(load_swarm_keys(config.swarm.key_file))
    return f"{count} in {short_path(config.swarm.key_file)}, readable by this user only"


def _clock(scene: Scene) -> str:
    now, folder = time.time(), scene.folder
    told = None if scene.status is None else scene.status.get("clock")
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    remedy = f"set the clock, or let it be set: {CLOCK_REMEDY}"
    if not CLOCK_SECONDS_MIN < now < CLOCK_SECONDS_MAX:
        raise FaultFound(f"it shows {shown}", remedy)
    if folder.is_dir() and os.access(folder, os.W_OK):
        with _probe(folder) as probe:
            apart = os.fstat(probe).st_mtime - time.time()
        if abs(apart) > CLOCK_APART_SECONDS_MAX:
            raise FaultFound(
                f"it is {abs(apart):.0f} s away from that of the data folder's file system", remedy
            )
    if told is not None and told["seconds"]:
        raise FaultFound(clock_text(told["seconds"], told["peers"]), remedy)
    return shown


async def _port(scene: Scene, address: Address) -> str:
    """Check that a port is free, or is this node's own. If another program has it, report the next free port,
    which the node would use."""
    if scene.status is not None:
        held = [text for text in scene.status["addresses"] if text.endswith(f":{address.port}")]
        if held or address.port == 0:
            scene.ports[address] = address.port
            return "held by this node"
        told = ", ".join(scene.status["addresses"]) or "addresses of its link alone"
        raise Skipped(f"the node of this data folder was started elsewhere: {told}")
    # Bind all together, as the node does, so that IPv4 and IPv6 get the same port.
    places = [(each.host, each.port) for each in scene.config.listen.addresses]
    every = await bind_all(places)
    for each in every:
        each.close()
    host = "" if address.kind.startswith("dns") else address.host
    bound = next((each for each in every if each.wanted == address.port and host in ("", each.host)), None)
    if bound is None:
        raise Skipped("this machine does not have IPv6")
    scene.ports[address] = bound.port
    if address.port in (0, bound.port):
        return f"TCP and UDP {bound.port} are free"
    return f"another program has {address.port}; the node would take {bound.port}, and say so"


async def _addresses(scene: Scene) -> str:
    await trio.lowlevel.checkpoint()
    listen = scene.config.listen
    if scene.status is not None:
        return f"this node tells {', '.join(scene.status['addresses'])}"
    places = [(address.host, port) for address, port in scene.ports.items()]
    if not places:
        raise Skipped("there is nowhere to listen")
    told = dialable(places, listen.announce)
    text = ", ".join(address.short for address in told)
    wants_others = any(not address.host.startswith("127.") for address in listen.addresses)
    if wants_others and all(address.host.startswith("127.") or address.host == "::1" for address in told):
        raise FaultFound(
            f"others would be told {text}, which no other machine can dial", "connect it to a network"
        )
    return f"others are told {text}"


async def _family(host: str) -> str:
    """Connect to this machine itself over this address family."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(trio.socket.socket(family, socket.SOCK_STREAM))
            await listener.bind((host, 0))
        except OSError:
            if family == socket.AF_INET6:
                raise Skipped("this machine has none") from None
            raise
        listener.listen(1)
        dialler = stack.enter_context(trio.socket.socket(family, socket.SOCK_STREAM))
        begun = _now()
        await dialler.connect(listener.getsockname())
        accepted, _ = await listener.accept()
        stack.enter_context(accepted)
        await dialler.send(b"x")
        await accepted.recv(1)
        return f"a connection to {host} in {(_now() - begun) * 1000:.1f} ms"


async def _udp() -> str:
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2)
        )
        for each in (one, other):
            await each.bind(("127.0.0.1", 0))
        data = os.urandom(DATAGRAM_BYTES)
        await one.sendto(data, other.getsockname())
        with trio.move_on_after(ANSWER_SECONDS):
            while (await other.recvfrom(2 * DATAGRAM_BYTES))[0] != data:
                pass
            return f"a datagram of {DATAGRAM_BYTES:,} bytes to ourselves"
    raise FaultFound("a datagram to ourselves did not arrive", "let UDP on loopback through the firewall")


async def _reachable(scene: Scene) -> str:
    """Report whether other nodes can reach the running one, according to them."""
    await trio.lowlevel.checkpoint()
    found = None if scene.status is None else scene.status.get("reachability")
    if scene.status is None:
        raise Skipped(_NO_NODE)
    if found is None or (found["reachable"] is None and not found.get("relays")):
        raise Skipped("nobody has tried to reach the running node yet")
    if found["reachable"]:
        return "other nodes get through to this one"
    ports = _own_ports(scene.status)
    if found.get("relays"):
        return f"other nodes get through by relays; directly: {open_ports_text(ports)}"
    raise FaultFound(
        f"{counted(found['asked'], 'other')} could not reach this node: it takes no stages of theirs, and "
        "trains alone",
        open_ports_text(ports),
    )


async def _router(scene: Scene) -> str:
    """Return what the running node has found out about its router."""
    await trio.lowlevel.checkpoint()
    found = None if scene.status is None else scene.status.get("reachability")
    texts = [] if found is None else [text for text in (found["mapping"], found["nat"]) if text]
    if not texts:
        raise Skipped(_NO_NODE if scene.status is None else "the running node knows of none before it")
    return "; ".join(texts)


async def _paths(scene: Scene) -> str:
    """Return how the running node reaches each of its peers, and what would make indirect paths direct."""
    await trio.lowlevel.checkpoint()
    if scene.status is None or scene.peers is None:
        raise Skipped(_NO_NODE)
    rows = [row for row in scene.peers["peers"] if row.get("path") is not None]
    if not rows:
        raise Skipped("the running node speaks to no peer")
    names = {row["peer"]: row["name"] for row in scene.peers["peers"]}
    told = [f"{_ways(rows, 'direct')} reached directly"] if _ways(rows, "direct") else []
    for row in [row for row in rows if row["path"]["way"] != "direct"][:NAMED_MAX]:
        relay = row["path"]["relay"]
        carrier = names.get(relay) or short_id(relay or "")
        told.append(f"{row['name'] or short_id(row['peer'])} {way_text(row['path'], carrier)}")
    more = len(rows) - _ways(rows, "direct") - NAMED_MAX
    told += [f"{more} more not directly"] if more > 0 else []
    if any(row["path"]["way"] == "relayed" for row in rows):
        told.append(f"to reach all directly, {open_ports_text(_own_ports(scene.status))}")
    return "; ".join(told)


def _ways(rows: Sequence[Mapping[str, Any]], way: str) -> int:
    return sum(row["path"]["way"] == way for row in rows)


def _own_ports(status: Mapping[str, Any]) -> list[int]:
    own = [parse_address(text) for text in status["addresses"]]
    return sorted({address.port for address in own if address.relay is None})


async def _datagrams(scene: Scene) -> str:
    """Report whether datagrams of the running node get through to its peers."""
    await trio.lowlevel.checkpoint()
    if scene.status is None:
        raise Skipped(_NO_NODE)
    found = scene.status.get("datagrams")
    if found is None or not found["blocked"]:
        return "they get through to all peers of the running node"
    blocked, of = len(found["blocked"]), found["of"]
    ports = {parse_address(text).port for text in scene.status["addresses"]}
    port = ", ".join(map(str, sorted(ports)))
    raise FaultFound(
        f"datagrams do not get through to {blocked} of {counted(of, 'peer')}; they are spoken to by streams",
        f"let UDP port {port} through, there and here, both ways; without, all goes on, more slowly",
    )


async def _local(scene: Scene) -> str:
    """Check that a packet comes back over every interface on which beacons are sent."""
    if not scene.config.join.lan:
        raise Skipped("turned off: --no-lan, or [join] lan = false")
    places = [(address.host, address.port) for address in scene.config.listen.addresses]
    wanted = interfaces_of([host for host, _ in places])
    if not wanted:
        raise Skipped("no interface to speak on")
    remedy = f"let UDP to {GROUP_4} and {GROUP_6}, port {scene.beacon_port}, through; or --no-lan"
    local = Multicast(places, Counter(), port=scene.beacon_port)
    # Nodes that receive this packet take it for a beacon of another swarm.
    packet, heard = os.urandom(64), 0
    async with trio.open_nursery() as nursery:
        await nursery.start(local.run)
        spoken = len(local.interfaces)
        local.send(packet)
        until = _now() + MULTICAST_SECONDS
        while heard < spoken and _now() < until:
            heard += sum(data == packet for _, data in await local.take(until))
        nursery.cancel_scope.cancel()
    names = ", ".join(dict.fromkeys(each.name for each in wanted))
    if heard < len(wanted):
        raise FaultFound(f"of {len(wanted)} packets to {names} {heard} came back", remedy)
    return f"beacons go out and come back on {names}"


def _computing(config: Config) -> str:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise Skipped(cannot_compute()) from None
    memory = psutil.virtual_memory()
    free = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    if memory.available < MEMORY_FREE_BYTES_MIN:
        raise FaultFound(f"{free}, too little for a stage", "end other programs, or run it with --observer")
    device = find_device(config.resources.device)
    return f"{device}, {counted(psutil.cpu_count() or 1, 'core')}, {free}, torch {torch}"


def _fences(scene: Scene) -> str:
    config = scene.config
    tried = scene.try_fences(find_device(config.resources.device))
    if not tried.unfenced:
        return "a stage's process is held to its files, memory and processor, and has no network"
    missing = "; ".join(tried.unfenced)
    if config.resources.allow_unfenced:
        return f"incomplete, which the configuration allows; missing: {missing}"
    raise FaultFound(f"the node takes stages of its own runs only; missing: {missing}", REMEDY)
