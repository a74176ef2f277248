"""The door's radix tree of tokens, and which sessions serve as prefixes of others."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace as replace_fields

from crypto.identity import PeerId
from partition.serve.bounds import SESSIONS_PER_DOOR_MAX
from partition.serve.door import GenerationWish
from partition.serve.messages import (
    Alive,
    LeaveSession,
    OpenSession,
    RestSession,
    SessionBase,
    SessionClosed,
    in_former_version,
)
from partition.serve.prefixes import (
    PREFIX_TOKENS_MIN,
    REST_SECONDS_MAX,
    RESTS_PER_SERVICE_MAX,
    KeptPrefix,
    Prefixes,
    PrefixKey,
    RadixTree,
    common_length,
)
from partition.serve.session_places import RESTS_PER_DOOR_MAX
from tests.partition.serve.world import DOORS, PROVIDERS, World, reference, wish

DOOR = DOORS[0]
ROUTE = (PeerId(b"one"), PeerId(b"two"))
KEY = PrefixKey(bytes(32), "me")


class TreeMachine(RuleBasedStateMachine):
    """Compares a tree with a plain dictionary. Tokens are few and sequences short, so that much is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: RadixTree[int] = RadixTree()
        self.plain: dict[int, tuple[int, ...]] = {}

    @rule(value=st.integers(0, 9), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def put(self, value: int, tokens: list[int]) -> None:
        self.tree.put(tokens, value)
        self.plain[value] = tuple(tokens)

    @rule(value=st.integers(0, 9))
    def remove(self, value: int) -> None:
        self.tree.remove(value)
        self.plain.pop(value, None)

    @rule(tokens=st.lists(st.integers(0, 2), max_size=14))
    def look(self, tokens: list[int]) -> None:
        row = tuple(tokens)
        shared = {value: common_length(own, row) for value, own in self.plain.items()}
        assert self.tree.shared(tokens) == {value: count for value, count in shared.items() if count}
        covered = {value for value, own in self.plain.items() if row[: len(own)] == own}
        assert self.tree.covered(tokens) == covered

    @invariant()
    def small(self) -> None:
        assert len(self.tree) == len(self.plain)
        nodes = [self.tree._root]
        count = 0
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            count += 1
            assert node is self.tree._root or node.values or len(node.children) > 1
            assert all(first == child.edge[0] for first, child in node.children.items())
        assert count <= 2 * len(self.plain) + 1


TreeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTree = TreeMachine.TestCase


def kept(number: int, route: tuple[PeerId, ...] = ROUTE, key: PrefixKey = KEY) -> KeptPrefix:
    return KeptPrefix(number.to_bytes(16, "big"), key, route)


def test_the_least_used_resting_session_is_released_first() -> None:
    prefixes = Prefixes()
    rows = [tuple(range(100 * n, 100 * n + 80)) for n in range(RESTS_PER_SERVICE_MAX + 1)]
    for number, row in enumerate(rows[:-1]):
        assert not prefixes.rest(float(number), kept(number), row)
    prefixes.use(50.0, kept(0).session)
    assert prefixes.rest(60.0, kept(99), rows[-1]) == [kept(1)]
    assert [each for each, _ in prefixes.find(KEY, rows[0])] == [kept(0)]
    assert not prefixes.find(KEY, rows[1])


def test_a_longer_session_replaces_its_prefix() -> None:
    prefixes = Prefixes()
    row = tuple(range(200))
    prefixes.rest(0.0, kept(1), row[:100])
    prefixes.rest(0.0, kept(2, route=ROUTE[::-1]), row[:90])
    assert prefixes.rest(1.0, kept(3), row) == [kept(1)]
    assert [(each.session[-1], count) for each, count in prefixes.find(KEY, row[:150])] == [(3, 150), (2, 90)]


def test_nothing_is_shared_between_owners_or_services() -> None:
    prefixes = Prefixes()
    row = tuple(range(100))
    prefixes.rest(0.0, kept(1), row)
    assert prefixes.find(KEY, row)
    assert not prefixes.find(replace(KEY, owner="another"), row)
    assert not prefixes.find(replace(KEY, service=bytes([1]) * 32), row)
    assert not prefixes.find(KEY, row[: PREFIX_TOKENS_MIN - 1])


def test_resting_sessions_end_with_their_provider_or_after_a_time() -> None:
    prefixes = Prefixes()
    prefixes.rest(0.0, kept(1), range(100))
    prefixes.rest(0.0, kept(2, route=(PeerId(b"three"),)), range(200, 300))
    assert prefixes.drop_peer(ROUTE[1]) == [kept(1)]
    assert not prefixes.expire(REST_SECONDS_MAX - 1)
    assert [each.session[-1] for each in prefixes.expire(REST_SECONDS_MAX)] == [2]
    assert not prefixes._trees


def run(world: World, wanted: GenerationWish, door: PeerId = DOOR) -> tuple[PeerId, int]:
    key = world.begin(door, wanted)
    world.settle()
    assert world.tokens[key] == reference(wanted)
    return key


def computed(world: World) -> int:
    return max(stage.computed for stage in world.stages.values())


def test_a_prompt_that_was_read_before_is_not_read_again() -> None:
    world = World()
    first = wish(300, 5)
    run(world, first)
    before = computed(world)
    run(world, replace(first, prompt=(*first.prompt[:200], 1, 2, 3)))
    assert world.routes[-1].shared == 200
    assert world.routes[-1].route == world.routes[-2].route
    assert computed(world) - before == 3 + 4


def test_another_owner_or_door_reads_its_own_prompt() -> None:
    world = World()
    run(world, wish(300, 2))
    run(world, replace(wish(300, 2), owner="another"))
    assert world.routes[-1].shared == 0
    run(world, wish(300, 2), DOORS[1])
    assert world.routes[-1].shared == 0


def test_sessions_of_each_owner_have_a_separate_share() -> None:
    world = World()
    door = world.doors[DOOR]
    shares = []
    for owner in ("one", "two", "one", "three"):
        key = world.begin(DOOR, replace(wish(70, 2), owner=owner))
        shares.append(door._shares._shares[owner])
        if owner == "two":
            door.cancel(world.now, key[1])
    assert shares == [0, 1, 0, 1], "the number of an owner without sessions was not reused"


def test_many_answers_to_one_prompt_read_the_prompt_once() -> None:
    world = World()
    wishes = [replace(wish(400, 3, temperature=0.8), sampling=wish(seed=n).sampling) for n in range(8)]
    keys = [world.begin(DOOR, each) for each in wishes]
    world.settle()
    assert [world.tokens[key] for key in keys] == [reference(each) for each in wishes]
    assert [route.shared for route in world.routes] == [0] + 7 * [399]
    assert computed(world) == 400 + 7 + 8 * 2


def test_an_answer_continues_without_the_session_that_read_its_prompt() -> None:
    world = World()
    one, other = world.begin(DOOR, wish(400, 3)), world.begin(DOOR, wish(400, 3))
    for _ in range(9):
        world.step()
    assert len(world.routes) == 1
    world.put(DOOR, world.doors[DOOR].cancel(world.now, one[1]))
    world.settle()
    assert world.tokens[other] == reference(wish(400, 3))


def test_a_generation_based_on_another_survives_a_killed_provider() -> None:
    world = World()
    run(world, wish(300, 2))
    key = world.begin(DOOR, replace(wish(300, 20), prompt=wish(300).prompt[:250]))
    while len(world.tokens[key]) < 3:
        assert world.step()
    assert world.routes[-1].shared == 250 - 1
    world.kill(world.routes[-1].route[1])
    world.settle()
    assert world.routes[-1].shared == 0
    assert world.tokens[key] == reference(replace(wish(300, 20), prompt=wish(300).prompt[:250]))


def test_a_peer_of_an_older_version_gets_no_base_session() -> None:
    world = World()
    peers = [peer for replicas in PROVIDERS.values() for peer in replicas]
    for peer in peers:
        world.doors[DOOR].note_former(peer)
    first = wish(300, 5)
    run(world, first)
    run(world, replace(first, prompt=(*first.prompt[:200], 1, 2, 3)))
    assert world.routes[-1].shared == 0
    assert not world.doors[DOOR]._prefixes.resting
    # After the peer was lost, it may return with a newer version.
    for peer in peers:
        world.doors[DOOR].lost(world.now, peer)
    assert not world.doors[DOOR]._routes._formers


def test_messages_for_an_older_version_name_no_base() -> None:
    opened = OpenSession(b"s" * 16, bytes(32), 0, DOOR, DOOR, SessionBase(b"t" * 16, 100))
    assert in_former_version(opened) == replace_fields(opened, base=None)
    assert in_former_version(RestSession(b"s" * 16)) == LeaveSession(b"s" * 16)
    assert in_former_version(Alive()) == Alive()


def test_a_generation_restarts_if_a_stage_has_released_its_base() -> None:
    world = World()
    run(world, wish(300, 2))
    route = world.routes[-1].route
    for stage, peer in enumerate(route):
        world.start(stage, peer)  # again, without a broken stream
    run(world, wish(300, 2))
    assert [event.lost for event in world.routes] == ["", "", ""]
    assert [event.shared for event in world.routes] == [0, 299, 0]


def test_resting_sessions_are_kept_alive_and_make_room() -> None:
    world = World()
    for number in range(RESTS_PER_DOOR_MAX + 3):
        run(world, wish(100, 1, seed=number))
    for _ in range(80):
        world.pass_time(0.5)
        while world.step():
            pass
    provider = world.providers[world.routes[-1].route[0]]
    assert 0 < provider.sessions <= RESTS_PER_DOOR_MAX
    assert provider.sessions_of(bytes(32)) == 0
    begun = [world.begin(DOOR, wish(100, 40, seed=100 + number)) for number in range(30)]
    world.settle()
    assert all(world.finished[key].reason == "length" for key in begun)


def test_a_session_replaces_its_base_if_there_is_no_other_room() -> None:
    world = World()
    for peers in PROVIDERS.values():
        world.kill(peers[1])
    long = [world.begin(DOOR, wish(5, 100, seed=10 + n)) for n in range(SESSIONS_PER_DOOR_MAX - 1)]
    run_beside = world.begin(DOOR, wish(100, 1))
    while run_beside not in world.finished:
        assert world.step()
    again = world.begin(DOOR, wish(100, 1))
    world.settle()
    assert world.tokens[again] == reference(wish(100, 1))
    assert [event.shared for event in world.routes[-1:]] == [99]
    assert not any(event.lost for event in world.routes)
    assert all(world.finished[key].reason == "length" for key in long)


def test_a_door_cannot_base_a_session_on_another_doors() -> None:
    world = World()
    run(world, wish(300, 2))
    base = next(each for each in world.doors[DOOR]._prefixes.resting)
    provider = world.providers[base.route[0]]
    opened = OpenSession(b"s" * 16, bytes(32), 0, DOORS[1], base.route[1], SessionBase(base.session, 100))
    ((_, told),) = provider.receive(world.now, DOORS[1], opened)
    assert isinstance(told, SessionClosed)
    assert told.code == "position", "the answer differs from that for a missing session"
