"""Catching up: a peer that joins late fetches the state of the present members, from several at once.

    StateRequest(run, signature, step)  ->  StateOffer(table) or NoState(reason)
    Fetch(run, digest, first, count)  ->  `count` payloads with a chunk each

Peers with the same bytes are recognised by the digest of the table. Each is asked for chunks as fast as it
delivers them, and the hash of every chunk is checked before it counts.

If members train independently, no two hold the same bytes. In that case a few chunks of each state are
fetched. They are drawn after the tables with their hashes have arrived, and the state nearest to the others
is taken (`gossip.nearest`).
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Annotated

import msgspec
import numpy as np
import trio
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip import nearest
from gossip.claims import VOICES_MIN, ClaimedCount, Count, LikelySteps, OfferedState, choose_state
from node.averaging.snapshot import (
    CHUNK_BYTES,
    CHUNKS_MAX,
    Array,
    Hash,
    Snapshot,
    SnapshotTable,
    check_table,
    numbers_of,
    sampled_chunks,
)
from node.errors import StreamClosed, Unreachable
from node.protocols.calls import conversation
from node.seams import Executor, Network, Stream, StreamLimits

PROTOCOL = "/peerloom/catchup/1"
TABLE_BYTES_MAX = 16 << 20
"""Maximum size of a table: 100,000 arrays with names of a hundred characters."""
STREAMS = StreamLimits(message_bytes_max=1_024, streams_per_peer_max=4)
ASKED_AT_ONCE = 8
"""Number of chunks in one request, enough that the link never waits for the next request."""
SPANS_AHEAD = 2
"""Number of simultaneous requests to one holder."""
SPANS_PER_HOLDER = 4
OFFER_SECONDS_MAX = 30.0
"""How long to wait for an offer. A training loop makes its copy between two steps, and a step may take a
while."""
CHUNK_SECONDS_MAX = 8.0
DONORS_MAX = 8
OTHERS_SECONDS = 10.0
"""How long to wait for others after the first offer; a silent peer must not delay a newcomer for long."""
AGREED_SECONDS = 0.5
"""How long to wait for others after enough peers have offered the same state; they may help to deliver it."""
AHEAD_STEPS = 2
"""If members have offered states of different steps, all are asked for a step this far ahead, so that they
copy at the same step."""
AHEAD_SECONDS = 10.0
"""How long to wait for such an offer. With slower steps, members are at the same step anyway."""
BEGINNING_SECONDS = 3.0
"""How long to wait for an offer of a run's initial state. Its holders made a copy when they joined, so an
answer takes one round trip, however busy their scripts are."""
BEGINNING_OTHERS_SECONDS = 0.1
"""How long to wait after the first such offer; the other holders help to deliver it."""
SAMPLE_SECONDS_MAX = 60.0
"""How long to wait for the samples of states, which take this long at 1 Mbit/s. A state whose holder takes
longer is not used."""

ChunkNumber = Annotated[int, msgspec.Meta(ge=0, lt=CHUNKS_MAX)]


class StateRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A request for the state of this run, at this global step or later."""

    run: Hash
    signature: Hash
    step: Count


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """A request for chunks of an offered state."""

    run: Hash
    digest: Hash
    first: ChunkNumber
    count: Annotated[int, msgspec.Meta(ge=1, le=ASKED_AT_ONCE)]


class StateOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """The table of the offered state."""

    table: SnapshotTable


class NoState(msgspec.Struct, frozen=True, array_like=True, tag="nothing"):
    """The holder has no state to offer, for this reason."""

    reason: Annotated[str, msgspec.Meta(max_length=200)]


class Sent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """The header of a chunk that follows as payload."""

    number: ChunkNumber


Question = StateRequest | Fetch
Answer = StateOffer | NoState | Sent
Snap = Callable[[PeerId, bytes, bytes, int], Awaitable[Snapshot | str]]
"""Returns a snapshot for this peer, of the run with this key and signature at this step or later, or why
there is none."""
Kept = Callable[[PeerId, bytes, bytes], Snapshot | None]
"""Returns the run's snapshot with this digest for this peer."""


class StateServer:
    """The server of snapshots of this node's runs."""

    def __init__(self, network: Network, snap: Snap, kept: Kept) -> None:

        self._snap = snap
        self._kept = kept
        network.handle(PROTOCOL, self._serve, STREAMS)

    async def _serve(self, stream: Stream) -> None:
        while True:
            question: Question = decode(await stream.receive(), Question, bytes_max=1_024)
            match question:
                case StateRequest():
                    found = await self._snap(stream.peer, question.run, question.signature, question.step)
                    answer = NoState(found) if isinstance(found, str) else StateOffer(found.table)
                    await stream.send(encode(answer))
                case Fetch():
                    await self._send_chunks(stream, question)

    async def _send_chunks(self, stream: Stream, asked: Fetch) -> None:
        snapshot = self._kept(stream.peer, asked.run, asked.digest)
        if snapshot is None or asked.first + asked.count > len(snapshot.table.chunks):
            await stream.send(encode(NoState("this state is no longer kept")))
            return
        for number in range(asked.first, asked.first + asked.count):
            with trio.move_on_after(CHUNK_SECONDS_MAX) as patience:
                await stream.send(encode(Sent(number)), snapshot.chunk(number))
            if patience.cancelled_caught:
                raise StreamClosed("a chunk was not received in time")


async def fetch_state(
    network: Network,
    executor: Executor,
    donors: Sequence[PeerId],
    run: bytes,
    signature: bytes,
    step: int,
    *,
    bytes_max: int,
    refuse: Callable[[PeerId, RemoteProtocolError], None],
    step_max: int | None = None,
    likely: LikelySteps | None = None,
    rng: Random,
    receiving: Callable[[], None] = lambda: None,
) -> Snapshot:
    """Return a state from `step` to `step_max`: the state that most of `donors` offer, fetched from all of
    them that hold the same bytes. If the `likely` steps are known, only a state at one of them counts, and it
    must be held by as many peers as required, or be the nearest to the others.

    `receiving` is called once the state is being fetched. Raises Unreachable if no peer has a state or
    delivers it.
    """
    request = _OfferRequest(network, executor, run, signature, bytes_max, step_max, likely, refuse)
    is_beginning = likely is not None and likely.lineage is not None
    offers = await request.ask(donors, step, BEGINNING_SECONDS if is_beginning else OFFER_SECONDS_MAX + 2)
    if request.may_agree(donors, offers):
        ahead = max(offers[peer].step for peer in request.likely_of(offers)) + AHEAD_STEPS
        again = await request.ask(donors, ahead, AHEAD_SECONDS)
        offers = again if request.likely_of(again) else offers
    if not offers:
        raise Unreachable("unknown", request.reasons[0] if request.reasons else "no peer has a state")
    transfer = _Transfer(network, executor, run, refuse)
    apart = request.likely_of(offers)
    if apart:
        receiving()
    if likely is not None and likely.is_nearest and len(apart) >= nearest.STATES_MIN:
        return await _fetch_nearest(transfer, {peer: offers[peer] for peer in apart}, rng)
    holders = choose_state(_offered({peer: offers[peer] for peer in apart}), likely, rng)
    if not holders:
        raise Unreachable("unknown", "no two members hold the same state of a step that the run can be at")
    return await transfer.state(holders, offers[holders[0]])


async def _fetch_nearest(
    transfer: "_Transfer", offers: Mapping[PeerId, SnapshotTable], rng: Random
) -> Snapshot:
    """Return the state whose sample is nearest to the others, or the next nearest if its holder does not
    deliver it. Raises Unreachable."""
    layouts = Counter(table.rows for table in offers.values())
    rows, _ = max(layouts.items(), key=lambda item: item[1])
    alike = {peer: table for peer, table in sorted(offers.items()) if table.rows == rows}
    numbers = sampled_chunks(len(next(iter(alike.values())).chunks), rng)
    samples: dict[PeerId, Mapping[str, nearest.Numbers]] = {}
    reason = "no sample of a state arrived in time"

    async def sample(peer: PeerId, table: SnapshotTable) -> None:
        nonlocal reason
        try:
            chunks = await transfer.sample(peer, table, numbers)
        except Unreachable as error:
            reason = error.detail
        else:
            samples[peer] = await transfer.executor.run(partial(numbers_of, table, chunks))

    if len(alike) >= nearest.STATES_MIN:
        with trio.move_on_after(SAMPLE_SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for peer, table in alike.items():
                    nursery.start_soon(sample, peer, table)
        found = dict(sorted(samples.items()))
    else:
        found = {peer: {} for peer in alike}
    if len(found) >= nearest.STATES_MIN:
        order = await transfer.executor.run(partial(nearest.nearest_first, found))
    else:
        order = rng.sample(list(found), len(found))
    for peer in order:
        try:
            return await transfer.state([peer], offers[peer])
        except Unreachable as error:
            reason = error.detail
    raise Unreachable("timeout", reason)


def _offered(offers: Mapping[PeerId, SnapshotTable]) -> dict[PeerId, OfferedState]:
    return {peer: OfferedState(ClaimedCount(table.step), table.digest) for peer, table in offers.items()}


@dataclass(frozen=True)
class _OfferRequest:
    """A request to several peers for offers of their state."""

    network: Network
    executor: Executor
    run: bytes
    signature: bytes
    bytes_max: int
    step_max: int | None
    likely: LikelySteps | None
    refuse: Callable[[PeerId, RemoteProtocolError], None]
    reasons: list[str] = field(default_factory=list)
    """Reasons given by peers that offer no state."""

    def likely_of(self, offers: Mapping[PeerId, SnapshotTable]) -> list[PeerId]:
        """Return the peers whose states are at a likely step."""
        likely = self.likely
        if likely is None:
            return list(offers)
        return [
            peer
            for peer, table in offers.items()
            if likely.first <= table.step <= likely.last and likely.lineage in (None, table.lineage)
        ]

    def most_alike(self, offers: Mapping[PeerId, SnapshotTable]) -> int:
        """Return the largest number of peers that offer the same state at a likely step."""
        alike = Counter((offers[peer].step, offers[peer].digest) for peer in self.likely_of(offers))
        return max(alike.values(), default=0)

    def may_agree(self, donors: Sequence[PeerId], offers: Mapping[PeerId, SnapshotTable]) -> bool:
        """Return whether fewer peers than required hold the same state, although enough have a state."""
        wanted = 1 if self.likely is None else self.likely.holders_wanted
        return self.most_alike(offers) < wanted <= min(len(donors), len(self.likely_of(offers)))

    async def ask(self, donors: Sequence[PeerId], step: int, seconds: float) -> dict[PeerId, SnapshotTable]:
        """Return these peers' offers of a state at this step or later."""
        offers: dict[PeerId, SnapshotTable] = {}
        with trio.move_on_after(seconds + 2) as patience:
            async with trio.open_nursery() as nursery:
                for donor in donors[:DONORS_MAX]:
                    nursery.start_soon(self._ask, donor, step, seconds, offers, patience)
        return offers

    async def _ask(
        self,
        donor: PeerId,
        step: int,
        seconds: float,
        offers: dict[PeerId, SnapshotTable],
        patience: trio.CancelScope,
    ) -> None:
        try:
            talk = conversation(
                self.network, donor, PROTOCOL, seconds=seconds, message_bytes_max=TABLE_BYTES_MAX
            )
            async with talk as stream:
                await stream.send(encode(StateRequest(self.run, self.signature, step)))
                data = await stream.receive()
            answer = await self.executor.run(partial(_read_offer, data, self.bytes_max, self.step_max))
        except RemoteProtocolError as error:
            self.refuse(donor, error)
        except (Unreachable, StreamClosed) as error:
            self.reasons.append(str(error))
        else:
            if isinstance(answer, str):
                self.reasons.append(answer)
                return
            offers[donor] = answer
            if self.likely_of({donor: answer}):
                wanted = VOICES_MIN if self.likely is None else max(VOICES_MIN, self.likely.holders_wanted)
                # If states differ anyway, two equal ones prove nothing, and further states are needed for
                # comparison.
                is_apart = self.likely is not None and self.likely.is_nearest
                is_agreed = self.most_alike(offers) >= wanted and not is_apart
                left = AGREED_SECONDS if is_agreed else OTHERS_SECONDS
                if self.likely is not None and self.likely.lineage is not None and not is_apart:
                    left = BEGINNING_OTHERS_SECONDS
                patience.deadline = min(patience.deadline, trio.current_time() + left)


def _read_offer(data: bytes, bytes_max: int, step_max: int | None) -> SnapshotTable | str:
    answer: Answer = decode(data, Answer, bytes_max=TABLE_BYTES_MAX)
    if isinstance(answer, StateOffer):
        check_table(answer.table, bytes_max)
        if step_max is not None and answer.table.step > step_max:
            raise RemoteProtocolError(
                f"a state of step {answer.table.step} was offered, but step {step_max} is the last allowed"
            )
        return answer.table
    if isinstance(answer, NoState):
        return "".join(letter if letter.isprintable() else "?" for letter in answer.reason)
    raise RemoteProtocolError("a chunk arrived in place of an offer")


@dataclass(frozen=True)
class _Transfer:
    """Fetches chunks of states to this peer."""

    network: Network
    executor: Executor
    run: bytes
    refuse: Callable[[PeerId, RemoteProtocolError], None]

    async def state(self, holders: Sequence[PeerId], table: SnapshotTable) -> Snapshot:
        """Return the state of this table, fetched from all `holders` at once. Raises Unreachable."""
        data = np.empty(table.size_bytes, np.uint8)
        count = len(table.chunks)
        # Cut enough spans that every holder gets several, however small the state is.
        span_chunks = max(1, min(ASKED_AT_ONCE, count // (SPANS_PER_HOLDER * len(holders))))
        spans = deque((first, min(span_chunks, count - first)) for first in range(0, count, span_chunks))

        def room(number: int) -> Array:
            return data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

        await self._fetch(holders, table, spans, room)
        return Snapshot(table, data, tuple(holders))

    async def sample(self, holder: PeerId, table: SnapshotTable, numbers: Sequence[int]) -> dict[int, Array]:
        """Return these chunks of a state. Raises Unreachable."""
        rooms = {
            number: np.empty(min(CHUNK_BYTES, table.size_bytes - number * CHUNK_BYTES), np.uint8)
            for number in numbers
        }
        await self._fetch([holder], table, deque((number, 1) for number in numbers), rooms.__getitem__)
        return rooms

    async def _fetch(
        self,
        holders: Sequence[PeerId],
        table: SnapshotTable,
        left: deque[tuple[int, int]],
        room: Callable[[int], Array],
    ) -> None:
        """Fetch these spans of chunks, each chunk into its buffer `room(number)`. Raises Unreachable."""
        reasons: list[str] = []
        delivered, failed = set[PeerId](), set[PeerId]()

        async def fetch_from(holder: PeerId) -> None:
            asked: deque[tuple[int, int]] = deque()
            try:
                stream = await self.network.open(holder, PROTOCOL)
                try:
                    while left or asked:
                        while left and len(asked) < SPANS_AHEAD:  # the link never waits for the next request
                            asked.append(left.popleft())
                            await stream.send(encode(Fetch(self.run, table.digest, *asked[-1])))
                        first, length = asked[0]
                        for number in range(first, first + length):
                            with trio.fail_after(CHUNK_SECONDS_MAX):
                                message, payload = await stream.receive_with_payload(CHUNK_BYTES)
                            answer: Answer = decode(message, Answer, bytes_max=1_024)
                            if not isinstance(answer, Sent) or answer.number != number:
                                raise StreamClosed("this state is no longer kept")
                            await self.executor.run(
                                partial(_put, room(number), table.chunks[number], payload)
                            )
                        asked.popleft()
                        delivered.add(holder)
                finally:
                    await stream.aclose()
            except RemoteProtocolError as error:
                self.refuse(holder, error)
                failed.add(holder)
                reasons.append(str(error))
            except (Unreachable, StreamClosed, trio.TooSlowError) as error:
                failed.add(holder)
                reasons.append(str(error) or "a chunk did not arrive in time")
            finally:
                left.extendleft(asked)

        useful = list(holders)
        while left:
            if not useful:
                raise Unreachable("timeout", reasons[-1] if reasons else "no peer delivered the state")
            delivered.clear()
            failed.clear()
            async with trio.open_nursery() as nursery:
                for holder in useful:
                    nursery.start_soon(fetch_from, holder)
            # A holder that failed without delivering anything kept spans that others could have delivered.
            useful = [holder for holder in useful if holder in delivered or holder not in failed]


def _put(room: Array, digest: bytes, payload: memoryview) -> None:
    if len(payload) != room.size or blake3(payload).digest() != digest:
        raise RemoteProtocolError("a chunk of a state does not match its hash")
    room[:] = np.frombuffer(payload, np.uint8)
