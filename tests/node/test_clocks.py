"""Clocks that are hours off: whole nodes on real sockets, some of which have the wrong time."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from crypto.contact import parse_address
from crypto.identity import PeerId
from dht.events import RecordStored
from dht.keys import content_key
from gossip.clocks import (
    KEPT_SECONDS,
    PAIR_SKEW_SECONDS_MAX,
    PEERS_KEPT_MAX,
    PLACE_WEIGHT_MAX,
    PLAUSIBLE_SECONDS_MAX,
    QUORUM_MAX,
    RELEASED_SECONDS,
    PeerClocks,
)
from node import config
from node.cli.status import status_lines
from node.content.directory import NotStored, _told
from node.doctor import local_checks
from node.doctor.local_checks import Scene
from node.doctor.steps import Steps, in_thread
from node.events import ClockCompared
from node.runtime import Node
from node.seams import RealClock
from node.services.swarm_clock import SKEW_SECONDS, SwarmClock
from sim.network.clocks import LocalClock
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimClock, SimNetworkFabric
from tests.node.simulated import simulated_node

HOURS = 3_600.0
TODAY = 1_800_000_000.0
"""A plausible time in Unix seconds; the clocks of these tests are some seconds ahead of it."""


class WrongClock(RealClock):
    """A clock that runs ahead by a settable number of seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wall(self) -> float:
        return super().wall() + self.seconds


def settings(folder: Path, name: str, join: str = "") -> config.Config:
    seeds = (parse_address(join),) if join else ()
    return config.Config(
        name=name,
        data_dir=folder / name,
        swarm=config.SwarmSettings(name="clocks", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False, seeds=seeds),
        resources=config.Resources(calibrate=False, accept_runs="never"),
    )


@asynccontextmanager
async def nodes(folder: Path, **clocks: WrongClock) -> AsyncIterator[dict[str, Node]]:
    """Yield a node for each clock; all nodes know each other."""
    async with AsyncExitStack() as stack:
        found: dict[str, Node] = {}
        for name, clock in clocks.items():
            join = next(iter(found.values())).addresses[0] if found else ""
            made = Node(settings(folder, name, join), clock=clock)
            found[name] = await stack.enter_async_context(made)
        for each in found.values():
            await each.wait_for_members(len(clocks) - 1)
        yield found


def skew(me: Node) -> float:
    """Return by how many hours a node reports its clock to be ahead; negative if behind."""
    found = me.state.clock
    return 0.0 if found is None else round(found.seconds / HOURS, 2)


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not holds():  # noqa: ASYNC110 - a fold of events wakes nobody
            await trio.sleep(0.02)


async def test_nodes_with_wrong_clocks_store_and_find_records_and_report_it(tmp_path: Path) -> None:
    ahead, behind, right = WrongClock(2 * HOURS), WrongClock(-2 * HOURS), WrongClock(0)
    async with nodes(tmp_path, a=right, fast=ahead, slow=behind) as found:
        a, fast, slow = found["a"], found["fast"], found["slow"]
        # With the report of only one peer, node a seems two hours off. With both peers' reports, its clock is
        # found right.
        await until(lambda: (skew(a), skew(fast), skew(slow)) == (0.0, 2.0, -2.0))
        for writer, reader in ((fast, a), (slow, a), (a, fast), (a, slow), (slow, fast)):
            key = f"{writer.config.name}-{reader.config.name}"
            await writer.dht.put(key, key.encode(), ttl_seconds=600)
            assert await reader.dht.get(key) == key.encode()
        expected = "this machine's clock is 2 h 0 min behind the median of 2 peers"
        assert any(expected in line for line in status_lines(slow.status()))
        steps = Steps(lambda _: None)
        scene = Scene(config.Config(data_dir=tmp_path / "slow"), status=slow.status())
        await steps.check("clock", partial(in_thread, partial(local_checks._clock, scene)))
        (clock,) = steps.all
        assert (clock.outcome, clock.detail) == ("failed", expected)
        assert "timedatectl" in clock.remedy
        wanted = "at least 3 are needed; this machine's clock is 2 h 0 min behind its peers'"
        with pytest.raises(NotStored, match=wanted):
            _told(content_key(b""), RecordStored(1, 0, 0, wanted=3), slow.seams)
        # While all nodes run, NTP corrects two clocks and an operator breaks another one.
        ahead.seconds = behind.seconds = 0.0
        right.seconds = 3 * HOURS
        await until(lambda: (skew(a), skew(fast), skew(slow)) == (3.0, 0.0, 0.0))
        await fast.dht.put("after", b"the jump", ttl_seconds=600)
        assert await a.dht.get("after") == b"the jump"
        await a.dht.put("fast-a", b"again", ttl_seconds=600)
        assert await slow.dht.get("fast-a", publisher=a.id) == b"again"


def test_two_nodes_with_different_clocks_still_find_records() -> None:
    medium = SimNetworkFabric(SimLinks(NetworkModel(), 1))

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            a = await stack.enter_async_context(simulated_node(medium, 0))
            late = SimClock(LocalClock(2 * HOURS))
            b = await stack.enter_async_context(simulated_node(medium, 1, a.addresses[0], clock=late))
            await trio.sleep(20)
            assert (skew(a), skew(b)) == (-2.0, 2.0)
            (line,) = (line for line in status_lines(b.status()) if "its only peer" in line)
            assert "2 h 0 min ahead of its only peer's: one of both is wrong" in line
            for writer, reader in ((a, b), (b, a)):
                await writer.dht.put(writer.config.name, b"v", ttl_seconds=600)
                assert await reader.dht.get(writer.config.name) == b"v"

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


# --- the core ----------------------------------------------------------------------------------------


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def heard(*ahead: float, now: float = 0.0, place: str | None = None) -> PeerClocks:
    clocks = PeerClocks()
    for number, seconds in enumerate(ahead):
        clocks.learn(now, peer(number), int((now + TODAY + seconds) * 1000), 0.0, place)
    return clocks


def ahead(clocks: PeerClocks, own: float, others: int, now: float = 0.0) -> float | None:
    """Return how far the swarm's time is ahead of TODAY, according to a machine whose own clock is `own`
    seconds ahead of TODAY; None if unknown."""
    found = clocks.swarm(now, TODAY + own, others)
    return None if found is None else found - TODAY


def test_few_peers_prove_nothing_unless_there_are_no_others() -> None:
    assert ahead(PeerClocks(), 0.0, 0) is None
    assert ahead(heard(5.0), 5.0, 2) is None
    assert ahead(heard(5.0), 9.0, 1) == 5.0
    assert ahead(heard(5.0, 5.0, 5.0), 9_000.0, 6) == 5.0
    assert ahead(heard(5.0, 5.0, 5.0), 9_000.0, 6, KEPT_SECONDS + 1) is None


def test_the_clock_is_corrected_once_half_of_the_members_were_heard() -> None:
    for others, least in ((7, 4), (60, 30), (500, QUORUM_MAX)):
        assert ahead(heard(*[5.0] * (least - 1)), 9_000.0, others) is None
        assert ahead(heard(*[5.0] * least), 9_000.0, others) == 5.0


@given(
    honest=st.lists(st.floats(99.0, 101.0), min_size=1, max_size=400),
    liars=st.lists(st.floats(-5e7, 8e8), max_size=PEERS_KEPT_MAX),
    order=st.randoms(use_true_random=False),
)
def test_a_minority_cannot_move_the_time_beyond_the_honest_clocks(
    honest: list[float], liars: list[float], order: Random
) -> None:
    clocks = [*honest, *liars[: len(honest) - 1]]
    order.shuffle(clocks)
    found = ahead(heard(*clocks), honest[0], len(clocks))
    assert found is not None
    assert 98.9 <= found <= 101.1


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=40))
def test_all_members_of_a_swarm_agree_on_one_time(clocks: list[float]) -> None:
    found = []
    for number, own in enumerate(clocks):
        others = clocks[:number] + clocks[number + 1 :]
        found.append(ahead(heard(*others), own, len(others)))
    times = [each for each in found if each is not None]
    assert len(times) == len(clocks)
    assert max(times) - min(times) <= 0.002


def test_the_only_other_member_moves_the_time_by_a_day_at_most() -> None:
    day = PAIR_SKEW_SECONDS_MAX
    assert ahead(heard(-day / 2), 0.0, 1) == -day / 2
    assert ahead(heard(day / 2), 0.0, 1) == 0.0
    assert ahead(heard(-2 * day), 0.0, 1) == 0.0
    looked = SwarmClock(FakeClock(), lambda: heard(-2 * day, now=1_000.0), lambda: 1)
    told = looked.look()
    assert isinstance(told, ClockCompared)
    assert told.seconds == pytest.approx(5_000.0 + 2 * day)
    assert looked.wall() == FakeClock().wall()


def test_times_before_this_release_or_far_in_the_future_are_refused() -> None:
    clocks = PeerClocks()
    for number, wall in enumerate((0.0, RELEASED_SECONDS - 1, PLAUSIBLE_SECONDS_MAX + 1, 2.0**53 / 1000)):
        clocks.learn(0.0, peer(number), int(wall * 1000), 0.0)
    assert len(clocks) == 0


def test_a_machine_whose_clock_starts_at_zero_follows_its_first_peers() -> None:
    assert heard(5.0).swarm(0.0, 0.0, 1) == TODAY + 5
    assert heard(5.0, 6.0, 7.0).swarm(0.0, 0.0, 500) == TODAY + 6


def test_many_ids_on_one_host_count_no_more_than_a_few_clocks() -> None:
    clocks = heard(*[1e8] * 300, place="203.0.113.7")
    for number in range(300, 300 + PLACE_WEIGHT_MAX):
        clocks.learn(0.0, peer(number), int(TODAY * 1000), 0.0, f"198.51.100.{number}")
    assert ahead(clocks, 0.0, 304) == 0.0


def test_clocks_of_departed_members_do_not_count() -> None:
    clocks = PeerClocks(lambda each: each != peer(0))
    clocks.learn(0.0, peer(0), int(TODAY * 1000), 0.0)
    assert clocks.peers(0.0) == []


def test_memory_for_the_clocks_of_peers_is_bounded() -> None:
    clocks = heard(*range(PEERS_KEPT_MAX + 100))
    assert len(clocks) == PEERS_KEPT_MAX
    clocks.learn(0.0, peer(1), int(TODAY * 1000), 11.0)
    clocks.learn(0.0, peer(1), int(TODAY * 1000), -1.0)
    assert len(clocks) == PEERS_KEPT_MAX


class FakeClock:
    """A monotonic and a wall clock that a test sets."""

    def __init__(self) -> None:
        self.now, self.ahead = 1_000.0, TODAY + 5_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self.ahead


def test_a_machine_that_slept_ignores_its_peers_older_reports() -> None:
    clock, clocks = FakeClock(), heard(5_000.0, 5_000.0, 5_000.0, now=1_000.0)
    looked = SwarmClock(clock, lambda: clocks, lambda: 3)
    assert looked.look() is None
    clock.ahead += HOURS  # the monotonic clock stood still while the machine slept
    assert looked.look() is None
    assert looked.wall() == clock.wall()
    for number in range(3):
        clocks.learn(clock.now, peer(number), int(clock.wall() * 1000), 0.0)
    assert looked.look() is None
    clock.ahead += HOURS  # this time an operator sets the clock
    assert looked.look() is None
    for number in range(3):
        clocks.learn(clock.now, peer(number), int((clock.wall() - HOURS) * 1000), 0.0)
    told = looked.look()
    assert isinstance(told, ClockCompared)
    assert told.peers == 3
    assert told.seconds == pytest.approx(HOURS)
    assert looked.wall() == pytest.approx(clock.wall() - HOURS)
    assert looked.look() is None, "the same correction was reported twice"
    clock.ahead -= HOURS - SKEW_SECONDS / 2
    for number in range(3):
        clocks.learn(clock.now, peer(number), int((clock.wall() - SKEW_SECONDS / 2) * 1000), 0.0)
    looked.look()
    for number in range(3):
        clocks.learn(clock.now, peer(number), int((clock.wall() - SKEW_SECONDS / 2) * 1000), 0.0)
    assert looked.wall() == clock.wall()
