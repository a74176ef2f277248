"""A node that is left alone with one stage also takes the missing stage as a stopgap, so answers continue.
Virtual time."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import trio

from node.cli.serve import service_lines
from node.errors import RunFailed
from node.offering import Offering
from node.protocols.services import Service
from node.serving.asking import Asking
from node.serving.hosting import ServiceMembership
from node.serving_events import GenerationMoved, ServiceChanged
from partition.serve.backoff import REST_SECONDS_MAX
from partition.serve.upkeep import RELIEF_SECONDS
from tests.node.serving.scene import TokensServed, ask, manifest, serving, until
from tests.partition.serve.world import reference, wish
from tests.stack import Swarm, simulate

TOKENS = 60


def held(group: Swarm, service: Service) -> dict[str, list[ServiceMembership]]:
    """Return the stages of a service that each live node holds; a node's permanent stage comes first."""
    return {
        name: node.serving.hosting.of(service.id)
        for name, node in group.nodes.items()
        if not group.scopes[name].cancel_called
    }


def stages(group: Swarm, service: Service) -> dict[str, list[int]]:
    return {name: [each.number for each in found] for name, found in held(group, service).items() if found}


async def disturbed(
    group: Swarm, service: Service, disturb: Callable[[], object], tokens: int = TOKENS
) -> float:
    """Disturb an answer at node a after five tokens. The answer must have the expected tokens, and every move
    must be exact. Return the longest pause.
    """
    times: list[float] = []
    seen: list[int] = []
    async with group.nodes["a"].serving.answer(service, wish(tokens=tokens)) as generation:
        async for token in generation:
            seen.append(token.token)
            times.append(trio.current_time())
            if len(seen) == 5:
                disturb()
        assert generation.is_exact
    assert seen == reference(wish(tokens=tokens))
    return max(after - before for before, after in pairwise(times))


@pytest.mark.parametrize("slots", [1, 2])
def test_an_answer_continues_at_the_only_remaining_node(
    slots: int, tokens_served: type[TokensServed]
) -> None:
    async def main() -> None:
        async with serving("ab", stages=tokens_served, offer=Offering(slots=slots)) as (group, service):
            first = stages(group, service)["a"]
            pause = await disturbed(group, service, lambda: group.kill("b"))
            assert pause < tokens_served.load_seconds + 3
            assert stages(group, service) == {"a": [*first, 1 - first[0]]}
            main_stage, other = held(group, service)["a"]
            assert (main_stage.turn is other.turn) is (slots == 1), (
                "two stages in one slot must compute in turn, and two in two slots must not"
            )
            assert (main_stage.slot == other.slot) is (slots == 1)
            assert len(group.nodes["a"].serving.hosted()) == slots
            assert other.machine.memory_bytes <= main_stage.machine.memory_bytes
            # New answers use both stages there, and the service's document lists the holders.
            assert await ask(group.nodes["a"], service, wish(seed=3)) == reference(wish(seed=3))
            rows = (await group.nodes["a"].serving.finder.routes(service)).values()
            assert [[each.peer for each in row] for row in rows] == [[group.nodes["a"].peer]] * 2
            told = service_lines(await Asking(group.nodes["a"].serving).document(service), {})
            assert any(line.endswith("holds 2 stages until another node takes over") for line in told)
            await trio.sleep(2)
            assert group.nodes["a"].serving.provider.sessions_of(service.id) == 0

    simulate(main)


def test_an_answer_continues_after_the_stage_of_a_lone_node_ended(tokens_served: type[TokensServed]) -> None:
    async def main() -> None:
        async with serving("a", stages=tokens_served, cuts=()) as (group, service):
            (member,) = held(group, service)["a"]
            ended: Any = member.stage
            pause = await disturbed(group, service, lambda: setattr(ended, "is_closed", True))
            assert pause < tokens_served.load_seconds + 3

    simulate(main)


def test_a_node_without_enough_memory_takes_no_second_stage(tokens_served: type[TokensServed]) -> None:
    tokens_served.needed_bytes = 1 << 60

    async def main() -> None:
        async with serving("ab", stages=tokens_served) as (group, service):
            group.kill("b")
            with pytest.raises(RunFailed, match="nobody answers for stage"):
                await ask(group.nodes["a"], service, wish())
            assert list(map(len, stages(group, service).values())) == [1]

    simulate(main)


def test_a_member_takes_no_stage_that_another_already_holds() -> None:
    async def main() -> None:
        async with serving("abc", offer=Offering(slots=3), cuts=(1, 2)) as (group, service):
            await trio.sleep(3)
            first = stages(group, service)
            asker, other, holder = (name for name in "bca" if name in first)
            hosting = group.nodes[asker].serving.hosting
            recruiter, rows = hosting.recruiter, hosting.of(service.id)[0].upkeep.rows()
            told = await recruiter.ask_to_host(group.nodes[other].peer, service, first[holder][0], rows)
            assert told == "another member holds the stage"
            # The asking member itself may leave: then it may ask another to take over its own stage.
            told = await recruiter.ask_to_host(group.nodes[other].peer, service, first[asker][0], rows)
            assert told is None
            assert stages(group, service)[holder] == first[holder]

    simulate(main)


def test_a_node_that_cannot_load_the_second_stage_retries_less_often(
    tokens_served: type[TokensServed],
) -> None:
    async def main() -> None:
        async with serving("ab", stages=tokens_served) as (group, service):
            tokens_served.broken.add(group.nodes["a"].peer)
            group.kill("b")
            await trio.sleep(200)
            assert len(stages(group, service)["a"]) == 1
            failed = [
                event
                for event in group.events["a"]
                if isinstance(event, ServiceChanged) and event.detail == "no such weights"
            ]
            assert 3 <= len(failed) <= 8
            tokens_served.broken.clear()
            await until(lambda: len(stages(group, service)["a"]) == 2, REST_SECONDS_MAX + 30)
            await trio.sleep(1)
            assert await ask(group.nodes["a"], service, wish()) == reference(wish())

    simulate(main)


def test_a_leaving_node_hands_its_stage_over_first(tokens_served: type[TokensServed]) -> None:
    tokens_served.load_seconds = 3.0

    async def main() -> None:
        async with serving("ab", stages=tokens_served) as (group, service), trio.open_nursery() as nursery:
            pause = await disturbed(
                group, service, lambda: nursery.start_soon(group.nodes["b"].leave), tokens=150
            )
            assert pause < 2.0
            await until(lambda: "b" not in stages(group, service))
            assert sorted(stages(group, service)["a"]) == [0, 1]

    simulate(main)


def test_a_stopgap_is_released_once_a_different_node_answers(tokens_served: type[TokensServed]) -> None:
    async def main() -> None:
        async with serving("abc", stages=tokens_served) as (group, service):
            (free,) = {"a", "b", "c"} - stages(group, service).keys()
            other = await group.nodes[free].serving.published.begin(
                manifest(name="other", cuts=()), [group.nodes[free].peer]
            )
            await group.nodes[free].serving.published.await_ready(other)
            victim = next(name for name in stages(group, service) if name != "a")
            first = dict(stages(group, service))
            pause = await disturbed(group, service, lambda: group.kill(victim))
            assert pause < tokens_served.load_seconds + 3
            holder = next(name for name in first if name != victim)
            assert stages(group, service) == {holder: [*first[holder], *first[victim]]}
            # The other node is free again, so it takes the stage, and a running answer moves there.
            await group.nodes[free].serving.published.stop(other)
            await until(lambda: free in stages(group, service))
            began = trio.current_time()
            await disturbed(group, service, lambda: None, tokens=int(RELIEF_SECONDS / 0.1) + 60)
            assert trio.current_time() - began > RELIEF_SECONDS
            await until(lambda: stages(group, service) == {holder: first[holder], free: first[victim]})
            moves = [each for each in group.events["a"] if isinstance(each, GenerationMoved)]
            assert len(moves) == 2
            assert all(each.is_exact for each in moves)

    simulate(main)


def test_a_leaving_node_takes_no_stage_again() -> None:
    async def main() -> None:
        async with serving("a", cuts=()) as (group, service):
            node = group.nodes["a"]
            await node.serving.leave()
            await trio.sleep(2)
            assert stages(group, service) == {}
            assert node.serving.hosting.take(service, 0, (), node.peer) == "the node leaves"

    simulate(main)
