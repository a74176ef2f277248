"""A hostile peer sends every message of both serving protocols while answers are generated, with the real
sessions, services and peers, from outside of the service and as a member.

Whole nodes in virtual time. Only answers through the hostile member itself change, because nobody can check
its logits. Sessions that do not use its stages keep their pace. PEERLOOM_MEMBER_SEEDS sets the number of
seeds.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import trio

from crypto.encoding import encode
from crypto.identity import PeerId
from node.errors import RunFailed, StreamClosed, Unreachable
from node.protocols.services import SERVICES_PROTOCOL, Service, StopServiceBody, make_stop
from node.runtime import Node
from node.serving import streams
from partition.serve.messages import (
    SERVE_PROTOCOL,
    Alive,
    Answer,
    LeaveSession,
    OpenSession,
    Roll,
    ServiceRow,
    SessionClosed,
    SessionOpened,
    UnitWork,
)
from partition.serve.provider import SESSIONS_PER_DOOR_MAX
from partition.serve.timeouts import ANSWER_SECONDS_MAX
from tests.hostile.virtual import NAME, Hostile, hostile_in
from tests.hostile.wire import PROTOCOLS, structs
from tests.node.serving.scene import STAGE_SECONDS, holders, manifest, served_by, until
from tests.partition.serve.world import reference, wish
from tests.stack import Swarm, simulate, swarm

SEEDS = range(1, 1 + int(os.environ.get("PEERLOOM_MEMBER_SEEDS", "1")))
SPEAKING = [each for each in PROTOCOLS if each.name in (SERVE_PROTOCOL, SERVICES_PROTOCOL)]
SERVE = SPEAKING[0]
TOKENS = 40
ANSWERS = 2
"""Number of answers at each of two doors, while the hostile peer sends."""
PACE = 1.5
"""How many times longer an answer may take while the hostile peer sends."""


def learn_serving(group: Swarm, bad: Hostile, service: Service) -> None:
    """Give the hostile peer all sessions, units and members that exist."""
    bad.known.learn(service.id, "service")
    bad.known.learn(service.fact)
    bad.known.learn(service.manifest)
    bad.known.learn(StopServiceBody(service.id))
    for name, node in group.nodes.items():
        if name == NAME:
            continue
        for session in node.serving.provider._sessions.values():
            for part in session.parts.values():
                ends = part.before, part.after
                bad.known.learn(OpenSession(session.id, service.id, part.stage, *ends), "session")
                bad.known.learn(UnitWork(session.id, part.newest + 1, part.kept, 1, 1, 1, stage=part.stage))
                bad.known.learn(Answer(session.id, max(0, part.newest), 1, (0.0,)))
                bad.known.learn(SessionOpened(session.id, part.stage))
            bad.known.learn(LeaveSession(session.id))
            bad.known.learn(SessionClosed(session.id, "failed", ""))
        for member in node.serving.hosting.members.values():
            bad.known.learn(Roll(service.id, member.number, True, False, member.upkeep.rows()))
            bad.known.learn(ServiceRow(node.peer, member.number, True))


async def timed(node: Node, service: Service, tokens: int) -> tuple[list[int], float, set[PeerId]]:
    """Return an answer, its duration, and the peers on its route."""
    began, said, over = trio.current_time(), list[int](), set[PeerId]()
    async with node.serving.answer(service, wish(tokens=tokens)) as generation:
        async for token in generation:
            said.append(token.token)
            over |= set(generation.route)
    return said, trio.current_time() - began, over


def check_bounds(group: Swarm) -> None:
    """Check the limits on the hostile peer's share of each node."""
    for name, node in group.nodes.items():
        if name == NAME:
            continue
        sessions = node.serving.provider._sessions.values()
        own = sum(each.door == group.nodes[NAME].peer for each in sessions)
        assert own <= SESSIONS_PER_DOOR_MAX
        for link in node.serving._streams._links._links.values():
            assert link.waiting_bytes <= streams.QUEUE_BYTES_MAX


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_member", [False, True], ids=["stranger", "member"])
def test_answers_stay_correct_and_timely_despite_a_hostile_peer(seed: int, is_member: bool) -> None:
    said: set[str] = set()
    through: list[bool] = []

    async def scenario() -> None:
        async with (
            swarm("abcd", seed=seed, preset="lan", parts=served_by()) as group,
            hostile_in(group, seed, takes_stages=is_member) as bad,
            trio.open_nursery() as nursery,
        ):
            bad.insider.protocols = SPEAKING
            door = group.nodes["a"]
            first = [bad.node.peer] if is_member else [door.peer]
            service = await door.serving.published.begin(manifest(replicas=2), first)
            await door.serving.published.await_ready(service)
            wanted = 4
            await until(lambda: len(holders_of(group)) >= wanted)
            assert (NAME in holders_of(group)) is is_member
            _, usual, _ = await timed(door, service, TOKENS)

            async def lie() -> None:
                while True:
                    learn_serving(group, bad, service)
                    await bad.insider.round([group.nodes[name].peer for name in "abcd"])
                    check_bounds(group)
                    await trio.sleep(0.2)

            async def go_on(name: str) -> None:
                for _ in range(ANSWERS):
                    try:
                        tokens, seconds, over = await timed(group.nodes[name], service, TOKENS)
                    except RunFailed:
                        assert is_member
                        continue
                    through.append(bad.node.peer in over)
                    if not through[-1]:
                        assert tokens == reference(wish(tokens=TOKENS))
                        assert seconds <= PACE * usual + STAGE_SECONDS

            nursery.start_soon(lie)
            async with trio.open_nursery() as honest:
                for name in "ab":
                    honest.start_soon(go_on, name)
            said.update(bad.insider.sent)
            nursery.cancel_scope.cancel()

    simulate(scenario)
    assert len(through) >= ANSWERS
    assert not all(through)
    kinds = {f"{each.name} {kind.__name__}" for each in SPEAKING for kind in structs(each.said)}
    assert kinds <= said


def holders_of(group: Swarm) -> dict[str, int]:
    """Return `holders` with the hostile peer."""
    others = Swarm({n: node for n, node in group.nodes.items() if n != NAME}, group.scopes)
    found = holders(others)
    for member in group.nodes[NAME].serving.hosting.members.values():
        found[NAME] = member.number
    return found


def spoken(bad: Hostile, group: Swarm, service: Service) -> list[Callable[[bytes, Any], Any]]:
    """Return messages that attack another peer's session: extend it, roll it back, end it, answer it, close
    it."""
    peer = bad.node.peer
    return [
        lambda session, each: UnitWork(session, each.newest + 1, each.kept, 1, 1, 1, stage=each.stage),
        lambda session, each: UnitWork(session, each.newest + 1, 0, 1, 1, 1, stage=each.stage),
        lambda session, each: UnitWork(session, each.newest + 1, 0, 1, 1, 1, stage=1 - each.stage),
        lambda session, each: OpenSession(session, service.id, 1 - each.stage, peer, peer),
        lambda session, _: LeaveSession(session),
        lambda session, _: OpenSession(session, service.id, 0, peer, peer),
        lambda session, _: SessionClosed(session, "failed", ""),
        lambda session, each: Answer(session, max(0, each.newest), 1, (0.0,)),
        lambda *_: Roll(service.id, 0, True, False, (ServiceRow(peer, 1, True),)),
        lambda *_: Roll(service.id, 1, False, True),
        lambda *_: Alive(),
    ]


def test_a_stranger_cannot_take_over_anothers_session() -> None:
    async def scenario() -> None:
        async with (
            swarm("abcd", parts=served_by()) as group,
            hostile_in(group, 1) as bad,
            trio.open_nursery() as nursery,
        ):
            door = group.nodes["a"]
            service = await door.serving.published.begin(
                manifest(), [group.nodes["b"].peer, group.nodes["c"].peer]
            )
            await door.serving.published.await_ready(service)
            members = [group.nodes[name] for name in holders_of(group)]

            async def steal() -> None:
                while True:
                    for make in spoken(bad, group, service):
                        for node in (*members, door):
                            sessions = [
                                (part.session.id, part)
                                for member in members
                                for each in member.serving.provider._sessions.values()
                                for part in each.parts.values()
                            ]
                            try:
                                stream = await bad.insider._open(node.peer, SERVE)
                                for session, each in sessions:
                                    await stream.send(encode(make(session, each)))
                                await stream.aclose()
                            except (StreamClosed, Unreachable):
                                pass
                    await bad.insider.put(members[0].peer, SPEAKING[1], encode(make_stop_of(bad, service)))
                    await trio.sleep(0.05)

            _, usual, _ = await timed(door, service, TOKENS)
            nursery.start_soon(steal)
            async with door.serving.answer(service, wish(tokens=TOKENS)) as generation:
                tokens = [token.token async for token in generation]
                assert generation.moves == 0
            assert tokens == reference(wish(tokens=TOKENS))
            _, seconds, _ = await timed(door, service, TOKENS)
            assert seconds <= PACE * usual
            nursery.cancel_scope.cancel()

    simulate(scenario)


def make_stop_of(bad: Hostile, service: Service) -> Any:
    """Return an end of another peer's service, signed by the hostile peer."""
    return SPEAKING[1].kinds[-1](make_stop(bad.node.signer, service.id))


def test_a_stalled_member_delays_only_its_own_sessions_and_only_briefly() -> None:
    async def scenario() -> None:
        async with swarm("abcd", parts=served_by()) as group:
            door = group.nodes["a"]
            service = await door.serving.published.begin(manifest(replicas=2), [door.peer])
            await until(lambda: len(holders(group)) == 4)
            await door.serving.published.await_ready(service)
            name = next(name for name, stage in holders(group).items() if stage == 1)
            (member,) = group.nodes[name].serving.hosting.members.values()
            _, usual, _ = await timed(door, service, TOKENS)

            async def stall(*_: object) -> Any:
                await trio.sleep_forever()

            assert member.stage is not None
            member.stage.compute = stall  # type: ignore[assignment,method-assign]  # its node goes on to say that it runs
            times: list[tuple[float, bool]] = []

            async def one() -> None:
                tokens, seconds, _ = await timed(door, service, TOKENS)
                assert tokens == reference(wish(tokens=TOKENS))
                times.append((seconds, seconds > ANSWER_SECONDS_MAX))

            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(one)
            assert all(seconds < ANSWER_SECONDS_MAX + 20 for seconds, _ in times)
            assert all(seconds <= PACE * usual for seconds, is_stalled in times if not is_stalled)
            assert len({is_stalled for _, is_stalled in times}) == 2

    simulate(scenario)
