"""Broadcasts of users: their delivery, replacement by newer ones, and cost to others."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.facts import Fact
from gossip.broadcasts import BROADCAST_INTERVALS, BROADCASTS_MAX, TOPICS_MAX, Broadcasts
from gossip.member import BroadcastHeard, Status
from gossip.messages import BROADCAST_BYTES_MAX, TOPIC_BYTES_MAX, BroadcastBody, Gossip, sign_body
from gossip.settings import SwimSettings
from gossip.swim import Swim
from tests.gossip.swarm import HashSigner, Swarm, peer_of, profile_of

LAN = SwimSettings.lan()


def tell(swarm: Swarm, number: int, topic: bytes, data: bytes) -> None:
    swarm.send(number, swarm.cores[number].broadcast(swarm.now, topic, data))


def heard(swarm: Swarm, number: int) -> list[tuple[bytes, bytes]]:
    return [(event.topic, event.data) for event in swarm.events[number] if isinstance(event, BroadcastHeard)]


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_a_broadcast_reaches_every_other_member_once(loss: float) -> None:
    swarm = Swarm(24, LAN, loss=loss)
    swarm.run(10)
    tell(swarm, 3, b"news", bytes(BROADCAST_BYTES_MAX))
    swarm.run(5)
    for number in swarm.cores:
        assert heard(swarm, number) == ([] if number == 3 else [(b"news", bytes(BROADCAST_BYTES_MAX))])


def test_a_newer_broadcast_replaces_an_older_one_everywhere() -> None:
    swarm = Swarm(12, LAN)
    swarm.run(10)
    swarm.blocked = lambda one, _other: one == 0
    for count in range(5):
        tell(swarm, 0, b"price", b"%d" % count)
    tell(swarm, 0, b"other", b"x")
    swarm.blocked = lambda _one, _other: False
    swarm.run(5)
    for number in range(1, 12):
        assert sorted(heard(swarm, number)) == [(b"other", b"x"), (b"price", b"4")]


def test_broadcasts_over_the_rate_wait_and_only_the_newest_is_sent() -> None:
    swarm = Swarm(3, LAN)
    swarm.run(10)
    for count in range(200):
        tell(swarm, 0, b"t", b"%d" % count)
        swarm.run(0.1)
    swarm.run(BROADCAST_INTERVALS)
    told = heard(swarm, 1)
    assert told[-1] == (b"t", b"199")
    assert len(told) <= BROADCASTS_MAX + 20 / BROADCAST_INTERVALS + 1


def test_a_broadcast_that_is_too_long_is_refused_locally() -> None:
    core = Swim(HashSigner(peer_of(0)), profile_of(0), LAN, Random(1), 1, 0.0)
    for topic, data in (
        (b"", b""),
        (bytes(TOPIC_BYTES_MAX + 1), b""),
        (b"t", bytes(BROADCAST_BYTES_MAX + 1)),
    ):
        with pytest.raises(LocalProtocolError):
            core.broadcast(0.0, topic, data)
    core.leave(0.0)
    with pytest.raises(LocalProtocolError):
        core.broadcast(0.0, b"t", b"")


def test_broadcasts_of_non_members_forgers_and_earlier_incarnations_are_ignored() -> None:
    swarm = Swarm(3, LAN)
    swarm.start(3, incarnation=1_000, join=0)
    swarm.run(10)
    core = swarm.cores[0]
    sound = sign_body(HashSigner(peer_of(1)), BroadcastBody(b"t", 10_000, b"x"))
    stranger = sign_body(HashSigner(peer_of(9)), BroadcastBody(b"t", 10_000, b"x"))
    earlier = sign_body(HashSigner(peer_of(3)), BroadcastBody(b"t", 999, b"x"))
    for fact in (stranger, earlier):
        core.receive(swarm.now, peer_of(2), Gossip((fact,)))
    assert heard(swarm, 0) == []
    assert not any(isinstance(event, BroadcastHeard) for event in core.events)
    with pytest.raises(RemoteProtocolError):
        core.receive(swarm.now, peer_of(2), Gossip((Fact(sound.author, sound.body, bytes(64)),)))
    core.receive(swarm.now, peer_of(2), Gossip((sound,)))
    core.receive(swarm.now, peer_of(2), Gossip((sound,)))
    assert sum(isinstance(event, BroadcastHeard) for event in core.events) == 1


def test_a_flooding_author_is_rate_limited_and_no_member_is_lost() -> None:
    swarm = Swarm(8, LAN)
    swarm.run(10)
    before = swarm.sent_bytes
    swarm.run(60)
    idle = (swarm.sent_bytes - before) / 60
    before, signer = swarm.sent_bytes, HashSigner(peer_of(7))
    for count in range(600):
        body = BroadcastBody(b"%d" % (count % 30), 10_000 + count, bytes(BROADCAST_BYTES_MAX))
        fact = sign_body(signer, body)
        for number in range(7):
            swarm.send(number, swarm.cores[number].receive(swarm.now, peer_of(7), Gossip((fact,))))
        swarm.run(0.1)
    for number in range(7):
        assert len(heard(swarm, number)) <= 2 * (BROADCASTS_MAX + 60 / BROADCAST_INTERVALS) + 1
        core = swarm.cores[number]
        assert all(status is Status.ALIVE for status in core.statuses.values())
        assert all(held <= limit for held, limit in core.sizes.values())
    assert (swarm.sent_bytes - before) / 60 / 7 < idle / 8 + 4_000


def test_facts_about_members_precede_broadcasts() -> None:
    swarm = Swarm(6, LAN)
    swarm.run(10)
    core = swarm.cores[0]
    for topic in range(8):
        core.broadcast(swarm.now, b"%d" % topic, bytes(BROADCAST_BYTES_MAX))
    core._beliefs.announce(profile_of(0, b"changed"))
    facts = core._beliefs.facts_for(peer_of(1))
    assert facts[0] == core._beliefs.me.said.fact
    assert len(facts) == 2


topics = st.sampled_from([b"%d" % number for number in range(2 * TOPICS_MAX)])


@given(st.lists(st.tuples(topics, st.integers(0, 60))))
def test_a_topic_delivers_only_increasing_sequence_numbers(told: list[tuple[bytes, int]]) -> None:
    broadcasts = Broadcasts(LAN, 1, 0.0)
    author, newest = peer_of(1), dict[bytes, int]()
    for count, (topic, sequence) in enumerate(told):
        now = 100.0 * count
        body = BroadcastBody(topic, sequence, b"")
        if broadcasts.is_news(now, author, body):
            assert sequence > newest.get(topic, -1)
            newest[topic] = sequence
            broadcasts.hear(now, author, body)
        assert len(broadcasts._heard.get(author, ({}, 0))[0]) <= TOPICS_MAX
