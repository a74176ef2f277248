"""Catching up: a peer that joins late fetches the state of those that were there, from several at once.

    Ask(run, signature, step)  ->  Offer(table) or Nothing(reason)
    Fetch(run, digest, first, count)  ->  `count` payloads, a chunk each

Peers with the same bytes are found by the digest of the table; each is asked for chunks as fast as it
delivers them, and every chunk is checked by its hash before it counts.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import trio
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.averaging.snapshot import CHUNK_BYTES, Hash, Snapshot, Table, check_table
from node.errors import StreamClosed, Unreachable
from node.protocols.calls import conversation
from node.seams import Executor, Network, Stream, StreamLimits

PROTOCOL = "/peerloom/catchup/1"
TABLE_BYTES_MAX = 16 << 20
"""A table of 100,000 arrays with names of a hundred letters."""
STREAMS = StreamLimits(message_bytes_max=1_024, streams_per_peer_max=4)
ASKED_AT_ONCE = 8
"""Chunks that one request asks for: enough that the link never waits for the next request."""
SPANS_AHEAD = 2
"""Requests that a holder has at once."""
SPANS_PER_HOLDER = 4
OFFER_SECONDS_MAX = 30.0
"""A training loop makes its copy between two steps, and a step may take a while."""
CHUNK_SECONDS_MAX = 8.0
DONORS_MAX = 8

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """What state do you have of this run, at this global step or later?"""

    run: Hash
    signature: Hash
    step: Count


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Send me these chunks of what you offered."""

    run: Hash
    digest: Hash
    first: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=ASKED_AT_ONCE)]


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """This one."""

    table: Table


class Nothing(msgspec.Struct, frozen=True, array_like=True, tag="nothing"):
    """None, and why."""

    reason: Annotated[str, msgspec.Meta(max_length=200)]


class Sent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """A chunk follows as payload."""

    number: Count


Question = Ask | Fetch
Answer = Offer | Nothing | Sent
Snap = Callable[[PeerId, bytes, bytes, int], Awaitable[Snapshot | str]]
"""For this peer, of a run with this signature, at this step or later: its snapshot, or why there is none."""


class StateServer:
    """Serves the snapshots of this node's runs."""

    def __init__(self, network: Network, snap: Snap, kept: Callable[[bytes, bytes], Snapshot | None]) -> None:
        """`kept` finds a snapshot by run and digest."""
        self._snap = snap
        self._kept = kept
        network.handle(PROTOCOL, self._serve, STREAMS)

    async def _serve(self, stream: Stream) -> None:
        while True:
            question: Question = decode(await stream.receive(), Question, bytes_max=1_024)
            match question:
                case Ask():
                    found = await self._snap(stream.peer, question.run, question.signature, question.step)
                    answer = Nothing(found) if isinstance(found, str) else Offer(found.table)
                    await stream.send(encode(answer))
                case Fetch():
                    await self._send_chunks(stream, question)

    async def _send_chunks(self, stream: Stream, asked: Fetch) -> None:
        snapshot = self._kept(asked.run, asked.digest)
        if snapshot is None or asked.first + asked.count > len(snapshot.table.chunks):
            await stream.send(encode(Nothing("this state is no longer kept")))
            return
        for number in range(asked.first, asked.first + asked.count):
            with trio.move_on_after(CHUNK_SECONDS_MAX) as patience:
                await stream.send(encode(Sent(number)), snapshot.chunk(number))
            if patience.cancelled_caught:
                raise StreamClosed("a chunk was not taken in time")


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
    step_likely: int | None = None,
) -> Snapshot:
    """Return the newest state, of `step_max` at most, that one of `donors` offers, fetched from all of them
    that hold the same bytes. One beyond `step_likely` is taken only where there is no other.

    Raises Unreachable: nobody has one, or nobody delivered it.
    """
    offers: dict[PeerId, Table] = {}
    reasons: list[str] = []

    async def ask(donor: PeerId) -> None:
        try:
            seconds, bytes_most = OFFER_SECONDS_MAX + 2, TABLE_BYTES_MAX
            talk = conversation(network, donor, PROTOCOL, seconds=seconds, message_bytes_max=bytes_most)
            async with talk as stream:
                await stream.send(encode(Ask(run, signature, step)))
                data = await stream.receive()
            answer = await executor.run(partial(_read_offer, data, bytes_max, step_max))
        except RemoteProtocolError as error:
            refuse(donor, error)
        except (Unreachable, StreamClosed) as error:
            reasons.append(str(error))
        else:
            if isinstance(answer, Table):
                offers[donor] = answer
            else:
                reasons.append(answer)

    async with trio.open_nursery() as nursery:
        for donor in donors[:DONORS_MAX]:
            nursery.start_soon(ask, donor)
    if not offers:
        raise Unreachable("unknown", reasons[0] if reasons else "no peer has a state")
    # The newest; among those, what most peers hold; a tie by the digest, so that all choose alike.
    digests = {donor: table.digest for donor, table in offers.items()}
    held = list(digests.values())
    likely = math.inf if step_likely is None else step_likely

    def rank(peer: PeerId) -> tuple[bool, int, int, bytes]:
        return offers[peer].step <= likely, offers[peer].step, held.count(digests[peer]), digests[peer]

    best = max(offers, key=rank)
    holders = [peer for peer, digest in digests.items() if digest == digests[best]]
    data = await _fetch(network, executor, holders, run, offers[best], refuse)
    return Snapshot(offers[best], data, tuple(holders))


def _read_offer(data: bytes, bytes_max: int, step_max: int | None) -> Table | str:
    answer: Answer = decode(data, Answer, bytes_max=TABLE_BYTES_MAX)
    if isinstance(answer, Offer):
        check_table(answer.table, bytes_max)
        if step_max is not None and answer.table.step > step_max:
            raise RemoteProtocolError(f"a state of step {answer.table.step}, where {step_max} is the last")
        return answer.table
    if isinstance(answer, Nothing):
        return "".join(letter if letter.isprintable() else "?" for letter in answer.reason)
    raise RemoteProtocolError("a chunk where an offer was asked for")


async def _fetch(
    network: Network,
    executor: Executor,
    holders: Sequence[PeerId],
    run: bytes,
    table: Table,
    refuse: Callable[[PeerId, RemoteProtocolError], None],
) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    data = np.empty(table.size_bytes, np.uint8)
    count = len(table.chunks)
    # Cut enough spans for every holder to get several, however small the state is.
    span_chunks = max(1, min(ASKED_AT_ONCE, count // (SPANS_PER_HOLDER * len(holders))))
    left: deque[tuple[int, int]] = deque(
        (first, min(span_chunks, count - first)) for first in range(0, count, span_chunks)
    )
    reasons: list[str] = []

    async def fetch_from(holder: PeerId) -> None:
        asked: deque[tuple[int, int]] = deque()
        try:
            stream = await network.open(holder, PROTOCOL)
            try:
                while left or asked:
                    while left and len(asked) < SPANS_AHEAD:  # the link never waits for the next question
                        asked.append(left.popleft())
                        await stream.send(encode(Fetch(run, table.digest, *asked[-1])))
                    first, length = asked[0]
                    for number in range(first, first + length):
                        with trio.fail_after(CHUNK_SECONDS_MAX):
                            message, payload = await stream.receive_with_payload(CHUNK_BYTES)
                        answer: Answer = decode(message, Answer, bytes_max=1_024)
                        if not isinstance(answer, Sent) or answer.number != number:
                            raise StreamClosed("this state is no longer kept")
                        await executor.run(partial(_put, data, table, number, payload))
                    asked.popleft()
            finally:
                await stream.aclose()
        except RemoteProtocolError as error:
            refuse(holder, error)
            reasons.append(str(error))
        except (Unreachable, StreamClosed, trio.TooSlowError) as error:
            reasons.append(str(error) or "a chunk did not come in time")
        finally:
            left.extendleft(asked)

    while left:
        before = len(left)
        async with trio.open_nursery() as nursery:
            for holder in holders:
                nursery.start_soon(fetch_from, holder)
        if left and len(left) >= before:
            raise Unreachable("timeout", reasons[-1] if reasons else "nobody delivered the state")
    return data


def _put(
    data: "np.ndarray[tuple[int], np.dtype[np.uint8]]", table: Table, number: int, payload: memoryview
) -> None:
    room = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
    if len(payload) != room.size or blake3(payload).digest() != table.chunks[number]:
        raise RemoteProtocolError("a chunk of a state that does not match its hash")
    room[:] = np.frombuffer(payload, np.uint8)
