"""Services of whole nodes in virtual time: how they are placed and found, answer, are maintained, and end.
The door of an answer is the node that asks for it."""

from itertools import pairwise
from typing import Any

import pytest
import trio

from node.errors import RunFailed, UsageError
from node.protocols.services import make_service
from node.serving import finding, texts
from node.serving_events import GenerationEnded, GenerationMoved, ServiceChanged
from partition.serve.backoff import FORGIVEN_ENDS
from partition.serve.timeouts import ROUTE_SECONDS_MAX
from sim.network.model import NetworkModel
from tests.node.serving.scene import (
    STAGE_SECONDS,
    TokensServed,
    ask,
    holders,
    manifest,
    served_by,
    serving,
    until,
)
from tests.partition.serve.world import reference, wish
from tests.stack import simulate, swarm


def test_a_service_answers_from_every_node() -> None:
    async def main() -> None:
        async with serving("abc") as (group, service):
            for node in group.nodes.values():
                found = await node.serving.finder.find("tokens")
                assert found == service
                assert await ask(node, found, wish()) == reference(wish())
            assert sorted(holders(group).values()) == [0, 1]

    simulate(main)


def test_an_answer_continues_after_a_spare_loads_a_killed_stage() -> None:
    async def main() -> None:
        async with serving("abc") as (group, service):
            door = group.nodes["a"]
            victim = next(name for name, stage in holders(group).items() if name != "a")
            seen: list[int] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, door, service, wish(tokens=40), seen)
                await until(lambda: len(seen) >= 5)
                group.kill(victim)
            assert seen == reference(wish(tokens=40))
            moved = [event for event in group.events["a"] if isinstance(event, GenerationMoved)]
            assert moved
            assert all(event.is_exact for event in moved)
            (ended,) = [event for event in group.events["a"] if isinstance(event, GenerationEnded)]
            assert (ended.outcome, ended.tokens) == ("length", 40)
            assert victim not in holders(group)

    simulate(main)


@pytest.mark.parametrize("holder", "ab")  # the node that asks, and another one
def test_a_stage_that_ends_while_idle_is_loaded_again(holder: str) -> None:
    async def main() -> None:
        async with serving("ab") as (group, service):
            hosting = group.nodes[holder].serving.hosting
            (member,) = hosting.of(service.id)
            ended: Any = member.stage
            ended.is_closed = True
            await until(lambda: hosting.of(service.id) != [member], 3)
            await group.nodes["a"].serving.published.await_ready(service)
            assert await ask(group.nodes["a"], service, wish()) == reference(wish())

    simulate(main)


def test_a_node_reloads_a_stage_that_keeps_ending_less_often(tokens_served: type[TokensServed]) -> None:
    async def main() -> None:
        async with serving("a", stages=tokens_served, cuts=()) as (group, service):
            for _ in range(300):
                await trio.sleep(1)
                for member in group.nodes["a"].serving.hosting.of(service.id):
                    ended: Any = member.stage
                    if ended is not None:
                        ended.is_closed = True
            assert FORGIVEN_ENDS + 3 <= len(tokens_served.opened) <= 10

    simulate(main)


def test_an_answer_with_a_replica_pauses_no_longer_than_the_time_out() -> None:
    async def main() -> None:
        async with serving("abcd", replicas=2) as (group, service):
            await until(lambda: len(holders(group)) == 4)
            await group.nodes["a"].serving.published.await_ready(service)
            await trio.sleep(5)
            seen: list[int] = []
            times: list[float] = []
            async with group.nodes["a"].serving.answer(service, wish(tokens=40)) as generation:
                async for token in generation:
                    seen.append(token.token)
                    times.append(trio.current_time())
                    if len(seen) == 5:
                        names = {node.peer: name for name, node in group.nodes.items()}
                        victim = next(names[peer] for peer in generation.route if names[peer] != "a")
                        group.kill(victim)
            assert seen == reference(wish(tokens=40))
            assert max(after - before for before, after in pairwise(times)) < 2.0

    simulate(main)


def test_a_leaving_node_first_moves_its_answers_elsewhere(tokens_served: type[TokensServed]) -> None:
    """The leaving node keeps answering while its replacement loads the stage, so no answer waits for the
    load."""
    tokens_served.load_seconds = 3.0

    async def main() -> None:
        async with serving("abc", stages=tokens_served) as (group, service):
            victim = next(name for name in holders(group) if name != "a")
            times: list[float] = []
            seen: list[int] = []

            async def listen() -> None:
                async with group.nodes["a"].serving.answer(service, wish(tokens=80)) as generation:
                    async for token in generation:
                        seen.append(token.token)
                        times.append(trio.current_time())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                await until(lambda: len(seen) >= 5)
                await group.nodes[victim].leave()
                assert 5 < len(seen) < 80
                assert victim not in holders(group)
            assert seen == reference(wish(tokens=80))
            assert max(after - before for before, after in pairwise(times)) < 1.0

    simulate(main)


@pytest.mark.parametrize("seconds", [0.02, 0.1])
def test_a_token_costs_its_computation_and_one_link_delay_per_hop(seconds: float) -> None:
    """With S stages there are S + 1 hops: from the door to the first stage, S - 1 between stages, and from
    the last stage back to the door."""

    async def main() -> None:
        network = NetworkModel(nearest_seconds=seconds, farthest_seconds=seconds)
        async with serving("abc", network=network) as (group, service):
            door = group.nodes[next(name for name in group.nodes if name not in holders(group))]
            times: list[float] = []
            async with door.serving.answer(service, wish(tokens=30)) as generation:
                async for _ in generation:
                    times.append(trio.current_time())
            token = (times[-1] - times[0]) / (len(times) - 1)
            best = 2 * STAGE_SECONDS + 3 * seconds
            assert best <= token * (1 + 1e-9) <= 1.06 * best

    simulate(main)


def test_an_abandoned_answer_is_forgotten_in_every_stage() -> None:
    async def main() -> None:
        async with serving("ab") as (group, service):
            async with group.nodes["a"].serving.answer(service, wish(tokens=100)) as generation:
                async for _ in generation:
                    break
            await trio.sleep(1)
            for node in group.nodes.values():
                assert node.serving.provider.sessions == 0
                for member in node.serving.hosting.members.values():
                    assert not member.stage.stage.kept  # type: ignore[union-attr]  # the one of the scene

    simulate(main)


def test_sessions_are_freed_when_their_door_dies() -> None:
    async def main() -> None:
        async with serving("abc") as (group, service):
            door = next(name for name in group.nodes if name not in holders(group))
            async with trio.open_nursery() as nursery:
                seen: list[int] = []
                nursery.start_soon(ask, group.nodes[door], service, wish(tokens=400), seen)
                await until(lambda: len(seen) >= 3)
                group.kill(door)
                await trio.sleep(12)
                nursery.cancel_scope.cancel()
            assert all(group.nodes[name].serving.provider.sessions == 0 for name in holders(group))

    simulate(main)


def test_a_service_without_a_spare_answers_once_a_node_becomes_free(
    tokens_served: type[TokensServed],
) -> None:
    tokens_served.needed_bytes = 1 << 60  # no member has memory for a second stage

    async def main() -> None:
        async with serving("abcd", stages=tokens_served) as (group, service):
            door = group.nodes["a"]
            victim = next(name for name in holders(group) if name != "a")
            other = group.nodes[next(name for name in "bcd" if name != victim)]
            taken = await other.serving.published.begin(manifest(name="other"), [other.peer])
            await other.serving.published.await_ready(taken)
            group.kill(victim)
            with pytest.raises(RunFailed, match="nobody answers for stage"):
                await ask(door, service, wish())
            await other.serving.published.stop(taken)
            began = trio.current_time()
            await door.serving.published.await_ready(service)
            assert trio.current_time() - began < 8.0, (
                "the members waited for their next round before they used the free node"
            )
            assert await ask(door, service, wish()) == reference(wish())

    simulate(main)


def test_a_service_outlives_its_publisher() -> None:
    async def main() -> None:
        async with serving("abcd", replicas=1) as (group, _):
            group.kill("a")
            await trio.sleep(20)
            assert sorted(stage for name, stage in holders(group).items() if name != "a") == [0, 1]
            other = group.nodes["b"]
            found = await other.serving.finder.find("tokens")
            assert await ask(other, found, wish()) == reference(wish())

    simulate(main)


def test_a_publisher_restarts_a_service_whose_members_all_died() -> None:
    async def main() -> None:
        async with swarm("abcde", parts=served_by()) as group:
            taken = await group.nodes["a"].serving.published.begin(
                manifest(name="other"), [group.nodes["a"].peer]
            )
            await group.nodes["a"].serving.published.await_ready(taken)
            service = await group.nodes["a"].serving.published.begin(manifest())
            await group.nodes["a"].serving.published.await_ready(service)
            members = [name for name, node in group.nodes.items() if service.id in node.serving.hosted()]
            assert "a" not in members
            spare = next(name for name in "bcde" if not group.nodes[name].serving.hosted())
            for name in members:
                group.kill(name)
            await trio.sleep(1)
            assert spare
            await group.nodes["a"].serving.published.stop(taken)
            await group.nodes["a"].serving.published.await_ready(service)
            assert await ask(group.nodes["a"], service, wish()) == reference(wish())

    simulate(main)


def test_an_answer_waits_while_a_stage_is_loading(tokens_served: type[TokensServed]) -> None:
    async def main() -> None:
        async with serving("abc", stages=tokens_served) as (group, service):
            tokens_served.load_seconds = 2 * ROUTE_SECONDS_MAX
            victim = next(name for name in holders(group) if name != "a")
            seen: list[int] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, group.nodes["a"], service, wish(tokens=20), seen)
                await until(lambda: len(seen) >= 5)
                group.kill(victim)
            assert seen == reference(wish(tokens=20))

    simulate(main)


def test_only_the_publisher_can_end_a_service() -> None:
    async def main() -> None:
        async with serving("abc") as (group, service):
            with pytest.raises(UsageError):
                await group.nodes["b"].serving.published.stop(service)
            await group.nodes["a"].serving.published.stop(service)
            await trio.sleep(20)
            assert holders(group) == {}, "a member started the service again"
            with pytest.raises(UsageError):
                await group.nodes["c"].serving.finder.find("tokens")
            ended = [event for event in group.events["a"] if isinstance(event, ServiceChanged)][-1]
            assert (ended.is_held, ended.detail) == (False, "its publisher ended the service")

    simulate(main)


def test_no_service_starts_if_nobody_accepts_a_stage() -> None:
    async def main() -> None:
        async with swarm("a", parts=served_by()) as group:
            with pytest.raises(RunFailed, match="nobody takes stage 2 of 2: no node offers a free slot"):
                await group.nodes["a"].serving.published.begin(manifest(), [group.nodes["a"].peer])
            await trio.sleep(1)
            assert group.nodes["a"].runs.has_slot

    simulate(main)


def test_a_stage_that_a_node_cannot_load_moves_to_another_node(tokens_served: type[TokensServed]) -> None:
    async def main() -> None:
        async with swarm("abc", parts=served_by(tokens_served)) as group:
            tokens_served.broken.add(group.nodes["b"].peer)
            service = await group.nodes["a"].serving.published.begin(manifest(), [group.nodes["a"].peer])
            await group.nodes["a"].serving.published.await_ready(service)
            assert holders(group) == {"a": 0, "c": 1}

    simulate(main)


def test_a_served_stage_occupies_a_slot() -> None:
    async def main() -> None:
        async with serving("ab") as (group, _):
            assert not any(node.runs.has_slot for node in group.nodes.values())

    simulate(main)


def test_concurrent_tokenizer_loads_are_limited_by_a_nodes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "READERS_USED_MAX", 0)

    async def main() -> None:
        async with swarm("a", parts=served_by()) as group:
            me = group.nodes["a"]
            service = make_service(me.signer, manifest(text="tokenizer", tokenizer=bytes(32)))
            with pytest.raises(RunFailed, match="asked here already"):
                async with me.serving.texts.reading(service, [me.peer]):
                    pass

    simulate(main)


def test_memory_figures_cover_only_the_members_asked_most_recently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with serving("abcde", replicas=2) as (group, service):
            finder = group.nodes["e"].serving.finder
            await finder.routes(service)
            assert len(finder.usage(service.id)) == 4
            monkeypatch.setattr(finding, "ASKED_MAX", 1)
            finder.note(service, [group.nodes["a"].peer])
            await finder.routes(service)
            assert len(finder.usage(service.id)) <= 2

    simulate(main)
