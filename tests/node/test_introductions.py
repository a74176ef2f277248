"""A node that introduces two peers forwards only their messages, and only until they dial each other."""

from collections import Counter
from random import Random

import pytest
import trio
import trio.testing

from crypto.encoding import decode, encode
from crypto.identity import PeerId
from node.errors import StreamClosed
from node.seams import RealClock, Stream
from node.transport.introductions import COMING_MAX
from node.transport.network import RealNetwork
from node.transport.paths import SEEKING_MAX, SOUGHT_MAX
from node.transport.punch_messages import (
    MESSAGE_BYTES_MAX,
    OFFER_BYTES_MIN,
    PROTOCOL,
    Begin,
    Introduce,
    Introduced,
    Meet,
    Observe,
    PunchOffer,
    RoundTrip,
)
from node.transport.puncher import Puncher
from node.transport.punching import (
    ANSWER_PAUSE_SECONDS,
    INTRODUCED_BURST,
    TARGET_INTRODUCED_BURST,
    IntroductionBudget,
)
from node.transport.streams import SecureStream
from tests.node.nets import acquaint, make_network, running, until
from tests.node.test_transport_parts import peer_ids

OFFER = PunchOffer(("/ip4/45.1.0.2/tcp/30000",), (), bytes(OFFER_BYTES_MIN))


async def open_with(network: RealNetwork, common: PeerId, *messages: object) -> SecureStream:
    stream = await network.open(common, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX)
    for message in messages:
        await stream.send(encode(message))
    return stream


@pytest.mark.parametrize("is_honest", [True, False])
async def test_peers_exchange_only_messages_for_punching_through_a_third(is_honest: bool) -> None:
    common, asker, target = (make_network(letter) for letter in "cat")
    counters: Counter[str] = Counter()
    async with running(common, asker, target):
        Puncher(common, RealClock(), Random(1), list, counters)
        acquaint(common, asker)
        target.learn(common.peer, common.addresses)
        inbox = target.inbox(PROTOCOL)
        common.inbox("/peerloom/ping/1")
        target.send(common.peer, "/peerloom/ping/1", b"here I am")
        with trio.fail_after(60):
            await until(lambda: common.heard_at(target.peer) > 0)
            near = await open_with(asker, common.peer, Introduce(target.peer), OFFER)
            ((sender, data),) = await inbox.take(trio.current_time() + 60)
            told: Introduced = decode(data, Introduced, bytes_max=MESSAGE_BYTES_MAX)
            assert (sender, told.peer) == (common.peer, asker.peer)
            stranger = await open_with(asker, common.peer, Meet(told.token))
            with pytest.raises(StreamClosed):
                await stranger.receive()
            far = await open_with(target, common.peer, Meet(told.token))
            came: PunchOffer = decode(await far.receive(), PunchOffer, bytes_max=MESSAGE_BYTES_MAX)
            assert came == OFFER
            if is_honest:
                for source, other, message in (
                    (far, near, OFFER),
                    (near, far, RoundTrip()),
                    (near, far, Begin()),
                ):
                    await source.send(encode(message))
                    assert await other.receive() == encode(message)
                await near.send(encode(OFFER))
            else:
                await far.send(encode(Observe()))
            with pytest.raises(StreamClosed):
                await near.receive()
    assert counters["introductions"] == 1


async def test_a_peer_that_sent_nothing_is_introduced_to_no_peer() -> None:
    common, asker = make_network("c"), make_network("a")
    counters: Counter[str] = Counter()
    async with running(common, asker):
        Puncher(common, RealClock(), Random(1), list, counters)
        acquaint(common, asker)
        for target in (make_network("n").peer, asker.peer, common.peer):
            stream = await open_with(asker, common.peer, Introduce(target), OFFER)
            with trio.fail_after(60), pytest.raises(StreamClosed):
                await stream.receive()
    assert counters["introductions_refused"] == 3


class SteppedClock(RealClock):
    """The real clock, `ahead_seconds` ahead."""

    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds


async def test_a_liar_blocks_neither_others_nor_the_peers_it_names() -> None:
    clock = SteppedClock()
    target, greedy, honest = (make_network(letter) for letter in "tgh")
    named = peer_ids(COMING_MAX)
    came, honest_came = 0, trio.Event()

    async def hold(stream: Stream) -> None:
        nonlocal came
        await stream.receive()
        came += 1
        await trio.sleep_forever()

    async def note(stream: Stream) -> None:
        honest_came.set()

    greedy.handle(PROTOCOL, hold)
    honest.handle(PROTOCOL, note)
    async with running(target, greedy, honest), trio.open_nursery() as nursery:
        puncher = Puncher(target, clock, Random(1), list, Counter())
        acquaint(target, greedy, honest)
        nursery.start_soon(puncher.run)
        with trio.fail_after(60):
            for number, peer in enumerate(named, start=1):
                clock.ahead_seconds += ANSWER_PAUSE_SECONDS
                greedy.send(target.peer, PROTOCOL, encode(Introduced(bytes(16), peer)))

                def have_come(number: int = number) -> bool:
                    return came == number

                await until(have_come)
            honest.send(target.peer, PROTOCOL, encode(Introduced(bytes(16), named[0])))
            await honest_came.wait()
        assert all(puncher.budget.may_answer(peer, clock.monotonic()) for peer in (greedy.peer, *named))
        nursery.cancel_scope.cancel()


async def test_peers_that_cannot_be_found_do_not_block_others() -> None:
    network = make_network("n")
    *invented, honest = peer_ids(SOUGHT_MAX + SEEKING_MAX + 1)
    begun: list[PeerId] = []

    async def until_begun(count: int) -> None:
        await until(lambda: len(begun) == count)

    async def fail(peer: PeerId) -> None:
        begun.append(peer)

    async def hang(peer: PeerId) -> None:
        begun.append(peer)
        await trio.sleep_forever()

    async with running(network):
        network.multiplexed.introduce = fail
        with trio.fail_after(60):
            for number, peer in enumerate((*invented, honest), start=1):
                network.multiplexed.seek(peer)
                await until_begun(number)
            network.multiplexed.introduce = hang
            for peer in invented:
                network.multiplexed.seek(peer)
            await until(lambda: len(begun) > len(invented) + 1)
        await trio.testing.wait_all_tasks_blocked()
        assert len(begun) <= len(invented) + 1 + SEEKING_MAX


def test_neither_an_asker_nor_a_target_is_served_too_often() -> None:
    asker, target, *others = peer_ids(3 * int(TARGET_INTRODUCED_BURST))
    budget = IntroductionBudget()
    assert sum(budget.may_introduce(asker, other, 0.0) for other in others) == INTRODUCED_BURST
    budget = IntroductionBudget()
    assert sum(budget.may_introduce(other, target, 0.0) for other in others) == TARGET_INTRODUCED_BURST
    assert all(size <= limit for size, limit in budget.sizes.values())


def test_one_asker_cannot_use_up_the_introductions_to_a_target() -> None:
    greedy, honest, target = peer_ids(3)
    budget = IntroductionBudget()
    for second in range(600):
        budget.may_introduce(greedy, target, float(second))
        if second % 100 == 50:
            assert budget.may_introduce(honest, target, float(second))
