"""The checkers find bugs that are planted in cores: each bug within a few seeds, and without false alarms.

A bug is a core that replaces ours, like a core that a user supplies (`sim.worlds.factories`).
"""

from collections.abc import Collection
from typing import Any
from unittest.mock import ANY

import pytest
from msgspec.structs import replace

from crypto.identity import PeerId
from dht.kademlia import Kademlia
from dht.messages import Message as RecordMessage
from dht.messages import Store
from dht.records import RecordStore
from gossip.messages import DeadBody, Message, SuspectBody, read_body
from gossip.prober import Prober
from gossip.swim import Swim
from node.services.driver import Sends
from partition.plan.paxos import ForkFound, PaxosChain
from partition.plan.paxos_messages import AgreementMessage, ChainHead
from partition.plan.quorum import Instance, Reach
from partition.run.draining import Draining
from partition.run.parts import Parts
from partition.steps.replica import Replica, SubtractReady, WorkItem
from sim.checkers import checkers_for
from sim.churn.model import Churn, ChurnEvent
from sim.network.model import NetworkModel
from sim.observers import Broken, Observation, Watch
from sim.scenario import Checks, MembershipScenario, RecordsScenario, Scenario, SwarmStart, TrainingScenario
from sim.worlds.cores import CoresWorld
from sim.worlds.factories import Cores
from sim.worlds.integer_stage import Truth

SEEDS_MAX = 50
"""Maximum number of seeds within which each bug must be found."""


def broken(scenario: Scenario, seed: int, **cores: Any) -> str | None:
    """Return the name of the broken invariant; None if all hold."""
    watch = Watch(checkers_for(scenario))

    def publish(observed: Observation) -> None:
        watch.publish(observed, world)

    world = CoresWorld(scenario, seed, publish, cores=Cores(**cores))
    try:
        world.play(lambda: watch.sample(world))
        watch.end(world)
    except Broken as found:
        return found.invariant
    return None


def seeds_until(invariant: str, scenario: Scenario, **cores: Any) -> int:
    """Return the number of seeds until the bug is found. Without the bug, no checker may report anything for
    these seeds.
    """
    for seed in range(1, SEEDS_MAX + 1):
        assert broken(scenario, seed) is None
        found = broken(scenario, seed, **cores)
        if found is not None:
            assert found == invariant
            return seed
    pytest.fail(f"not found within {SEEDS_MAX} seeds")


class ProbesNoDead(Prober):
    """A core that never probes a member that it believes dead."""

    def probe_dead(self, now: float, count: int, peer: PeerId | None = None) -> Sends:
        del now, count, peer
        return []


class ForgetsToRefute(Swim):
    """A core that ignores accusations against itself, and probes no member that it believes dead."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._prober = ProbesNoDead(self._beliefs, self._measures, self._settings, self.events, 0)
        self._flight = self._prober.flight

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        facts = getattr(message, "facts", ())
        kept = tuple(fact for fact in facts if not self._accuses_me(read_body(fact)))
        return super().receive(now, sender, replace(message, facts=kept) if facts else message)

    def _accuses_me(self, body: Any) -> bool:
        return isinstance(body, SuspectBody | DeadBody) and body.subject == self.peer


class DropsRecords(Kademlia):
    """A core that claims to keep a record, but does not."""

    def receive(self, now: float, sender: PeerId, message: RecordMessage) -> Sends:
        sends = super().receive(now, sender, message)
        if isinstance(message, Store):
            self.records = RecordStore(self.settings)
        return sends


class CountsTwice(Replica):
    """A core that does not subtract a micro-batch from its sums if another replica counts it, but claims that
    it did.
    """

    def next(self, now: float) -> WorkItem | None:
        item = super().next(now)
        while isinstance(item, SubtractReady):
            self.removed(item)
            item = super().next(now)
        return item


def test_a_swim_core_that_never_refutes_is_found_with_the_first_seed() -> None:
    frozen = Scenario(
        name="frozen",
        about="a live peer is frozen for so long that the others declare it dead",
        nodes=12,
        seconds=60.0,
        start=SwarmStart(spread_seconds=1.0),
        events=(ChurnEvent(kind="freeze", at_seconds=20.0, lasts_seconds=8.0, share=0.1),),
        network=NetworkModel(nearest_seconds=0.001, farthest_seconds=0.003),
        membership=MembershipScenario(preset="local"),
        records=RecordsScenario(enabled=False),
    )
    assert seeds_until("refutation", frozen, swim=ForgetsToRefute) == 1


@pytest.mark.slow
def test_a_dht_core_that_loses_records_is_found_with_the_first_seed() -> None:
    storing = Scenario(
        name="storing",
        about="there are more peers than copies, so that a record's author is seldom a holder",
        nodes=40,
        seconds=40.0,
        start=SwarmStart(spread_seconds=5.0),
        membership=MembershipScenario(preset="wan"),
        network=NetworkModel(nearest_seconds=0.01, farthest_seconds=0.03),
        records=RecordsScenario(stores_per_second=1.0, lookups_per_second=4.0, republish_seconds=10.0),
        checks=Checks(found_share=0.95),
    )
    assert seeds_until("lost-records", storing, kademlia=DropsRecords) == 1


class HearsOfItself(PaxosChain):
    """A core that judges any branch other than its own to be the longer one."""

    def receive(self, now: float, sender: PeerId, message: AgreementMessage) -> Any:
        sends = super().receive(now, sender, message)
        if isinstance(message, ChainHead) and message.fork != self.head.fork:
            self.events.append(ForkFound(sender, message))
        return sends

    def gives_way(self, head: ChainHead) -> bool:
        return True


FORKED_RUN = Scenario(
    name="forked-run",
    about="a split long enough for both sides to continue alone, and time to heal",
    nodes=7,
    seconds=130.0,
    start=SwarmStart(spread_seconds=2.0),
    membership=MembershipScenario(preset="local"),
    records=RecordsScenario(enabled=False),
    events=(ChurnEvent(at_seconds=15.0, kind="partition", share=0.5, lasts_seconds=90.0),),
    runs=(
        TrainingScenario(
            members=7,
            replicas=3,
            steps=200,
            checkpoint_every=5,
            at_seconds=10.0,
            pass_seconds=0.1,
            on_lost_quorum="fork",
        ),
    ),
)


def test_abandoning_both_branches_is_found_with_the_first_seed() -> None:
    assert seeds_until("branches", FORKED_RUN, agreement=HearsOfItself) == 1


class ForgetsLeaves(Draining):
    """A core that ignores members' requests to leave."""

    def note(self, now: float, peer: PeerId) -> None:
        del now, peer


LEFT_RUN = Scenario(
    name="left-run",
    about="members say goodbye, each the last of its stage",
    nodes=8,
    seconds=40.0,
    start=SwarmStart(spread_seconds=2.0),
    membership=MembershipScenario(preset="local"),
    records=RecordsScenario(enabled=False),
    churn=Churn(permanent=0),
    events=(ChurnEvent(at_seconds=14.0, kind="leave", share=0.25, lasts_seconds=0.0),),
    runs=(TrainingScenario(members=8, replicas=1, stages=4, steps=60, at_seconds=10.0, pass_seconds=0.05),),
)


def test_a_member_that_forgets_a_leave_is_found_within_fifty_seeds() -> None:
    assert seeds_until("goodbyes", LEFT_RUN, member=Parts(draining=ForgetsLeaves)) <= SEEDS_MAX


class DecidesAlone(PaxosChain):
    """A core that treats its own vote as a majority."""

    class Reach(Reach):
        def decides(self, instance: Instance, votes: Collection[PeerId]) -> bool:
            return bool(votes)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reach.__class__ = self.Reach


SPLIT_RUN = Scenario(
    name="split-run",
    about="a split into two sides, of which only one has a majority",
    nodes=7,
    seconds=45.0,
    start=SwarmStart(spread_seconds=2.0),
    membership=MembershipScenario(preset="local"),
    records=RecordsScenario(enabled=False),
    events=(ChurnEvent(at_seconds=15.0, kind="partition", share=0.5, lasts_seconds=20.0),),
    runs=(
        TrainingScenario(
            members=7, replicas=3, steps=100, checkpoint_every=5, at_seconds=10.0, pass_seconds=0.1
        ),
    ),
)


def test_a_minority_that_decides_is_found_with_the_first_seed() -> None:
    assert seeds_until("plans", SPLIT_RUN, agreement=DecidesAlone) == 1


LOSSY_RUN = Scenario(
    name="lossy-run",
    about="live members are suspected, so that what they have counted is also given to others",
    nodes=7,
    seconds=45.0,
    start=SwarmStart(spread_seconds=2.0),
    network=NetworkModel(nearest_seconds=0.005, farthest_seconds=0.02, loss=0.2),
    membership=MembershipScenario(preset="local"),
    records=RecordsScenario(enabled=False),
    runs=(
        TrainingScenario(
            members=7, replicas=3, steps=20, microbatches=32, at_seconds=10.0, pass_seconds=0.05
        ),
    ),
)


def test_double_counting_is_found_even_without_computing_expected_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Truth, "state", lambda *_: ANY)
    assert seeds_until("sums", LOSSY_RUN, replica=CountsTwice) <= 3
