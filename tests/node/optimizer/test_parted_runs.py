"""Two halves of a run with a target batch meet again after a partition. Pure logic, without nodes."""

from random import Random
from types import SimpleNamespace
from typing import Any

from crypto.identity import PeerId
from gossip.averaging.attendance import ABSENT_ROUNDS_MIN
from gossip.claims import VOICES_MIN, LikelySteps
from gossip.roster import Report, Roster
from node.averaging.expectations import Expectations
from node.optimizer.position import RunPosition

ME, PARTNER, *OTHERS = (PeerId(bytes([number]) * 32) for number in range(5))
RUN, OURS, THEIRS = (letter * 32 for letter in (b"r", b"o", b"t"))
STEP = 100


class _Half:
    """Return a peer that trained with all others, and then with only one partner."""

    def __init__(self) -> None:
        self.roster = Roster(ME, RUN, RUN, Random(1), 0.0, 1)
        self.roster.tell(0.0, step=STEP, samples=8, rounds=STEP, lineage=OURS, has_state=True)
        clock: Any = SimpleNamespace(monotonic=lambda: 1.0)
        self.expectations = Expectations(ME, self.roster, clock)
        self.expectations.attendance.completed([PARTNER, *OTHERS])
        for _ in range(ABSENT_ROUNDS_MIN):
            self.expectations.attendance.completed([PARTNER])
        self.position = RunPosition(None)
        self.position.is_joined = True
        self.position.moved(STEP, STEP)

    def hears(self, step: int, *peers: PeerId) -> None:
        told = dict.fromkeys(peers, (step, THEIRS)) | {PARTNER: (STEP, OURS)}
        for peer, (at, lineage) in told.items():
            self.roster.receive(1.0, peer, Report(RUN, RUN, 1, at, 8, at, lineage, has_state=True))

    def takes(self) -> LikelySteps | None:
        self.expectations._refresh()
        known = self.roster.reports
        voices = [known[peer] for peer in known.keys() - self.expectations.absent]
        return self.position.state_to_take(STEP, OURS, list(known.values()), voices)


def test_the_half_that_is_behind_adopts_the_state_of_the_other() -> None:
    half = _Half()
    half.hears(STEP + 5, *OTHERS)
    taken = half.takes()
    assert taken is not None
    assert taken.first <= STEP + 5 <= taken.last
    assert taken.holders_min == VOICES_MIN
    half.expectations.missed_state()
    assert half.takes() is None, "the peer asks for the state again before it has averaged"


def test_the_half_that_is_ahead_keeps_its_own_state() -> None:
    half = _Half()
    half.hears(STEP - 5, *OTHERS)
    assert half.takes() is None


def test_a_single_member_of_the_other_half_is_ignored() -> None:
    half = _Half()
    half.hears(STEP + 5, OTHERS[0])
    assert half.takes() is None
