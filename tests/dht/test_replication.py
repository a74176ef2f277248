"""How records reach their holders and stay there: tokens, immutable values, republishing and repair."""

from math import inf

import pytest

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from dht.caching import CACHED_PER_KEY_MAX, RecordCache
from dht.events import RecordsFound, RecordStored
from dht.kademlia import Kademlia
from dht.keys import Key, content_key, distance, node_key, record_key
from dht.messages import (
    MESSAGE_BYTES_MAX,
    FindNode,
    FindValue,
    Message,
    Ping,
    Pong,
    Store,
    Stored,
    Values,
)
from dht.records import NOBODY, Refusal, check_record, make_immutable
from dht.settings import KademliaSettings
from dht.tokens import PERIOD_SECONDS, TOKEN_SECONDS, WriteTokens
from tests.dht.swarm import WALL, Swarm, address, lone, met, record, signer, token

KEY = record_key("test", b"name")
VALUE = b"immutable"
NEVER = KademliaSettings(republish_seconds=inf)


def stored(swarm: Swarm, node: Kademlia, fact: Fact) -> RecordStored:
    return swarm.ask(node, lambda now: node.store(now, fact), RecordStored)


def found(swarm: Swarm, node: Kademlia, key: Key = KEY, *, first: bool = False) -> RecordsFound:
    return swarm.ask(node, lambda now: node.find(now, key, first=first), RecordsFound)


def holders(swarm: Swarm, key: Key = KEY) -> list[Kademlia]:
    return [node for node in swarm.nodes.values() if node.records.get(WALL + swarm.now, key)]


def order_of(swarm: Swarm, key: Key = KEY) -> list[Kademlia]:
    return sorted(swarm.nodes.values(), key=lambda node: distance(node.key, key))


# Immutable values.


def test_an_immutable_value_outlives_the_node_that_stored_it() -> None:
    swarm = Swarm(1)
    nodes = swarm.grow(10)
    assert stored(swarm, nodes[3], make_immutable(VALUE, expires=int(WALL + 3600))).acknowledged == 10
    del swarm.nodes[nodes[3].peer]
    (only,) = found(swarm, nodes[0], content_key(VALUE), first=True).records
    assert (only.publisher, only.value) == (NOBODY, VALUE)


def test_an_immutable_value_under_another_key_is_refused() -> None:
    node = lone()
    good = make_immutable(VALUE, expires=int(WALL + 60))
    forged = Fact(NOBODY, good.body.replace(VALUE, b"something"), b"")
    for fact in (forged, Fact(NOBODY, good.body, bytes(64)), Fact(signer(1).peer, good.body, b"")):
        with pytest.raises(RemoteProtocolError):
            check_record(signer(0), fact)
    check_record(signer(0), good)
    assert len(node.records) == 0


def test_an_immutable_value_is_kept_once_until_its_last_expiry() -> None:
    node = lone()
    for seconds in (60, 600, 300):
        node.replication.keep(
            0.0, check_record(signer(0), make_immutable(VALUE, expires=int(WALL + seconds)))
        )
    (kept,) = node.records.get(WALL, content_key(VALUE))
    assert kept.expires == int(WALL + 600)


# Write tokens.


def refusal(node: Kademlia, sender: int, given: bytes, now: float = 0.0) -> str:
    sends = node.receive(now, signer(sender).peer, Store(1, (), record(sender, KEY), given))
    (answer,) = [message for _, message in sends if isinstance(message, Stored)]
    return answer.refused


def test_only_peers_with_a_recent_write_token_may_store() -> None:
    node = lone()
    given = token(node, signer(1).peer)
    assert refusal(node, 1, b"") == Refusal.UNPROVEN
    assert refusal(node, 2, given) == Refusal.UNPROVEN
    assert refusal(node, 1, given, now=PERIOD_SECONDS) == ""
    assert refusal(node, 1, given, now=2 * PERIOD_SECONDS) == Refusal.UNPROVEN


def test_two_nodes_give_different_tokens() -> None:
    assert token(lone(1), signer(9).peer) != token(Swarm(18).start(2), signer(9).peer)


# Republishing.


def test_holders_keep_a_departed_publishers_record_alive() -> None:
    swarm = Swarm(2, settings=KademliaSettings(k=8, find_width=4, republish_seconds=200, refresh_seconds=150))
    nodes = swarm.grow(14)
    stored(swarm, nodes[0], record(0, KEY, expires=WALL + 20_000))
    del swarm.nodes[nodes[0].peer]
    for number in range(30, 44):  # by the end, none of the first holders is left
        del swarm.nodes[order_of(swarm)[0].peer]
        introducer = order_of(swarm)[-1].peer
        newcomer = swarm.start(number)
        swarm.send(newcomer, newcomer.join(swarm.now, [introducer]))
        swarm.run(60)
    swarm.run(400)
    assert len(holders(swarm)) >= 7
    assert [each.value for each in found(swarm, order_of(swarm)[-1]).records] == [b"v"]


def test_one_holder_republishes_a_record_for_all_holders() -> None:
    swarm = Swarm(3, settings=KademliaSettings(republish_seconds=300))
    nodes = swarm.grow(12)
    stored(swarm, nodes[0], record(0, KEY, expires=WALL + 20_000))
    del swarm.nodes[nodes[0].peer]
    before = len(swarm.trace)
    swarm.run(480)
    times = sorted({node.replication._due[KEY, nodes[0].peer] for node in swarm.nodes.values()})
    assert times[0] > swarm.now  # every holder has seen a later store than the first
    stores = len(swarm.trace) - before
    assert stores < 12 * 12 * 4  # a few stores, instead of one by each holder


def test_an_expired_record_is_not_stored_again() -> None:
    swarm = Swarm(4, settings=KademliaSettings(republish_seconds=100, refresh_seconds=10_000))
    nodes = swarm.grow(5)
    stored(swarm, nodes[0], record(0, KEY, expires=WALL + swarm.now + 90))
    swarm.run(120)
    before = len(swarm.trace)
    swarm.run(300)
    assert len(swarm.trace) == before


# Handing over.


def test_a_newcomer_receives_its_records_once() -> None:
    swarm = Swarm(5, settings=NEVER)
    nodes = swarm.grow(8)
    keys = [record_key("test", bytes([number])) for number in range(10)]
    for key in keys:
        stored(swarm, nodes[0], record(0, key, expires=WALL + 20_000))
    newcomer = swarm.start(50)
    swarm.send(newcomer, newcomer.join(swarm.now, [nodes[4].peer]))
    swarm.run(30)
    assert {each.key for each in newcomer.records} == set(keys)
    assert not swarm.refused
    sent = len(swarm.trace)
    for node in nodes:  # when it comes again, no node hands it anything a second time
        swarm.send(node, node.remove(swarm.now, newcomer.peer))
        swarm.send(node, node.add(swarm.now, newcomer.peer, [address(50)]))
    swarm.run(5)
    assert len(swarm.trace) - sent <= 2 * 2 * len(nodes)  # pings and pongs in both directions


def test_a_newcomer_far_from_the_key_receives_nothing() -> None:
    swarm = Swarm(6, settings=KademliaSettings(k=4, find_width=2, republish_seconds=inf))
    nodes = swarm.grow(40)
    stored(swarm, nodes[0], record(0, KEY, expires=WALL + 20_000))
    last = distance(order_of(swarm)[8].key, KEY)
    far = next(n for n in range(100, 200) if distance(node_key(signer(n).peer), KEY) > last)
    newcomer = swarm.start(far)
    swarm.send(newcomer, newcomer.join(swarm.now, [nodes[0].peer]))
    swarm.run(30)
    assert len(newcomer.records) == 0


# Copies left by finds.


def test_a_lookup_sends_the_newest_record_to_holders_of_an_old_one() -> None:
    swarm = Swarm(7, settings=NEVER)
    nodes = swarm.grow(12)
    stored(swarm, nodes[0], record(0, KEY, b"new", sequence=2))
    behind = order_of(swarm)[0] if order_of(swarm)[0] is not nodes[0] else order_of(swarm)[1]
    behind.records._by_key[KEY][nodes[0].peer] = check_record(signer(0), record(0, KEY, b"old", sequence=1))
    asker = next(node for node in nodes if node not in (behind, nodes[0]))
    assert [each.value for each in found(swarm, asker).records] == [b"new"]
    swarm.run(1)
    assert [each.value for each in behind.records.get(WALL + swarm.now, KEY)] == [b"new"]


def test_a_node_far_from_the_key_keeps_a_copy_briefly() -> None:
    swarm = Swarm(8, settings=KademliaSettings(k=4, find_width=2, republish_seconds=inf, cache_seconds=100))
    swarm.grow(60)
    far = next(node for node in reversed(order_of(swarm)) if len(node.table) >= 10)
    given = token(far, signer(99).peer, swarm.now)
    sender = signer(99).peer
    fact = record(0, KEY, expires=WALL + 20_000)
    plain = [m for _, m in far.receive(swarm.now, sender, Store(1, (), fact, given)) if isinstance(m, Stored)]
    copy = [
        m for _, m in far.receive(swarm.now, sender, Store(2, (), fact, given, True)) if isinstance(m, Stored)
    ]
    assert [plain[0].refused, copy[0].refused] == [Refusal.DISTANT, ""]

    def shown() -> int:
        sends = far.receive(swarm.now, sender, FindValue(3, (), KEY, b""))
        return next(len(message.records) for _, message in sends if isinstance(message, Values))

    assert (shown(), len(far.records)) == (1, 0)
    swarm.run(101)
    assert shown() == 0


def test_copies_left_by_lookups_are_few_and_never_outdated() -> None:
    cache = RecordCache(3, 100.0)
    old, new = (check_record(signer(0), record(1, KEY, b"v", sequence=number)) for number in (1, 2))
    assert (cache.put(0.0, new), cache.put(0.0, old)) == (True, False)
    assert [each.sequence for each in cache.get(0.0, WALL, KEY)] == [2]
    for author in range(2, 2 + CACHED_PER_KEY_MAX):
        cache.put(0.0, check_record(signer(0), record(author, record_key("test", bytes([author])))))
    assert len(cache) == 3
    assert cache.get(0.0, WALL, KEY) == []


# Too few holders.


def test_a_store_reports_that_it_reached_too_few_holders() -> None:
    swarm = Swarm(9)
    nodes = swarm.grow(8)
    assert stored(swarm, nodes[0], record(0, KEY)).is_safe
    for node in nodes[1:]:
        del swarm.nodes[node.peer]
    alone = stored(swarm, nodes[0], record(0, KEY, sequence=2))
    assert (alone.acknowledged, alone.wanted, alone.is_safe) == (1, 3, False)


def test_a_small_swarm_needs_no_more_holders_than_it_has() -> None:
    swarm = Swarm(10)
    nodes = swarm.grow(2)
    both = stored(swarm, nodes[0], record(0, KEY))
    assert (both.acknowledged, both.wanted, both.is_safe) == (2, 2, True)


def test_a_store_by_a_client_that_reaches_nobody_fails() -> None:
    node = lone()
    node.appear([], client=True)
    node.store(0.0, record(0, KEY))
    (event,) = [each for each in node.events if isinstance(each, RecordStored)]
    assert (event.acknowledged, event.is_safe) == (0, False)


# Splits.


def test_two_halves_agree_on_the_newest_record_after_a_split() -> None:
    settings = KademliaSettings(republish_seconds=600, refresh_seconds=200, lost_retry_seconds=30)
    swarm = Swarm(11, settings=settings)
    nodes = swarm.grow(12)
    stored(swarm, nodes[0], record(0, KEY, b"old", sequence=1, expires=WALL + 20_000))
    left = {node.peer: node for node in nodes[:6]}
    right = {node.peer: node for node in nodes[6:]}
    # Each half runs while the other is stopped: stopped nodes look dead to the others.
    swarm.nodes = dict(right)
    swarm.run(900)
    swarm.nodes = dict(left)
    for node in left.values():
        swarm.send(node, node.wake(swarm.now))
    swarm.run(900)
    stored(swarm, nodes[0], record(0, KEY, b"new", sequence=2, expires=WALL + 20_000))
    assert all(peer not in right for node in left.values() for peer in (c.peer for c in node.table))
    swarm.nodes = {**left, **right}
    for node in right.values():
        swarm.send(node, node.wake(swarm.now))
    swarm.run(700)
    values = [each.value for node in nodes for each in node.records.get(WALL + swarm.now, KEY)]
    assert values == [b"new"] * 12


# Contacts that may become members of a table.


def test_a_contact_that_asks_but_never_answers_is_removed() -> None:
    swarm = Swarm(12)
    nodes = swarm.grow(4)
    mute = nodes[2]
    swarm.tamper[mute.peer] = lambda message: Stored(1, (), "") if isinstance(message, Pong) else message
    for _ in range(60):
        for node in nodes:
            if node is not mute:
                swarm.send(node, node.receive(swarm.now, mute.peer, Ping(9, ())))
                contact = node.table.get(mute.peer)
                if contact is not None:
                    swarm.send(node, node.ping(swarm.now, mute.peer)[1])
        swarm.run(5)
    assert all(node.table.get(mute.peer) is None for node in nodes if node is not mute)


def test_a_contact_that_sends_a_bad_answer_is_removed() -> None:
    node = met(met(lone(), signer(1).peer), signer(2).peer)
    _, sends = node.find(0.0, KEY)
    asked = dict(sends)
    liar, honest = signer(1).peer, signer(2).peer
    with pytest.raises(RemoteProtocolError):
        node.receive(0.01, liar, Values(asked[liar].id, (), (record(3, record_key("a", b"")),), False, ()))
    assert node.deadline == 0.01
    node.wake(0.01)
    node.receive(0.015, honest, Values(asked[honest].id, (), (record(4, KEY),), False, ()))
    assert [len(event.records) for event in node.events if isinstance(event, RecordsFound)] == [1]
    assert node.table.get(liar) is None
    # its request is answered, but it is not added to the table
    assert node.receive(0.1, liar, Ping(1, ()))[1:] == []


# A store in a known neighbourhood.


def sent_by(swarm: Swarm, node: Kademlia, since: int) -> list[Message]:
    """Return the messages that a node sent after the first `since` entries of the trace."""
    data = [data for _, sender, _, data in swarm.trace[since:] if sender == node.peer]
    return [decode(each, Message, bytes_max=MESSAGE_BYTES_MAX) for each in data]


def test_a_store_among_known_nodes_is_one_request_to_each_holder() -> None:
    swarm = Swarm(21)
    nodes = swarm.grow(12)
    since, begun = len(swarm.trace), swarm.now
    assert stored(swarm, nodes[3], record(3, KEY)).acknowledged == 12
    assert swarm.now - begun < 0.25  # two one-way delays of 20 to 80 ms, polled every 100 ms
    sends = sent_by(swarm, nodes[3], since)
    assert [type(message) for message in sends] == [Store] * 11
    assert len(holders(swarm)) == 12


def test_a_store_continues_to_a_nearer_node_that_holders_name() -> None:
    swarm = Swarm(22, settings=KademliaSettings(k=4, find_width=3))
    nodes = swarm.grow(10)
    others = order_of(swarm)
    newcomer = next(
        node
        for node in map(swarm.start, range(100, 400))
        if distance(node.key, KEY) < distance(others[0].key, KEY)
    )
    for node in [node for node in swarm.nodes.values() if node not in (*nodes, newcomer)]:
        del swarm.nodes[node.peer]
    storer = others[-1]
    swarm.send(newcomer, newcomer.join(swarm.now, [others[0].peer]))
    swarm.run(5)
    storer.table.remove(newcomer.peer)
    number = nodes.index(storer)
    assert stored(swarm, storer, record(number, KEY)).acknowledged == 4
    assert newcomer in holders(swarm)


def test_an_outdated_token_costs_one_more_round_trip() -> None:
    swarm = Swarm(23)
    nodes = swarm.grow(8)
    for node in nodes[1:]:
        node.tokens = WriteTokens(b"another")  # as after a restart
    since = len(swarm.trace)
    assert stored(swarm, nodes[0], record(0, KEY)).acknowledged == 8
    assert len([message for message in sent_by(swarm, nodes[0], since) if isinstance(message, Store)]) == 14


def test_a_node_does_not_use_tokens_from_minutes_ago() -> None:
    swarm = Swarm(24, settings=KademliaSettings(refresh_seconds=10_000))
    nodes = swarm.grow(8)
    swarm.run(TOKEN_SECONDS + 60)
    since = len(swarm.trace)
    assert stored(swarm, nodes[0], record(0, KEY)).acknowledged == 8
    kinds = [type(message) for message in sent_by(swarm, nodes[0], since)]
    assert kinds.count(FindNode) == kinds.count(Store) == 7


def test_a_client_keeps_no_state_for_its_token_holders() -> None:
    node = lone()
    given = token(node, signer(1).peer)
    node.appear((), client=True)
    assert refusal(node, 1, given) == Refusal.UNPROVEN
