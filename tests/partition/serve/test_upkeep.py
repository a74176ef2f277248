"""A service keeps its number of replicas, whichever of its members dies."""

from itertools import pairwise
from random import Random

import pytest

from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from partition.serve.messages import Roll, ServiceRow
from partition.serve.upkeep import (
    FORGET_SECONDS,
    FORMER_TELL_SECONDS,
    HEARSAY_SECONDS,
    MEMBERS_MAX,
    PAUSE_SECONDS_MAX,
    SETTLE_SECONDS,
    Recruit,
    RosterChanged,
    ServiceUpkeep,
)

SERVICE = bytes(32)
PEERS = [Identity(bytes([1 + number]) * 32).peer for number in range(9)]


class Swarm:
    """Members that hear each other, and spare nodes that accept every stage."""

    def __init__(self, members: dict[PeerId, int], spares: list[PeerId], *, stages: int, wished: int) -> None:
        self.now = 0.0
        self.stages, self.wished = stages, wished
        self.spares = spares
        self.members: dict[PeerId, ServiceUpkeep] = {}
        self.recruits = 0
        rows = [ServiceRow(peer, stage, True) for peer, stage in members.items()]
        for peer, stage in members.items():
            self.join(peer, stage, rows)

    def join(self, peer: PeerId, stage: int, rows: list[ServiceRow] | tuple[ServiceRow, ...]) -> None:
        core = ServiceUpkeep(self.now, peer, SERVICE, self.stages, self.wished, stage, rows)
        self.members[peer] = core
        self.send(peer, core.ready(self.now))

    def send(self, sender: PeerId, sends: list[tuple[PeerId, Roll]]) -> None:
        for receiver, message in sends:
            if receiver in self.members:
                self.send(receiver, self.members[receiver].receive(self.now, sender, message))

    def kill(self, peer: PeerId, *, breaks: bool) -> None:
        del self.members[peer]
        for core in self.members.values() if breaks else ():
            core.lost(self.now, peer)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            for peer, core in list(self.members.items()):
                self.send(peer, core.wake(self.now))
                for event in core.events[:]:
                    if isinstance(event, Recruit):
                        self.recruits += 1
                        spare = self.spares.pop() if self.spares else None
                        if spare is not None:
                            self.join(spare, event.stage, core.rows())
                        core.recruited(self.now, event.stage, spare)
                core.events.clear()

    def counts(self) -> list[int]:
        return [sum(core.stage == stage for core in self.members.values()) for stage in range(self.stages)]


def test_a_service_grows_from_one_member_per_stage_to_its_replicas() -> None:
    swarm = Swarm({PEERS[0]: 0, PEERS[1]: 1}, PEERS[2:6], stages=2, wished=2)
    swarm.run(10)
    assert swarm.counts() == [2, 2]
    assert len(swarm.spares) == 2, "more replicas were started than requested"


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.parametrize("victim", range(4))
def test_the_remaining_members_replace_a_dead_one(victim: int, breaks: bool) -> None:
    swarm = Swarm({PEERS[n]: n % 2 for n in range(4)}, PEERS[4:6], stages=2, wished=2)
    swarm.run(3)
    swarm.kill(PEERS[victim], breaks=breaks)
    swarm.run(FORGET_SECONDS + 12)
    assert swarm.counts() == [2, 2]
    assert len(swarm.spares) == 1


def test_a_swarm_without_a_free_node_is_asked_ever_less_often() -> None:
    swarm = Swarm({PEERS[0]: 0}, [], stages=1, wished=2)
    swarm.run(200)
    assert swarm.recruits < 8 + 200 / PAUSE_SECONDS_MAX
    swarm.spares = [PEERS[1]]
    swarm.run(PAUSE_SECONDS_MAX + 1)
    assert swarm.counts() == [2]


def test_a_node_that_becomes_free_is_asked_at_once() -> None:
    swarm = Swarm({PEERS[0]: 0}, [], stages=1, wished=2)
    swarm.run(200)
    swarm.spares = [PEERS[1]]
    (core,) = swarm.members.values()
    assert core.is_paused
    core.offered(swarm.now)
    swarm.run(1)
    assert swarm.counts() == [2]


def test_a_leaving_member_is_replaced_at_once() -> None:
    swarm = Swarm({PEERS[0]: 0, PEERS[1]: 0}, [PEERS[2]], stages=1, wished=2)
    swarm.run(4)
    leaver = swarm.members.pop(PEERS[1])
    swarm.send(PEERS[1], leaver.leave())
    swarm.run(3)
    assert swarm.counts() == [2]


def test_a_slow_new_members_stage_is_offered_to_no_other_node() -> None:
    swarm = Swarm({}, [PEERS[2]], stages=2, wished=1)
    rows = [ServiceRow(PEERS[0], 0, False), ServiceRow(PEERS[1], 1, False)]
    swarm.join(PEERS[0], 0, rows)
    swarm.run(HEARSAY_SECONDS - 1)
    swarm.join(PEERS[1], 1, rows)
    swarm.run(FORGET_SECONDS + 5)
    assert (swarm.counts(), swarm.recruits) == ([1, 1], 0)


def test_a_member_that_was_suspended_considers_no_member_silent() -> None:
    core = ServiceUpkeep(0.0, PEERS[0], SERVICE, 2, 1, 0, [ServiceRow(PEERS[1], 1, True)])
    for second in range(1, 5):
        core.receive(float(second), PEERS[1], Roll(SERVICE, 1, True))
        core.wake(float(second))
    core.wake(30.0)
    assert core.has(PEERS[1]), "a member was dropped before its waiting messages were read"
    # From then on silence counts.
    for second in range(31, 31 + int(FORGET_SECONDS)):
        core.wake(float(second))
    assert not core.has(PEERS[1])
    assert [event.stage for event in core.events if isinstance(event, Recruit)] == [1]


def test_members_that_lost_each_other_meet_again_without_a_third_peer() -> None:
    swarm = Swarm({PEERS[0]: 0, PEERS[1]: 1}, [], stages=2, wished=1)
    swarm.run(4)
    for core, other in ((swarm.members[PEERS[0]], PEERS[1]), (swarm.members[PEERS[1]], PEERS[0])):
        core.lost(swarm.now, other)
        assert not core.has(other)
    swarm.run(FORMER_TELL_SECONDS + 1)
    assert swarm.members[PEERS[0]].has(PEERS[1])
    assert swarm.members[PEERS[1]].has(PEERS[0])


@pytest.mark.parametrize("message_first", [True, False])
def test_a_stall_neither_counts_as_silence_nor_shortens_the_wait(message_first: bool) -> None:
    core = ServiceUpkeep(0.0, PEERS[0], SERVICE, 3, 1, 0, [ServiceRow(PEERS[1], 1, True)])
    core.receive(0.5, PEERS[1], Roll(SERVICE, 1, True))
    core.wake(0.5)
    now = 20.5
    if message_first:
        core.receive(now, PEERS[1], Roll(SERVICE, 1, True))
    core.ready(now)
    core.wake(now)
    assert core.has(PEERS[1])
    while not (found := [event.stage for event in core.events if isinstance(event, Recruit)]):
        now += 0.25
        core.receive(now, PEERS[1], Roll(SERVICE, 1, True))
        core.wake(now)
    assert found == [2]
    # Half a second had passed before the stall, so the other member may be the first to act.
    assert now - 20.0 >= SETTLE_SECONDS


def test_a_named_peer_that_takes_the_stage_is_asked_once() -> None:
    core = ServiceUpkeep(0.0, PEERS[0], SERVICE, 2, 1, 0, [ServiceRow(PEERS[1], 1, False)])
    now = 0.0
    while not core.events:
        now += 0.25
        core.wake(now)
        core.introduce(now, [ServiceRow(PEERS[1], 1, False)])
        core.events = [event for event in core.events if isinstance(event, Recruit)]
    core.events.clear()
    core.recruited(now, 1, PEERS[1])
    core.wake(now + 1)
    assert not [event for event in core.events if isinstance(event, Recruit)]


def test_members_learn_of_each_other_through_other_members() -> None:
    swarm = Swarm({}, [], stages=1, wished=1)
    swarm.join(PEERS[0], 0, [])
    for before, peer in pairwise(PEERS[:6]):
        swarm.members[before].introduce(swarm.now, [ServiceRow(peer, 0, False)])
        swarm.join(peer, 0, [ServiceRow(before, 0, True)])
    swarm.run(4)
    assert all(len(core.rows()) == 6 for core in swarm.members.values())


def test_a_peer_known_only_by_hearsay_counts_as_no_replica() -> None:
    rng = Random(1)
    core = ServiceUpkeep(0.0, PEERS[0], SERVICE, 1, 2, 0, [])
    core.introduce(0.0, [ServiceRow(peer, 0, True) for peer in PEERS[1:]])
    for peer in PEERS[1:]:
        core.receive(0.0, peer, Roll(SERVICE, 0, True))
    rows = tuple(ServiceRow(rng.randbytes(32), 0, True) for _ in range(MEMBERS_MAX))
    core.receive(0.0, PEERS[1], Roll(SERVICE, 0, True, False, rows))
    assert {row.peer for row in core.rows()} == {*PEERS}
    for second in range(1, 9):
        core.wake(float(second))
    assert len(core.rows()) == 1


def test_an_unknown_peer_that_no_member_named_is_not_a_member() -> None:
    core = ServiceUpkeep(0.0, PEERS[0], SERVICE, 1, 2, 0, [])
    core.receive(0.0, PEERS[1], Roll(SERVICE, 0, True, False, (ServiceRow(PEERS[2], 0, True),)))
    assert [row.peer for row in core.rows()] == [PEERS[0]]
    core.receive(0.0, PEERS[2], Roll(SERVICE, 0, True))
    assert not core.has(PEERS[2])


def test_a_returned_member_counts_again_after_its_own_report() -> None:
    core = ServiceUpkeep(0.0, PEERS[0], SERVICE, 1, 2, 0, [ServiceRow(PEERS[1], 0, True)])
    core.receive(0.0, PEERS[1], Roll(SERVICE, 0, True))
    core.lost(1.0, PEERS[1])
    assert not core.has(PEERS[1])
    core.receive(30.0, PEERS[1], Roll(SERVICE, 0, True))
    assert core.has(PEERS[1])


def test_a_message_about_a_stage_that_does_not_exist_is_refused() -> None:
    core = ServiceUpkeep(0.0, PEERS[0], SERVICE, 2, 1, 0, [])
    with pytest.raises(RemoteProtocolError):
        core.receive(0.0, PEERS[1], Roll(SERVICE, 2, True))
    with pytest.raises(RemoteProtocolError):
        core.receive(0.0, PEERS[1], Roll(bytes([1]) * 32, 0, True))


def test_changes_of_the_roster_are_reported() -> None:
    core = ServiceUpkeep(0.0, PEERS[0], SERVICE, 2, 1, 0, [])
    core.ready(0.0)
    core.introduce(0.0, [ServiceRow(PEERS[1], 1, False)])
    core.receive(0.0, PEERS[1], Roll(SERVICE, 1, False))
    core.receive(0.0, PEERS[1], Roll(SERVICE, 1, True))
    core.receive(0.0, PEERS[1], Roll(SERVICE, 1, True))
    told = [event.ready for event in core.events if isinstance(event, RosterChanged)]
    assert told == [((PEERS[0],), ()), ((PEERS[0],), (PEERS[1],))]
