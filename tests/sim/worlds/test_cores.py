"""A world of cores is repeatable by seed, and its peers behave like nodes."""

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from crypto.identity import PeerId
from gossip.member import (
    MemberDown,
    MemberLeft,
    MemberRefuted,
    MemberSuspected,
    MemberUp,
    SelfAccused,
    Status,
)
from gossip.swim import Swim
from sim.churn.model import Churn, ChurnEvent, Distribution
from sim.events import NetworkHealed, NetworkSplit, PeerFrozen, PeerStarted, PeerStopped, RecordGot
from sim.network.model import NetworkModel
from sim.observers import Observation, Watch
from sim.scenario import MembershipScenario, RecordsScenario, Scenario, SwarmStart
from sim.worlds.cores import CoresWorld
from sim.worlds.factories import Cores


class Played:
    """A world that was played to its end, and all published events."""

    def __init__(self, scenario: Scenario, seed: int = 1, **cores: Any) -> None:
        self.seen: list[Observation] = []
        self.samples = 0
        watch = Watch(())

        def publish(observed: Observation) -> None:
            self.seen.append(observed)
            watch.publish(observed, self.world)

        def sample() -> None:
            self.samples += 1

        self.world = CoresWorld(scenario, seed, publish, cores=Cores(**cores))
        self.world.play(sample)
        self.digest = watch.digest()

    def of(self, *kinds: type) -> list[Observation]:
        return [observed for observed in self.seen if isinstance(observed.event, kinds)]

    def live_views(self) -> list[set[PeerId]]:
        return [
            {other for other, status in self.world.believes(peer).items() if status is Status.ALIVE}
            for peer in self.world.peers
            if self.world.is_up(peer)
        ]


def scenario(**changes: Any) -> Scenario:
    """Twenty peers in one minute over links of exactly 50 ms, so that many events fall on the same
    instant."""
    fields: dict[str, Any] = {"name": "test", "about": "", "nodes": 20, "seconds": 60.0}
    return Scenario(**(fields | changes))


def test_all_nodes_start_and_list_each_other() -> None:
    played = Played(scenario())
    assert len(played.of(PeerStarted)) == 20
    assert played.live_views() == [set(played.world.peers)] * 20
    ups = Counter(observed.peer for observed in played.of(MemberUp))
    assert set(ups.values()) == {19}
    assert played.samples == 60


def test_fifty_that_start_within_a_second_find_each_other() -> None:
    records = RecordsScenario(enabled=False)
    played = Played(scenario(nodes=50, seconds=15.0, start=SwarmStart(spread_seconds=1.0), records=records))
    assert max(o.time for o in played.of(PeerStarted)) < 1.0
    assert played.live_views() == [set(played.world.peers)] * 50
    assert not played.of(RecordGot)


def test_stored_records_are_found() -> None:
    played = Played(scenario(network=NetworkModel(nearest_seconds=0.01, farthest_seconds=0.09)))
    lookups = [o.event for o in played.of(RecordGot) if not o.event.storing and o.event.expected]
    assert len(lookups) > 20
    assert all(got.copies == 1 and got.rounds >= 0 and got.seconds < 2 for got in lookups)


def test_digests_are_equal_for_equal_seeds_and_differ_for_others() -> None:
    digests = [Played(scenario(nodes=12, seconds=40.0), seed).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_all_peers_notice_a_crash_and_a_return() -> None:
    played = Played(
        scenario(
            seconds=120.0, events=(ChurnEvent(at_seconds=40.0, kind="crash", share=0.1, lasts_seconds=40.0),)
        )
    )
    crashed = [o.peer for o in played.of(PeerStopped)]
    assert len(crashed) == 2
    for peer in crashed:
        assert peer is not None
        witnesses = [o for o in played.of(MemberDown) if o.event.peer == peer]
        assert len(witnesses) == 18
        assert all(41.0 < o.time < 70.0 for o in witnesses)
        assert played.world.up_since(peer) == 80.0
    assert played.live_views() == [set(played.world.peers)] * 20
    again = [o.event for o in played.of(PeerStarted) if o.time == 80.0]
    assert [event.remembers for event in again] == [True, True]


def test_a_goodbye_is_reported_and_nobody_is_suspected() -> None:
    played = Played(
        scenario(
            events=(ChurnEvent(at_seconds=40.0, kind="leave", share=0.1, lasts_seconds=0.0),), seconds=80.0
        )
    )
    stopped = played.of(PeerStopped)
    assert [(o.time, o.event.why) for o in stopped] == [(40.6, "leave")] * 2
    for gone in stopped:
        told = [o for o in played.of(MemberLeft) if o.event.peer == gone.peer]
        assert {o.peer for o in told} >= {o.peer for o in played.of(PeerStarted)} - {o.peer for o in stopped}
        assert max(o.time for o in told) < 42.0
    assert played.of(MemberDown) == []
    assert len(played.live_views()) == 18


def test_a_flash_crowd_comes_at_its_configured_time() -> None:
    crowd = ChurnEvent(at_seconds=30.0, kind="join", share=1.0, lasts_seconds=5.0)
    played = Played(scenario(start=SwarmStart(late_share=0.5), events=(crowd,)))
    late = [o.time for o in played.of(PeerStarted) if o.time >= 30]
    assert len(late) == 10
    assert max(late) <= 35.0
    assert played.live_views() == [set(played.world.peers)] * 20


def test_an_instant_restart_gives_the_peer_a_new_incarnation() -> None:
    played = Played(scenario(events=(ChurnEvent(at_seconds=30.0, kind="restart", share=0.2),)))
    assert [o.event.why for o in played.of(PeerStopped)] == ["restart"] * 4
    assert [o.time for o in played.of(PeerStarted) if o.event.remembers] == [30.0] * 4
    assert played.live_views() == [set(played.world.peers)] * 20
    assert not played.of(MemberDown), "a peer was declared dead before it was back"


def test_a_swarm_under_churn_keeps_working() -> None:
    churn = Churn(
        sessions=Distribution(distribution="weibull", scale_seconds=60.0, shape=0.6),
        absences=Distribution(distribution="exponential", scale_seconds=30.0),
        permanent=2,
        crash_share=0.5,
    )
    played = Played(scenario(seconds=120.0, churn=churn))
    stopped = Counter(o.event.why for o in played.of(PeerStopped))
    assert min(stopped["crash"], stopped["leave"]) >= 3
    up = {peer for peer in played.world.peers if played.world.is_up(peer)}
    assert all(len(view & up) > len(up) / 2 for view in played.live_views())


def test_after_a_partition_heals_all_list_each_other_again() -> None:
    cut = ChurnEvent(at_seconds=30.0, kind="partition", share=0.3, lasts_seconds=60.0)
    played = Played(scenario(nodes=10, seconds=300.0, events=(cut,)))
    (split,) = played.of(NetworkSplit)
    (healed,) = played.of(NetworkHealed)
    assert sorted(len(side) for side in split.event.sides) == [3, 7]
    assert (split.time, healed.time) == (30.0, 90.0)
    side_of = {peer: number for number, side in enumerate(split.event.sides) for peer in side}
    downs = [o for o in played.of(MemberDown) if 30 < o.time < 90]
    assert {(side_of[o.peer], side_of[o.event.peer]) for o in downs if o.peer} == {(0, 1), (1, 0)}
    assert played.live_views() == [set(played.world.peers)] * 10


def test_a_deaf_peer_is_declared_dead_and_returns() -> None:
    deaf = ChurnEvent(at_seconds=30.0, kind="one-way", share=0.1, lasts_seconds=30.0)
    played = Played(scenario(nodes=10, seconds=300.0, events=(deaf,)))
    given_up = Counter(o.event.peer for o in played.of(MemberDown) if o.time < 60)
    (outcast,) = (peer for peer, by in given_up.items() if by == 9)
    assert played.live_views() == [set(played.world.peers)] * 10
    found = [o for o in played.of(RecordGot) if o.peer == outcast and not o.event.storing]
    assert not [o for o in found if o.event.expected and 30 < o.time < 60]


def test_a_peer_without_datagrams_is_probed_by_streams_and_stays_alive() -> None:
    blocked = ChurnEvent(at_seconds=30.0, kind="no-datagrams", share=0.1, lasts_seconds=60.0)
    near = NetworkModel(nearest_seconds=0.001, farthest_seconds=0.02)
    played = Played(scenario(nodes=10, seconds=100.0, events=(blocked,), network=near))
    assert not played.of(MemberDown)
    assert not [o for o in played.of(MemberSuspected) if 30 < o.time < 90]
    assert played.live_views() == [set(played.world.peers)] * 10


def test_a_frozen_peer_is_suspected_and_refutes_after_its_thaw() -> None:
    # This is long enough to be suspected, but too short to be declared dead.
    still = ChurnEvent(at_seconds=40.0, kind="freeze", share=0.05, lasts_seconds=6.0)
    played = Played(scenario(seconds=100.0, events=(still,)))
    (frozen,) = played.of(PeerFrozen)
    assert {o.event.peer for o in played.of(MemberSuspected)} >= {frozen.peer}
    assert frozen.peer in {o.event.peer for o in played.of(MemberRefuted)}
    assert not played.of(MemberDown)
    accused = [o.time for o in played.of(SelfAccused) if o.peer == frozen.peer]
    assert accused
    assert min(accused) >= 46.0
    assert not [o for o in played.seen if o.peer == frozen.peer and 40.0 < o.time < 46.0]


def test_records_outlive_churn_through_republishing() -> None:
    churn = Churn(
        sessions=Distribution(distribution="exponential", scale_seconds=120.0),
        absences=Distribution(distribution="exponential", scale_seconds=60.0),
        permanent=4,
    )
    records = RecordsScenario(stores_per_second=0.1, republish_seconds=60.0, lifetime_seconds=240.0)
    played = Played(scenario(nodes=16, seconds=400.0, churn=churn, records=records))
    lookups = [o.event for o in played.of(RecordGot) if not o.event.storing and o.event.expected]
    assert len(lookups) > 100
    assert sum(got.copies > 0 for got in lookups) >= 0.99 * len(lookups)


def test_a_users_swim_core_replaces_the_built_in_one() -> None:
    made: list[PeerId] = []

    class Shy(Swim):
        """A core that does not say goodbye."""

        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            made.append(self.peer)

        def leave(self, now: float) -> Any:
            super().leave(now)
            return []

    leave = ChurnEvent(at_seconds=30.0, kind="leave", share=0.05, lasts_seconds=0.0)
    played = Played(scenario(events=(leave,)), swim=Shy)
    assert sorted(made) == sorted(played.world.peers)
    assert not [o for o in played.of(MemberLeft) if o.time < 30.1]


def test_real_signatures_give_the_same_events_as_hashes() -> None:
    played = Played(scenario(nodes=8, seconds=30.0, signatures="ed25519"))
    assert played.live_views() == [set(played.world.peers)] * 8
    assert played.digest == Played(scenario(nodes=8, seconds=30.0, signatures="ed25519")).digest
    assert set(played.world.peers).isdisjoint(Played(scenario(nodes=8, seconds=1.0)).world.peers)


def test_messages_through_the_real_encoding_change_nothing() -> None:
    one, other = (Played(scenario(nodes=12, seconds=40.0, encoded=encoded)) for encoded in (True, False))
    assert one.digest == other.digest


def test_a_swarm_works_despite_wrong_clocks() -> None:
    network = NetworkModel(clock_offset_seconds=20.0, clock_drift=0.001)
    crash = ChurnEvent(at_seconds=60.0, kind="crash", share=0.1, lasts_seconds=30.0)
    played = Played(scenario(nodes=12, seconds=150.0, network=network, events=(crash,)))
    assert {o.event.peer for o in played.of(MemberDown)} == {o.peer for o in played.of(PeerStopped)}
    assert played.live_views() == [set(played.world.peers)] * 12


def test_a_peer_lists_only_peers_of_its_neighbourhood() -> None:
    played = Played(scenario(nodes=16, seconds=60.0, membership=MembershipScenario(scope="neighbourhood")))
    for peer in played.world.peers:
        view = {other for other, status in played.world.believes(peer).items() if status is Status.ALIVE}
        assert view == {other for other in played.world.peers if played.world.in_scope(peer, other)}


def test_the_digest_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-m", "tests.sim.worlds.test_cores"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        digests.add(printed.stdout)
    assert digests == {eventful().digest + "\n"}


def test_many_events_share_one_instant() -> None:
    assert eventful().world.counters()["tied"] > 500


@cache
def eventful() -> Played:
    """Return a scenario with a little of everything, over links of exactly 50 ms."""
    return Played(
        scenario(
            nodes=10,
            seconds=80.0,
            churn=Churn(
                sessions=Distribution(distribution="exponential", scale_seconds=60.0),
                absences=Distribution(distribution="exponential", scale_seconds=20.0),
            ),
            events=(
                ChurnEvent(at_seconds=25.0, kind="partition", share=0.5, lasts_seconds=10.0),
                ChurnEvent(at_seconds=30.0, kind="partition", share=0.5, lasts_seconds=10.0),
                ChurnEvent(at_seconds=45.0, kind="freeze", share=0.2, lasts_seconds=3.0),
                ChurnEvent(at_seconds=50.0, kind="slow", share=0.2, lasts_seconds=10.0),
                ChurnEvent(at_seconds=60.0, kind="loss", share=0.5, lasts_seconds=10.0),
                ChurnEvent(at_seconds=65.0, kind="one-way", share=0.1, lasts_seconds=5.0),
                ChurnEvent(at_seconds=75.0, kind="leave", share=0.2, lasts_seconds=0.3),
            ),
        )
    )


if __name__ == "__main__":
    sys.stdout.write(eventful().digest + "\n")
