"""How peers agree on a group: the matchmaking core, in virtual time."""

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from dht.settings import KademliaSettings as DhtSettings
from gossip import matchmaking, matchmaking_messages
from gossip.averaging.attendance import Attendance
from gossip.averaging.group import Group, GroupMember, Terms
from gossip.matchmaking import Formed, GroupDeclined, GroupWish, Matchmaking, NotFormed
from gossip.matchmaking_messages import Closed, Propose, Ready
from sim.engine import Engine
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.ports import Wire

KEY, TENSORS = blake3(b"key").digest(), blake3(b"tensors").digest()


def peer_of(number: int) -> PeerId:
    return PeerId(blake3(number.to_bytes(8, "big")).digest())


def member_of(number: int, nonce: int = 0) -> GroupMember:
    return GroupMember(peer_of(number), bytes([nonce]) * 16, 1_000)


def make_group(members: tuple[GroupMember, ...], signature: bytes = TENSORS) -> Group:
    return Group(b"run", 3, 0, Terms("butterfly", "float32", signature, 10, "float32"), members)


def other_terms(group: Group, **changed: object) -> Group:
    terms = msgspec.structs.replace(group.terms, **changed)
    return msgspec.structs.replace(group, terms=terms)


class World:
    """Peers that wish for a group under one key."""

    def __init__(self, count: int, *, loss: float = 0.0, seed: int = 1) -> None:
        self.events: dict[PeerId, list[tuple[float, object]]] = {peer_of(n): [] for n in range(count)}
        self.engine = Engine(
            SimLinks(NetworkModel(loss=loss), seed),
            publish=lambda now, peer, event: self.events[peer].append((now, event)),
            wires={"": Wire(matchmaking_messages.Message, matchmaking.MESSAGE_BYTES_MAX)},
        )
        self.count = count
        self.cores = [Matchmaking(peer_of(number)) for number in range(count)]
        for number, core in enumerate(self.cores):
            self.engine.add(peer_of(number), core)

    def wish(self, number: int, at: float = 0.0, expected: int | None = None, **options: object) -> None:
        others = [peer_of(each) for each in range(self.count if expected is None else expected)]
        given_options = {"window_seconds": 2.0, "patience_seconds": 20.0, **options}

        def begin(core: Matchmaking, now: float) -> matchmaking.Sends:
            wish = GroupWish(member_of(number), KEY, others, make_group, now, **given_options)  # type: ignore[arg-type]  # of several types
            return core.begin(now, wish)

        self.engine.call(at, peer_of(number), begin)

    def groups(self) -> dict[PeerId, Group]:
        found = {}
        for peer, events in self.events.items():
            formed = [event.group for _, event in events if isinstance(event, Formed)]
            assert len(formed) <= 1, "a wish put a peer into two groups"
            if formed:
                found[peer] = formed[0]
        return found

    def reasons(self) -> list[str]:
        return [
            event.reason for rows in self.events.values() for _, event in rows if isinstance(event, NotFormed)
        ]


def test_all_expected_peers_form_one_group_before_the_window_ends() -> None:
    world = World(8)
    for number in range(8):
        world.wish(number, at=0.1 * number, window_seconds=15.0)
    world.engine.run(5.0)
    groups = world.groups()
    assert len(groups) == 8
    assert len({group.id for group in groups.values()}) == 1
    assert len(groups[peer_of(0)].members) == 8
    assert max(now for rows in world.events.values() for now, _ in rows) < 2.0


def test_absent_peers_are_awaited_only_until_the_window_ends() -> None:
    world = World(4)
    for number in range(3):
        world.wish(number)
    world.engine.run(5.0)
    assert {len(group.members) for group in world.groups().values()} == {3}


def test_a_dead_convener_is_skipped() -> None:
    world = World(6)
    order = sorted(range(5), key=lambda number: blake3(KEY + peer_of(number)).digest())
    for number in range(5):
        # All wait for a sixth peer that never comes, so the first in order dies before it proposes.
        world.wish(number, window_seconds=3.0, patience_seconds=30.0)
    world.engine.kill(peer_of(order[0]), 1.0)
    world.engine.run(25.0)
    groups = world.groups()
    assert len(groups) == 4
    assert len({group.id for group in groups.values()}) == 1


def test_a_late_peer_learns_that_the_round_has_its_group() -> None:
    world = World(4)
    for number in range(3):
        world.wish(number)
    world.wish(3, at=6.0)
    world.engine.run(10.0)
    assert peer_of(3) not in world.groups()
    assert world.reasons() == ["the group of this round was formed without this peer"]


def test_an_unexpected_peer_that_is_ready_in_time_joins_the_group() -> None:
    for seed in range(8):
        world = World(3, seed=seed)
        world.wish(2)
        for number in range(2):
            world.wish(number, at=0.4, expected=2, others=[peer_of(2)])
        world.engine.run(5.0)
        assert {len(group.members) for group in world.groups().values()} == {3}
        assert max(now for rows in world.events.values() for now, _ in rows) < 0.7


def test_an_unanswered_early_message_delays_one_group_only() -> None:
    world = World(3)
    formed = []
    early = Ready(KEY, bytes(16), 1_000)
    for turn in range(3):
        at = 10.0 * turn
        for number in range(2):

            def tell(core: Matchmaking, now: float) -> matchmaking.Sends:
                core.end(KEY)
                return core.receive(now, peer_of(2), early)

            world.engine.call(at, peer_of(number), tell)
            world.wish(number, at=at + 0.4, expected=2)
        world.events = {peer: [] for peer in world.events}
        world.engine.run(at + 8.0)
        assert {len(group.members) for group in world.groups().values()} == {2}
        formed.append(max(now for rows in world.events.values() for now, _ in rows) - at - 0.4)
    assert formed[0] > matchmaking.ANSWER_SECONDS
    assert all(seconds < 0.2 for seconds in formed[1:])


def test_without_round_numbers_the_remaining_peers_form_the_next_group() -> None:
    world = World(5)
    for number in range(5):
        world.wish(number, size_max=2, is_exclusive=False)
    world.engine.run(19.0)
    groups = world.groups()
    assert Counter(len(group.members) for group in groups.values()) == {2: 4}
    assert len({group.id for group in groups.values()}) == 2
    world.engine.run(30.0)
    assert world.reasons() == ["nobody else was ready"]


def test_a_lone_peer_forms_no_group() -> None:
    world = World(1)
    world.wish(0, patience_seconds=5.0)
    world.engine.run(30.0)
    assert world.groups() == {}
    assert world.reasons() == ["nobody else was ready"]


def test_a_peer_that_all_others_exclude_is_not_waited_for() -> None:
    """Without this, the wish of the excluded peer alone would keep another peer from making a step by itself,
    round after round."""
    world = World(2)
    silent = peer_of(1)
    world.wish(0, patience_seconds=5.0, leaves_out=lambda peer: peer == silent)
    world.wish(1, patience_seconds=9.0, size_min=3)  # so it proposes nothing
    world.engine.run(6.0)
    assert world.reasons() == ["nobody else was ready"]


def test_no_group_is_smaller_than_requested() -> None:
    world = World(4)
    for number in range(2):
        world.wish(number, size_min=3)
    world.engine.run(25.0)
    assert world.groups() == {}


@settings(max_examples=30)
@given(st.integers(2, 9), st.integers(0, 1_000), st.sampled_from([0.0, 0.1, 0.3]), st.booleans())
def test_a_group_is_held_by_all_its_members_or_declined(
    count: int, seed: int, loss: float, is_exclusive: bool
) -> None:
    world = World(count, loss=loss, seed=seed)
    for number in range(count):
        world.wish(
            number, at=(seed * (number + 1) % 17) / 10, is_exclusive=is_exclusive, size_max=4 + seed % 5
        )
    world.engine.run(60.0)
    groups = world.groups()
    for peer, group in groups.items():
        assert peer in group.peers
        for other in group.peers:
            held = groups.get(other)
            declined = any(isinstance(event, GroupDeclined) for _, event in world.events[peer])
            assert held == group or declined or loss > 0


def make_wish(now: float = 0.0) -> GroupWish:
    return GroupWish(
        member_of(0), KEY, [peer_of(1)], make_group, now, window_seconds=5.0, patience_seconds=9.0
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda group: make_group(group.members, KEY),
        lambda group: Group(b"other", 3, 0, group.terms, group.members),
        lambda group: other_terms(group, codec="bfloat16"),
        lambda group: other_terms(group, items=11),
        lambda group: make_group((group.members[0], member_of(2))),
    ],
)
def test_a_group_for_another_key_is_refused(spoil: Callable[[Group], Group]) -> None:
    wish = make_wish()
    group = spoil(make_group((member_of(0), member_of(1))))
    with pytest.raises(RemoteProtocolError):
        wish.receive(0.0, peer_of(1), Propose(KEY, group))
    assert wish.group is None


def test_a_group_with_a_nonce_of_an_earlier_wish_is_declined() -> None:
    wish = make_wish()
    group = make_group((member_of(0, nonce=9), member_of(1)))
    sends = wish.receive(0.0, peer_of(1), Propose(KEY, group))
    assert [(peer, type(message).__name__) for peer, message in sends] == [(peer_of(1), "Decline")]


def test_a_second_group_is_declined_to_all_its_members() -> None:
    wish = make_wish()
    first = make_group((member_of(0), member_of(1)))
    second = make_group((member_of(0), member_of(2), member_of(3)))
    assert wish.receive(0.0, peer_of(1), Propose(KEY, first)) == []
    sends = wish.receive(0.0, peer_of(2), Propose(KEY, second))
    assert [peer for peer, _ in sends] == [peer_of(2), peer_of(3)]
    assert wish.group == first


def test_a_withdrawn_wish_accepts_no_group() -> None:
    core = Matchmaking(peer_of(0))
    core.begin(0.0, make_wish())
    core.end(KEY)
    group = make_group((member_of(0), member_of(1)))
    sends = core.receive(0.0, peer_of(1), Propose(KEY, group))
    assert [type(message).__name__ for _, message in sends] == ["Decline"]
    assert core.receive(0.0, peer_of(1), Ready(KEY, bytes(16), 1)) == []
    assert core.receive(0.0, peer_of(1), Closed(KEY)) == []


def test_wishes_are_bounded() -> None:
    core = Matchmaking(peer_of(0))
    for number in range(matchmaking.WISHES_MAX):
        key = blake3(number.to_bytes(2, "big")).digest()
        wish = GroupWish(member_of(0), key, [], make_group, 0.0, window_seconds=1.0, patience_seconds=2.0)
        core.begin(0.0, wish)
    with pytest.raises(ValueError, match="at most"):
        core.begin(0.0, make_wish())


def test_peers_introduced_later_learn_of_a_wish_and_are_bounded() -> None:
    world = World(3)
    for number in range(3):
        world.wish(number, expected=0, window_seconds=4.0, size_hoped=3)
    for number in range(3):
        found = [peer_of(each) for each in range(3)]
        world.engine.call(1.0, peer_of(number), lambda core, _, found=found: core.introduce(KEY, found))  # type: ignore[misc]  # bound now
    world.engine.run(10.0)
    groups = {
        event.group.id for events in world.events.values() for _, event in events if isinstance(event, Formed)
    }
    assert len(groups) == 1
    core = Matchmaking(peer_of(0))
    wish = GroupWish(member_of(0), KEY, (), make_group, 0.0, window_seconds=1.0, patience_seconds=9.0)
    core.begin(0.0, wish)
    many = [peer_of(number) for number in range(1, matchmaking.OTHERS_MAX + 100)]
    assert len(core.introduce(KEY, many)) == matchmaking.OTHERS_MAX
    assert core.introduce(KEY, [peer_of(10**6)]) == []


def test_peers_whose_declarations_did_not_fit_still_join_groups() -> None:
    """A DHT key holds a bounded number of records. Peers whose own records did not fit find the others there,
    and send them their wishes.
    """
    count, declared = 96, DhtSettings().records_per_key_max
    assert declared < count
    world = World(count)
    for number in range(count):
        world.wish(number, expected=0, window_seconds=4.0, size_hoped=8, size_max=8, is_exclusive=False)
        found = [peer_of(each) for each in range(declared)]
        world.engine.call(1.0, peer_of(number), lambda core, _, found=found: core.introduce(KEY, found))  # type: ignore[misc]  # bound now
    world.engine.run(30.0)
    groups = world.groups()
    crowded_out = {peer_of(number) for number in range(declared, count)}
    assert len(crowded_out & groups.keys()) >= len(crowded_out) - 1, "more than one peer is left over"
    assert len(groups) >= count - 1
    assert {len(group.members) for group in groups.values()} <= set(range(2, 9))


def test_a_wish_survives_one_peers_claim_that_the_round_is_closed() -> None:
    others = [peer_of(1), peer_of(2)]
    wish = GroupWish(member_of(0), KEY, others, make_group, 0.0, window_seconds=5.0, patience_seconds=9.0)
    for _ in range(3):
        wish.receive(0.0, peer_of(1), Closed(KEY))
        wish.receive(0.0, peer_of(9), Closed(KEY))
    assert not wish.is_over
    wish.receive(0.0, peer_of(2), Closed(KEY))
    assert wish.is_over


def test_forty_silent_ready_peers_delay_only_the_first_round() -> None:
    """Such peers say that they want a group, and never propose one. Each round has a different key, and so a
    different order."""
    honest, silent = [peer_of(n) for n in range(8)], [peer_of(100 + n) for n in range(40)]
    attendances = {peer: Attendance() for peer in honest}
    lasted = []
    for number in range(20):
        key = blake3(number.to_bytes(2, "big")).digest()
        wishes = {
            peer: GroupWish(
                GroupMember(peer, bytes(16), 1),
                key,
                (),
                make_group,
                0.0,
                window_seconds=1.0,
                patience_seconds=60.0,
                others=honest,
                leaves_out=lambda other, own=attendances[peer]: own.is_left_out(0.0, other),  # type: ignore[misc]  # bound now
                rank=lambda other, own=attendances[peer], me=peer: rank_of(own, me, other),  # type: ignore[misc]  # bound now
            )
            for peer in honest
        }
        lasted.append(form(wishes, silent, key))
        for peer, wish in wishes.items():
            assert wish.group is not None
            attendances[peer].passed_over(wish.passed_over)
            attendances[peer].failed(0.0, [other for other in wish.group.peers if other in silent], 2.0)
            attendances[peer].completed(other for other in wish.group.peers if other in honest)
    assert max(lasted[1:]) < 2.0, "the first round did not wait for their turns to propose"


def rank_of(attendance: Attendance, me: PeerId, other: PeerId) -> int:
    return 2 * attendance.is_passed_over(other) + (other != me and not attendance.has_completed(other))


def form(wishes: dict[PeerId, GroupWish], silent: list[PeerId], key: bytes) -> float:
    """Deliver all messages simultaneously until each wish has a group; return how long that took."""
    now = 0.0
    while any(wish.group is None for wish in wishes.values()):
        assert now < 60.0, "no group formed"
        queue = [(peer, to, message) for peer, wish in wishes.items() for to, message in wish.wake(now)]
        for peer, wish in wishes.items():
            for other in silent:
                sends = wish.receive(now, other, Ready(key, bytes(16), 1))
                queue += [(peer, to, message) for to, message in sends]
        while queue:
            sender, to, message = queue.pop(0)
            if to in wishes:
                queue += [(to, after, sent) for after, sent in wishes[to].receive(now, sender, message)]
        now += 0.25
    return now


def test_one_message_does_not_cause_hashing_all_ready_peers() -> None:
    wish = GroupWish(
        member_of(0), KEY, [], make_group, 0.0, window_seconds=0.0, patience_seconds=9.0, size_min=2_000
    )
    for number in range(1, 660):
        wish.receive(0.0, peer_of(number), Ready(KEY, bytes(16), 1_000))
    misses = matchmaking._distance.cache_info().misses
    for number in range(1, 660):
        wish.receive(0.0, peer_of(number), Ready(KEY, bytes(16), 1_000))
    assert matchmaking._distance.cache_info().misses == misses
