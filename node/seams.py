"""The six seams to the outside world; there is no seventh (ARCHITECTURE law 2).

Network, Clock, rng, entropy, Executor, Storage. Every effect of a node goes through one of them, and the
simulator replaces them and nothing else. This module has the interfaces. The real implementations are in
`transport`, `storage`, `executor` and `RealClock` here, the simulated ones in `sim.seams`.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import IO, Any, Protocol, TypeVar, cast

import numpy as np
import trio

from crypto.contact import Address
from crypto.identity import PeerId
from crypto.noise import Data
from crypto.registers import Budget
from partition.codecs.choice import Cost
from partition.codecs.codec import Codec

T = TypeVar("T")
Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


class Clock(Protocol):
    """Two clocks: `monotonic` for timers and leases, `wall` (Unix seconds) for the expiry of records."""

    def monotonic(self) -> float: ...
    def wall(self) -> float: ...


class Inbox(Protocol):
    """The received datagrams of one protocol, oldest first. The queue is bounded; when it is full, new
    datagrams are dropped."""

    async def take(self, until: float) -> list[tuple[PeerId, bytes]]:
        """Return the received items. If there are none, wait for the first until the monotonic time `until`;
        the list may be empty."""

    def notify(self) -> None:
        """Make the waiting `take` return now, because its deadline has changed."""


class Stream(Protocol):
    """An authenticated, encrypted, ordered stream of messages with one peer.

    A message may have a payload: bytes, such as tensors, that are passed on without being decoded or copied.
    All methods except `aclose` raise `node.errors.StreamClosed` once either side has closed.

    A cancelled `receive` loses nothing. If a `send` is cancelled, either it has not begun or the stream is
    closed. So a deadline for either is a cancel scope around the call.
    """

    @property
    def peer(self) -> PeerId: ...

    @property
    def protocol(self) -> str:
        """The protocol name under which the stream was opened."""

    @property
    def source(self) -> Address | None:
        """The address of the connection's other end, as seen from this node; None if unknown."""

    @property
    def has_better_path(self) -> bool:
        """Whether a new stream to the peer would take a more direct path than this one."""

    async def send(self, message: Data, *payload: Data) -> None:
        """Send a message. The pieces of `payload` arrive as one; their memory must not change until this
        returns."""

    async def receive(self) -> bytes:
        """Return the next message. A message with a payload violates the protocol here and ends the
        stream."""

    async def receive_with_payload(self, payload_bytes_max: int) -> tuple[bytes, memoryview]:
        """Return the next message and its payload, which is read-only and empty if there is none. Its memory
        is reused once nothing refers to it. A payload longer than `payload_bytes_max` ends the stream."""

    async def send_eof(self) -> None:
        """Announce that this side sends nothing more. The other side gets `node.errors.StreamEnded` after the
        last message, and may still answer."""

    async def aclose(self) -> None:
        """End sending and receiving. Messages already sent still arrive; after them the other side gets
        `StreamEnded`."""


def own_rng(rng: Random) -> Random:
    """Return a new generator for the next service of the node, so that one service's draws do not depend on
    those of other services."""
    return Random(rng.getrandbits(64))  # noqa: S311 - choices, not keys


class LocalNetwork(Protocol):
    """Packets to all hosts nearby: unauthenticated, unordered, sometimes lost."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses at which nearby nodes reach this one."""

    def send(self, data: bytes) -> None:
        """Send a packet of at most `node.transport.beacon.BEACON_BYTES_MAX` to all hosts nearby; this node
        may receive it too."""

    async def take(self, until: float) -> list[tuple[str, bytes]]:
        """Return the received packets, each with its source host. It waits, and bounds the queue, like
        `Inbox.take`."""


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one inbound stream; the network closes the stream when the handler returns."""

MESSAGE_BYTES_USUAL = 2**20
"""Maximum length of a stream's messages, unless its protocol allows more. It bounds the memory that an
unknown peer can make a node use, so it should not be the limit of the protocol with the longest messages."""


@dataclass(frozen=True)
class StreamLimits:
    """The limits on the streams of one protocol that other peers open."""

    message_bytes_max: int = MESSAGE_BYTES_USUAL
    """Maximum length of a message. A longer one ends its stream and the underlying connection before it is
    received. Each call of `receive_with_payload` limits the payload."""
    streams_per_peer_max: int = 16
    """Maximum number of simultaneous streams of one peer; a further one is refused as busy. This allows a
    request or two for each task that concerns the peer."""
    streams_max: int = 256
    """Maximum number of simultaneous streams of all peers. It is half of the connections that a node accepts,
    so that the open streams of one protocol leave room for others."""
    patience_seconds: float = 10.0
    """If a stream needs room, another may be closed if its peer has transferred nothing in either direction
    for this long. This holds for a peer that has completed a request here; an unknown peer has
    `crypto.registers.STRANGER_PATIENCE_SECONDS`. While there is room, a stream may be silent for as long as
    its handler allows."""

    @property
    def budget(self) -> Budget:
        """The budget of a protocol. One network, unless it is local, gets at most half of the streams."""
        return Budget(
            self.streams_max, self.streams_per_peer_max, max(1, self.streams_max // 2), self.patience_seconds
        )


USUAL_STREAMS = StreamLimits()


class Network(Protocol):
    """Reaches peers by their ids. Protocols are versioned names such as `/peerloom/swim/1`."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses at which other nodes should dial this one."""

    @property
    def counters(self) -> Mapping[str, int]:
        """The numbers of refusals and drops, by reason."""

    @property
    def reachable(self) -> bool | None:
        """Whether other nodes can reach this one, if known in advance; None: other nodes must be asked."""

    def announce(self, address: Address) -> None:
        """Add an address at which other nodes have reached this one to `addresses`."""

    @property
    def local(self) -> LocalNetwork | None:
        """The local network, once `run` has started; None if it is not used."""

    def learn(self, peer: PeerId, addresses: Sequence[Address], *, is_hint: bool = False) -> None:
        """Remember addresses that a peer claims, or that others claim for it (`is_hint`). They are tried
        until the peer has answered at one."""

    def known_addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses where a peer has answered, the latest first, and after them the claimed
        ones."""

    def is_own(self, address: Address) -> bool:
        """Return whether this node itself listens at an address."""

    def admits(self, address: Address) -> bool:
        """Return whether a claimed address may be tried: see `node.transport.address_policy`."""

    def host_of(self, peer: PeerId) -> str | None:
        """Return the host at which a peer was last seen, which the peer cannot choose; None if it was never
        seen."""

    def send(
        self, peer: PeerId, protocol: str, message: bytes, *, by_stream: bool = False, is_answer: bool = False
    ) -> None:
        """Send one message, unreliably. A message that does not fit into a datagram goes over a stream. With
        `by_stream` a short message does too, unless it `is_answer` and the peer has sent nothing over a
        stream recently."""

    def inbox(self, protocol: str) -> Inbox:
        """Return the inbox for messages to this node under `protocol`."""

    def handle(self, protocol: str, handler: Handler, limits: StreamLimits = USUAL_STREAMS) -> None:
        """Serve the streams that peers open under `protocol`, within `limits`."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `addresses` are known once this has started."""

    def paths(self, peer: PeerId) -> tuple[Address, ...]:
        """Return one address of the peer for each network that this machine shares with it; empty if this
        machine is on only one network."""

    def prefer(self, peer: PeerId, address: Address) -> None:
        """Open streams to the peer at this address from now on, as long as the peer answers there."""

    async def open(
        self,
        peer: PeerId,
        protocol: str,
        *others: str,
        message_bytes_max: int = MESSAGE_BYTES_USUAL,
        at: Address | None = None,
    ) -> Stream:
        """Open a stream to a known peer under the first of the protocol names that the peer supports. Several
        names are versions of one protocol, the newest first. A received message longer than
        `message_bytes_max` ends the stream. `at` is the one of its `paths` to use; by default the best known.
        Raises `node.errors.Unreachable`."""

    async def identify(self, address: Address) -> PeerId:
        """Return the peer that answers at an address. Raises `node.errors.Unreachable` or `WrongPeer`."""


class Stage(Protocol):
    """A hosted pipeline stage; `partition.stage` defines its requests."""

    async def call(self, request: object) -> object:
        """Send one request to the stage and wait for its answer. Raises `StageFailed`."""

    def vector(self, name: str) -> memoryview:
        """Return the bytes of one of the stage's arenas (`parameters`, `gradients`, ...), without a copy."""

    async def aclose(self) -> None: ...


class Executor(Protocol):
    """Runs computations outside the event loop."""

    async def run(self, function: Callable[[], T], *, seconds: float = 0.0, apart: bool = False) -> T:
        """Run `function` outside the event loop. `seconds` is its modelled time in the simulator. `apart`
        is for long work that unknown peers can cause: such work runs one at a time, without delaying other
        work."""

    async def calibrate(self, sample: "np.ndarray[Any, np.dtype[Any]]") -> Mapping[Codec, Cost]:
        """Return every codec's cost on this machine, measured on float32 values like those sent between
        stages."""

    async def unpack(self, archive: IO[bytes], out: IO[bytes], *, allow_unfenced: bool) -> Arrays:
        """Unpack an untrusted npz into the empty file `out` and return its arrays, mapped from that file; the
        arrays may outlive `out`. Raises `node.content.npz.BadArchive`, or OSError if the disk is full."""

    async def open_stage(self, specification: bytes) -> Stage:
        """Start a stage from an encoded `partition.stage.StageSpecification`."""

    async def replace_stage(self, stage: Stage, specification: bytes) -> Stage:
        """Close a stage (even if this fails) and start the run's next one, reusing what the first has
        loaded."""

    def keep_stage_ready(self, machine: tuple[int, str] | None) -> None:
        """Keep a preloaded process ready, so that the next stage opens quickly. `machine` is its number of
        threads and its device; None ends the process."""


class Draft(Protocol):
    """A blob that is being written to the disk, in pieces, by one task. Raises OSError."""

    def write(self, data: Data) -> None: ...

    def commit(self) -> None:
        """Complete the blob: it durably replaces the previous version."""

    def discard(self) -> None:
        """Delete what was written, unless it was committed. Must be called in any case."""


class Storage(Protocol):
    """Named blobs that survive a restart. A write is atomic: a reader sees the old or the new version, never
    a part."""

    def read(self, name: str) -> bytes | None: ...
    def write(self, name: str, data: bytes) -> None: ...
    def delete(self, name: str) -> None: ...

    def open(self, name: str) -> IO[bytes] | None:
        """Open the current version of a blob of any size for reading in parts; it stays readable if the blob
        is replaced. The caller closes it. None if the blob does not exist."""

    def temporary(self) -> IO[bytes]:
        """Return an empty unnamed file to write and map; it disappears once it is closed and unmapped."""

    def read_part(self, name: str, offset: int, length: int) -> bytes | None:
        """Return `length` bytes at `offset`, fewer at the end of the blob; None if the blob does not
        exist."""

    def draft(self, name: str) -> Draft:
        """Begin to write a blob of any size. Raises OSError."""

    def copy_in(self, name: str, path: Path) -> None:
        """Replace a blob with a file of this machine, of any size. Raises OSError."""

    def write_soon(self, name: str, data: bytes | memoryview) -> None:
        """Like `write`, but durable only after `sync`. Until then a crash of the machine may damage or lose
        the blob, so this is only for data that its reader can verify. Raises OSError."""

    def sync(self, names: Iterable[str]) -> None:
        """Make these blobs of `write_soon` durable; missing blobs are ignored."""

    def spill(self, data: Data) -> memoryview:
        """Return the same bytes, read-only, in memory that the system can move to disk. It has no name, is
        freed with its last view, and does not survive a restart. Raises OSError if there is no space."""

    def sizes(self, under: str) -> dict[str, int]:
        """Return the blobs whose names begin with `under` and a slash, with their lengths in bytes."""


class RealClock:
    """The machine's clocks. `monotonic` is trio's, so that tests may run under a MockClock."""

    def monotonic(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return time.time()


CoreMaker = Callable[..., Any]
"""Makes a core; its arguments are the core's class and the arguments of that class."""


def make_core(kind: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Make a core without recording."""
    return kind(*arguments, **named)


Parts = Mapping[type[Any], Callable[..., Any]]
"""Maps classes of a node's parts to callables that make their replacements."""


@dataclass(frozen=True)
class Seams:
    """All six seams, as one node holds them. `core` makes the cores that use them; if the node is recorded
    (`node.recording`), its recorder makes them. `parts` replace some of the node's parts."""

    network: Network
    clock: Clock
    rng: Random
    entropy: Callable[[int], bytes]
    executor: Executor
    storage: Storage
    core: CoreMaker = make_core
    corrected: Clock | None = None
    parts: Parts = field(default_factory=dict)

    def part(self, usual: type[T]) -> type[T]:
        """Return the class that this node uses for `usual`, one of `node.parts.PARTS`."""
        return cast("type[T]", self.parts.get(usual, usual))

    @property
    def swarm_clock(self) -> Clock:
        """The clock for signed data that other machines compare: this machine's clock, or the other nodes'
        time if this clock is wrong (`node.services.swarm_clock`)."""
        return self.corrected or self.clock
