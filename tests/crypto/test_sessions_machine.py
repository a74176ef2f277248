"""Three peers under every fault of a network: loss, reordering, duplicates, replays, changed packets, forged
and new addresses, and time. No message arrives twice or changed, and once the network is good again every
message arrives.
"""

from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from crypto.errors import RemoteProtocolError
from crypto.sessions.macs import Source
from crypto.sessions.packets import RESPONSE, payload_bytes_max
from crypto.sessions.state import AMPLIFICATION_MAX, FORGET_SECONDS
from tests.crypto.meeting import PING, Node

PEERS = 3
VICTIM: Source = ("203.0.113.7", 7)
"""An address that no peer has. An attacker on the path writes it into other peers' packets as their
source."""
GOOD_SECONDS = 15.0
"""The longest backoff, plus a margin."""

Number = st.integers(0, PEERS - 1)
Which = st.integers(0, 200)


class Packet(NamedTuple):
    sender: int
    source: Source
    target: Source
    data: bytes


class BadNetwork(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.nodes = [Node(number + 1) for number in range(PEERS)]
        self.numbers = {node.peer: number for number, node in enumerate(self.nodes)}
        self.book = {(one, other): self.nodes[other].source for one in range(PEERS) for other in range(PEERS)}
        self.heard_at: dict[tuple[int, int], float] = {}
        self.flight: list[Packet] = []
        self.past: list[Packet] = []
        self.sent: dict[bytes, tuple[int, int]] = {}
        self.delivered: dict[bytes, int] = {}
        self.from_victim = [0] * PEERS
        self.to_victim = [0] * PEERS
        self.moves = 0

    # --- actions of the peers ----------------------------------------------------------------------------

    @rule(sender=Number, receiver=Number, size=st.sampled_from([0, 100, 900, payload_bytes_max(PING) - 8]))
    def send(self, sender: int, receiver: int, size: int) -> None:
        if sender != receiver:
            payload = len(self.sent).to_bytes(8, "big") + bytes(size)
            self.sent[payload] = (sender, receiver)
            peer = self.nodes[receiver].peer
            target = self.where(sender, receiver)
            for data in self.nodes[sender].sessions.send(self.now, peer, PING, payload):
                self.put(sender, target, data)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 5.0, 40.0, 130.0]))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := min(node.sessions.deadline for node in self.nodes)) <= until:
            self.now = max(self.now, due)
            for number, node in enumerate(self.nodes):
                for peer, data in node.sessions.wake(self.now):
                    self.put(number, self.where(number, self.numbers[peer]), data)
        self.now = until

    @rule(number=Number)
    def move(self, number: int) -> None:
        self.moves += 1
        self.nodes[number].source = ("198.51.100.1", self.moves)

    # --- actions of the network --------------------------------------------------------------------------

    @rule(which=Which, keep=st.booleans())
    def deliver(self, which: int, keep: bool) -> None:
        if self.flight:
            which %= len(self.flight)
            self.take(self.flight[which] if keep else self.flight.pop(which))

    @rule()
    def deliver_all(self) -> None:
        while self.flight:
            self.take(self.flight.pop(0))

    @rule(which=Which)
    def lose(self, which: int) -> None:
        if self.flight:
            self.flight.pop(which % len(self.flight))

    @rule(which=Which)
    def replay(self, which: int) -> None:
        if self.past:
            self.take(self.past[which % len(self.past)])

    @rule(which=Which, where=st.integers(0, 2_000), bit=st.integers(0, 7))
    def change(self, which: int, where: int, bit: int) -> None:
        if self.past:
            packet = self.past[which % len(self.past)]
            at = where % len(packet.data)
            changed = packet.data[:at] + bytes((packet.data[at] ^ 1 << bit,)) + packet.data[at + 1 :]
            self.take(packet._replace(data=changed))

    @rule(which=Which)
    def forge_the_source(self, which: int) -> None:
        packets = [packet for packet in self.flight if packet.data[0] != RESPONSE]
        if packets:
            packet = packets[which % len(packets)]
            self.flight.remove(packet)
            self.take(packet._replace(source=VICTIM))

    # --- invariants ---------------------------------------------------------------------------------------

    def where(self, sender: int, receiver: int) -> Source:
        """Return the address in an address book. An address that has been silent for long counts as
        hearsay."""
        is_old = self.now >= self.heard_at.get((sender, receiver), 0.0) + FORGET_SECONDS
        if is_old or self.nodes[receiver].peer not in self.nodes[sender].sessions.peers:
            self.book[sender, receiver] = self.nodes[receiver].source
        return self.book[sender, receiver]

    def put(self, sender: int, target: Source, data: bytes) -> None:
        if target == VICTIM:
            self.to_victim[sender] += len(data)
        else:
            packet = Packet(sender, self.nodes[sender].source, target, data)
            self.flight.append(packet)
            self.past.append(packet)

    def take(self, packet: Packet) -> None:
        for number, node in enumerate(self.nodes):
            if node.source != packet.target:
                continue
            if packet.source == VICTIM:
                self.from_victim[number] += len(packet.data)
            try:
                received = node.sessions.receive(self.now, packet.data, packet.source)
            except RemoteProtocolError:
                return
            for answer in received.answers:
                self.put(number, packet.source, answer)
            if received.peer is not None and received.newest:
                pair = (number, self.numbers[received.peer])
                self.book[pair], self.heard_at[pair] = packet.source, self.now
            if received.datagram is not None:
                payload = received.datagram.payload
                assert self.sent[payload] == (self.numbers[received.datagram.sender], number)
                self.delivered[payload] = self.delivered.get(payload, 0) + 1

    @invariant()
    def nothing_comes_twice(self) -> None:
        assert all(count == 1 for count in self.delivered.values())

    @invariant()
    def nobody_is_flooded_by_us(self) -> None:
        for went, came in zip(self.to_victim, self.from_victim, strict=True):
            assert went <= AMPLIFICATION_MAX * came

    @invariant()
    def nothing_grows(self) -> None:
        for node in self.nodes:
            assert len(node.sessions.peers) < PEERS

    def teardown(self) -> None:
        """Make the network good from now on, and let every peer know all addresses. The first message may
        still be lost, together with a session that the other side has forgotten; later messages must arrive.
        """
        for one, other in self.book:
            self.book[one, other] = self.nodes[other].source
        self.talk_in_peace()
        before = len(self.sent)
        self.talk_in_peace()
        assert [payload for payload in list(self.sent)[before:] if payload not in self.delivered] == []
        self.nothing_comes_twice()

    def talk_in_peace(self) -> None:
        until = self.now + GOOD_SECONDS
        self.deliver_all()
        for sender in range(PEERS):
            for receiver in range(PEERS):
                self.send(sender, receiver, 100)
        while self.now < until:
            self.deliver_all()
            due = min(node.sessions.deadline for node in self.nodes)
            self.wait(min(max(due, self.now), until) - self.now)


TestBadNetwork: Any = BadNetwork.TestCase
TestBadNetwork.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
