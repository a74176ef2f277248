"""A few members under all faults simultaneously: invariants hold despite loss, duplicates and delays."""

import os
from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gossip.member import Status
from gossip.messages import Gossip
from gossip.settings import SwimSettings
from tests.gossip.swarm import Swarm, peer_of

MEMBERS = 5
LAN = SwimSettings.lan()
numbers = st.integers(0, MEMBERS - 1)


class Unreliable(RuleBasedStateMachine):
    """Members crash, restart, stall and lose each other's messages. At a restart the clock may be set
    back."""

    def __init__(self) -> None:
        super().__init__()
        self.swarm = Swarm(MEMBERS, LAN, seed=3)
        self.swarm.run(5)
        # The highest incarnation of each subject that each observer has held since the observer's latest
        # start.
        self.held: dict[int, dict[int, int]] = defaultdict(dict)

    @rule(loss=st.sampled_from([0.0, 0.1, 0.5]))
    def lose(self, loss: float) -> None:
        self.swarm.loss = loss

    @rule(one=numbers, other=numbers)
    def cut_off(self, one: int, other: int) -> None:
        self.swarm.blocked = lambda a, b: {a, b} == {one, other} and one != other

    @rule(one=numbers)
    def isolate(self, one: int) -> None:
        self.swarm.blocked = lambda a, b: (a == one) != (b == one)

    @rule(one=numbers, seconds=st.floats(0.1, 20.0))
    def freeze(self, one: int, seconds: float) -> None:
        if one in self.swarm.cores:
            self.swarm.stall(one, seconds)

    @rule(one=numbers)
    def kill(self, one: int) -> None:
        if one in self.swarm.cores and len(self.swarm.cores) > 2:
            self.swarm.kill(one)
            self.held.pop(one, None)

    @rule(one=numbers, incarnation=st.integers(1, 60))
    def restart(self, one: int, incarnation: int) -> None:
        if one not in self.swarm.cores:
            via = min(self.swarm.cores)
            self.swarm.start(one, incarnation=incarnation, join=via)

    @rule(seconds=st.floats(0.1, 30.0))
    def wait(self, seconds: float) -> None:
        self.swarm.run(seconds)

    @rule(one=numbers, other=numbers)
    def repeat_what_is_held(self, one: int, other: int) -> None:
        """Deliver an old list once more, out of order."""
        cores = self.swarm.cores
        if one in cores and other in cores and one != other:
            facts = cores[one]._beliefs.table.facts()[:8]
            self.swarm.send(other, cores[other].receive(self.swarm.now, peer_of(one), Gossip(facts)))

    @invariant()
    def incarnations_only_rise(self) -> None:
        for observer in self.swarm.cores:
            before = self.held[observer]
            for subject, member in self.swarm.view(observer).items():
                assert member.incarnation >= before.get(subject, 0)
                before[subject] = member.incarnation
            for subject in set(before) - set(self.swarm.view(observer)):
                del before[subject]  # a member is forgotten after ten minutes

    @invariant()
    def the_dead_were_dead_in_the_incarnation_that_is_held(self) -> None:
        for observer in self.swarm.cores:
            for row in self.swarm.cores[observer]._beliefs.table.rows.values():
                if row.verdict is not None:
                    assert row.verdict.incarnation >= row.said.incarnation

    def teardown(self) -> None:
        """Once the network is good again, no list names a live member as dead."""
        self.swarm.loss, self.swarm.blocked = 0.0, lambda _a, _b: False
        self.swarm.run(60)
        for number in list(self.swarm.cores):
            # A member that has forgotten all others joins again, as a lone node does.
            if len(self.swarm.view(number)) == 1:
                others = [peer_of(other) for other in self.swarm.cores if other != number]
                self.swarm.send(number, self.swarm.cores[number].join(self.swarm.now, others))
        self.swarm.run(120)
        for observer in self.swarm.cores:
            view = self.swarm.view(observer)
            for subject in self.swarm.cores:
                assert view[subject].status is Status.ALIVE, (observer, subject, view[subject])


TestUnreliable = Unreliable.TestCase
TestUnreliable.settings = settings(
    max_examples=int(os.environ.get("PEERLOOM_SWIM_EXAMPLES", "12")), stateful_step_count=20, deadline=None
)
