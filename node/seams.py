"""The six seams to the outside world, and no seventh (ARCHITECTURE law 2).

Network, Clock, rng, entropy, Executor, Storage. Every effect of a node goes through one of these; the
simulator swaps them and nothing else. These are the interfaces; the real ones are in `transport`, `storage`,
`executor` and `RealClock` here, the simulated ones in `sim.seams`.
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
    """Two clocks: `monotonic` for timers and leases, `wall` (unix seconds) for record expiry."""

    def monotonic(self) -> float: ...
    def wall(self) -> float: ...


class Inbox(Protocol):
    """Datagrams of one protocol that have arrived, oldest first, bounded: the newest are dropped."""

    async def take(self, until: float) -> list[tuple[PeerId, bytes]]:
        """Return the received items, waiting for the first until the monotonic time `until`; may be empty."""

    def notify(self) -> None:
        """Make the waiting `take` return now: the deadline it waits for has changed."""


class Stream(Protocol):
    """An authenticated, encrypted, ordered stream of messages with one peer.

    A message may have a payload: bytes that are neither decoded nor copied on the way, such as tensors.
    Raises `node.errors.StreamClosed` from all but `aclose` once either side has closed.

    A cancelled `receive` loses nothing; a cancelled `send` either has not begun, or the stream is closed. So
    a deadline for either is a cancel scope around it.
    """

    @property
    def peer(self) -> PeerId: ...

    @property
    def protocol(self) -> str:
        """The name by which it was opened."""

    @property
    def source(self) -> Address | None:
        """The address of the connection's other end, as seen from here; None if unknown."""

    @property
    def has_better_path(self) -> bool:
        """Whether another stream to the peer would be carried more directly than this one."""

    async def send(self, message: Data, *payload: Data) -> None:
        """The pieces of `payload` arrive as one; their memory must not change until this returns."""

    async def receive(self) -> bytes:
        """The next message. One with a payload breaks the protocol and ends the stream."""

    async def receive_with_payload(self, payload_bytes_max: int) -> tuple[bytes, memoryview]:
        """The next message and its payload: read-only, empty for none, in memory that is used again once
        nothing refers to it. A longer payload than `payload_bytes_max` ends the stream."""

    async def send_eof(self) -> None:
        """Say that nothing more is sent here; the other side gets `node.errors.StreamEnded` after the last
        message, and may still answer."""

    async def aclose(self) -> None:
        """End sending and receiving. Sent messages arrive; then the other side gets `StreamEnded`."""


def own_rng(rng: Random) -> Random:
    """Return the generator for the next service of a node with `rng`, so that one service's draws do not
    depend on others'."""
    return Random(rng.getrandbits(64))  # noqa: S311 - choices, not keys


class LocalNetwork(Protocol):
    """Packets to all hosts nearby: unauthenticated, unordered, sometimes lost."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses at which nearby nodes reach this one."""

    def send(self, data: bytes) -> None:
        """Send to all nearby, at most `node.transport.beacon.BEACON_BYTES_MAX`; it may come back here too."""

    async def take(self, until: float) -> list[tuple[str, bytes]]:
        """Return the received packets, each with its source host, as `Inbox.take`, with the same bounds."""


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one inbound stream; the network closes the stream when it returns."""

MESSAGE_BYTES_USUAL = 2**20
"""The longest message of a stream, a request or an answer, unless its protocol asks for more. A stranger can
make a node hold this much, and not as much as the protocol with the longest messages needs."""


@dataclass(frozen=True)
class StreamLimits:
    """The limits on the streams of one protocol that others open."""

    message_bytes_max: int = MESSAGE_BYTES_USUAL
    """A longer message ends its stream and the connection below, before it is taken. How long a payload may
    be is said by each `receive_with_payload`."""
    streams_per_peer_max: int = 16
    """The streams of one peer at once; one more is refused as busy. A request or two of each task that has to
    do with the other side."""
    streams_max: int = 256
    """The streams of all peers at once: half of the connections that a node takes, so that what is held open
    of one protocol leaves room for the others."""
    patience_seconds: float = 10.0
    """How long a peer that has completed something here may move nothing, in either direction, before its
    stream makes room for another that needs it. A stranger has `crypto.registers.STRANGER_PATIENCE_SECONDS`;
    while nobody needs the room a stream may be silent for as long as its handler lets it."""

    @property
    def budget(self) -> Budget:
        """The budget of a protocol. One network, unless it is a local one, gets half of the streams."""
        return Budget(
            self.streams_max, self.streams_per_peer_max, max(1, self.streams_max // 2), self.patience_seconds
        )


USUAL_STREAMS = StreamLimits()


class Network(Protocol):
    """Reach a peer by its id. Protocols are versioned names such as `/peerloom/swim/1`."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses at which others should dial this node."""

    @property
    def counters(self) -> Mapping[str, int]:
        """The numbers of refusals and drops, by reason."""

    @property
    def reachable(self) -> bool | None:
        """Whether others can reach this node, if that is known beforehand; None: they have to be asked."""

    def announce(self, address: Address) -> None:
        """Others have reached this node there: it is one of `addresses` from now on."""

    @property
    def local(self) -> LocalNetwork | None:
        """The local network, once `run` has started; None if it is not used."""

    def learn(self, peer: PeerId, addresses: Sequence[Address], *, is_hint: bool = False) -> None:
        """Remember a peer's claimed addresses, or others' claims about it (`is_hint`). They are tried until
        it has answered somewhere."""

    def known_addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses where a peer has answered, the latest first, and then the claimed ones."""

    def is_own(self, address: Address) -> bool:
        """Whether this very node listens at an address."""

    def admits(self, address: Address) -> bool:
        """Return whether a claimed address may be tried: see `node.transport.address_policy`."""

    def host_of(self, peer: PeerId) -> str | None:
        """The host at which a peer was seen, which it cannot choose; None if it was not."""

    def send(
        self, peer: PeerId, protocol: str, message: bytes, *, by_stream: bool = False, is_answer: bool = False
    ) -> None:
        """Send one message, unreliably; one that does not fit a datagram goes by a stream, and with
        `by_stream` a short one too, unless it `is_answer` and the peer has just sent nothing by a stream."""

    def inbox(self, protocol: str) -> Inbox:
        """Return the inbox of messages to this node under `protocol`."""

    def handle(self, protocol: str, handler: Handler, limits: StreamLimits = USUAL_STREAMS) -> None:
        """Serve streams that peers open under `protocol`, as far as `limits` go."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `addresses` are known once it has started."""

    def paths(self, peer: PeerId) -> tuple[Address, ...]:
        """Return an address of the peer for each network that this machine shares with it; none if this
        machine is on one network."""

    def prefer(self, peer: PeerId, address: Address) -> None:
        """Open streams to the peer at this one of its addresses from now on, as long as it answers there."""

    async def open(
        self,
        peer: PeerId,
        protocol: str,
        *others: str,
        message_bytes_max: int = MESSAGE_BYTES_USUAL,
        at: Address | None = None,
    ) -> Stream:
        """Open a stream to a known peer, by the first of the names that it speaks: several are versions of
        one protocol, the newest first. A longer message than `message_bytes_max` that comes back ends it.
        `at` is one of its `paths` to be taken; else the best that is known.
        Raises `node.errors.Unreachable`."""

    async def identify(self, address: Address) -> PeerId:
        """Return the peer that answers at an address. Raises `node.errors.Unreachable` or `WrongPeer`."""


class Stage(Protocol):
    """A hosted pipeline stage: see `partition.stage` for the requests it takes."""

    async def call(self, request: object) -> object:
        """Hand one request to the stage and wait for its answer. Raises `StageFailed`."""

    def vector(self, name: str) -> memoryview:
        """The bytes of one of its arenas (`parameters`, `gradients`, ...), without a copy."""

    async def aclose(self) -> None: ...


class Executor(Protocol):
    """The place of computing, which is never the event loop."""

    async def run(self, function: Callable[[], T], *, seconds: float = 0.0, apart: bool = False) -> T:
        """Run `function` elsewhere. `seconds` is its modelled time in the simulator. `apart` is for long work
        that strangers cause: one at a time, without delaying other work."""

    async def calibrate(self, sample: "np.ndarray[Any, np.dtype[Any]]") -> Mapping[Codec, Cost]:
        """Return every codec's time on this machine, measured on float32 numbers like those that travel."""

    async def unpack(self, archive: IO[bytes], out: IO[bytes], *, allow_unfenced: bool) -> Arrays:
        """The arrays of an npz, a stranger's bytes, unpacked into the empty file `out` and mapped; they
        outlive it. Raises `node.content.npz.BadArchive`, or OSError: the disk is full."""

    async def open_stage(self, specification: bytes) -> Stage:
        """Start a stage from an encoded `partition.stage.StageSpecification`."""

    async def replace_stage(self, stage: Stage, specification: bytes) -> Stage:
        """Close a stage, in any case, and start another one of the same run, reusing what the first has
        loaded."""

    def keep_stage_ready(self, machine: tuple[int, str] | None) -> None:
        """Keep a process loaded for a stage with this many threads on a device, so that it opens at once;
        None: none."""


class Draft(Protocol):
    """A blob on its way to the disk, written a piece at a time by one task. Raises OSError."""

    def write(self, data: Data) -> None: ...

    def commit(self) -> None:
        """Commit the complete blob: it durably replaces the previous one."""

    def discard(self) -> None:
        """Leave nothing of it, unless it was committed. To be called in any case."""


class Storage(Protocol):
    """Named blobs that survive a restart. A write is atomic: old or new, never half."""

    def read(self, name: str) -> bytes | None: ...
    def write(self, name: str, data: bytes) -> None: ...
    def delete(self, name: str) -> None: ...

    def open(self, name: str) -> IO[bytes] | None:
        """Open the present version of a blob of any size for reading in parts, even if its name is replaced;
        to be closed. None if there is none."""

    def temporary(self) -> IO[bytes]:
        """An empty file without a name, to be written and mapped; gone once it is closed and unmapped."""

    def read_part(self, name: str, offset: int, length: int) -> bytes | None:
        """Return `length` bytes at `offset`, fewer at the end of the blob; None if there is none."""

    def draft(self, name: str) -> Draft:
        """A blob of any size that is to be written. Raises OSError."""

    def copy_in(self, name: str, path: Path) -> None:
        """Replace a blob by a file of this machine, of any size. Raises OSError."""

    def write_soon(self, name: str, data: bytes | memoryview) -> None:
        """As `write`, but durable only after `sync`: until then a crash of the machine may damage or lose it,
        so only for data that its reader can check. Raises OSError."""

    def sync(self, names: Iterable[str]) -> None:
        """Make these blobs of `write_soon` durable; missing ones are ignored."""

    def spill(self, data: Data) -> memoryview:
        """Return the same bytes, read-only, in memory that the system may reclaim: without a name, freed with
        their last view, and gone after a restart. Raises OSError: no room."""

    def sizes(self, under: str) -> dict[str, int]:
        """The blobs whose names begin with `under` and a slash, with their lengths in bytes."""


class RealClock:
    """The machine's clocks. `monotonic` is trio's, so that tests may run under a MockClock."""

    def monotonic(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return time.time()


CoreMaker = Callable[..., Any]
"""Makes a core: its class, then what the class is called with."""


def make_core(kind: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Make a core of a node without recording."""
    return kind(*arguments, **named)


Parts = Mapping[type[Any], Callable[..., Any]]
"""Classes of a node's parts, each with what makes them in its place."""


@dataclass(frozen=True)
class Seams:
    """All six, as one node holds them. `core` makes the cores over them: those of a node that is recorded
    (`node.recording`) are made by its recorder. `parts` make some of the node's parts in the place of our
    classes."""

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
        """Return the class that this node uses for such a part, one of `node.parts.PARTS`."""
        return cast("type[T]", self.parts.get(usual, usual))

    @property
    def swarm_clock(self) -> Clock:
        """The clock for signed data that other machines compare: this machine's, or theirs if that is wrong
        (`node.services.swarm_clock`)."""
        return self.corrected or self.clock
