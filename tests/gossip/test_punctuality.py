"""Members that answer late, or only through others, are marked by the peers that observe this, and stay alive
for all.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.member import Condition, MemberDegraded, MemberDown, MemberRecovered, MemberSuspected, Status
from gossip.messages import Ack, ByStream
from gossip.punctuality import LATE_MIN, RECENT, RELAYED_MIN, ProbeAnswer, Punctuality
from gossip.round_trips import STALL_TIMES, RoundTrips
from gossip.settings import SwimSettings
from gossip.swim import Sends
from tests.gossip.swarm import Swarm, peer_of

LAN = SwimSettings.lan()


class SlowAnswers(Swarm):
    """Return a swarm in which `slow` answers pings `delay` seconds late."""

    slow = 0
    delay = 0.0

    def send(self, number: int, sends: Sends) -> None:
        acks = [row for row in sends if isinstance(row[1], Ack | ByStream)]
        late = acks if number == self.slow and self.delay else []
        super().send(number, [row for row in sends if row not in late])
        if late:
            begun, self.now = self.now, self.now + self.delay
            super().send(number, late)
            self.now = begun


def marks(swarm: Swarm, number: int) -> list[object]:
    kinds = MemberDegraded | MemberRecovered
    return [event for event in swarm.events[number] if isinstance(event, kinds)]


def test_a_late_member_is_marked_degraded_and_recovers() -> None:
    swarm = SlowAnswers(4, LAN)
    swarm.run(10)
    swarm.delay = 0.6
    swarm.run(60)
    first = marks(swarm, 1)[0]
    assert isinstance(first, MemberDegraded)
    assert (first.peer, first.condition) == (peer_of(0), Condition.LATE)
    assert 0.0 <= first.rate <= 1 - LATE_MIN / RECENT
    assert 0.6 <= first.seconds <= 0.7
    assert "answered late, after 0.6 s" in first.reason
    swarm.delay = 0.0
    swarm.run(60)
    assert marks(swarm, 1)[-1] == MemberRecovered(peer_of(0))
    assert not any(isinstance(event, MemberDown) for events in swarm.events.values() for event in events)


@pytest.mark.parametrize("delay", [0.6, 0.95, 1.3])
def test_a_distant_member_is_probed_patiently_and_no_longer_suspected(delay: float) -> None:
    swarm = SlowAnswers(4, LAN, loss=0.02)
    swarm.delay = delay
    swarm.run(60)
    settled = [len(swarm.events[number]) for number in (1, 2, 3)]
    swarm.run(600)
    for number, known in zip((1, 2, 3), settled, strict=True):
        later = swarm.events[number][known:]
        assert not [event for event in later if isinstance(event, MemberSuspected | MemberDown)]
    swarm.kill(0)
    took = swarm.run_until(lambda: swarm.all_see(0, Status.DEAD), at_most=60)
    assert took > 0


def test_presets_for_one_machine_keep_timeouts_fixed_and_forget_nobody() -> None:
    for settings in (SwimSettings.local(), SwimSettings.host()):
        trips = RoundTrips(settings)
        trips.learn(0.0, peer_of(1), 5.0)
        assert trips.stretch(peer_of(1)) == 1.0
    trips = RoundTrips(LAN)
    for now in range(9):
        trips.learn(now, peer_of(1), 0.001)
    assert (trips.stretch(peer_of(1)), len(trips)) == (1.0, 0)
    trips.learn(9.0, peer_of(1), STALL_TIMES * LAN.probe_timeout_max_seconds)
    trips.learn(9.1, peer_of(1), STALL_TIMES * LAN.probe_timeout_max_seconds)
    assert (trips.stretch(peer_of(1)), len(trips)) == (1.0, 1), "only one change"
    trips.learn(19.0, peer_of(1), STALL_TIMES * LAN.probe_timeout_max_seconds)
    assert trips.stretch(peer_of(1)) == LAN.probe_timeout_max_seconds / LAN.probe_timeout_seconds
    for now in range(20, 80):
        trips.learn(now, peer_of(1), 0.001)
    assert len(trips) == 0


def test_a_member_that_stalled_is_not_considered_distant() -> None:
    swarm = Swarm(5, LAN, seed=4)
    swarm.run(40)
    swarm.stall(3, 10.0)
    swarm.run(15)
    observers = [swarm.cores[number]._table.trips for number in (0, 1, 2, 4)]
    assert [trips.stretch(peer_of(3)) for trips in observers] == [1.0] * 4


def test_a_member_without_a_direct_path_is_reported_but_not_dead() -> None:
    swarm = Swarm(5, LAN)
    swarm.run(10)
    swarm.blocked = lambda one, other: {one, other} == {0, 1}
    swarm.run(60)
    for here, there in ((0, 1), (1, 0)):
        found = marks(swarm, here)
        assert [type(event) for event in found] == [MemberDegraded]
        assert isinstance(found[0], MemberDegraded)
        assert (found[0].peer, found[0].condition) == (peer_of(there), Condition.NO_PATH)
        assert swarm.cores[here].status(peer_of(there)) is Status.ALIVE
    assert marks(swarm, 2) == []
    swarm.blocked = lambda _one, _other: False
    swarm.run(30)
    assert marks(swarm, 0)[-1] == MemberRecovered(peer_of(1))


def test_loss_alone_marks_nobody_and_a_dead_member_has_no_mark() -> None:
    swarm = Swarm(6, LAN, loss=0.1)
    swarm.run(600)
    assert all(marks(swarm, number) == [] for number in swarm.cores)
    swarm.loss = 0.0
    swarm.blocked = lambda one, other: {one, other} == {0, 1}
    swarm.run(60)
    assert swarm.cores[0].punctuality.marks
    swarm.kill(1)
    swarm.run(60)
    assert swarm.cores[0].status(peer_of(1)) is Status.DEAD
    assert len(swarm.cores[0].punctuality) == 0


@given(st.lists(st.sampled_from(ProbeAnswer)))
def test_marks_follow_the_latest_answers_and_use_bounded_memory(answers: list[ProbeAnswer]) -> None:
    punctuality, told = Punctuality(), False
    for count, answer in enumerate(answers, 1):
        event = punctuality.note(peer_of(1), answer, 0.5)
        last = answers[max(0, count - RECENT) : count]
        if event is not None:
            # Every event changes the marks, but a path counts as lost only after this many failures in a row.
            assert isinstance(event, MemberDegraded) or told
            if isinstance(event, MemberDegraded) and event.condition is Condition.NO_PATH:
                assert last[-RELAYED_MIN:] == [ProbeAnswer.RELAYED] * RELAYED_MIN
            told = isinstance(event, MemberDegraded)
        assert told == (peer_of(1) in punctuality.marks)
        if last.count(ProbeAnswer.LATE) >= LATE_MIN and last[-1] is not ProbeAnswer.RELAYED:
            assert told
    for _ in range(RECENT):
        punctuality.note(peer_of(1), ProbeAnswer.IN_TIME, 0.1)
    assert len(punctuality) == 0
    assert punctuality.marks == {}
