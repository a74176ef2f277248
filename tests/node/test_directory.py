"""The DHT as programs see it: values, blobs, providers, searches, and restarts. Whole nodes in virtual
time."""

import pytest
import trio

from node.cli.dht import found_lines
from node.cli.render import short_id
from node.commands import Commands
from node.content.directory import NotStored
from node.errors import UsageError
from node.events import Event, RecordShort
from sim.network.model import NetworkModel
from tests.stack import manifest, simulate, swarm, train


def test_a_value_is_found_by_every_node_and_the_newest_wins() -> None:
    async def scenario() -> None:
        async with swarm("abcd", preset="lan") as group:
            await trio.sleep(5)
            a, b, c = (group.nodes[name].dht for name in "abc")
            assert (await a.put("weather", b"rain")).holders == 4
            await trio.sleep(0.01)
            assert await b.get("weather") == b"rain"
            await a.put("weather", b"sun")
            assert await c.get("weather") == b"sun"
            await trio.sleep(0.01)
            await b.put("weather", b"fog")
            assert await c.get("weather") == b"fog"
            assert await c.get("weather", group.nodes["a"].id) == b"sun"
            assert len(await c.get_all("weather")) == 2
            assert await c.get("nothing") is None

    simulate(scenario)


def test_a_value_too_large_for_a_record_is_stored_as_a_blob() -> None:
    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            await trio.sleep(5)
            value = bytes(range(256)) * 400
            await group.nodes["a"].dht.put("large", value)
            assert await group.nodes["b"].dht.get("large") == value

    simulate(scenario)


def test_an_immutable_value_is_found_by_its_hash() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            await trio.sleep(5)
            stored = await group.nodes["a"].dht.put_immutable(b"for ever")
            group.kill("a")
            await trio.sleep(3)
            assert await group.nodes["c"].dht.get_immutable(stored.key) == b"for ever"

    simulate(scenario)


def test_providers_of_content_are_found_by_its_hash() -> None:
    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            await trio.sleep(5)
            digest = bytes(32).hex()
            await group.nodes["a"].provide(digest)
            await group.nodes["b"].provide(digest)
            found = await group.nodes["c"].providers(digest)
            assert set(found) == {group.nodes["a"].id, group.nodes["b"].id}

    simulate(scenario)


def test_a_search_by_capability_finds_the_other_nodes() -> None:
    async def scenario() -> None:
        async with swarm("abcd", preset="lan") as group:
            await trio.sleep(20)
            asker = group.nodes["d"]
            found = await asker.dht.find(device="cpu")
            assert {node.peer for node in found} == {group.nodes[name].id for name in "abc"}
            assert await asker.dht.find(device="cuda") == ()
            assert asker.status()["dht"]["contacts"] == 3
            stat = await asker.dht.stat()
            assert stat["nodes_estimated"] == 4
            await group.nodes["a"].dht.put("key", b"value")
            assert (await asker.dht.stat("key"))["holders"] == 4

    simulate(scenario)


def test_a_search_orders_nodes_by_measured_round_trips() -> None:
    async def scenario() -> None:
        apart = NetworkModel(nearest_seconds=0.005, farthest_seconds=0.15)
        async with swarm("abcdefgh", network=apart, preset="local") as group:
            for name in "bdfh":
                group.nodes[name].set("location", "eu-west")
            await trio.sleep(60)
            asker, links = group.nodes["a"], group.medium.links

            def trip(name: str) -> float:
                peers = asker.peer, group.nodes[name].peer
                return links.latency_seconds(*peers) + links.latency_seconds(*reversed(peers))

            for near, names in (("", "bcdefgh"), ("eu-west", "bdfh")):
                wanted = sorted(names, key=trip)
                assert wanted != sorted(wanted, key=lambda name: group.nodes[name].id), (
                    "the order by round trip equals the order by id, so the test proves nothing"
                )
                found = await asker.dht.find(near=near)
                assert [node.peer for node in found] == [group.nodes[name].id for name in wanted]
                assert [node.seconds for node in found] == pytest.approx(list(map(trip, wanted)), abs=2e-3)
                shown = await Commands(asker).handlers["dht.find"]({"near": near}, ignore)
                assert isinstance(shown, dict)
                lines = found_lines(shown)[1:]
                assert [line.split()[0] for line in lines] == [short_id(node.peer) for node in found]
                few = await asker.dht.find(near=near, count=2)
                assert [node.peer for node in few] == [group.nodes[name].id for name in wanted[:2]]
            assert await asker.dht.find(near="mars") == ()

    simulate(scenario)


def test_a_value_that_no_other_node_keeps_is_reported() -> None:
    async def scenario() -> None:
        async with swarm("abcd") as group:
            await trio.sleep(5)
            alone = group.nodes["a"]
            with alone.watch() as events:
                for name in "bcd":
                    group.kill(name)
                with pytest.raises(NotStored):
                    await alone.dht.put("key", b"value")
                seen: list[Event] = []
                while not any(isinstance(event, RecordShort) for event in seen):
                    seen.append(await events.receive())

    simulate(scenario)


def test_every_record_is_found_after_all_nodes_restarted() -> None:
    async def scenario() -> None:
        async with swarm("abcd", preset="lan") as group:
            await trio.sleep(5)
            for number, name in enumerate("abcd"):
                await group.nodes[name].dht.put(f"key {number}", name.encode(), 7_200)
            await trio.sleep(10)
            storages = dict(group.storages)
        async with swarm("abcd", storages=storages, preset="lan") as again:
            await trio.sleep(5)
            for number, name in enumerate("abcd"):
                for node in again.nodes.values():
                    assert await node.dht.get(f"key {number}") == name.encode()

    simulate(scenario)


def test_commands_and_library_give_the_same_results() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            await trio.sleep(20)
            handlers = Commands(group.nodes["a"]).handlers

            async def ask(name: str, **arguments: object) -> dict[str, object]:
                answer = await handlers[name](dict(arguments), ignore)
                assert isinstance(answer, dict)
                return answer

            put = await ask("dht.put", key="k", value=b"v".hex(), ttl_seconds=60)
            assert (put["holders"], put["wanted"]) == (2, 2)
            assert (await ask("dht.get", key="k"))["value"] == b"v".hex()
            assert (await ask("dht.get", key="nothing"))["found"] is False
            nodes = (await ask("dht.find", device="cpu"))["nodes"]
            assert isinstance(nodes, list)
            assert [node["peer"] for node in nodes] == [group.nodes["b"].id]
            assert (await ask("dht.stat"))["contacts"] == 1
            for wrong in ({"key": ""}, {"key": "k" * 600}, {"key": "k", "ttl_seconds": 0}):
                with pytest.raises(UsageError):
                    await ask("dht.put", value="", **wrong)
            with pytest.raises(UsageError):
                await ask("dht.find", device="abacus")

    simulate(scenario)


async def ignore(_: object) -> None:
    """Discard a progress report."""


def test_a_run_is_placed_on_nodes_found_by_their_offers() -> None:
    async def scenario() -> None:
        async with swarm("abcd", preset="lan") as group:
            await trio.sleep(40)
            asker = group.nodes["a"]
            own = [offer for offer in asker.runs.offers() if offer.peer == asker.peer]
            asker.runs.offers = lambda: own
            run, outcome = await train(group, "a", manifest(steps=1, stages=2, replicas=1))
            plan = group.nodes["a"].state.runs[run.text].plan
            assert plan is not None
            assert len({peer for stage in plan.stages for peer in stage}) == 2
            assert outcome is not None

    simulate(scenario)
