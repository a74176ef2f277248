"""`/peerloom/links/1`: measures a link now and then, by bursts of a known length in each direction.

The asking peer sends a burst. The other peer reports how long it took to arrive, and sends an equal burst
back. So each end measures the burst that it receives, and is told the result of its own. Bursts are bounded
in bytes and time. They are refused, with a time to retry, while a stage computes here or when others ask too
often.

`partition.plan.link_probes` decides when and whom to probe, and what follows from the results.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil
from random import Random
from typing import Annotated

import msgspec
import trio

from crypto.contact import Address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, short_peer
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.seams import Clock, Network, Stream, StreamLimits
from node.transport.network import RealNetwork
from partition.plan.link_probes import FAST_SECONDS, PROBE_BYTES, LinkProbes, ProbeLimits
from partition.plan.observed import LINKS_MAX

LINKS_PROTOCOL = "/peerloom/links/1"
MESSAGE_BYTES_MAX = 256
STREAMS = StreamLimits(message_bytes_max=MESSAGE_BYTES_MAX, streams_per_peer_max=2)
CHUNK_BYTES = 1 << 14
"""Size of a chunk. The first chunk starts the receiver's clock; the others are measured."""
BURST_SECONDS_MAX = 5.0
"""Time limit of one direction, from the request on. A link below 200 kbit/s is not measured."""
SEND_SECONDS_MAX = 2.0
"""How long a burst is sent at most; it then ends early."""
PROBE_SECONDS_MAX = 4 * BURST_SECONDS_MAX
ANSWER_SECONDS_MAX = 3_600
WAYS_MAX = 2 * LINKS_MAX
"""Maximum number of measured links whose path is remembered: those that are published, and some earlier
ones."""
NANOSECONDS_MIN = 1_000
"""Least duration, the resolution of a clock."""

Size = Annotated[int, msgspec.Meta(ge=2 * CHUNK_BYTES, le=PROBE_BYTES[-1])]
_FILLING = memoryview(bytes(CHUNK_BYTES))


class LinkProbe(msgspec.Struct, frozen=True, tag="probe"):
    """A question: may the sender send this many bytes? The recipient then sends an equal number back."""

    size: Size


class ProbeAdmitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The burst may be sent now."""


class ProbeRefused(msgspec.Struct, frozen=True, tag="refused"):
    """A refusal; the peer may ask again after `seconds`."""

    seconds: Annotated[int, msgspec.Meta(ge=0, le=ANSWER_SECONDS_MAX)]


class ProbeChunk(msgspec.Struct, frozen=True, tag="chunk"):
    """A part of a burst; its bytes are sent with it."""

    is_last: bool


class ProbeTaken(msgspec.Struct, frozen=True, tag="taken"):
    """The number of bytes that came after the first chunk, and the time between the first and the last
    chunk."""

    bytes: Annotated[int, msgspec.Meta(ge=0, le=PROBE_BYTES[-1])]
    nanoseconds: Annotated[int, msgspec.Meta(ge=NANOSECONDS_MIN, le=10**11)]

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes * 1e9 / self.nanoseconds


ProbeQuestion = LinkProbe | ProbeChunk
ProbeAnswer = ProbeAdmitted | ProbeRefused | ProbeTaken | ProbeChunk


class MeasurementRefused(Exception):
    """The peer refused to measure now."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds:.0f} s")
        self.seconds = seconds


async def measure_link(
    network: Network, clock: Clock, peer: PeerId, at: Address | None = None
) -> tuple[float, float]:
    """Return the bytes a second from this node to `peer`, and in the other direction. `at` is an address of
    `peer` to measure.

    Raises:
        Unreachable, StreamClosed: the peer could not be asked. RemoteProtocolError: a malformed answer.
        MeasurementRefused: the peer does not measure now.
    """
    sent, taken = 0.0, 0.0
    for size in PROBE_BYTES:
        with trio.move_on_after(PROBE_SECONDS_MAX):
            stream = await network.open(peer, LINKS_PROTOCOL, at=at)
            try:
                began = clock.monotonic()
                try:
                    sent, taken = await _measure(stream, clock, size)
                except MeasurementRefused:
                    if not sent:
                        raise
                    return sent, taken  # the result of a short burst is better than none
            finally:
                await stream.aclose()
            # A relay carries pieces of half the short burst, so the end of a short burst would come together
            # with the second piece.
            is_relayed = _way_to(network, peer).startswith("relayed")
            if clock.monotonic() - began > FAST_SECONDS and not is_relayed:
                return sent, taken
            continue
        if sent:
            return sent, taken
        raise Unreachable("timeout", f"no burst within {PROBE_SECONDS_MAX:g} s")
    return sent, taken


async def _measure(stream: Stream, clock: Clock, size: int) -> tuple[float, float]:
    await stream.send(encode(LinkProbe(size)))
    asked = clock.monotonic()
    answer = _read(await stream.receive())
    round_trip = clock.monotonic() - asked
    if isinstance(answer, ProbeRefused):
        raise MeasurementRefused(answer.seconds)
    if not isinstance(answer, ProbeAdmitted):
        raise RemoteProtocolError(f"a {type(answer).__name__} in answer to a probe")
    began = clock.monotonic()
    length = await _send_burst(stream, clock, size)
    told = _read(await stream.receive())
    lasted = clock.monotonic() - began
    if not isinstance(told, ProbeTaken) or told.bytes > length:
        raise RemoteProtocolError("a report that does not match the burst that was sent")
    # An upper bound: the burst took at least the time until the receiver's report came, less a round trip.
    fastest = length / max(lasted - round_trip, lasted / 2, 1e-6)
    taken = await _take_burst(stream, clock, size, answer=True)
    return min(told.rate, 2 * fastest), taken.rate


async def _send_burst(stream: Stream, clock: Clock, size: int) -> int:
    """Send up to `size` bytes; return their number."""
    began, sent = clock.monotonic(), 0
    while sent < size:
        sent += CHUNK_BYTES
        is_last = sent >= size or clock.monotonic() - began > SEND_SECONDS_MAX
        await stream.send(encode(ProbeChunk(is_last)), _FILLING)
        if is_last:
            break
    return sent


async def _take_burst(stream: Stream, clock: Clock, size: int, *, answer: bool) -> ProbeTaken:
    """Receive a burst of at most `size` bytes. Raises RemoteProtocolError if it is longer, or is something
    else."""
    first: float | None = None
    taken = 0
    while True:
        data, payload = await stream.receive_with_payload(CHUNK_BYTES)
        chunk = _read(data) if answer else _ask(data)
        now = clock.monotonic()
        if not isinstance(chunk, ProbeChunk) or len(payload) != CHUNK_BYTES:
            raise RemoteProtocolError("a message that does not belong to the burst")
        if first is None:
            first = now
        else:
            taken += CHUNK_BYTES
        if taken + CHUNK_BYTES > size:
            raise RemoteProtocolError("a burst longer than requested")
        if chunk.is_last:
            return ProbeTaken(taken, min(10**11, max(NANOSECONDS_MIN, round((now - first) * 1e9))))


def _read(data: bytes) -> ProbeAnswer:
    found: ProbeAnswer = decode(data, ProbeAnswer, bytes_max=MESSAGE_BYTES_MAX)
    return found


def _ask(data: bytes) -> ProbeQuestion:
    found: ProbeQuestion = decode(data, ProbeQuestion, bytes_max=MESSAGE_BYTES_MAX)
    return found


def _way_to(network: Network, peer: PeerId) -> str:
    """Return a word for how the peer is reached: dialled, punched, or its relay."""
    path = network.multiplexed.best(peer) if isinstance(network, RealNetwork) else None
    if path is None:
        return "dialled"
    return path.way if path.relay is None else f"{path.way} {short_peer(path.relay)}"


class LinkMeasuring:
    """The link measurements of one node. It serves other nodes' measurements from the start; `run` measures
    links itself. `is_busy` returns whether this node computes, which prevents both."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        rng: Random,
        *,
        is_busy: Callable[[], bool],
        round_trip_seconds: Callable[[PeerId], float | None],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        counters: Counter[str],
    ) -> None:
        self._ways: dict[PeerId, str] = {}
        self._network = network
        self._clock = clock
        self._is_busy = is_busy
        self._round_trip = round_trip_seconds
        self._refuse = refuse
        self._counters = counters
        self._limits = ProbeLimits(clock.monotonic())
        self.core = LinkProbes(rng, clock.monotonic())
        network.handle(LINKS_PROTOCOL, self._serve, STREAMS)

    async def run(self, candidates: Callable[[], Sequence[PeerId]], changed: Callable[[], None]) -> None:
        """Measure the links to some of `candidates` now and then, until cancelled. `changed` is called after
        each measurement."""
        while True:
            await trio.sleep(max(0.0, self.core.deadline - self._clock.monotonic()))
            now = max(self._clock.monotonic(), self.core.deadline)
            self._look_at_ways(now)
            nearest = sorted(candidates(), key=lambda peer: (self._round_trip(peer) or 10.0, peer))
            peer = self.core.next(now, nearest)
            if peer is not None and not self._is_busy():
                with contain("measuring of a link"):
                    if await self._probe(peer):
                        changed()

    def _look_at_ways(self, now: float) -> None:
        """Request a new measurement of links whose path has changed since they were measured."""
        for peer, way in list(self._ways.items()):
            if _way_to(self._network, peer) != way:
                del self._ways[peer]
                self.core.rerouted(now, peer)

    async def _probe(self, peer: PeerId) -> bool:
        try:
            sent, taken = await measure_link(self._network, self._clock, peer)
        except MeasurementRefused as refused:
            self.core.failed(self._clock.monotonic(), peer, refused.seconds)
            return False
        except (Unreachable, StreamClosed):
            self.core.failed(self._clock.monotonic(), peer)
            return False
        except RemoteProtocolError as error:
            self._refuse(peer, error)
            self.core.failed(self._clock.monotonic(), peer)
            return False
        self.core.probed(self._clock.monotonic(), peer, sent, taken, self._round_trip(peer))
        self._ways[peer] = _way_to(self._network, peer)
        if len(self._ways) > WAYS_MAX:
            del self._ways[next(iter(self._ways))]
        self._counters["links_measured"] += 1
        return True

    async def _serve(self, stream: Stream) -> None:
        with trio.move_on_after(PROBE_SECONDS_MAX):
            try:
                await self._answer(stream)
            except RemoteProtocolError as error:
                self._refuse(stream.peer, error)

    async def _answer(self, stream: Stream) -> None:
        asked = _ask(await stream.receive())
        if not isinstance(asked, LinkProbe):
            raise RemoteProtocolError(f"a {type(asked).__name__} before a probe")
        now = self._clock.monotonic()
        seconds = self._limits.refusal_seconds(now, stream.peer, is_busy=self._is_busy())
        if seconds:
            self._counters["link_probes_refused"] += 1
            await stream.send(encode(ProbeRefused(ceil(seconds))))
            return
        self._counters["link_probes_served"] += 1
        self._limits.is_serving = True
        try:
            await stream.send(encode(ProbeAdmitted()))
            with trio.move_on_after(BURST_SECONDS_MAX) as coming:
                taken = await _take_burst(stream, self._clock, asked.size, answer=False)
            if coming.cancelled_caught:
                return
            await stream.send(encode(taken))
            with trio.move_on_after(BURST_SECONDS_MAX):
                await _send_burst(stream, self._clock, asked.size)
        finally:
            self._limits.is_serving = False
