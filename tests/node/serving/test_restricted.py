"""Services that only certain peers may hold. Whole nodes in virtual time."""

import pytest
import trio

from node.errors import UsageError
from node.protocols.services import holder_name
from node.serving.joined import named_peers
from tests.node.serving.scene import ask, holders, manifest, served_by, until
from tests.partition.serve.world import reference, wish
from tests.stack import simulate, swarm


def test_only_the_named_peers_hold_a_restricted_service() -> None:
    async def main() -> None:
        async with swarm("abcd", parts=served_by()) as group:
            door, named = group.nodes["a"], [group.nodes[name].peer for name in "ad"]
            wanted = manifest(holders=tuple(map(holder_name, named)))
            service = await door.serving.published.begin(wanted, named)
            await door.serving.published.await_ready(service)
            assert set(holders(group)) == {"a", "d"}
            assert await ask(group.nodes["b"], service, wish()) == reference(wish())
            # No other peer may replace d, whichever member asks it to.
            group.kill("d")
            await trio.sleep(20)
            assert set(holders(group)) == {"a"}
            reason = await door.serving.hosting.recruiter.ask_to_host(group.nodes["b"].peer, service, 1, ())
            assert reason == "the service is restricted to other peers"

    simulate(main)


def test_routes_through_peers_that_may_not_hold_a_service_are_ignored() -> None:
    async def main() -> None:
        async with swarm("abc", parts=served_by()) as group:
            door = group.nodes["a"]
            service = await door.serving.published.begin(manifest(cuts=()), [door.peer])
            await door.serving.published.await_ready(service)
            stranger = group.nodes["b"].peer
            narrow = manifest(cuts=(), holders=(holder_name(stranger),))
            assert not narrow.may_hold(door.peer)
            found = await group.nodes["c"].serving.finder.routes(service)
            assert [each.peer for each in found[0]] == [door.peer]
            restricted = type(service)(service.id, service.publisher, narrow, service.fact)
            assert await group.nodes["c"].serving.finder.routes(restricted) == {}

    simulate(main)


def test_holders_are_given_by_names_or_ids() -> None:
    async def main() -> None:
        async with swarm("abc", parts=served_by()) as group:
            node = group.nodes["a"]
            await until(lambda: len(node.members()) == 2)
            assert named_peers(node, ["b"]) == [group.nodes["b"].peer]
            assert named_peers(node, [group.nodes["c"].id[-8:]]) == [group.nodes["c"].peer]
            with pytest.raises(UsageError, match="no member has that name"):
                named_peers(node, ["nobody"])
            with pytest.raises(UsageError, match="lists no peers, or none that it knows"):
                named_peers(node, ["invited"])

    simulate(main)
