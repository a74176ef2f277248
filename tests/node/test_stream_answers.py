"""Limits on the connections that other peers make this node open: streams to addresses that are merely
claimed."""

import time
from collections import Counter
from random import Random

import trio
from trio.testing import MockClock

from crypto.contact import Address, make_address
from crypto.encoding import encode
from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from gossip.member import CandidateFound, MemberUp, Profile
from gossip.messages import MESSAGE_BYTES_MAX, Message, Ping, StreamPing, alive_body, sign_body
from gossip.settings import SwimSettings
from gossip.swim import PROTOCOL, Swim
from node.seams import RealClock
from node.services.driver import Driver
from node.transport.address_book import TRIES_MAX
from node.transport.short_messages import ShortMessages
from tests.node.nets import PING, make_network, running, until

CLAIMED = 8


class Victim:
    """Count the incoming connections, and close each at once."""

    def __init__(self) -> None:
        self.connections = 0
        self.port = 0

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(make_address(f"127.0.0.{host}", self.port) for host in range(1, CLAIMED + 1))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="0.0.0.0")
        self.port = listener.socket.getsockname()[1]
        task_status.started()
        async with listener:
            while True:
                stream = await listener.accept()
                self.connections += 1
                await stream.aclose()


async def test_a_request_by_datagram_opens_no_stream_to_a_claimed_address() -> None:
    node, liar, victim = make_network("a"), make_network("b"), Victim()
    signers = {name: IdentitySigner(Identity(name.encode() * 32), "test") for name in "ab"}
    milliseconds = int(time.time() * 1000)
    async with running(node, liar), trio.open_nursery() as nursery:
        await nursery.start(victim.run)
        profile = Profile("a", node.addresses)
        clock = RealClock()
        swim = Swim(signers["a"], profile, SwimSettings.lan(), Random(1), milliseconds, clock.monotonic())

        def publish(event: object) -> None:
            if isinstance(event, MemberUp | CandidateFound):
                node.learn(event.peer, event.addresses)

        driver = Driver(
            swim,
            PROTOCOL,
            Message,
            message_bytes_max=MESSAGE_BYTES_MAX,
            network=node,
            clock=clock,
            publish=publish,
            refuse=lambda _peer, _error: None,
        )
        await nursery.start(driver.run)
        liar.inbox(PROTOCOL)
        liar.learn(node.peer, node.addresses)
        body = alive_body(Profile("b", victim.addresses), milliseconds)
        liar.send(node.peer, PROTOCOL, encode(Ping(1, (sign_body(signers["b"], body),))))
        await until(lambda: swim.live == 2)
        before = node.counters["datagrams_sent"]
        for number in range(200):
            liar.send(node.peer, PROTOCOL, encode(StreamPing(number)))
            await trio.sleep(0.001)
        await until(lambda: node.counters["datagrams_sent"] - before >= 200)
        assert victim.connections == 0
        nursery.cancel_scope.cancel()


async def test_claimed_addresses_are_dialled_a_few_times_and_then_rarely() -> None:
    node, victim = make_network("a"), Victim()
    async with running(node), trio.open_nursery() as nursery:
        await nursery.start(victim.run)
        peer = Identity(b"b" * 32).peer
        node.learn(peer, victim.addresses)
        for number in range(1, 41):
            node.send(peer, PING, b"", by_stream=True)
            await until(lambda wanted=number: node.counters["messages_by_stream_failed"] == wanted)  # type: ignore[misc]  # mypy knows no such default
        assert 0 < victim.connections <= TRIES_MAX * CLAIMED
        nursery.cancel_scope.cancel()


def test_unreachable_peers_do_not_delay_peers_that_have_answered() -> None:
    good, sent = PeerId(bytes(32)), Counter[PeerId]()

    async def send(peer: PeerId, _protocol: str, _message: bytes) -> None:
        if peer != good:
            await trio.sleep_forever()
        sent[peer] += 1

    async def scenario() -> None:
        short = ShortMessages(
            send,
            Counter(),
            is_reached=lambda peer: peer == good,
            sent=lambda _peer: None,
            failed=lambda _peer: None,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(short.run)
            for turn in range(300):
                for number in range(14):  # 70 candidates per second
                    short.put(PeerId((1 + turn * 14 + number).to_bytes(32, "big")), PING, b"")
                short.put(good, PING, b"")
                await trio.sleep(0.2)
            assert sent == {good: 300}
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
