"""The answers of a node that is asked for a stage: in order, once, and only to the holder of the promise."""

from dataclasses import dataclass

import pytest

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import NO_HASH, Plan, StagePlan, plan_hash
from partition.run.asks import Declined, Done
from partition.run.provider import BEHIND, BUSY, NO_LEASE, OVER, Hold, KnownRun, StageProvider
from partition.run.settings import RunSettings
from partition.run.slots import ORPHAN_SECONDS, Slots
from partition.run.witnesses import WITNESSED_MAX

SETTINGS = RunSettings()
ME, ASKER, OTHER = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))
STRANGE = KnownRun(ASKER, is_over=False, member=None)


def plan(holder: PeerId = ME, run: int = 7) -> Plan:
    roster = tuple(sorted({ME, ASKER, holder}))
    return Plan(bytes([run]) * 32, NO_HASH, 0, roster, (ASKER,), 4, (StagePlan(0, 4, (holder,), (1,)),))


@dataclass
class InRun:
    """A member that is behind, or under a plan."""

    plan: Plan | None
    behind: bool = False

    def is_behind(self, sender: PeerId, plan: Plan) -> bool:
        return self.behind

    def on_start(self, sender: PeerId, plan: Plan) -> Done | Declined | None:
        return Done() if self.plan else None


def provider(witnessing: int = 0) -> StageProvider:
    return StageProvider(ME, Slots(1, tuple), lambda: witnessing, tuple, SETTINGS)


def held(one: StageProvider, wanted: Plan, now: float = 0.0, known: KnownRun = STRANGE) -> Hold | Declined:
    return one.on_hold(now, ASKER, wanted, wanted.stage_of(ME), known, lambda: None)


def promised(one: StageProvider, wanted: Plan, now: float = 0.0) -> None:
    """Give a promise as a driver does."""
    hold = held(one, wanted, now)
    assert isinstance(hold, Hold), hold
    promise = one.promise(now, hold)
    assert not isinstance(promise, Declined)
    if promise.stage is not None:
        one.slots.promise(now, promise)


def test_a_stage_is_opened_only_for_the_promised_plan() -> None:
    one, mine, another = provider(), plan(), plan(run=8)
    assert one.on_open(0, ASKER, mine, STRANGE) == Declined(NO_LEASE)
    assert one.on_start(0, ASKER, mine, STRANGE) == Declined(NO_LEASE)
    promised(one, mine)
    assert held(one, another) == Declined(BUSY), "a second run got the only slot"
    assert one.on_open(0, ASKER, mine, STRANGE) is None
    assert one.on_start(0, ASKER, mine, STRANGE) is None
    assert one.on_open(0, ASKER, another, STRANGE) == Declined(NO_LEASE)
    assert one.on_start(SETTINGS.silence_seconds_max, ASKER, mine, STRANGE) == Declined(NO_LEASE), (
        "a stage was opened although the planner waited too long"
    )


def test_a_declined_planner_learns_when_a_slot_expires_soon() -> None:
    one = provider()
    promised(one, plan())
    assert held(one, plan(run=8), now=5.0) == Declined(BUSY)
    assert one.slots.release_all(5.0, ASKER)
    assert held(one, plan(run=8), now=6.5) == Declined(BUSY, 9)
    assert isinstance(held(one, plan(run=8), now=5.0 + ORPHAN_SECONDS), Hold)


def test_only_the_planner_releases_its_promise() -> None:
    one, mine = provider(), plan()
    promised(one, mine)
    assert not one.on_release(OTHER, plan_hash(mine))
    assert held(one, plan(run=8)) == Declined(BUSY)
    assert one.on_release(ASKER, plan_hash(mine))
    assert isinstance(held(one, plan(run=8)), Hold)


def test_a_plan_withdrawn_meanwhile_gets_no_promise() -> None:
    one, mine = provider(), plan()
    hold = held(one, mine)
    assert isinstance(hold, Hold)
    one.on_release(ASKER, plan_hash(mine))
    assert one.promise(0, hold) == Declined(BUSY)
    promised(one, mine)  # requested again


def test_a_planner_that_died_meanwhile_gets_no_promise() -> None:
    dead: list[PeerId] = []
    one, mine = StageProvider(ME, Slots(1, tuple), lambda: 0, lambda: dead, SETTINGS), plan()
    hold = held(one, mine)
    assert isinstance(hold, Hold)
    dead.append(ASKER)
    assert one.promise(0, hold) == Declined(BUSY)
    promised(one, mine)  # it asks although it was declared dead


def test_a_repeated_request_withdraws_the_earlier_plan() -> None:
    one, mine = provider(), plan()
    promised(one, mine)
    assert one.supersede(ASKER, plan(run=8), STRANGE) == []
    assert one.supersede(ASKER, mine, KnownRun(ASKER, True, None)) == [], (
        "a plan was withdrawn although its run is over"
    )
    assert one.supersede(ASKER, mine, STRANGE) == [plan_hash(mine)]
    assert one.on_open(0, ASKER, mine, STRANGE) == Declined(NO_LEASE)


def test_a_slot_given_away_meanwhile_is_not_promised_twice() -> None:
    one = provider()
    hold = held(one, plan())
    assert isinstance(hold, Hold)
    promised(one, plan(run=8))
    assert one.promise(0, hold) == Declined(BUSY)


def test_a_member_that_is_behind_or_whose_run_ended_promises_nothing() -> None:
    one, mine = provider(), plan()
    over, behind = KnownRun(ASKER, True, None), KnownRun(ASKER, False, InRun(mine, behind=True))
    for known, reason in ((over, OVER), (behind, BEHIND)):
        assert held(one, mine, known=known) == Declined(reason)
        assert one.on_open(0, ASKER, mine, known) == Declined(reason)
    assert one.on_start(0, ASKER, mine, over) == Declined(OVER)
    assert one.on_start(0, ASKER, mine, behind) == Done(), (
        "a member that is behind was refused although it learns the rest from the chain"
    )


def test_a_run_whose_turn_it_is_comes_before_others() -> None:
    waits = Declined("busy: 2 wait before it", 60)
    assert provider().on_hold(0, ASKER, plan(), 0, STRANGE, lambda: waits) == waits


def test_a_stage_that_the_plan_gives_to_another_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="does not give to this node"):
        provider().on_hold(0, ASKER, plan(holder=OTHER), 0, STRANGE, lambda: None)


def test_a_witness_needs_no_slot_but_must_have_agreed() -> None:
    one, without = provider(), plan(holder=OTHER)
    promised(one, plan(run=8))
    assert one.on_open(0, ASKER, without, STRANGE) == Declined(NO_LEASE)
    assert isinstance(one.on_start(0, ASKER, without, STRANGE), Declined)
    promised(one, without)
    assert one.on_open(0, ASKER, without, STRANGE) == Done()
    assert one.on_start(0, ASKER, without, STRANGE) is None
    one.on_release(ASKER, plan_hash(without))
    assert isinstance(one.on_start(0, ASKER, without, STRANGE), Declined)


def test_a_witness_of_many_runs_accepts_no_more_except_its_own() -> None:
    one, without = provider(WITNESSED_MAX), plan(holder=OTHER)
    assert isinstance(held(one, without), Declined)
    own = KnownRun(ME, is_over=False, member=None)
    assert one.on_start(0, ASKER, without, own) is None
