"""Neighbourhoods: which peers list each other as a swarm grows and shrinks, and how little unknown peers and
liars can change."""

from collections import Counter
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from dht import keys
from dht.keys import node_number
from gossip.member import MemberDown, NeighbourhoodLookupWanted, SelfAccused
from gossip.messages import (
    DIGESTS_MAX,
    Compare,
    Gossip,
    Message,
    Ping,
    PingRequest,
    ScopedCompare,
    ScopedSync,
    SuspectBody,
    Sync,
    sign_body,
)
from gossip.push_pull import SEARCH_SYNCS_MAX
from gossip.refutations import OUTSIDERS_REFUTED_MAX
from gossip.settings import SwimSettings
from gossip.swim import Swim
from gossip.view import DEPTH_MAX, KEY_BITS, Scope
from tests.gossip.neighbourhoods import SMALL, Neighbourhoods
from tests.gossip.swarm import HashSigner, peer_of, profile_of
from tests.gossip.test_hostile import any_facts, numbers, true_facts

PEERS = [peer_of(number) for number in range(400)]
LEAST, MOST = SMALL.scope_members_min, SMALL.scope_members_max


def settled(count: int, seed: int = 1, loss: float = 0.0) -> Neighbourhoods:
    swarm = Neighbourhoods(count, seed=seed, loss=loss)
    swarm.settle(at_most=90)
    return swarm


@pytest.fixture(scope="module")
def town() -> Neighbourhoods:
    """110 peers in a stable swarm, with a tenth of all datagrams lost. Tests that share it only observe it or
    kill members."""
    return settled(110, seed=2, loss=0.1)


def depths(swarm: Neighbourhoods) -> dict[int, int]:
    return {number: core.scope.depth for number, core in swarm.cores.items()}


def test_all_members_list_exactly_their_neighbourhood(town: Neighbourhoods) -> None:
    assert min(depths(town).values()) >= 2
    assert all(LEAST <= len(town.listed(number)) <= MOST for number in town.cores)


def test_under_loss_depths_are_stable_and_nobody_is_declared_dead(town: Neighbourhoods) -> None:
    before = depths(town)
    assert len(set(before.values())) > 1, "all peers have the same depth, so the test is too weak"
    town.run(60)
    assert depths(town) == before
    assert not [event for heard in town.events.values() for event in heard if isinstance(event, MemberDown)]


def test_fruitless_searches_become_less_frequent() -> None:
    swarm = settled(40)
    period = SMALL.sync_period_seconds(MOST)
    swarm.run(3 * SEARCH_SYNCS_MAX * period)

    def searches() -> Counter[int]:
        return Counter(
            {
                number: sum(isinstance(event, NeighbourhoodLookupWanted) for event in heard)
                for number, heard in swarm.events.items()
            }
        )

    before = searches()
    swarm.run(2 * SEARCH_SYNCS_MAX * period)
    seldom = searches() - before
    assert all(1 <= seldom[number] <= 4 for number in swarm.cores)
    # A newcomer does not wait for the next search.
    swarm.start(100, join=3)
    swarm.run(2 * period)
    assert swarm.right()


def test_a_death_is_reported_only_to_peers_that_listed_the_member(
    town: Neighbourhoods,
) -> None:
    listed_by = {number for number in town.cores if 7 in town.listed(number)} - {7}
    assert LEAST - 1 <= len(listed_by) < 100
    town.kill(7)
    town.run_until(lambda: not any(7 in town.listed(number) for number in listed_by), at_most=60)
    town.run(10)  # all suspect it, so it has over 5 s to refute
    told = {
        number
        for number, heard in town.events.items()
        if any(isinstance(event, MemberDown) and event.peer == peer_of(7) for event in heard)
    }
    assert told == listed_by


def test_neighbourhoods_split_as_the_swarm_grows_and_merge_as_it_shrinks() -> None:
    swarm = settled(20)
    assert set(depths(swarm).values()) == {0}
    for number in range(20, 110):
        swarm.start(number, join=swarm.rng.choice(sorted(swarm.cores)))
        swarm.run(0.2)
    swarm.settle(at_most=90)
    grown = depths(swarm)
    assert min(grown.values()) >= 2
    for number in range(20, 110):
        swarm.kill(number)
        swarm.run(1)
    swarm.settle(at_most=240)
    assert all(depth < grown[number] for number, depth in depths(swarm).items())
    # Each depth occurs at most once while the swarm grows and once while it shrinks, so none oscillates.
    assert all(max(map(swarm.depths[number].count, swarm.depths[number])) <= 2 for number in swarm.cores)


def test_a_peers_load_does_not_grow_with_the_swarm() -> None:
    loads = []
    for count in (40, 140):
        swarm = settled(count)
        sent, told, bytes_before = swarm.messages.total(), swarm.told.total(), swarm.sent_bytes
        swarm.run(30)
        loads.append(
            (
                (swarm.messages.total() - sent) / count,
                (swarm.told.total() - told) / count,
                (swarm.sent_bytes - bytes_before) / count,
            )
        )
    assert all(large < 1.2 * small + 1 for small, large in zip(*loads, strict=True)), loads


# The arithmetic.


def test_keys_are_as_wide_as_those_of_the_dht() -> None:
    scope = scope_of(PEERS[0], 7)
    assert KEY_BITS == keys.KEY_BITS
    assert scope.own_key() == keys.node_key(PEERS[0])
    beyond, anywhere = scope.key_beyond(), scope.random_key(Random(1))
    assert keys.distance(beyond, scope.own_key()).bit_length() == KEY_BITS - 7
    assert keys.distance(anywhere, scope.own_key()).bit_length() <= KEY_BITS - 7


def scope_of(me: PeerId, depth: int = 0) -> Scope:
    scope = Scope(me, node_number, members_min=LEAST, members_max=MOST)
    scope.depth = depth
    return scope


populations = st.lists(st.sampled_from(PEERS[1:]), unique=True).map(lambda peers: [PEERS[0], *peers])


@given(populations, st.integers(0, 6))
def test_a_fitted_depth_is_stable_for_the_same_members(population: list[PeerId], depth: int) -> None:
    scope = scope_of(PEERS[0], depth)
    fitted = scope.fit(population)
    assert fitted >= depth - 1
    scope.depth = fitted
    if fitted > depth:
        assert scope.fit(population) == fitted
    elif fitted == depth - 1:
        assert scope.fit(filter(scope_of(PEERS[0], depth).holds, population)) <= fitted


@given(st.sampled_from(PEERS), st.sampled_from(PEERS), st.integers(0, 8), st.integers(0, 8))
def test_two_scopes_agree_on_the_peers_in_both(one: PeerId, other: PeerId, depth: int, others: int) -> None:
    left, right = scope_of(one, depth), scope_of(other, others)
    ours, theirs = left.common(other, others), right.common(one, depth)
    both = {peer for peer in PEERS if left.holds(peer) and right.holds(peer)}
    assert set(ours.among(PEERS) if ours else ()) == both
    assert set(theirs.among(PEERS) if theirs else ()) == both
    assert left.held_by(other, others) == right.holds(one)


@given(st.integers(0, 30), st.randoms(use_true_random=False))
def test_search_keys_are_near_possibly_missing_neighbours(depth: int, rng: Random) -> None:
    scope = scope_of(PEERS[0], depth)
    own, beyond = _bits(scope.own_key()), _bits(scope.key_beyond())
    assert beyond[:depth] == own[:depth]
    assert beyond[depth] != own[depth]
    assert beyond[depth + 1 :] == own[depth + 1 :]
    assert _bits(scope.random_key(rng))[:depth] == own[:depth]


def _bits(key: bytes) -> str:
    return f"{int.from_bytes(key, 'big'):0{8 * len(key)}b}"


# Unknown peers and liars.


def core_of(number: int, depth: int | None = None, limits: SwimSettings = SMALL) -> Swim:
    core = Swim(HashSigner(peer_of(number)), profile_of(number), limits, Random(1), 1, 0.0, place=node_number)
    core.scope.depth = depth or 0
    return core


def outsider_of(core: Swim) -> int:
    return next(number for number in range(1, 400) if not core.scope.holds(peer_of(number)))


def test_scoped_and_full_swarms_refuse_each_others_lists() -> None:
    full = Swim(HashSigner(peer_of(0)), profile_of(0), SMALL, Random(1), 1, 0.0)
    cases: list[tuple[Swim, Message]] = [
        (full, ScopedSync(True, 0, ())),
        (full, ScopedCompare(0, (bytes(16),))),
        (core_of(0), Sync(True, ())),
        (core_of(0), Compare(bytes(16))),
    ]
    for core, message in cases:
        with pytest.raises(RemoteProtocolError):
            core.receive(0.0, peer_of(1), message)


def test_refutations_for_accusers_outside_the_scope_are_limited() -> None:
    core = core_of(0, depth=4)
    accuser = outsider_of(core)
    for incarnation in range(1, 10):
        body = SuspectBody(core.peer, incarnation, 100)
        core.receive(0.0, peer_of(accuser), Ping(1, (sign_body(HashSigner(peer_of(accuser)), body),)))
    refuted = [event.incarnation for event in core.events if isinstance(event, SelfAccused)]
    assert refuted == [2 + number for number in range(OUTSIDERS_REFUTED_MAX)]
    assert len(core.members) == 1


def test_a_peer_outside_the_scope_is_answered_but_neither_listed_nor_pinged() -> None:
    core = core_of(0, depth=4)
    outside = outsider_of(core)
    joining = core_of(outside).join(0.0, [core.peer])[0][1]
    assert isinstance(joining, ScopedSync)
    sends = core.receive(0.0, peer_of(outside), Ping(1, joining.facts))
    assert [type(message).__name__ for _, message in sends] == ["Ack"]
    sends = core.receive(0.0, peer_of(outside), joining)
    assert sends == [(peer_of(outside), ScopedSync(False, 4, ()))]
    assert [member.peer for member in core.members] == [core.peer]


def test_a_scope_made_too_deep_by_a_liar_recovers() -> None:
    core = core_of(0)
    liar = next(peer for peer in PEERS[1:] if core.scope.held_by(peer, 3))
    core.join(0.0, [liar])
    core.receive(0.0, liar, ScopedSync(False, DEPTH_MAX, ()))
    assert core.scope.joining, "a liar made the scope deeper than the bits that it shares with us"
    core.receive(0.0, liar, ScopedSync(False, 3, ()))
    assert core.scope.depth == 3
    while core.deadline < 3 * SMALL.sync_interval_seconds + 30:
        core.wake(core.deadline)
    assert core.scope.depth == 0


depths_said = st.integers(0, 6) | st.just(DEPTH_MAX)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Ping, numbers, st.lists(true_facts, max_size=6).map(tuple)),
    st.builds(PingRequest, numbers, st.sampled_from(PEERS[:12]), any_facts),
    st.builds(Gossip, any_facts),
    st.builds(
        ScopedCompare,
        depths_said,
        st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=DIGESTS_MAX).map(tuple),
        any_facts,
    ),
    st.builds(ScopedSync, st.booleans(), st.none() | depths_said, any_facts),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(PEERS[:12]), messages), max_size=30),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_peer_outside_the_neighbourhood_is_never_listed(
    arrivals: list[tuple[PeerId, Message]], depth: int, joining: bool
) -> None:
    core = core_of(0, depth, SwimSettings(scope_members_min=2, scope_members_max=6, members_max=6))
    if joining:
        core.join(0.0, [peer_of(1)])
    for count, (sender, message) in enumerate(arrivals):
        with suppress(RemoteProtocolError):
            core.receive(count * 0.3, sender, message)
        if core.deadline <= count * 0.3:
            core.wake(count * 0.3)
        listed = [member.peer for member in core.members]
        assert all(core.scope.holds(peer) for peer in listed)
        assert len(listed) <= 6
        assert 0 <= core.scope.depth <= DEPTH_MAX
