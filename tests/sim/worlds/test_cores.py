"""A world of cores: the same from the same seed, and peers that do what nodes do."""

from collections import Counter
from typing import Any

from crypto.identity import PeerId
from gossip.member import MemberUp, Status
from sim.happenings import PeerStarted, RecordGot
from sim.network.model import NetworkModel
from sim.scenario import Scenario
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
