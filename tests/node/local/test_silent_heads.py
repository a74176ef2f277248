"""A silent head that is attached to the holder of a stage does not block other heads."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import Identity
from node.local.stage_server import STREAMS, StageServer
from node.seams import Network, Stage, Stream
from partition import stage as api
from partition.plan.plan import STEPS_MAX
from partition.run.local import column_messages as column
from partition.run.local.seat import BEGINNING_SECONDS, HEAD_PATIENCE_SECONDS, HEAD_SECONDS_MAX, StageSeat
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimNetworkFabric
from tests.stack import simulate

RUN = bytes(32)


class Idle:
    """A stage that computes nothing."""

    async def call(self, request: object) -> object:
        del request
        return api.StageDone()


def chain() -> tuple[Fact, ...]:
    return ()


def attach(step: int = 0) -> bytes:
    return encode(column.Attach(RUN, 1, step, chain()))


async def ask(network: Network, holder: Network, message: bytes) -> tuple[Stream, object]:
    stream = await network.open(holder.peer, column.PROTOCOL)
    await stream.send(message)
    answer: object = decode(await stream.receive(), column.Answer, bytes_max=column.MESSAGE_BYTES_MAX)
    return stream, answer


async def work(stream: Stream, request: object) -> object:
    await stream.send(encode(column.Do()), encode(request))
    message, _ = await stream.receive_with_payload(1_000)
    return decode(message, column.Answer, bytes_max=column.MESSAGE_BYTES_MAX)


def scenario(test: Callable[[StageServer, Network, Network, Network], Awaitable[None]]) -> None:
    async def main() -> None:
        fabric = SimNetworkFabric(SimLinks(NetworkModel(), 1))
        holder, one, other = networks = [fabric.attach(Identity(bytes([n]) * 32).peer) for n in range(1, 4)]
        server = StageServer(
            cast("Stage", Idle()),
            StageSeat(1),
            accept=lambda _peer, _attach: column.Attached(chain(), ()),
            apply=lambda _step, _samples: None,
            payload_bytes_max=1_000,
            now=trio.current_time,
        )

        async def serve(stream: Stream) -> None:
            question: Any = decode(
                await stream.receive(), column.Question, bytes_max=column.MESSAGE_BYTES_MAX
            )
            await server.serve(stream, question)

        holder.handle(column.PROTOCOL, serve, STREAMS)
        async with trio.open_nursery() as nursery:
            for network in networks:
                await nursery.start(network.run)
                network.learn(holder.peer, holder.addresses)
            await test(server, holder, one, other)
            nursery.cancel_scope.cancel()

    simulate(main)


def test_a_silent_head_makes_room_for_a_working_one() -> None:
    async def test(server: StageServer, holder: Network, one: Network, other: Network) -> None:
        _, attached = await ask(one, holder, attach())
        assert isinstance(attached, column.Attached)
        _, refused = await ask(other, holder, attach())
        assert isinstance(refused, column.ColumnRefusal)
        await trio.sleep(BEGINNING_SECONDS)
        stream, attached = await ask(other, holder, attach())
        assert isinstance(attached, column.Attached)
        assert server.head == other.peer
        assert isinstance(await work(stream, api.Apply(0, 1, 1.0)), column.Did)

    scenario(test)


def test_a_head_with_steps_may_be_silent_for_one_round() -> None:
    async def test(server: StageServer, holder: Network, one: Network, other: Network) -> None:
        stream, _ = await ask(one, holder, attach())
        assert isinstance(await work(stream, api.Apply(0, 1, 1.0)), column.Did)
        await trio.sleep(HEAD_PATIENCE_SECONDS - 5)
        _, refused = await ask(other, holder, attach())
        assert isinstance(refused, column.ColumnRefusal)
        await trio.sleep(10)
        _, attached = await ask(other, holder, attach())
        assert isinstance(attached, column.Attached)
        assert server.head == other.peer

    scenario(test)


def test_a_holder_releases_a_head_that_sends_no_request() -> None:
    async def test(server: StageServer, holder: Network, one: Network, other: Network) -> None:
        del other
        await ask(one, holder, attach())
        await trio.sleep(HEAD_SECONDS_MAX + 1)
        assert server.head is None

    scenario(test)


@pytest.mark.parametrize("step", [-1, STEPS_MAX + 1, 2**52])
def test_a_step_out_of_range_makes_a_message_invalid(step: int) -> None:
    data = msgspec.msgpack.encode(["attach", RUN, 1, step, []])
    with pytest.raises(RemoteProtocolError):
        decode(data, column.Question, bytes_max=column.MESSAGE_BYTES_MAX)
