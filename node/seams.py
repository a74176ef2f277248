"""The six seams to the outside world, and no seventh (ARCHITECTURE law 2).

Network, Clock, rng, entropy, Executor, Storage. Everything a node does to the world goes through
one of these; the simulator swaps them and nothing else. These are the shapes; the real ones stand
in `transport`, `storage`, `executor` and `RealClock` here, the simulated ones in `sim.seams`.
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
        """Return what has come, waiting for the first until the monotonic time `until`; may be empty."""

    def notify(self) -> None:
        """Make the waiting `take` return now: the deadline it waits for has changed."""


class Stream(Protocol):
    """An authenticated, encrypted, ordered stream of messages with one peer.

    A message may have a payload: bytes that nobody decodes, such as tensors, and that are not copied on
    the way. Raises `node.errors.StreamClosed` from all but `aclose` once either side has closed.

    Cancelled, a `receive` has taken nothing; a `send` either has not begun, or the stream is closed. So a
    deadline for either is a cancel scope around it.
    """

    @property
    def peer(self) -> PeerId: ...

    @property
    def protocol(self) -> str:
        """The name by which it was opened."""

    @property
    def source(self) -> Address | None:
        """Where the other end of the connection is, seen from here; None where that is not known."""

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
        """Send and receive no more. What was sent arrives; then the other side gets `StreamEnded`."""


def own_rng(rng: Random) -> Random:
    """The next generator of one service of a node that has `rng`: what one service draws does not depend on
    what others do."""
    return Random(rng.getrandbits(64))  # noqa: S311 - choices, not keys


class LocalNetwork(Protocol):
    """Packets to all who are near, whoever they are: unauthenticated, unordered, now and then lost."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where those near reach this node."""

    def send(self, data: bytes) -> None:
        """To everybody near, at most `node.transport.beacon.BEACON_BYTES_MAX`; it may come back here too."""

    async def take(self, until: float) -> list[tuple[str, bytes]]:
        """Return what has come, each with the host it came from, as `Inbox.take`; bounded as that is."""


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
        """Where this node listens, as others should dial it."""

    @property
    def counters(self) -> Mapping[str, int]:
        """The numbers of refusals and drops, by reason."""

    @property
    def reachable(self) -> bool | None:
        """Whether others can reach this node, where that is known beforehand; None: they have to be asked."""

    def announce(self, address: Address) -> None:
        """Others have reached this node there: it is one of `addresses` from now on."""

    @property
    def local(self) -> LocalNetwork | None:
        """The local network, once `run` has started; None where it is not used."""

    def learn(self, peer: PeerId, addresses: Sequence[Address], *, is_hint: bool = False) -> None:
        """Remember where a peer says that it may be reached, or where others say so (`is_hint`). It is tried
        until it has answered somewhere."""

    def known_addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Return where a peer has answered, the latest first, and then where it is said to be."""

    def is_own(self, address: Address) -> bool:
        """Whether this very node listens at an address."""

    def admits(self, address: Address) -> bool:
        """Whether an address of which somebody says that a peer is there may be tried: see
        `node.transport.address_policy`."""

    def host_of(self, peer: PeerId) -> str | None:
        """The host at which a peer was seen, which it cannot choose; None if it was not."""

    def send(
        self, peer: PeerId, protocol: str, message: bytes, *, by_stream: bool = False, is_answer: bool = False
    ) -> None:
        """Send one message, unreliably; what does not fit a datagram goes by a stream, and `by_stream` a
        short one too, unless it `is_answer` and nothing has come from the peer by a stream just now."""

    def inbox(self, protocol: str) -> Inbox:
        """Return where messages sent to this node under `protocol` arrive."""

    def handle(self, protocol: str, handler: Handler, limits: StreamLimits = USUAL_STREAMS) -> None:
        """Serve streams that peers open under `protocol`, as far as `limits` go."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `addresses` are known once it has started."""

    def paths(self, peer: PeerId) -> tuple[Address, ...]:
        """Return an address of the peer for each network that this machine shares with it; none where it is
        on one network."""

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
        """Return who answers at an address. Raises `node.errors.Unreachable` or `WrongPeer`."""


class Stage(Protocol):
    """A hosted pipeline stage: see `partition.stage` for the requests it takes."""

    async def call(self, request: object) -> object:
        """Hand one request to the stage and wait for its answer. Raises `StageFailed`."""

    def vector(self, name: str) -> memoryview:
        """The bytes of one of its arenas (`parameters`, `gradients`, ...), without a copy."""

    async def aclose(self) -> None: ...


class Executor(Protocol):
    """Where computing happens: never on the event loop."""

    async def run(self, function: Callable[[], T], *, seconds: float = 0.0, apart: bool = False) -> T:
        """Run `function` elsewhere. `seconds` is what it is modelled to take, for the simulator. `apart` is
        for long work that strangers cause: one at a time, never in the way of what else runs here."""

    async def calibrate(self, sample: "np.ndarray[Any, np.dtype[Any]]") -> Mapping[Codec, Cost]:
        """Return what every codec takes on this machine, tried on float32 numbers like those that travel."""

    async def unpack(self, archive: IO[bytes], out: IO[bytes], *, allow_unfenced: bool) -> Arrays:
        """The arrays of an npz, a stranger's bytes, unpacked into the empty file `out` and mapped; they
        outlive it. Raises `node.content.npz.BadArchive`, or OSError: the disk is full."""

    async def open_stage(self, specification: bytes) -> Stage:
        """Start a stage from an encoded `partition.stage.StageSpecification`."""

    async def replace_stage(self, stage: Stage, specification: bytes) -> Stage:
        """Close a stage, in any case, and start another one of the same run: what the first has loaded may
        serve again."""

    def keep_stage_ready(self, machine: tuple[int, str] | None) -> None:
        """Have what a stage of so many threads on a device needs loaded, so that one opens at once; None: no
        more."""


class Draft(Protocol):
    """A blob on its way to the disk, written a piece at a time by one task. Raises OSError."""

    def write(self, data: Data) -> None: ...

    def commit(self) -> None:
        """It is whole: durably in place of what was there."""

    def discard(self) -> None:
        """Leave nothing of it, unless it was committed. To be called in any case."""


class Storage(Protocol):
    """Named blobs that survive a restart. A write is atomic: old or new, never half."""

    def read(self, name: str) -> bytes | None: ...
    def write(self, name: str, data: bytes) -> None: ...
    def delete(self, name: str) -> None: ...

    def open(self, name: str) -> IO[bytes] | None:
        """A blob of any size to be read in parts, as it is now, whatever becomes of its name meanwhile; to be
        closed. None where there is none."""

    def temporary(self) -> IO[bytes]:
        """An empty file without a name, to be written and mapped; gone once it is closed and unmapped."""

    def read_part(self, name: str, offset: int, length: int) -> bytes | None:
        """`length` bytes at `offset`, fewer at the end of the blob; None where there is none."""

    def draft(self, name: str) -> Draft:
        """A blob of any size that is to be written. Raises OSError."""

    def copy_in(self, name: str, path: Path) -> None:
        """Put a file of this machine, of any size, in place of what was there. Raises OSError."""

    def write_soon(self, name: str, data: bytes | memoryview) -> None:
        """As `write`, but sure to survive a crash of the machine only after `sync`: until then it may be
        damaged or gone, so only for what its reader can check. Raises OSError."""

    def sync(self, names: Iterable[str]) -> None:
        """Make what `write_soon` wrote under these names survive; those that are not there are passed
        over."""

    def spill(self, data: Data) -> memoryview:
        """The same bytes, read-only, where the system may take their memory: without a name, gone with the
        last view of them, and never there after a restart. Raises OSError: no room."""

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
    """Make a core of a node that nobody records."""
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
        """Return the class of which this node makes such a part."""
        return cast("type[T]", self.parts.get(usual, usual))

    @property
    def swarm_clock(self) -> Clock:
        """The clock by which signed what other machines compare is: this machine's, or theirs where that is
        wrong (`node.services.swarm_clock`)."""
        return self.corrected or self.clock
