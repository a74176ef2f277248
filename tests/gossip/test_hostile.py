"""Hostile input raises only RemoteProtocolError, and every table stays bounded."""

from contextlib import suppress
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.messages import (
    FACT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Ack,
    AliveBody,
    Body,
    BroadcastBody,
    Compare,
    DeadBody,
    Gossip,
    LeftBody,
    Message,
    Nack,
    Ping,
    PingRequest,
    SuspectBody,
    Sync,
    fact_bytes,
    read_body,
    sign_body,
)
from gossip.probes import RELAYS_MAX
from gossip.settings import SwimSettings
from gossip.swim import Swim
from tests.gossip.swarm import HashSigner, peer_of, profile_of

PEERS = [peer_of(number) for number in range(12)]
SMALL = SwimSettings(members_max=6)

peers = st.sampled_from(PEERS)
incarnations = st.integers(0, 4)
bodies: st.SearchStrategy[Body] = st.one_of(
    st.builds(AliveBody, incarnations, st.sampled_from(["a", "b\n"]), st.just(()), st.binary(max_size=2)),
    st.builds(SuspectBody, peers, incarnations, st.integers(0, 5000)),
    st.builds(DeadBody, peers, incarnations, st.integers(0, 5000)),
    st.builds(LeftBody, incarnations),
    st.builds(BroadcastBody, st.binary(min_size=1, max_size=3), incarnations, st.binary(max_size=3)),
)
true_facts = st.builds(lambda peer, body: sign_body(HashSigner(peer), body), peers, bodies)
false_facts = st.builds(Fact, peers | st.binary(max_size=40), st.binary(max_size=80), st.binary(max_size=64))
facts = st.lists(true_facts, max_size=6).map(tuple)
any_facts = st.lists(st.one_of(true_facts, true_facts, true_facts, false_facts), max_size=4).map(tuple)
numbers = st.integers(0, 2**32 - 1)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Ping, numbers, facts),
    st.builds(Ack, numbers, facts),
    st.builds(Nack, numbers, facts),
    st.builds(PingRequest, numbers, peers, facts),
    st.builds(Gossip, any_facts),
    st.builds(Compare, st.binary(min_size=16, max_size=16), facts),
    st.builds(Sync, st.booleans(), any_facts | facts),
)


@given(messages)
def test_a_message_survives_its_encoding(message: Message) -> None:
    assert decode(encode(message), Message, bytes_max=MESSAGE_BYTES_MAX) == message


@given(st.binary(max_size=300))
def test_garbage_is_refused_while_decoding(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)
    with suppress(RemoteProtocolError):
        read_body(Fact(PEERS[0], data, b""))


@given(messages, st.data())
def test_a_damaged_message_is_refused_or_another_valid_one(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RemoteProtocolError):
        decode(bytes(damaged), Message, bytes_max=MESSAGE_BYTES_MAX)


@given(true_facts)
def test_the_size_of_a_fact_is_not_underestimated(fact: Fact) -> None:
    assert len(encode(fact)) <= fact_bytes(fact) <= FACT_BYTES_MAX


steps = st.lists(st.tuples(st.floats(0, 3), peers, messages | st.none(), st.booleans()), max_size=40)


@settings(max_examples=150)
@given(steps, st.integers(0, 100))
def test_random_messages_raise_no_unexpected_errors_in_a_core(
    sequence: list[tuple[float, PeerId, Message | None, bool]], seed: int
) -> None:
    core = Swim(HashSigner(PEERS[0]), profile_of(0), SMALL, Random(seed), 1, 0.0)
    sends = core.join(0.0, PEERS[1:4])
    now = 0.0
    for pause, sender, message, answered in sequence:
        now += pause
        try:
            if message is not None:
                sends += core.receive(now, sender, message)
            # Include the answers of a correct peer, so that some probes succeed and some fail.
            for receiver, sent in sends if answered else []:
                if isinstance(sent, Ping | PingRequest):
                    core.receive(now, receiver, Ack(sent.number))
        except RemoteProtocolError:
            pass
        sends = core.wake(now) if core.deadline <= now else []
        for receiver, sent in sends:
            assert receiver != PEERS[0]
            assert isinstance(sent, Sync) or len(encode(sent)) <= SMALL.facts_bytes_max + 50
        assert len(core.members) <= SMALL.members_max
        assert core.members[[member.peer for member in core.members].index(PEERS[0])].live
        assert len([member for member in core.members if member.live]) == core._table.live
        assert core.deadline > now
    core.leave(now)
    # The core has facts to send exactly if there is still a member to receive them.
    assert (core.deadline < float("inf")) == any(member.live for member in core.members)


def test_relayed_pings_and_answers_to_unknown_peers_are_bounded() -> None:
    core = Swim(HashSigner(PEERS[0]), profile_of(0), SwimSettings(), Random(1), 1, 0.0)
    for peer in PEERS[1:3]:
        core.receive(0.0, peer, Gossip((sign_body(HashSigner(peer), AliveBody(1, "x", (), b"")),)))
    sent = [core.receive(0.0, PEERS[1], PingRequest(number, PEERS[2])) for number in range(RELAYS_MAX + 50)]
    assert sum(len(sends) for sends in sent) == RELAYS_MAX
    asked = [core.receive(0.0, peer_of(number), Ping(1)) for number in range(100, 200)]
    assert sum(len(sends) - 1 for sends in asked) == 16
    served = [core.receive(0.0, peer_of(number), Sync(True, ())) for number in range(100, 300)]
    assert sum(len(sends) for sends in served) == 64


def test_a_core_woken_without_reason_keeps_its_state() -> None:
    core = Swim(HashSigner(PEERS[0]), profile_of(0), SwimSettings(), Random(1), 1, 5.0)
    assert core.wake(5.0) == []
    assert core.wake(1000.0) == []
    assert core.deadline > 1000.0
