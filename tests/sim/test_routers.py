"""Simulated routers admit the same packets as the laboratory's real ones, and peers behind them
stay members.
"""

from itertools import combinations_with_replacement

import pytest

import sim
from crypto.identity import PeerId
from gossip.member import MemberDown
from sim.events import PathOpened, PlaceFound, RouterRebooted
from sim.network.machines import PORT, Internet, RoutedMachine, carry, connect
from sim.network.routers import PRESETS, Endpoint, Preset, RouterBehaviour, SimRouter, Transport
from sim.observers import Observation, World
from sim.scenario import load, with_values
from sim.scenario.model import Scenario
from tests.lab import nat as lab

NAMES: dict[Preset, str] = {"none": "public", **{name: name for name in PRESETS if name in lab.PRESETS}}
TRANSPORTS: tuple[Transport, ...] = ("tcp", "udp")


def machines(*presets: Preset, behind_one: int = 1) -> list[RoutedMachine]:
    internet = Internet()
    made = []
    for number, preset in enumerate(presets):
        machine = internet.machine(PeerId(number.to_bytes(32, "big")), number, preset, behind_one)
        machine.is_up = True
        made.append(machine)
    return made


def seen(
    one: RoutedMachine, server: RoutedMachine, transport: Transport, now: float = 0.0, family: int = 4
) -> Endpoint | None:
    """Return the address at which a server sees a machine that sends to it."""
    return carry(transport, one, server, server.cards[family].inner, now)


def punched(one: RoutedMachine, other: RoutedMachine, server: RoutedMachine, transport: Transport) -> bool:
    """Return whether packets arrive in both directions. Each machine first sends to the other's observed
    address, and then to the source address of the packets that it received. Plain sockets in the laboratory
    do the same.
    """
    family = one.family(other)
    places = {end.peer: seen(end, server, transport, family=family) for end in (one, other)}
    reached = set()
    for _ in range(3):
        for near, far in ((one, other), (other, one)):
            to = places[far.peer]
            source = None if to is None else carry(transport, near, far, to, 0.0)
            if source is not None:
                places[near.peer] = source
                reached.add(near.peer)
    return len(reached) == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("one", "other"), [*combinations_with_replacement(NAMES, 2)])
def test_two_machines_connect_directly_exactly_as_in_the_laboratory(
    one: Preset, other: Preset, transport: Transport
) -> None:
    server, *ends = machines("none", one, other)
    sites = [lab.PRESETS[NAMES[each]] for each in (one, other)]
    assert punched(ends[0], ends[1], server, transport) == lab.can_be_direct(sites[0], sites[1], transport)


def test_a_mapping_is_forgotten_after_its_time() -> None:
    a, b, home = machines("none", "none", "half-minute")
    there = seen(home, a, "udp")
    assert there is not None
    assert carry("udp", a, home, there, 29.0) is not None
    assert carry("udp", b, home, there, 29.0) is None, "a packet was sent to the expired mapping"
    assert carry("udp", a, home, there, 60.0) is None
    assert seen(home, b, "udp", 61.0) == there, "the port differs by destination"


def test_a_rebooted_router_breaks_connections_and_changes_ports() -> None:
    server, home = machines("none", "home")
    made = connect(home, server, server.cards[4].inner, 0.0)
    assert made is not None
    assert made.passes(home, 1.0)
    assert made.passes(server, 1.0)
    assert home.site is not None
    home.site.reboot()
    assert not made.passes(server, 2.0)
    assert not made.passes(home, 2.0)
    again = connect(home, server, server.cards[4].inner, 3.0)
    assert again is not None
    assert again.source != made.source


def test_machines_behind_one_router_connect_inside_and_by_hairpin() -> None:
    presets: tuple[Preset, ...] = ("home", "cone")
    for preset in presets:
        server, one, other = machines("none", preset, preset, behind_one=2)
        assert one.site is other.site
        assert carry("udp", one, other, other.cards[4].inner, 0.0) == one.cards[4].inner
        there = seen(other, server, "udp")
        assert there is not None
        assert (carry("udp", one, other, there, 0.0) is not None) == (preset == "cone")


def test_a_full_cone_can_be_dialled_while_its_mapping_lasts() -> None:
    server, stranger, cone, home = machines("none", "none", "cone", "home")
    assert cone.place_for(stranger, "tcp", 0.0) is None
    assert seen(cone, server, "tcp") is not None
    assert cone.lets_in(stranger, 1.0)
    assert connect(stranger, cone, cone.place_for(stranger, "tcp", 1.0), 1.0) is not None
    assert seen(home, server, "tcp") is not None
    assert not home.lets_in(stranger, 1.0)


def test_a_router_keeps_a_bounded_number_of_mappings() -> None:
    router = SimRouter(RouterBehaviour(mapping="dependent", udp_seconds=30.0), "45.0.1.2")
    for number in range(20_000):
        router.leave(
            "udp", ("192.168.1.10", PORT), (f"46.{number >> 8}.{number & 255}.1", PORT), number / 10.0
        )
    assert len(router) < 5_000


# Peers behind routers.


def scenario(seconds: str = "180") -> Scenario:
    """Return the built-in scenario, shortened."""
    short = {
        "nodes": "14",
        "seconds": seconds,
        "start.spread_seconds": "10",
        "events.0.at_seconds": "30",
        "events.0.share": "0.3",
        "checks.converge_seconds": "0",
    }
    return with_values(load("nat"), short)


class Story:
    """Collects events by kind."""

    def __init__(self) -> None:
        self.rows: list[Observation] = []

    def see(self, observed: Observation, world: World) -> None:
        del world
        self.rows.append(observed)

    def sample(self, world: World) -> None: ...
    def end(self, world: World) -> None: ...

    def of(self, kind: type) -> list[Observation]:
        return [row for row in self.rows if isinstance(row.event, kind)]


def test_peers_behind_routers_are_members_through_relays_or_punched_paths() -> None:
    story = Story()
    played = sim.run(scenario(), seed=3, watchers=[story])
    assert played.broken is None
    assert {row.event.way for row in story.of(PathOpened)} == {"direct", "punched", "relayed"}
    assert story.of(PlaceFound)
    assert story.of(RouterRebooted)
    assert not story.of(MemberDown)
    assert played.summary["traffic"]["counters"]["places renewed"] > 0
    assert played.summary["membership"]["entries_right_share_end"] == 1.0


def test_the_same_seed_gives_the_same_events() -> None:
    short = scenario(seconds="40")
    assert sim.run(short, seed=3).digest == sim.run(short, seed=3).digest


@pytest.mark.slow
def test_expiring_mappings_cause_no_false_death_in_twelve_hours() -> None:
    played = sim.run("nat", seed=1)
    assert played.broken is None
    assert played.summary["membership"]["false_deaths"] == 0
    assert played.summary["virtual_seconds"] == 12 * 3_600
    assert played.summary["traffic"]["counters"]["places renewed"] > 12 * 60 * 70
