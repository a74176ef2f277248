"""Limits in [offer] on how much one peer may use a node's stages, tested through whole nodes."""

import pytest
import trio

from node.errors import RunFailed
from node.offering import Offering
from node.protocols.services import Service
from node.runtime import Node
from tests.node.serving.scene import TokensServed, ask, holders, serving, until
from tests.partition.serve.world import reference, wish
from tests.stack import Swarm, simulate


def stranger(group: Swarm) -> Node:
    """Return the node that holds no stage, so that both holders count it as another peer."""
    return group.nodes[next(name for name in group.nodes if name not in holders(group))]


async def refused(node: Node, service: Service) -> str:
    with pytest.raises(RunFailed) as told:
        await ask(node, service, wish(tokens=3))
    return told.value.what


def test_a_peer_gets_no_more_sessions_than_the_owner_allows() -> None:
    async def main() -> None:
        async with serving("abc", offer=Offering(peer_sessions=2)) as (group, service):
            node = stranger(group)
            async with trio.open_nursery() as nursery:
                running = [list[int]() for _ in range(2)]
                for seen in running:
                    nursery.start_soon(ask, node, service, wish(tokens=400), seen)
                await until(lambda: all(running))
                what = await refused(node, service)
                assert "this peer has 2 sessions here, as many as the owner allows" in what
                holder = group.nodes[next(iter(holders(group)))]
                assert await ask(holder, service, wish()) == reference(wish())
                nursery.cancel_scope.cancel()
            assert await ask(node, service, wish()) == reference(wish())

    simulate(main)


def test_a_peer_gets_no_more_tokens_a_minute_than_the_owner_allows() -> None:
    async def main() -> None:
        async with serving("abc", offer=Offering(peer_tokens_per_minute=10)) as (group, service):
            node = stranger(group)
            assert await ask(node, service, wish(5, 14)) == reference(wish(5, 14)), (
                "the answer that reached the limit was cut off"
            )
            what = await refused(node, service)
            assert "its owner allows 10 tokens a minute to each peer: more in" in what
            await trio.sleep(30)
            assert await ask(node, service, wish(5, 4)) == reference(wish(5, 4))

    simulate(main)


def test_a_peer_gets_no_more_of_the_cache_than_the_owner_allows(tokens_served: type[TokensServed]) -> None:
    tokens_served.tokens_max = 100

    async def main() -> None:
        async with serving("abc", stages=tokens_served, offer=Offering(peer_cache_percent=30)) as (
            group,
            service,
        ):
            node = stranger(group)
            assert await ask(node, service, wish(5, 20)) == reference(wish(5, 20))
            with pytest.raises(RunFailed, match="keys and values of 30 tokens here"):
                await ask(node, service, wish(5, 40))

    simulate(main)


def test_a_waiting_answer_starts_when_its_peers_previous_one_ends() -> None:
    async def main() -> None:
        async with serving("abc", offer=Offering(peer_sessions=1)) as (group, service):
            node, first, second = stranger(group), list[int](), list[int]()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, node, service, wish(tokens=20), first)
                await until(lambda: bool(first))
                nursery.start_soon(ask, node, service, wish(tokens=5, seed=2), second)
            assert first == reference(wish(tokens=20))
            assert second == reference(wish(tokens=5, seed=2))

    simulate(main)
