"""Turns at a stage: a door with few sessions keeps its share next to a door with many."""

from dataclasses import dataclass, field

import pytest

from crypto.identity import PeerId
from partition.serve.messages import UNIT_TOKENS_MAX, Alive, OpenSession, SessionOpened
from partition.serve.provider import SESSIONS_PER_DOOR_MAX, ComputeBatch, SessionProvider
from partition.serve.turns import TOKENS_BESIDE_MAX, UNITS_BESIDE_MAX
from tests.partition.serve.test_provider import ALICE, BOB, NEXT, SERVICE, batches, provider, session, unit


@dataclass
class Stage:
    """A stage whose call with n tokens takes n ** 0.5 hundredths of a second, and doors that request the next
    token when one arrives. The last session does so `late` seconds later.
    """

    many: PeerId
    one: PeerId
    shares: tuple[int, int] = (0, 0)
    others: int = SESSIONS_PER_DOOR_MAX - 1
    chunk: int = 1
    late: float = 0.0
    now: float = 0.0
    core: SessionProvider = field(default_factory=provider)
    calls: list[list[int]] = field(default_factory=list)
    """The sessions of each call; the last number stands for the single session."""
    came: list[float] = field(default_factory=list)
    """The time of each token of the single session."""

    def __post_init__(self) -> None:
        self._newest = dict.fromkeys(range(self.others + 1), -1)
        for number in self._newest:
            share = self.shares[number == self.others]
            asked = OpenSession(session(number), SERVICE, 0, self._door(number), NEXT, None, share)
            ((_, told),) = self.core.receive(0.0, self._door(number), asked)
            assert isinstance(told, SessionOpened)
        for number in self._newest:
            self._ask(number)

    def _door(self, number: int) -> PeerId:
        return self.one if number == self.others else self.many

    def _ask(self, number: int) -> None:
        self._newest[number] += 1
        tokens = 1 if number == self.others else self.chunk
        asked = unit(number, tokens, 0, self._newest[number])
        assert self.core.receive(self.now, self._door(number), asked) == []

    def run(self, tokens: int) -> "Stage":
        owed: list[tuple[float, int]] = []
        running: tuple[float, ComputeBatch] | None = None
        while len(self.came) < tokens:
            for asked in batches(self.core):
                assert running is None
                taken = 0.01 * sum(each.work.tokens for each in asked.units) ** 0.5
                running = (self.now + taken, asked)
                self.calls.append([int.from_bytes(each.session) for each in asked.units])
            due = [self.core.deadline, *(at for at, _ in owed), *([running[0]] if running else [])]
            self.now = max(self.now, min(due))
            for door in {self.many, self.one}:
                self.core.receive(self.now, door, Alive())
            for entry in [entry for entry in owed if entry[0] <= self.now]:
                owed.remove(entry)
                self._ask(entry[1])
            self.core.wake(self.now)
            if running is not None and running[0] <= self.now:
                asked, running = running[1], None
                answers = [(None, each.arrays) for each in asked.units]
                self.core.computed(self.now, SERVICE, asked.batch, answers)
                for each in asked.units:
                    number = int.from_bytes(each.session)
                    if number == self.others:
                        self.came.append(self.now)
                    if number == self.others and self.late:
                        owed.append((self.now + self.late, number))
                    else:
                        self._ask(number)
        return self

    @property
    def pace(self) -> float:
        """Seconds per token of the single session."""
        return (self.came[-1] - self.came[4]) / (len(self.came) - 5)


PARTIES = pytest.mark.parametrize(
    ("one", "shares"), [(BOB, (0, 0)), (ALICE, (0, 1))], ids=["two doors", "two keys of one door"]
)


@PARTIES
def test_a_single_session_is_in_each_call_next_to_many_others(one: PeerId, shares: tuple[int, int]) -> None:
    alone = Stage(ALICE, one, shares, others=0).run(40).pace
    stage = Stage(ALICE, one, shares).run(40)
    assert all(stage.others in call for call in stage.calls[3:])
    assert {len(call) for call in stage.calls[3:]} == {UNITS_BESIDE_MAX + 1}
    assert stage.pace <= 1.12 * 2 * alone, "the single session got less than half of the stage"


@PARTIES
def test_a_single_session_waits_for_at_most_one_chunk_of_others(one: PeerId, shares: tuple[int, int]) -> None:
    alone = Stage(ALICE, one, shares, others=0).run(40).pace
    stage = Stage(ALICE, one, shares, chunk=128).run(40)
    assert all(stage.others in call for call in stage.calls[3:])
    assert stage.pace <= 129**0.5 * alone


@PARTIES
def test_a_door_that_was_idle_does_not_delay_others(one: PeerId, shares: tuple[int, int]) -> None:
    core, orders = provider(), dict.fromkeys(range(6), 0)
    doors = {number: one if number == 5 else ALICE for number in orders}
    now = 0.0

    def opens(number: int) -> None:
        asked = OpenSession(session(number), SERVICE, 0, doors[number], NEXT, None, shares[number == 5])
        core.receive(now, doors[number], asked)

    def asks(number: int, tokens: int) -> None:
        assert core.receive(now, doors[number], unit(number, tokens, 0, orders[number])) == []
        orders[number] += 1

    def computed() -> list[int]:
        nonlocal now
        while not (found := batches(core)):
            now = max(now, core.deadline)
            core.wake(now)
        (asked,) = found
        now += 0.01
        core.computed(now, SERVICE, asked.batch, [(None, each.arrays) for each in asked.units])
        return [int.from_bytes(each.session) for each in asked.units]

    for number in (0, 5):
        opens(number)
    for _ in range(3_000):  # session 0 requests nothing meanwhile
        asks(5, 1)
        assert computed() == [5]
        core.receive(now, ALICE, Alive())
    for number in range(1, 5):
        opens(number)
        for _ in range(4):
            asks(number, 128)
    asks(5, 1)
    calls: list[list[int]] = []
    while not calls or 5 not in calls[-1]:
        calls.append(computed())
        for number in calls[-1]:
            asks(number, 128 if number != 5 else 1)
    assert len(calls) <= 1 + UNIT_TOKENS_MAX // TOKENS_BESIDE_MAX


def test_the_stage_does_not_wait_for_a_late_session() -> None:
    stage = Stage(ALICE, BOB, late=0.015).run(20)
    begun = 0.01 * sum(len(call) ** 0.5 for call in stage.calls)
    assert stage.now <= begun + 0.03, "the stage was idle"
    soon = Stage(ALICE, BOB, late=0.002).run(20)
    assert all(soon.others in call for call in soon.calls[3:])


def test_a_wait_ends_on_time_despite_other_messages() -> None:
    stage = Stage(ALICE, BOB, others=1, late=0.002).run(10)
    core, until = stage.core, stage.core.deadline
    assert stage.now < until < stage.now + 0.01
    assert batches(core) == [], "a batch was computed while Bob's next unit was in transit"
    core.receive(until + 0.001, BOB, Alive())
    assert core.deadline == until
    core.wake(until + 0.001)
    (asked,) = batches(core)
    assert [each.session for each in asked.units] == [session(0)]
    assert core.deadline > until + 0.001


def test_many_owners_of_one_door_share_one_turn() -> None:
    core = provider()
    for number in range(8):
        core.receive(0.0, ALICE, OpenSession(session(number), SERVICE, 0, ALICE, NEXT, None, number))
    core.receive(0.0, BOB, OpenSession(session(8), SERVICE, 0, BOB, NEXT))
    orders = dict.fromkeys(range(9), 0)
    computed = {ALICE: 0, BOB: 0}
    for _ in range(40):
        for number in orders:
            door = BOB if number == 8 else ALICE
            while len(core._sessions[session(number)].parts[0].waiting) < 8:
                core.receive(0.0, door, unit(number, 100, 0, orders[number]))
                orders[number] += 1
        for asked in batches(core):
            for each in asked.units:
                computed[BOB if each.session == session(8) else ALICE] += each.work.tokens
            core.computed(0.0, SERVICE, asked.batch, [(None, each.arrays) for each in asked.units])
    assert computed[BOB] == pytest.approx(computed[ALICE], rel=0.1)


def test_the_shares_of_a_door_are_forgotten_with_their_sessions() -> None:
    core = provider()
    core.receive(0.0, ALICE, OpenSession(session(0), SERVICE, 0, ALICE, NEXT))
    for number in range(1, 9):
        core.receive(0.0, ALICE, OpenSession(session(number), SERVICE, 0, ALICE, NEXT, None, number))
        core.reject(ALICE, session(number), "over")
    assert list(core._turns._shares) == [(ALICE, 0)]
    core.lost(ALICE)
    assert not core._turns._shares
