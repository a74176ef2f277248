"""The statistics of a hand-made world are compared with direct counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.member import MemberForgotten, MemberLeft, Status
from sim.events import (
    NetworkHealed,
    NetworkSplit,
    PeerFrozen,
    PlanAdopted,
    RecordGot,
    RecordWanted,
    StepCommitted,
)
from sim.measures.measures import Measures
from sim.scenario import MembershipScenario, Scenario
from tests.sim.made_world import MadeWorld

RUN = b"r" * 32


def scenario(*, nodes: int = 4, seconds: float = 100.0, scope: str = "all") -> Scenario:
    membership = MembershipScenario(scope="neighbourhood" if scope == "neighbourhood" else "all")
    return Scenario(name="made", about="", nodes=nodes, seconds=seconds, membership=membership)


def measured(nodes: int, *, seconds: float = 100.0, scope: str = "all") -> tuple[MadeWorld, Measures]:
    measures = Measures(scenario(nodes=nodes, seconds=seconds, scope=scope))
    return MadeWorld(nodes, measures), measures


def swarm(nodes: int, *, scope: str = "all") -> tuple[MadeWorld, Measures]:
    """Return a world in which all peers are up and know each other."""
    world, measures = measured(nodes, scope=scope)
    for peer in range(nodes):
        world.start(0.0, peer)
    for one in range(nodes):
        for other in range(nodes):
            if one != other:
                world.meet(1.0, one, other)
    return world, measures


def last(measures: Measures, metric: str, label: str = "") -> float:
    return [row.value for row in measures.rows if (row.metric, row.label) == (metric, label)][-1]


def all_of(measures: Measures, metric: str) -> list[tuple[float, str, float]]:
    return [(row.time_seconds, row.label, row.value) for row in measures.rows if row.metric == metric]


def right_share(world: MadeWorld) -> tuple[float, float]:
    """Return the share of lists that are fully right, and the mean share of right entries, computed from the
    definitions."""
    up = [peer for peer in world.peers if world.is_up(peer)]
    wholly, shares = 0, []
    for observer in up:
        listed = {
            other
            for other, status in world.believes(observer).items()
            if status in (Status.ALIVE, Status.SUSPECT) and world.in_scope(observer, other)
        }
        right = {
            other
            for other in up
            if other != observer and world.reaches(observer, other) and world.in_scope(observer, other)
        }
        wholly += listed == right
        if listed | right:
            shares.append(len(listed & right) / len(listed | right))
    return wholly / len(up), sum(shares) / len(shares) if shares else 1.0


def test_the_population_is_counted_in_total_and_by_region() -> None:
    world, measures = measured(3)
    world.start(0.0, 0, "here")
    world.start(0.0, 1, "there")
    world.start(10.0, 2, "there")
    world.sample(20.0)
    world.crash(20.0, 1)
    world.crash(30.0, 2, "leave")
    world.sample(40.0)
    assert all_of(measures, "population_peers") == [
        (20.0, "", 3), (20.0, "here", 1), (20.0, "there", 2),
        (40.0, "", 1), (40.0, "here", 1), (40.0, "there", 0),
    ]  # fmt: skip
    told = measures.summary(world)["population"]
    assert told == {
        "mean": pytest.approx((40 + 20 + 20) / 40), "min": 1, "max": 3,
        "starts": 3, "restarts": 0, "crashes": 1, "leaves": 1,
    }  # fmt: skip


def test_a_member_list_with_missing_and_departed_peers_is_partly_right() -> None:
    world, measures = swarm(4)
    world.happen(2.0, 0, MemberForgotten(world.peers[1]))
    world.crash(2.0, 3)
    world.bury(3.0, 1, 3)
    world.bury(3.0, 2, 3)
    world.sample(5.0)
    # Peer 0 lists 2 and 3 instead of 1 and 2; the lists of peers 1 and 2 are right.
    assert last(measures, "views_right_share") == pytest.approx(2 / 3)
    assert last(measures, "entries_right_share") == pytest.approx((1 / 3 + 1 + 1) / 3)
    assert last(measures, "entries_missing_share") == pytest.approx(1 / 6)
    assert last(measures, "entries_stale_share") == pytest.approx(1 / 6)


def test_during_a_split_a_right_list_has_only_reachable_peers() -> None:
    world, measures = swarm(4)
    here, there = tuple(world.peers[:2]), tuple(world.peers[2:])
    world.happen(2.0, None, NetworkSplit((here, there)))
    world.sample(3.0)
    assert last(measures, "views_right_share") == 0
    for one in range(4):
        for other in range(4):
            if (one < 2) != (other < 2):
                world.bury(20.0, one, other)
    world.sample(21.0)
    assert last(measures, "views_right_share") == 1
    world.happen(30.0, None, NetworkHealed())
    world.sample(31.0)
    assert last(measures, "views_right_share") == 0
    # No peer was really dead, and no peer is blamed for declaring one dead.
    membership = measures.summary(world)["membership"]
    assert (membership["false_deaths"], membership["excused_deaths"]) == (0, 4)


def test_a_restarted_peer_with_a_remembered_list_is_measured_by_that_list() -> None:
    world, measures = swarm(3)
    world.crash(2.0, 2)
    world.remembered[world.peers[2]] = {world.peers[0]: Status.ALIVE, world.peers[1]: Status.DEAD}
    world.start(3.0, 2)
    world.sample(4.0)
    assert last(measures, "entries_right_share") == pytest.approx((1 + 1 + 0.5) / 3)


Steps = st.lists(st.tuples(st.sampled_from("smmmbflcx"), st.integers(0, 5), st.integers(0, 5)), max_size=80)


@given(Steps)
def test_the_sampled_share_of_right_views_equals_a_full_count(
    steps: list[tuple[str, int, int]],
) -> None:
    world, measures = measured(6)
    world.start(0.0, 0)
    for time, (what, one, other) in enumerate(steps, start=1):
        up = world.is_up(world.peers[one])
        if what == "s" and not up:
            world.start(time, one)
        elif what == "c" and up and one:
            world.crash(time, one)
        elif what == "x":
            sides = (tuple(world.peers[: one + 1]), tuple(world.peers[one + 1 :]))
            world.happen(time, None, NetworkSplit(sides) if other % 2 else NetworkHealed())
        elif up and one != other:
            if what == "m":
                world.meet(time, one, other)
            elif what == "b":
                world.bury(time, one, other)
            elif what in "fl":
                kind = MemberForgotten if what == "f" else MemberLeft
                world.happen(time, one, kind(world.peers[other]))
        world.sample(time)
        views, entries = right_share(world)
        assert last(measures, "views_right_share") == pytest.approx(views)
        assert last(measures, "entries_right_share") == pytest.approx(entries)


def test_a_large_scoped_swarm_samples_peers_within_their_scope() -> None:
    world, measures = measured(300, scope="neighbourhood")
    world.scopes = {
        peer: set(world.peers[number // 10 * 10 :][:10]) for number, peer in enumerate(world.peers)
    }
    for peer in range(300):
        world.start(0.0, peer)
    for peer in range(300):
        for other in range(peer // 10 * 10, peer // 10 * 10 + 10):
            if other != peer:
                world.meet(1.0, peer, other)
        world.meet(1.0, peer, (peer + 50) % 300)  # out of scope: no peer needs to notice
    world.sample(2.0)
    assert last(measures, "views_right_share") == 1
    world.crash(3.0, 0)
    assert last(measures, "entries_right_share") == 1
    world.sample(4.0)
    watched = [number for number in range(1, 10) if number in {row * 300 // 128 for row in range(128)}]
    assert last(measures, "entries_right_share") == pytest.approx(1 - len(watched) / 127 / 9)
    for observer in range(1, 10):
        world.bury(9.0, observer, 0)
    assert all_of(measures, "crash_known_to_all_seconds") == [(9.0, "n0", 6.0)]


def test_crashes_are_timed_to_first_suspicion_first_verdict_and_last_notice() -> None:
    world, measures = swarm(4)
    world.crash(10.0, 3)
    world.suspect(12.0, 0, 3)
    world.suspect(12.5, 1, 3, accuser=0)
    world.bury(15.0, 1, 3)
    world.bury(15.2, 0, 3, accuser=1)
    world.bury(16.0, 2, 3, accuser=1)
    assert all_of(measures, "crash_suspected_seconds") == [(12.0, "n3", 2.0)]
    assert all_of(measures, "crash_dead_seconds") == [(15.0, "n3", 5.0)]
    assert all_of(measures, "crash_known_to_all_seconds") == [(16.0, "n3", 6.0)]
    membership = measures.summary(world)["membership"]
    assert (membership["false_suspicions"], membership["false_deaths"]) == (0, 0)


def test_deaths_are_not_timed_for_dead_observers_and_returned_peers() -> None:
    world, measures = swarm(4)
    world.crash(10.0, 3)
    world.bury(15.0, 1, 3)
    world.crash(16.0, 0)
    world.bury(17.0, 2, 3)
    assert all_of(measures, "crash_known_to_all_seconds") == [(17.0, "n3", 7.0)]
    world.start(18.0, 0)
    world.bury(19.0, 1, 0)
    world.bury(30.0, 1, 0)
    world.bury(31.0, 2, 0)
    membership = measures.summary(world)["membership"]
    assert membership["known_to_all_crashes"] == 1
    assert membership["excused_deaths"] == 1, (
        "a verdict about the peer's previous incarnation was counted against the returned peer"
    )
    assert membership["false_deaths"] == 1, "one mistake of two observers was not counted as one"


def test_a_false_suspicion_counts_once_and_is_excused_by_a_freeze() -> None:
    world, measures = swarm(4)
    world.suspect(22.0, 0, 1)
    world.suspect(22.1, 2, 1, accuser=0)
    world.bury(23.0, 0, 1)
    world.happen(24.0, 3, PeerFrozen(10.0))
    world.suspect(26.0, 0, 3)
    world.suspect(35.0, 2, 3)
    assert all_of(measures, "false_suspicion") == [(22.0, "", 1), (26.0, "frozen", 1), (35.0, "", 1)]
    membership = measures.summary(world)["membership"]
    assert (membership["false_suspicions"], membership["excused_suspicions"]) == (2, 1)
    assert membership["false_deaths"] == 1


def got(*, storing: bool = False, copies: int = 1, expected: bool = True, seconds: float = 1.0) -> RecordGot:
    return RecordGot(7, storing, copies, expected, seconds, 2)


def test_a_lookup_fails_only_if_the_record_existed() -> None:
    world, measures = measured(2)
    for _ in range(5):
        world.happen(1.0, 0, RecordWanted(7, storing=False))
    world.happen(2.0, 0, got(seconds=1.0))
    world.happen(3.0, 0, got(copies=0, seconds=4.0))
    world.happen(4.0, 0, got(copies=0, expected=False))
    world.happen(5.0, 1, got(storing=True, copies=20))
    world.sample(11.0)
    world.sample(21.0)
    assert all_of(measures, "lookups_found_share") == [(11.0, "", 0.5)]
    assert all_of(measures, "lookup_seconds") == [(11.0, "p50", 1.0), (11.0, "p95", 4.0)]
    dht = measures.summary(world)["dht"]
    assert (dht["lookups"], dht["lookups_expected"], dht["lookups_found_share"]) == (3, 2, 0.5)
    assert (dht["store_copies_mean"], dht["lookups_without_end"]) == (20.0, 2)


def test_traffic_is_measured_per_protocol_and_per_uptime_of_all_peers() -> None:
    world, measures = measured(2)
    world.start(0.0, 0)
    world.start(10.0, 1)
    world.count = {"bytes /peerloom/swim/1": 3000, "messages /peerloom/swim/1": 30, "lost": 5}
    world.sample(20.0)
    world.count = {"bytes /peerloom/swim/1": 5000, "messages /peerloom/swim/1": 40, "lost": 6}
    world.sample(30.0)
    assert all_of(measures, "sent_bytes_per_node_second") == [(20.0, "swim", 100.0), (30.0, "swim", 100.0)]
    traffic = measures.summary(world)["traffic"]
    assert traffic["sent_bytes_per_node_second"] == 100.0
    assert traffic["counters"] == {"lost": 6}


def test_a_run_is_measured_by_progress_pauses_and_repeated_steps() -> None:
    world, measures = measured(2)
    counted = (((world.peers[0], (0, 1)), (world.peers[1], (2,))),)
    world.happen(1.0, 0, PlanAdopted(RUN, 1, b"plan1", b""))
    world.happen(1.0, 1, PlanAdopted(RUN, 1, b"plan1", b""))
    times = [2.0, 3.0, 4.0, 5.0]
    for step, at in enumerate(times):
        world.happen(at, 0, StepCommitted(RUN, b"plan1", 1, step, counted, 2.0 - step / 10))
        world.happen(at, 1, StepCommitted(RUN, b"plan1", 1, step, counted, 2.0 - step / 10))
    world.happen(40.0, 1, PlanAdopted(RUN, 2, b"plan2", b"plan1"))
    world.happen(45.0, 1, StepCommitted(RUN, b"plan2", 2, 3, counted, 1.5))
    world.sample(50.0)
    assert [value for *_, value in all_of(measures, "plan_height")] == [1, 2]
    assert all_of(measures, "microbatches_per_second") == [(50.0, RUN.hex()[:8], 15 / 50)]
    (told,) = measures.summary(world)["runs"]
    assert (told["steps"], told["steps_again"], told["plans"], told["height"]) == (4, 1, 2, 2)
    assert (told["loss"], told["stalls"], told["stalled_seconds"]) == (1.5, 1, 40.0)
