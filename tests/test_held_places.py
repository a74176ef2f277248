"""If 64 peers hold as much as they can of one protocol, other peers still get answers.

Whole nodes in virtual time; `tests.test_held_places_processes` does the same for minutes with a real node.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio

from crypto.encoding import decode, encode
from crypto.identity import Identity, PeerId
from gossip.averaging import messages as attempt
from gossip.pieces import messages as pieces
from node.averaging import transfer
from node.averaging.participation import Participation
from node.averaging.rounds import RoundWish
from node.checkpoints import replication
from node.content import blobs
from node.errors import StreamClosed, Unreachable
from node.protocols import calls, receipts
from node.protocols import runs as wire
from node.runs import traces
from node.runtime import Node
from node.seams import Network, Stream
from node.transport.punch_messages import PROTOCOL as PUNCH_PROTOCOL
from node.transport.settings import TRANSPORT
from partition.run.asks import Declined
from tests.hostile.wire import PROTOCOLS
from tests.stack import Swarm, simulate, swarm

HOSTILE = 64
ANSWER_SECONDS = 2.0
HOLD_SECONDS = 1.0
"""Seconds for which the hostile peers hold their places before the honest peer comes."""
AGAIN_SECONDS = 1.0
"""Seconds after which a hostile peer that lost a place tries to get one again."""
STREAMED = [
    protocol.name for protocol in PROTOCOLS if protocol.said is not None and protocol.name != PUNCH_PROTOCOL
]
NOTHING, RUN = bytes(32), "0" * 16
ROUNDS, STREAMS_EACH = 3, 4


async def hold(network: Network, victim: PeerId, protocol: str, first: bytes) -> None:
    """Open a stream, send `first` if it is not empty, and then neither read nor write. Reopen the stream once
    it is closed."""
    while True:
        with suppress(Unreachable, StreamClosed):
            stream = await network.open(victim, protocol)
            if first:
                await stream.send(first)
            await closed(stream)
        await trio.sleep(AGAIN_SECONDS)


async def never_read(stream: Stream) -> None:
    await trio.sleep_forever()


async def closed(stream: Stream) -> None:
    while True:
        await stream.receive()


async def ask(network: Network, node: Node, protocol: str, question: object, kind: Any) -> object:
    return await calls.call(
        network, node.peer, protocol, question, kind, seconds=ANSWER_SECONDS, reply_bytes_max=1 << 16
    )


class DataPeer:
    """Ask about data; the answer arrives on a stream that the other side opens."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._send, self._receive = trio.open_memory_channel[bytes](8)
        network.handle(pieces.DATA_PROTOCOL, self._take)

    async def _take(self, stream: Stream) -> None:
        with suppress(StreamClosed):
            while True:
                await self._send.send(await stream.receive())

    async def ask(self, peer: PeerId) -> None:
        """Return once the answer has arrived."""
        stream = await self._network.open(peer, pieces.DATA_PROTOCOL)
        try:
            await stream.send(encode(pieces.PiecesHeld(NOTHING, b"\0", True, False)))
            answer: pieces.Message = decode(await self._receive.receive(), pieces.Message, bytes_max=1 << 16)
            assert isinstance(answer, pieces.Unknown)
        finally:
            with trio.move_on_after(1) as scope:
                scope.shield = True
                await stream.aclose()


QUESTIONS: dict[str, tuple[object, Any, type]] = {
    wire.RUNS_PROTOCOL: (wire.Describe(RUN), wire.Reply, Declined),
    blobs.BLOBS_PROTOCOL: (blobs.Want(NOTHING), blobs.Reply, blobs.BlobAbsent),
    replication.COPIES_PROTOCOL: (replication.Which(RUN), replication.Reply, replication.Here),
    transfer.PROTOCOL: (transfer.StateRequest(NOTHING, NOTHING, 0), transfer.Answer, transfer.NoState),
    receipts.RECEIPTS_PROTOCOL: (receipts.ShowReceipts(), receipts.Answer, receipts.ShownReceipts),
    traces.TRACES_PROTOCOL: (traces.SpanRequest(NOTHING, 0, 0), traces.Told, traces.Told),
}
"""For each protocol: a question, the type of its answers, and the type of an answer other than `busy`."""


async def honest_call(network: Network, node: Node, protocol: str) -> None:
    """Use a protocol as an honest peer: ask and await the answer. If the protocol has no question, open a
    stream, which must be accepted."""
    if protocol == pieces.DATA_PROTOCOL:
        await DataPeer(network).ask(node.peer)
    elif protocol in QUESTIONS:
        question, kind, expected = QUESTIONS[protocol]
        assert isinstance(await ask(network, node, protocol, question, kind), expected)
    else:
        stream = await network.open(node.peer, protocol)
        await stream.aclose()


def first_words(protocol: str) -> bytes:
    """Return a plausible first message that makes the other side allocate a place."""
    if protocol == pieces.DATA_PROTOCOL:
        return encode(pieces.PiecesHeld(bytes([1]) * 32, b"\0", True, False))
    if protocol == attempt.PROTOCOL:
        return encode(attempt.Opening(bytes([1]) * 32))
    return b""


def scenario(test: Callable[[Swarm, Node, Sequence[Network], Network], Awaitable[None]]) -> None:
    async def main() -> None:
        async with swarm("a") as group, trio.open_nursery() as nursery:
            node = group.nodes["a"]
            peers = [Identity(number.to_bytes(32, "big")).peer for number in range(HOSTILE + 1)]
            networks = [group.medium.attach(peer) for peer in peers]
            for network in networks:
                await nursery.start(network.run)
                network.learn(node.peer, node.network.addresses)
                node.network.learn(network.peer, network.addresses)
            await test(group, node, networks[1:], networks[0])
            nursery.cancel_scope.cancel()

    simulate(main)


@pytest.mark.parametrize("protocol", STREAMED)
def test_streams_held_by_64_peers_block_no_answer(protocol: str) -> None:
    async def test(group: Swarm, node: Node, hostile: Sequence[Network], honest: Network) -> None:
        limits = node.network._handlers.limits[protocol]  # type: ignore[attr-defined]  # of the simulated one
        async with trio.open_nursery() as nursery:
            for network in hostile:
                network.handle(pieces.DATA_PROTOCOL, never_read)
                for _number in range(min(limits.streams_per_peer_max, TRANSPORT.inbound_max // HOSTILE)):
                    nursery.start_soon(hold, network, node.peer, protocol, first_words(protocol))
            await trio.sleep(HOLD_SECONDS)
            with trio.fail_after(ANSWER_SECONDS):
                await honest_call(honest, node, protocol)
            nursery.cancel_scope.cancel()

    scenario(test)


def test_streams_held_by_64_peers_delay_no_honest_round() -> None:
    """The hostile peers open streams of attempts that do not exist, before and during the rounds of one
    member."""
    took: list[float] = []

    async def take_part(run: Participation, own: float) -> None:
        await run.wait_for_peers(2)
        for number in range(ROUNDS):
            run.tell(step=number, samples=8, rounds=number, lineage=bytes(32), has_state=True)
            wanted = RoundWish(round=number, window_seconds=1.0, patience_seconds=10.0)
            begun = trio.current_time()
            made = await run.average(np.full(64, own, np.float32), 8.0, wanted)
            took.append(trio.current_time() - begun)
            assert made.vector is not None
            assert np.allclose(made.vector, 1.0)

    async def main() -> None:
        async with swarm("abc", preset="lan") as group, trio.open_nursery() as nursery:
            nodes, victim = list(group.nodes.values()), group.nodes["b"]
            words = first_words(attempt.PROTOCOL)
            for number in range(HOSTILE):
                network = group.medium.attach(Identity(number.to_bytes(32, "big")).peer)
                await nursery.start(network.run)
                network.learn(victim.peer, victim.network.addresses)
                victim.network.learn(network.peer, network.addresses)
                for _ in range(STREAMS_EACH):
                    nursery.start_soon(hold, network, victim.peer, attempt.PROTOCOL, words)
            await trio.sleep(HOLD_SECONDS)
            async with trio.open_nursery() as honest:
                for own, node in enumerate(nodes):
                    honest.start_soon(take_part, node.averaging.open("x", bytes(32), aggregate="mean"), own)
            nursery.cancel_scope.cancel()

    simulate(main)
    assert len(took) == 3 * ROUNDS
    assert max(took) <= ANSWER_SECONDS, took
