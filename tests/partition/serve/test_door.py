"""The token loop of the door (the node that asks a service): how it reacts to silent, slow, full and lying
providers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.serve.door import ATTEMPTS_MAX, GenerationOver, RouteTaken, StageReplica
from partition.serve.known_routes import OTHER_CLASS
from partition.serve.messages import Answer, Carried, SessionClosed, SessionOpened, UnitWork
from partition.serve.timeouts import ANSWER_SECONDS_MAX, ROUTE_SECONDS_MAX, SILENCE_SECONDS_MAX
from tests.partition.serve.world import (
    DOORS,
    PROVIDERS,
    SERVICE,
    VOCABULARY,
    World,
    logits_after,
    reference,
    wish,
)

DOOR, OTHER = DOORS
FIRST, SECOND = (min(PROVIDERS[stage]) for stage in (0, 1))
OTHER_SECOND = max(PROVIDERS[1])


def begun(tokens: int = 3, prompt: int = 5) -> tuple[World, tuple[object, int]]:
    """Return a world with a generation whose sessions are open at the first provider of each stage."""
    world = World()
    key = world.begin(DOOR, wish(prompt, tokens))
    while any(not isinstance(message, Carried) for queue in world.queues.values() for message in queue):
        world.deliver(next(pair for pair, q in world.queues.items() if not isinstance(q[0], Carried)))
    return world, key


def routes(world: World) -> list[RouteTaken]:
    return [event for event in world.doors[DOOR].events if isinstance(event, RouteTaken)]


def test_an_answer_moves_away_from_a_silent_node_within_a_second() -> None:
    world, key = begun()
    world.providers.pop(SECOND)  # its streams do not break, but no message arrives any more
    door, left_at = world.doors[DOOR], None
    for _ in range(20):
        world.now += 0.1
        sends = door.wake(world.now)
        if any(event.lost for event in routes(world)):
            left_at = world.now
            break
        for peer, _ in sends:
            if peer != SECOND:
                door.receive(world.now, peer, world.providers[peer].wake(world.now)[0][1])
    assert left_at is not None
    assert left_at - 100.0 <= SILENCE_SECONDS_MAX + 0.25
    assert key not in world.finished


def test_a_long_computation_of_a_live_node_does_not_count_as_silence() -> None:
    world, key = begun()
    while any(world.queues.values()):
        world.deliver(next(iter(world.queues)))
    assert world.computing, "the first stage is not computing"
    for _ in range(300):
        world.pass_time(0.1)
        while any(world.queues.values()):
            world.deliver(next(iter(world.queues)))
    world.settle()
    assert world.tokens[key] == reference(wish(5, 3))  # type: ignore[index]  # by how it was made


def test_a_missing_answer_is_requested_from_another_provider() -> None:
    world, key = begun()
    held = {FIRST, SECOND}
    for _ in range(int(ANSWER_SECONDS_MAX * 10) + 20):
        world.pass_time(0.1)
        while any(world.queues.values()):
            world.deliver(next(iter(world.queues)))
        for _ in range(len(world.computing)):
            world.computing.rotate(-1)
            if world.computing[0][0] not in held:
                world.compute()
        if key in world.finished:
            break
    assert world.tokens[key] == reference(wish(5, 3))  # type: ignore[index]  # by how it was made


def test_a_door_that_slept_blames_no_provider_for_silence() -> None:
    world, _ = begun()
    world.doors[DOOR].events.clear()
    world.now += 30.0
    world.doors[DOOR].wake(world.now)
    assert not routes(world)


def test_a_broken_stream_moves_a_generation_at_once() -> None:
    world, key = begun()
    world.kill(FIRST)
    assert world.doors[DOOR].generations == 1
    world.settle()
    assert world.tokens[key] == reference(wish(5, 3))  # type: ignore[index]  # by how it was made


def test_a_generation_that_loses_its_only_replica_ends_with_a_reason() -> None:
    world, key = begun()
    for peer in PROVIDERS[1]:
        world.kill(peer)
    began = world.now
    while key not in world.finished:
        while world.step():
            pass
        world.pass_time(0.1)
        assert world.now - began < ROUTE_SECONDS_MAX + 5
    end = world.finished[key]
    assert end.reason == "failed"
    assert end.detail == "nobody answers for stage 2 (its stream broke)"
    world.start(1, SECOND)
    key = world.begin(DOOR, wish(5, 3))
    world.settle()
    assert world.finished[key].reason == "length"


def other_class(*, is_exact: bool) -> tuple[World, tuple[PeerId, int]]:
    """Return a generation that has lost its second stage; only a machine of a different bit class remains."""
    world = World()
    world.bits[OTHER_SECOND] = b"y"
    world.kill(OTHER_SECOND)
    key = world.begin(DOOR, replace(wish(5, 6), is_exact=is_exact))
    while not world.tokens.get(key):
        assert world.step()
    world.start(1, OTHER_SECOND)
    world.kill(SECOND)
    return world, key


def test_a_move_to_a_different_bit_class_is_reported() -> None:
    world, key = other_class(is_exact=False)
    world.settle()
    assert len(world.tokens[key]) == 6
    assert [event.is_exact for event in world.routes[-2:]] == [True, False]


def test_an_exact_generation_waits_for_its_bit_class_and_then_ends() -> None:
    world, key = other_class(is_exact=True)
    while key not in world.finished:
        while world.step():
            pass
        world.pass_time(0.1)
    end = world.finished[key]
    assert (end.reason, end.detail) == ("failed", f"{OTHER_CLASS.format(stage=2)} (its stream broke)")
    world, key = other_class(is_exact=True)
    world.bits[OTHER_SECOND] = b"x"  # it came back as a different machine
    world.settle()
    assert world.finished[key].reason == "length"
    assert all(event.is_exact for event in world.routes)


def test_a_move_prefers_the_same_bit_class_over_less_load() -> None:
    world, key = begun()
    door = world.doors[DOOR]
    same, other = PeerId(b"s" * len(SECOND)), PeerId(b"o" * len(SECOND))
    while not world.tokens.get(key):  # type: ignore[arg-type]  # by how it was made
        assert world.step()
    rows = [StageReplica(other, bits=b"y"), StageReplica(same, sessions=30, bits=b"x")]
    door.learn(world.now, SERVICE, {0: [StageReplica(FIRST, bits=b"x")], 1: rows})
    door.lost(world.now, SECOND)
    assert routes(world)[-1].route == (FIRST, same)


def test_a_provider_that_refuses_each_time_ends_a_generation() -> None:
    world = World()
    for stage, peers in PROVIDERS.items():
        for peer in peers:
            world.providers[peer].release(SERVICE, stage, "leaving", "")
    key = world.begin(DOOR, wish())
    began = world.now
    while key not in world.finished:
        while world.step():
            pass
        world.pass_time(0.1)
        assert world.now - began < ATTEMPTS_MAX
    assert world.finished[key].reason == "failed"


def test_a_door_replaces_a_stage_that_always_fails() -> None:
    """The nonsense may come from the previous stage, so the door leaves both providers if they have
    replicas."""
    world = World()
    key = world.begin(DOOR, wish(5, 3))
    for _ in range(20):
        while world.queues:
            pair = next(iter(world.queues))
            message = world.queues[pair][0]
            if pair == (FIRST, SECOND) and isinstance(message, Carried):
                world.queues.pop(pair)
                world.put(SECOND, world.providers[SECOND].reject(FIRST, message.message.session, "nonsense"))
            else:
                world.deliver(pair)
        if key in world.finished:
            break
        if world.computing:
            world.compute()
        else:
            world.pass_time(0.1)
    world.settle()
    assert world.finished[key].reason == "length"
    assert world.tokens[key] == reference(wish(5, 3))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer, arrays: (answer, ()),
        lambda answer, arrays: (Answer(answer.session, answer.number + 1, 1, answer.sums), arrays),
        lambda answer, arrays: (answer, (("int64", np.array([99])), arrays[1])),
        lambda answer, arrays: (answer, (arrays[0], ("float32", np.array([np.nan], np.float32)))),
        lambda answer, arrays: (Answer(answer.session, answer.number, 1, (np.inf,)), arrays),
        lambda answer, arrays: (Answer(answer.session, answer.number, 0, answer.sums), arrays[1:]),
    ],
)
def test_an_invalid_answer_costs_the_provider_but_no_token(spoil: Any) -> None:
    world, key = begun()
    while world.stages[SECOND].kept.get(next(iter(world.stages[SECOND].kept), b"")) is None:
        world.step()
    queue = world.queues[SECOND, DOOR]
    place = next(n for n, each in enumerate(queue) if isinstance(each, Carried))
    answer, arrays = spoil(queue[place].message, queue[place].arrays)  # type: ignore[union-attr]  # by how it was made
    queue[place] = Carried(answer, arrays)
    world.settle()
    assert [each.peer for each in world.misbehaved] == [SECOND]
    assert world.tokens[key] == reference(wish(5, 3))  # type: ignore[index]  # by how it was made


def test_only_the_providers_of_a_generation_can_answer_it() -> None:
    world, _ = begun()
    session = next(iter(world.doors[DOOR]._sessions))
    with pytest.raises(RemoteProtocolError):
        world.doors[DOOR].receive(world.now, OTHER, SessionOpened(session, 1))
    with pytest.raises(RemoteProtocolError):
        world.doors[DOOR].receive(world.now, OTHER, SessionClosed(session, "busy"))
    with pytest.raises(RemoteProtocolError):
        world.doors[DOOR].receive(world.now, OTHER, Carried(Answer(session, 0)))
    assert not world.doors[DOOR].receive(world.now, OTHER, SessionOpened(bytes(16), 1))


def test_a_prompt_is_sent_in_chunks_with_several_in_flight() -> None:
    world, key = begun(prompt=590, tokens=1)
    flying = [each.message for each in world.queues[DOOR, FIRST] if isinstance(each, Carried)]
    assert [(work.position, work.tokens, work.wanted) for work in flying if isinstance(work, UnitWork)] == [
        (0, 128, 0),
        (128, 128, 0),
        (256, 128, 0),
        (384, 128, 0),
    ]
    world.settle()
    assert world.tokens[key] == reference(wish(590, 1))  # type: ignore[index]  # by how it was made


def test_a_generation_ends_at_the_end_of_the_context() -> None:
    world = World()
    key = world.begin(DOOR, wish(595, 100))
    world.settle()
    assert world.finished[key] == GenerationOver(1, "length")
    assert len(world.tokens[key]) == 5


def test_a_stop_token_is_not_part_of_the_text() -> None:
    plain = reference(wish(5, 12))
    stop = plain[4]
    wanted = wish(5, 12)
    world = World()
    key = world.begin(DOOR, type(wanted)(wanted.prompt, 12, wanted.sampling, frozenset({stop})))
    world.settle()
    assert world.finished[key].reason == "stop"
    assert world.tokens[key] == plain[: plain.index(stop)]


def test_sessions_are_spread_over_replicas() -> None:
    world = World()
    for number in range(4):
        world.begin(DOOR, wish(5, 3, seed=number))
        while world.step():
            if world.computing:
                break
    taken = {peer: provider.sessions for peer, provider in world.providers.items()}
    assert max(taken.values()) <= 3
    world.settle()


MASKED = replace(wish(5, 8), is_masked=True)


def allowed_after(made: int) -> Any:
    return np.arange(VOCABULARY) % 3 == made % 3


def masked_tokens(kill_at: int = -1, *, is_row_waiting: bool = False) -> list[int]:
    """Play an answer with newly allowed tokens at each position; a provider dies after `tokens`."""
    world, told = World(), -1
    key = world.begin(DOOR, MASKED)
    while key not in world.finished:
        made = len(world.tokens[key])
        if made > told:
            if is_row_waiting or made == kill_at:
                while world.step():
                    assert len(world.tokens[key]) == made, "the generation went on without its allowed tokens"
            if made == kill_at:
                world.kill(SECOND)
            told = made
            world.put(DOOR, world.doors[DOOR].permit(world.now, key[1], allowed_after(made)))
            world.drain()
        elif not world.step():
            world.pass_time(0.1)
    assert world.finished[key].reason == "length"
    return world.tokens[key]


def test_a_masked_generation_emits_only_allowed_tokens() -> None:
    tokens = masked_tokens()
    assert [token % 3 for token in tokens] == [number % 3 for number in range(8)]
    assert tokens == masked_tokens(is_row_waiting=True)
    wanted = [*MASKED.prompt]
    for number in range(8):
        row = logits_after(tuple(wanted))
        wanted.append(int(np.argmax(np.where(allowed_after(number), row, -np.inf))))
    assert MASKED.sampling.temperature > 0 or tokens == wanted[5:]


@pytest.mark.parametrize("kill_at", [0, 3, 7])
def test_allowed_tokens_of_a_position_survive_the_death_of_a_provider(kill_at: int) -> None:
    assert masked_tokens(kill_at) == masked_tokens()


def test_a_masked_generation_ends_if_no_token_is_allowed() -> None:
    world = World()
    key = world.begin(DOOR, MASKED)
    world.put(DOOR, world.doors[DOOR].permit(world.now, key[1], np.zeros(VOCABULARY, np.bool_)))
    world.drain()
    assert world.finished[key].reason == "stop"
    assert world.doors[DOOR].permit(world.now, key[1], np.ones(VOCABULARY, np.bool_)) == []


def hidden_of(tokens: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    return np.stack([logits_after(tokens[: end + 1]) for end in range(len(tokens))])


def test_hidden_states_are_read_again_after_a_provider_dies() -> None:
    world = World()
    wanted = replace(wish(400, 1), is_hidden=True)
    key = world.begin(DOOR, wanted)
    while world.stages[SECOND].computed < 200:
        assert world.step()
    world.kill(SECOND)
    world.settle()
    assert world.finished[key].reason == "stop"
    assert np.array_equal(world.hidden[key], hidden_of(wanted.prompt))
    assert world.tokens[key] == []
    # The tokens that this session has read can start an answer. They cannot start another request for hidden
    # states, which needs the rows of these tokens.
    again = world.begin(DOOR, wanted)
    world.settle()
    assert np.array_equal(world.hidden[again], hidden_of(wanted.prompt))
    assert world.routes[-1].shared == 0
    text = world.begin(DOOR, wish(400, 2))
    world.settle()
    assert world.routes[-1].shared > 0
    assert world.tokens[text] == reference(wish(400, 2))


def test_hidden_states_are_not_requested_from_peers_of_older_versions() -> None:
    """An older peer would answer with logits, without an error. Its version is known once a stream to it is
    open.
    """
    world = World()
    door, wanted = world.doors[DOOR], replace(wish(400, 1), is_hidden=True)
    key = world.begin(DOOR, wanted)
    for peer in world.routes[-1].route:
        door.note_former(peer)
    former = set(world.routes[-1].route)
    world.settle()
    assert world.finished[key].reason == "stop"
    assert former.isdisjoint(world.routes[-1].route)
    assert np.array_equal(world.hidden[key], hidden_of(wanted.prompt))
    assert world.misbehaved == []
    assert all(world.providers[peer].sessions == 0 for peer in former)
    taken = len(world.routes)
    world.begin(DOOR, wanted)
    assert former.isdisjoint(*(route.route for route in world.routes[taken:]))
    world.settle()


def test_hidden_states_fail_if_only_older_peers_could_answer() -> None:
    world = World()
    key = world.begin(DOOR, replace(wish(5, 1), is_hidden=True))
    for peers in PROVIDERS.values():
        for peer in peers:
            world.doors[DOOR].note_former(peer)
    world.settle()
    assert world.finished[key].reason == "failed"
    assert "its version cannot answer with hidden states" in world.finished[key].detail


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: (("float32", rows[1:]),),
        lambda rows: (("float32", np.full_like(rows, np.inf)),),
        lambda rows: (("int64", rows.astype(np.int64)),),
        lambda rows: (),
    ],
)
def test_rows_that_cannot_be_hidden_states_cost_their_provider(spoil: Any) -> None:
    world = World()
    wanted = replace(wish(5, 1), is_hidden=True)
    key = world.begin(DOOR, wanted)
    while not any(isinstance(each, Carried) for each in world.queues.get((SECOND, DOOR), ())):
        assert world.step()
    queue = world.queues[SECOND, DOOR]
    place = next(n for n, each in enumerate(queue) if isinstance(each, Carried))
    carried = queue[place]
    assert isinstance(carried, Carried)
    queue[place] = Carried(carried.message, spoil(carried.arrays[0][1]))
    world.settle()
    assert [each.peer for each in world.misbehaved] == [SECOND]
    assert np.array_equal(world.hidden[key], hidden_of(wanted.prompt))


def test_a_node_that_was_only_silent_drops_a_moved_session() -> None:
    world, key = begun(tokens=40)
    while len(world.tokens[key]) < 2:  # type: ignore[index]  # by how it was made
        assert world.step()
    for _ in range(20):  # its messages do not arrive, as if its machine had stalled
        world.pass_time(0.1)
        world.queues.pop((SECOND, DOOR), None)
        for pair in list(world.queues):
            world.deliver(pair)
    assert routes(world) == []
    assert world.routes[-1].route[-1] == OTHER_SECOND
    while world.step() and not world.queues.get((DOOR, SECOND)):
        pass
    assert world.providers[SECOND].sessions == 0
    world.settle()
    assert world.tokens[key] == reference(wish(5, 40))  # type: ignore[index]  # by how it was made
