"""A world of cores: the same from the same seed, and peers that do what nodes do."""

from collections import Counter
from typing import Any

from crypto.identity import PeerId
from gossip.member import MemberDown, MemberLeft, MemberUp, Status
from sim.churn.model import Churn, Distribution, Event
from sim.happenings import PeerStarted, PeerStopped, RecordGot
from sim.network.model import NetworkModel
from sim.scenario import Scenario, Start
from sim.watch import Observed, Watch
from sim.worlds.cores import CoresWorld
from sim.worlds.replaceable import Cores


class Played:
    """A world that was played to its end, and all that was published."""

    def __init__(self, scenario: Scenario, seed: int = 1, **cores: Any) -> None:
        self.seen: list[Observed] = []
        self.samples = 0
        watch = Watch(())

        def publish(observed: Observed) -> None:
            self.seen.append(observed)
            watch.publish(observed, self.world)

        def sample() -> None:
            self.samples += 1

        self.world = CoresWorld(scenario, seed, publish, cores=Cores(**cores))
        self.world.play(sample)
        self.digest = watch.digest()

    def of(self, *kinds: type) -> list[Observed]:
        return [observed for observed in self.seen if isinstance(observed.event, kinds)]

    def live_views(self) -> list[set[PeerId]]:
        return [
            {other for other, status in self.world.believes(peer).items() if status is Status.ALIVE}
            for peer in self.world.peers
            if self.world.is_up(peer)
        ]


def scenario(**changes: Any) -> Scenario:
    """Twenty peers in one minute, over links of exactly 50 ms, so that much happens at one instant."""
    fields: dict[str, Any] = {"name": "test", "about": "", "nodes": 20, "seconds": 60.0}
    return Scenario(**(fields | changes))


def test_all_start_and_list_each_other() -> None:
    played = Played(scenario())
    assert len(played.of(PeerStarted)) == 20
    assert played.live_views() == [set(played.world.peers)] * 20
    ups = Counter(observed.peer for observed in played.of(MemberUp))
    assert set(ups.values()) == {19}
    assert played.samples == 60


def test_records_are_found() -> None:
    played = Played(scenario(network=NetworkModel(nearest_seconds=0.01, farthest_seconds=0.09)))
    lookups = [o.event for o in played.of(RecordGot) if not o.event.storing and o.event.expected]
    assert len(lookups) > 20
    assert all(got.copies == 1 and got.rounds >= 0 and got.seconds < 2 for got in lookups)


def test_the_same_seed_gives_the_same_digest_and_another_seed_another() -> None:
    digests = [Played(scenario(), seed).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_a_crash_is_noticed_by_all_and_a_return_too() -> None:
    played = Played(
        scenario(seconds=120.0, events=(Event(at_seconds=40.0, kind="crash", share=0.1, lasts_seconds=40.0),))
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


def test_a_goodbye_is_told_and_nobody_is_suspected() -> None:
    played = Played(
        scenario(events=(Event(at_seconds=40.0, kind="leave", share=0.1, lasts_seconds=0.0),), seconds=80.0)
    )
    stopped = played.of(PeerStopped)
    assert [(o.time, o.event.why) for o in stopped] == [(40.6, "leave")] * 2
    for gone in stopped:
        told = [o for o in played.of(MemberLeft) if o.event.peer == gone.peer]
        assert {o.peer for o in told} >= {o.peer for o in played.of(PeerStarted)} - {o.peer for o in stopped}
        assert max(o.time for o in told) < 42.0
    assert not [o for o in played.of(MemberDown)]
    assert len(played.live_views()) == 18


def test_a_flash_crowd_comes_when_it_is_told_to() -> None:
    crowd = Event(at_seconds=30.0, kind="join", share=1.0, lasts_seconds=5.0)
    played = Played(scenario(start=Start(late_share=0.5), events=(crowd,)))
    late = [o.time for o in played.of(PeerStarted) if o.time >= 30]
    assert len(late) == 10
    assert max(late) <= 35.0
    assert played.live_views() == [set(played.world.peers)] * 20


def test_a_restart_at_one_instant_is_a_new_life_of_the_same_peer() -> None:
    played = Played(scenario(events=(Event(at_seconds=30.0, kind="restart", share=0.2),)))
    assert [o.event.why for o in played.of(PeerStopped)] == ["restart"] * 4
    assert [o.time for o in played.of(PeerStarted) if o.event.remembers] == [30.0] * 4
    assert played.live_views() == [set(played.world.peers)] * 20
    assert not played.of(MemberDown), "each was back before anybody gave it up"


def test_a_swarm_under_churn_goes_on_and_repeats() -> None:
    churn = Churn(
        sessions=Distribution(distribution="weibull", scale_seconds=60.0, shape=0.6),
        absences=Distribution(distribution="exponential", scale_seconds=30.0),
        permanent=2,
        crash_share=0.5,
    )
    wanted = scenario(seconds=180.0, churn=churn)
    played = Played(wanted)
    stopped = Counter(o.event.why for o in played.of(PeerStopped))
    assert min(stopped["crash"], stopped["leave"]) > 5
    up = {peer for peer in played.world.peers if played.world.is_up(peer)}
    assert all(len(view & up) > len(up) / 2 for view in played.live_views())
    assert Played(wanted).digest == played.digest
