"""An unreachable node offers no stages, is asked for none, and says what its owner can do."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from crypto.contact import make_address, parse_address
from crypto.identity import peer_text
from node import config
from node.cli.status import status_lines
from node.commands import ALONE_TEXT, Commands
from node.errors import RunFailed
from node.events import Event, RunChanged, RunPlanned
from node.runtime import Node
from node.service_settings import ServiceSettings
from node.services.autonat_core import OTHERS, ReachSettings
from node.services.metadata import UNREACHABLE_WORD
from sim.network.links import SimLinks
from sim.network.model import Access, Nat, NetworkModel
from sim.seams import SimNetworkFabric
from sim.seeds import seeded_identity
from tests import stack
from tests.node.nets import unused_address
from tests.node.simulated import SEED, simulated_node

HASTY = ServiceSettings(reach=ReachSettings(soon_seconds=0.1))


def settings(
    folder: Path, name: str, *join: str, announce: int = 0, has_relays: bool = False
) -> config.Config:
    told = (make_address("127.0.0.1", announce),) if announce else ()
    listen = config.Listen(addresses=(config.read_listen("127.0.0.1:0"),), announce=told)
    return config.Config(
        name=name,
        data_dir=folder / name,
        swarm=config.SwarmSettings(name="unreachable", preset="local"),
        listen=listen,
        relay=config.Relaying(enabled=has_relays),
        join=config.JoinSettings(lan=False, seeds=tuple(map(parse_address, join))),
        resources=config.Resources(calibrate=False, allow_unfenced=True),
    )


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not holds():  # noqa: ASYNC110 - a fold of events wakes nobody
            await trio.sleep(0.02)


def offers_slot(asked: Node, of: Node) -> bool:
    """Return whether a run of `asked` may place a stage on the other node."""
    (offer,) = (offer for offer in asked.runs.offers() if offer.peer == of.peer)
    return offer.has_slot


async def test_a_node_whose_announced_port_is_dead_gets_no_stage(tmp_path: Path) -> None:
    dead = unused_address().port
    async with AsyncExitStack() as stack:

        async def begin(name: str, *join: str, announce: int = 0) -> Node:
            made = settings(tmp_path, name, *join, announce=announce)
            return await stack.enter_async_context(Node(made, settings=HASTY))

        first = await begin("a")
        others = [first, *[await begin(name, first.addresses[0]) for name in "bc"]]
        hidden = await begin("hidden", first.addresses[0], announce=dead)
        await until(lambda: hidden.state.reachability is not None)
        await until(lambda: hidden.provider.is_unreachable)
        assert hidden.state.reachability is not None
        assert hidden.state.reachability.asked == OTHERS
        await until(lambda: all(hidden.peer in each.membership.live for each in others))
        await until(lambda: not any(offers_slot(each, hidden) for each in others))
        (member,) = (each for each in first.members() if each.name == "hidden")
        assert member.standing is not None
        assert UNREACHABLE_WORD in member.standing.capabilities
        assert all(offers_slot(first, each) for each in others[1:])
        lines = "\n".join(status_lines(hidden.status()))
        assert "no other node gets through to this one" in lines
        assert f"let TCP and UDP port {dead} through" in lines


async def test_an_undialable_node_offers_its_slot_through_a_relay(tmp_path: Path) -> None:
    dead = unused_address().port
    async with AsyncExitStack() as stack:

        async def begin(name: str, *join: str, announce: int = 0) -> Node:
            made = settings(tmp_path, name, *join, announce=announce, has_relays=True)
            return await stack.enter_async_context(Node(made, settings=HASTY))

        first = await begin("a")
        await begin("b", first.addresses[0])
        hidden = await begin("hidden", first.addresses[0], announce=dead)
        await until(lambda: bool(hidden.network.addresses[1:]))
        circuits = [address for address in hidden.network.addresses if address.relay is not None]
        await until(lambda: offers_slot(first, hidden))
        assert not hidden.provider.is_unreachable
        found = hidden.state.reachability
        assert found is not None
        assert set(found.relays) == {address.relay for address in circuits}
        lines = "\n".join(status_lines(hidden.status()))
        assert "which carry what others say to it" in lines
        assert "/p2p-circuit" not in lines

        def path_of_hidden() -> dict[str, object] | None:
            told = first.inbound.told_of({"peers": [{"peer": peer_text(hidden.peer)}]})
            path: dict[str, object] | None = told["peers"][0]["path"]
            return path

        def is_spoken_to() -> bool:
            path = path_of_hidden()
            return path is not None and path["way"] in ("direct", "relayed")

        await until(is_spoken_to)


@asynccontextmanager
async def behind(nat: Nat, *, observer: bool = False) -> AsyncIterator[tuple[Node, list[Node]]]:
    """Return a node behind a NAT whose reachability is known, and four nodes with public addresses."""
    medium = SimNetworkFabric(
        SimLinks(NetworkModel(access=(Access(share=0.5), Access(share=0.5, nat=nat))), 1)
    )
    translated = [medium.links.at(seeded_identity(SEED, number).peer).nat is not None for number in range(40)]
    inside = translated.index(True)
    outside = [number for number in range(40) if not translated[number]][:4]
    async with AsyncExitStack() as opened:
        public = [await opened.enter_async_context(simulated_node(medium, outside[0]))]
        first = public[0].network.addresses[0].short
        for number in outside[1:]:
            public.append(await opened.enter_async_context(simulated_node(medium, number, first)))
        made = simulated_node(medium, inside, first, settings={"observer": observer})
        hidden = await opened.enter_async_context(made)
        await trio.sleep(90)
        yield hidden, public


@pytest.mark.parametrize(("nat", "is_asked"), [("full-cone", True), ("restricted", False)])
def test_only_reachable_nodes_exchange_stages(nat: Nat, is_asked: bool) -> None:
    async def scenario() -> None:
        async with behind(nat) as (hidden, public):
            assert [offers_slot(each, hidden) for each in public] == [is_asked] * len(public)
            assert len(hidden.runs.offers()) == (len(public) + 1 if is_asked else 1)
            run = stack.prepare(public[0], stack.manifest(steps=1))
            refusal = hidden.provider.refusal(run, hidden.peer)
            wanted = None if is_asked else "takes no stages of others: no other node gets through to it"
            assert refusal == wanted

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_a_run_of_an_unreachable_node_is_placed_on_that_node() -> None:
    async def scenario() -> None:
        async with behind("restricted") as (hidden, _):
            run = stack.prepare(hidden, stack.manifest(steps=1))
            with hidden.watch() as events:
                await Commands(hidden).submit(run, 0.0)
                seen: list[Event] = []
                while not any(isinstance(event, RunPlanned) for event in seen):
                    seen.append(await events.receive())
            told = [event.reason for event in seen if isinstance(event, RunChanged)]
            assert ALONE_TEXT in told
            plan = hidden.runs.members[run.id].plan
            assert plan is not None
            assert set(plan.members) == {hidden.peer}

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_an_unreachable_nodes_run_fails_at_once_without_own_slots() -> None:
    async def scenario() -> None:
        async with behind("restricted", observer=True) as (hidden, _):
            run = stack.prepare(hidden, stack.manifest(steps=1))
            begun = trio.current_time()
            with pytest.raises(RunFailed) as refusal:
                await Commands(hidden).submit(run, 0.0)
            assert ALONE_TEXT in refusal.value.what
            assert "--announce HOST:PORT" in str(refusal.value.do)
            assert trio.current_time() - begun < 30

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
