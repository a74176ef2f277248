"""Reachability as judged by peers that dial back. Real sockets on loopback; no third party can be made a
target."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count, pairwise
from random import Random
from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from crypto.contact import Address, make_address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import Unreachable
from node.seams import Clock, Network, RealClock, Stream
from node.services.autonat import (
    ECHOES_PER_SECOND_MAX,
    HOST_SERVED_MAX,
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    DialBack,
    Dialled,
    Echo,
    Outcome,
    ReachService,
    ask_dial_back,
    family_of,
)
from node.services.autonat_core import (
    AGAIN_SECONDS,
    BELIEVED_SECONDS,
    FAMILY_OTHERS,
    OTHERS,
    REACH,
    DialReport,
    FamilyVerdicts,
    Reachability,
    ReachSettings,
)
from node.transport.network import RealNetwork
from sim.network.instants import nearest_instant
from sim.network.links import SimLinks
from sim.network.model import Access, Nat, NetworkModel
from sim.seams import SimClock, SimNetworkFabric
from sim.seeds import seeded_identity
from tests.node.nets import acquaint, make_network, running, until, unused_address
from tests.node.simulated import SEED, simulated_node

OWN = make_address("198.51.100.7", 9747)


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def there(number: int) -> Address:
    return make_address(f"10.{number}.0.1", 9747)


def report(at: float, number: int, reason: str = "", address: Address = OWN) -> DialReport:
    return DialReport(at, there(number), ((address, reason),))


# --- the verdict -----------------------------------------------------------------------------------


def test_one_success_or_three_failures_decide_reachability() -> None:
    core = Reachability(Random(1), 0.0)
    verdicts = []
    for number in range(3):
        core.answered(number, peer(number), report(number, number, "timeout"))
        verdicts.append((core.verdict, core.asked))
    assert verdicts == [(None, 1), (None, 2), (False, 3)]
    core.answered(4, peer(4), report(4, 4))
    assert core.verdict is True


def test_three_reports_from_one_network_do_not_prove_unreachability() -> None:
    core = Reachability(Random(1), 0.0)
    for number in range(9):
        core.answered(number, peer(number), DialReport(number, there(1), ((OWN, "timeout"),)))
        assert core.verdict is None
        assert core.deadline <= number + REACH.soon_seconds, "the node stopped asking for reports"
    for number in (10, 11):
        assert core.verdict is None
        core.answered(number, peer(number), report(number, number, "timeout"))
    assert (core.verdict, core.asked) == (False, 3)
    for number in range(12, 20):
        core.answered(number, peer(number), DialReport(number, there(1), ((OWN, "timeout"),)))
    assert core.verdict is False


def test_three_reports_decide_if_the_swarm_is_one_network() -> None:
    core = Reachability(Random(1), 0.0)
    core.next(0.0, [peer(number) for number in range(3)], networks=1)
    for number in range(3):
        assert core.verdict is None
        core.answered(number, peer(number), DialReport(number, there(1), ((OWN, "timeout"),)))
    assert core.verdict is False


def test_a_success_outlives_failures_reported_by_one_network() -> None:
    core = Reachability(Random(1), 0.0)
    core.answered(0, peer(0), report(0, 2))
    for number in range(1, 9):
        core.answered(number, peer(number), DialReport(number, there(1), ((OWN, "timeout"),)))
    assert core.verdict is True


def test_a_peer_that_refuses_to_dial_is_not_asked_again() -> None:
    core = Reachability(Random(1), 0.0)
    now = core.deadline
    first = core.next(now, [peer(1), peer(2)])
    assert first is not None
    core.failed(now, first)
    second = core.next(core.deadline, [peer(1), peer(2)])
    assert second not in (None, first)
    assert (core.verdict, core.asked) == (None, 0)


def test_three_peers_are_asked_soon_then_rarely_and_more_often_in_doubt() -> None:
    for reason, seconds in (("", REACH.later_seconds), ("timeout", REACH.doubt_seconds)):
        core = Reachability(Random(1), 0.0)
        asked: list[PeerId] = []
        now = 0.0
        while len(asked) < 5:
            now = core.deadline
            chosen = core.next(now, [peer(number) for number in range(50)])
            assert chosen is not None
            assert chosen not in asked
            asked.append(chosen)
            core.answered(now, chosen, report(now, len(asked), reason))
        assert now == pytest.approx(OTHERS * 5 + 2 * seconds)


def test_an_answer_ends_the_long_pauses_after_failed_requests() -> None:
    core = Reachability(Random(1), 0.0)
    others = [peer(number) for number in range(50)]
    for _ in range(6):
        now = core.deadline
        chosen = core.next(now, others)
        assert chosen is not None
        core.failed(now, chosen)
    assert core.deadline > now + 100
    now = core.deadline
    chosen = core.next(now, others)
    assert chosen is not None
    core.answered(now + 0.1, chosen, report(now + 0.1, 1, "timeout"))
    assert core.deadline == pytest.approx(now + 0.1 + REACH.soon_seconds)


def test_a_recent_failure_makes_the_next_request_sooner() -> None:
    core = Reachability(Random(1), 0.0)
    for number, reason in enumerate(("timeout", "timeout", "", "")):
        core.answered(number, peer(number), report(number, number, reason))
        if number >= 2:
            assert core.verdict is True
            assert core.deadline == number + REACH.doubt_seconds
    core.answered(9, peer(9), report(9, 9))
    assert core.deadline == 9 + REACH.later_seconds


def test_a_swarm_of_two_asks_the_same_peer_again() -> None:
    core = Reachability(Random(1), 0.0)
    times = []
    for _ in range(2_000):
        now = core.deadline
        chosen = core.next(now, [peer(1)])
        if chosen is not None:
            times.append(now)
            core.answered(now, chosen, report(now, 1))
    assert len(times) > 3
    assert all(after - before >= REACH.later_seconds for before, after in pairwise(times))


def test_a_node_in_a_hurry_asks_peers_that_answered_a_minute_ago() -> None:
    core = Reachability(Random(1), 0.0)
    others = [peer(number) for number in range(4)]
    asked: dict[PeerId, float] = {}
    while len(asked) < len(others):
        now = core.deadline
        chosen = core.next(now, others)
        assert chosen is not None
        core.answered(now, chosen, report(now, others.index(chosen), "timeout"))
        asked[chosen] = now
    first, since = next(iter(asked.items()))
    hurried = now
    core.hurry(hurried)
    chosen = None
    while chosen is None:
        now = core.deadline
        chosen = core.next(now, others)
    assert chosen == first
    assert now - since >= AGAIN_SECONDS
    assert now - hurried <= AGAIN_SECONDS


def test_results_of_old_dial_backs_are_forgotten() -> None:
    core = Reachability(Random(1), 0.0)
    core.answered(0, peer(1), report(0, 1))
    core.next(BELIEVED_SECONDS + 1, [])
    assert core.verdict is None


def test_an_address_counts_once_three_networks_have_dialled_it() -> None:
    outside = make_address("203.0.113.9", 9747)
    core = Reachability(Random(1), 0.0)
    for number in range(3):  # three identities in one network
        core.answered(0, peer(number), DialReport(0, make_address(f"10.0.0.{number}", 1), ((outside, ""),)))
    assert not core.addresses
    for number in range(3):
        core.answered(1, peer(10 + number), report(1, number, "", outside))
    assert core.addresses == (outside,)
    core.answered(2, peer(20), report(2, 20, "timeout", outside))
    assert not core.addresses


@given(
    st.lists(st.tuples(st.integers(0, 600), st.sampled_from(["", "timeout"]), st.booleans()), max_size=400)
)
def test_memory_for_the_reports_of_others_is_bounded(said: list[tuple[int, str, bool]]) -> None:
    core = Reachability(Random(1), 0.0)
    for now, (number, reason, tried) in enumerate(said):
        if tried:
            core.answered(now, peer(number), report(now, number % 250, reason))
        else:
            core.failed(now, peer(number))
        core.next(now, [peer(number)])
    assert all(size <= limit for size, limit in core.sizes.values())
    assert 0 <= core.asked <= OTHERS


# --- over sockets ------------------------------------------------------------------------------------


@asynccontextmanager
async def reaching(
    *letters: str, settings: ReachSettings = REACH
) -> AsyncIterator[tuple[list[RealNetwork], list[ReachService], Counter[str]]]:
    networks = [make_network(letter) for letter in letters]
    counters: Counter[str] = Counter()
    services = [
        ReachService(network, RealClock(), counters=counters, settings=settings) for network in networks
    ]
    async with running(*networks):
        acquaint(*networks)
        yield networks, services, counters


async def ask(network: RealNetwork, other: PeerId, message: object) -> Dialled:
    stream = await network.open(other, PROTOCOL)
    try:
        await stream.send(encode(message))
        answer: Dialled = decode(await stream.receive(), Dialled, bytes_max=MESSAGE_BYTES_MAX)
        return answer
    finally:
        await stream.aclose()


async def test_a_listening_node_is_dialled_back_at_its_address() -> None:
    async with reaching("a", "b") as ((alice, bob), _, _):
        found = await ask_dial_back(alice, RealClock(), bob.peer)
        address = make_address("127.0.0.1", alice.port)
        assert found.outcomes == ((address, ""),)
        assert found.there == make_address("127.0.0.1", bob.port)


async def test_a_node_with_a_new_address_asks_for_reports_at_once() -> None:
    hasty = ReachSettings(soon_seconds=0.01)
    async with (
        reaching("a", "b", settings=hasty) as ((alice, bob), (reach, other), _),
        trio.open_nursery() as nursery,
    ):
        told: list[tuple[bool | None, int]] = []

        def changed(verdict: bool | None, asked: int, found: tuple[Address, ...]) -> None:
            assert found == ()
            told.append((verdict, asked))

        nursery.start_soon(reach.run, Random(1), lambda: (alice.peer, bob.peer), changed)
        await until(lambda: told == [(True, 1)])
        other._served.clear()  # a minute later
        reach.move()
        await until(lambda: told == [(True, 1)] * 2)
        nursery.cancel_scope.cancel()


async def test_requests_name_only_ports_so_no_other_host_can_be_dialled() -> None:
    async with reaching("a", "b", "c") as ((alice, bob, carol), _, _):
        closed = unused_address().port
        said = await ask(alice, bob.peer, DialBack((alice.port, carol.port, closed)))
        # A different node answers at the asker's own host; its key reveals that.
        assert said == Dialled(
            "127.0.0.1",
            (Outcome(alice.port, ""), Outcome(carol.port, "wrong key"), Outcome(closed, "refused")),
        )


async def test_dial_backs_are_limited_per_peer_and_per_host() -> None:
    letters = "abcdefghijklm"[: HOST_SERVED_MAX + 2]
    async with reaching(*letters) as ((server, *askers), _, counters):
        served = [(await ask(asker, server.peer, DialBack((asker.port,)))).outcomes for asker in askers]
        assert [bool(outcomes) for outcomes in served] == [True] * HOST_SERVED_MAX + [False]
        assert (await ask(askers[0], server.peer, DialBack((askers[0].port,)))).outcomes == ()
        assert counters["dial_backs_refused"] == 2


@pytest.mark.parametrize(
    "answer",
    [
        lambda port: Dialled("198.51.100.1", (Outcome(port + 1, ""),)),
        lambda port: Dialled("evil.example", (Outcome(port, ""),)),
        lambda port: Dialled("127.0.0.1", (Outcome(port, "\x1b[2J"),)),
        lambda port: ["?", port],
    ],
)
async def test_an_answer_that_no_correct_peer_gives_is_refused(answer: Callable[[int], object]) -> None:
    alice, liar = make_network("a"), make_network("l")

    async def lie(stream: Stream) -> None:
        await stream.receive()
        await stream.send(encode(answer(alice.port)))

    liar.handle(PROTOCOL, lie)
    async with running(alice, liar):
        acquaint(alice, liar)
        with pytest.raises(RemoteProtocolError):
            await ask_dial_back(alice, RealClock(), liar.peer)


async def test_datagrams_are_echoed_unchanged_and_at_a_limited_rate() -> None:
    async with reaching("a", "b") as ((alice, bob), (_, echoing), counters), trio.open_nursery() as nursery:
        bob.inbox(PROTOCOL)  # no answer has come yet
        nursery.start_soon(echoing.echo)
        inbox = alice.inbox(PROTOCOL)
        alice.send(bob.peer, PROTOCOL, encode(Echo(True, 7, bytes(1_000))))
        (came,) = await inbox.take(trio.current_time() + 20)
        assert came == (bob.peer, encode(Echo(False, 7, bytes(1_000))))
        for message in (encode(Echo(False, 7)), b"garbage"):  # an echo of an echo would never end
            alice.send(bob.peer, PROTOCOL, message)
        await until(lambda: counters["echoes_malformed"] == 1)
        for number in range(2 * ECHOES_PER_SECOND_MAX):
            alice.send(bob.peer, PROTOCOL, encode(Echo(True, number)))
        await until(lambda: counters["echoes_over_rate"] > 0)
        nursery.cancel_scope.cancel()


async def test_a_confirmed_address_is_announced_unless_the_owner_sets_others() -> None:
    alice, bob = make_network("a"), make_network("b", announce=[make_address("lab.example", 1)])
    async with running(alice, bob):
        for network in (alice, bob):
            network.announce(OWN)
            network.announce(OWN)
        assert alice.addresses == (make_address("127.0.0.1", alice.port, alice.peer), OWN.of(alice.peer))
        assert [address.host for address in bob.addresses] == ["lab.example"]


def test_a_coarse_clock_does_not_keep_a_node_busy() -> None:
    class Counted(SimClock):
        looks = 0

        def monotonic(self) -> float:
            self.looks += 1
            assert self.looks < 100
            return super().monotonic()

    async def scenario() -> None:
        clock, medium = Counted(), SimNetworkFabric(SimLinks(NetworkModel(), 1))
        # As a float, the time five seconds later is not a whole number of microseconds. The nearest whole
        # number is earlier.
        await trio.sleep(
            next(t for t in (number / 1e6 for number in count(1)) if nearest_instant(t + 5.0) < t + 5.0)
        )
        reach = ReachService(medium.attach(peer(1)), clock, counters=Counter())
        with trio.move_on_after(60):
            await reach.run(Random(1), lambda: (), lambda *_: None)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


# --- whole nodes, in virtual time --------------------------------------------------------------------


@pytest.mark.parametrize(("nat", "reachable"), [("full-cone", True), ("restricted", False)])
def test_a_node_behind_a_nat_detects_it_and_leaves_routing_tables(nat: Nat, reachable: bool) -> None:
    medium = SimNetworkFabric(
        SimLinks(NetworkModel(access=(Access(share=0.5), Access(share=0.5, nat=nat))), 1)
    )
    translated = [medium.links.at(seeded_identity(SEED, number).peer).nat is not None for number in range(40)]
    inside = translated.index(True)
    outside = [number for number in range(40) if not translated[number]][:4]

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            public = [await stack.enter_async_context(simulated_node(medium, outside[0]))]
            first = public[0].network.addresses[0].short
            for number in outside[1:]:
                public.append(await stack.enter_async_context(simulated_node(medium, number, first)))
            hidden = await stack.enter_async_context(simulated_node(medium, inside, first))
            await trio.sleep(90)
            found = hidden.state.reachability
            assert found is not None
            assert (found.reachable, found.asked) == (reachable, OTHERS)
            assert public[0].state.reachability is None
            # After its capacity record is stored the node asks again. Then it is out of all routing tables,
            # or in all of them.
            await hidden.discovery.find("test", b"anything")
            standing = [each.discovery._core.table.get(hidden.peer) is not None for each in public]
            assert standing == [reachable] * len(public)
            # The node stays a member, because an unreachable node is not dead.
            assert all(hidden.peer in each.membership.live for each in public)

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


# --- by address family ------------------------------------------------------------------------------


def family_report(at: float, kind: str, reason: str) -> DialReport:
    host = "45.1.0.2" if kind == "ip4" else "2a0f:1::2"
    return DialReport(at, None, ((make_address(host, 9747), reason),))


def test_ipv4_and_ipv6_are_judged_separately() -> None:
    verdicts = FamilyVerdicts()
    assert verdicts.verdict(6, 0.0) is None
    for number in range(FAMILY_OTHERS):
        verdicts.note(1.0, peer(number), family_report(1.0, "ip6", "timeout"))
    verdicts.note(1.0, peer(0), family_report(1.0, "ip4", ""))
    assert (verdicts.verdict(4, 2.0), verdicts.verdict(6, 2.0)) == (True, False)
    text = "IPv4 lets new hosts in, IPv6 lets in only hosts that this node has contacted"
    assert verdicts.text({4, 6}, 2.0) == text
    assert verdicts.text({4}, 2.0) == ""
    assert verdicts.verdict(6, 2.0 + BELIEVED_SECONDS) is None


def test_the_least_recently_asked_family_is_next() -> None:
    verdicts = FamilyVerdicts()
    assert verdicts.next({4}, {4, 6}) is None
    assert verdicts.next({4, 6}, set()) is None
    assert verdicts.next({4, 6}, {6}) == 6
    verdicts.note(1.0, peer(0), family_report(1.0, "ip4", ""))
    assert verdicts.next({4, 6}, {4, 6}) == 6
    verdicts.note(2.0, peer(0), family_report(2.0, "ip6", ""))
    assert verdicts.next({4, 6}, {4, 6}) == 4


class TwoFamilies:
    """A network on which this node has IPv4 and IPv6, and the other peers have the families `theirs`."""

    peer = peer(1_000)
    addresses = (make_address("45.1.0.2", 9747), make_address("2a0f:1::2", 9747))

    def __init__(self, theirs: Collection[int]) -> None:
        self._theirs = theirs

    def handle(self, *_: object) -> None:
        pass

    def known_addresses(self, other: PeerId) -> tuple[Address, ...]:
        number = int.from_bytes(other, "big")
        places = {4: f"45.1.{number}.3", 6: f"2a0f:{number:x}::3"}
        return tuple(make_address(places[family], 9747) for family in self._theirs)

    def host_of(self, other: PeerId) -> str:
        return self.known_addresses(other)[0].host


def asked_by_family(
    theirs: Collection[int], working: Collection[int]
) -> tuple[Counter[int | None], ReachService, list[Any]]:
    """Have a node ask thirty other peers for two hours. Return how often it asked for each family, the
    service, and its reports. No peer can be asked over a family that is not in `working`.
    """
    asked: Counter[int | None] = Counter()
    told: list[Any] = []
    network = TwoFamilies(theirs)

    async def ask(_: object, clock: Clock, other: PeerId, at: Address | None = None) -> DialReport:
        await trio.sleep(0.1)
        asked[None if at is None else family_of(at)] += 1
        family = (4 if 4 in working else 6) if at is None else family_of(at)
        if family not in working:
            raise Unreachable("timeout", "a test")
        there = next(each for each in network.known_addresses(other) if family_of(each) == family)
        return DialReport(clock.monotonic(), there, ((network.addresses[0 if family == 4 else 1], ""),))

    async def scenario() -> ReachService:
        reach = ReachService(cast("Network", network), SimClock(), counters=Counter(), ask=ask)
        with trio.move_on_after(7_200):
            others = [peer(number) for number in range(1, 31)]
            await reach.run(Random(1), lambda: others, lambda *found: told.append(found))
        return reach

    return asked, trio.run(scenario, clock=MockClock(autojump_threshold=0)), told


def test_a_broken_family_does_not_affect_the_others_verdict() -> None:
    asked, reach, told = asked_by_family((4, 6), (4,))
    assert told[OTHERS - 1][:2] == (True, OTHERS)
    assert asked[6] <= 12
    assert reach.families.verdict(4, 7_200) is True


def test_a_family_that_few_peers_have_is_asked_for_slowly() -> None:
    asked, _, _ = asked_by_family((4,), (4,))
    assert asked.total() <= OTHERS + FAMILY_OTHERS + 7_200 / REACH.later_seconds


def test_both_families_are_judged_soon_if_other_peers_have_both() -> None:
    asked, reach, _ = asked_by_family((4, 6), (4, 6))
    assert reach.families.unknown((4, 6), 7_200) == set()
    assert asked.total() <= OTHERS + FAMILY_OTHERS + 7_200 / REACH.later_seconds
