"""How members agree on checkpoints: despite failures and delays, a complete one is on enough disks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import NO_HASH, Plan, StagePlan, plan_hash
from partition.run.checkpoint_rounds import (
    COPIES_MIN,
    CheckpointRounds,
    CheckpointWhole,
    NewestChanged,
    SealWanted,
    SpreadWanted,
)
from tests.partition.fake_stage import peer

A, B, C, D, E, STRANGER = (peer(name) for name in "abcdex")
PLAN = Plan(
    run=bytes(32),
    parent=NO_HASH,
    height=0,
    roster=tuple(sorted((A, B, C, D, E))),
    trainers=(E,),
    microbatches=2,
    stages=(StagePlan(0, 1, (A, B), (1, 1)), StagePlan(1, 2, (C, D), (1, 1))),
)
LATER = replace(PLAN, parent=plan_hash(PLAN), height=1)
NAME = b"n" * 32


def rounds_of() -> CheckpointRounds[str]:
    """The committer's rounds, with all members there."""
    return CheckpointRounds(bytes(32), PeerId(PLAN.committer), lambda: (A, B, C, D))


def save_all(rounds: CheckpointRounds[str], step: int, plan: Plan = PLAN) -> None:
    for number, stage in enumerate(plan.stages):
        rounds.saved(plan, PeerId(stage.replicas[0]), step, number, f"{number} at {step}")


def taken(rounds: CheckpointRounds[str]) -> list[object]:
    events, rounds.events[:] = list(rounds.events), []
    return list(events)


def spread(rounds: CheckpointRounds[str]) -> SpreadWanted[str]:
    (wanted,) = taken(rounds)
    assert isinstance(wanted, SpreadWanted)
    return wanted


def test_a_checkpoint_is_spread_sealed_and_announced() -> None:
    rounds = rounds_of()
    save_all(rounds, 4)
    wanted = spread(rounds)
    assert wanted.states == ("0 at 4", "1 at 4")
    assert wanted.savers == (A, C)
    rounds.spread(wanted.keepers)
    (seal,) = taken(rounds)
    assert isinstance(seal, SealWanted)
    assert rounds.newest is None
    rounds.sealed(NAME, seal.keepers)
    changed, whole = taken(rounds)
    assert changed == NewestChanged(4, NAME)
    assert isinstance(whole, CheckpointWhole)
    assert set(whole.audience) == {A, B, C, D}
    assert whole.copies == 3
    assert rounds.newest == (NAME, 4)


def test_a_checkpoint_on_one_disk_is_never_complete() -> None:
    rounds = rounds_of()
    save_all(rounds, 4)
    keepers = spread(rounds).keepers
    rounds.spread([keepers[0], keepers[1][:1]])
    assert taken(rounds) == []
    save_all(rounds, 8)
    keepers = spread(rounds).keepers
    rounds.spread(keepers)
    assert isinstance(taken(rounds)[0], SealWanted)
    rounds.sealed(NAME, [keepers[0], ()])
    assert taken(rounds) == []
    assert rounds.newest is None


def test_checkpoints_are_spread_one_at_a_time_newest_first() -> None:
    rounds = rounds_of()
    for step in (4, 8, 12):
        save_all(rounds, step)
    assert spread(rounds).step == 4
    rounds.failed()
    assert spread(rounds).step == 12


def test_the_best_state_waits_its_turn_despite_newer_ones() -> None:
    rounds = rounds_of()
    save_all(rounds, 4)
    rounds.best_step = 8
    for step in (8, 12, 16):
        save_all(rounds, step)
    found = []
    for _ in range(3):
        found.append(spread(rounds).step)
        rounds.failed()
    assert found == [4, 8, 16]


def test_states_saved_under_a_later_plan_are_spread_under_it() -> None:
    rounds = rounds_of()
    save_all(rounds, 4)
    assert spread(rounds).plan == PLAN
    save_all(rounds, 8, LATER)
    rounds.failed()
    wanted = spread(rounds)
    assert (wanted.plan, wanted.step) == (LATER, 8)


def test_late_saves_of_an_earlier_plan_are_ignored() -> None:
    rounds = rounds_of()
    save_all(rounds, 8, LATER)
    assert spread(rounds).plan == LATER
    rounds.failed()
    save_all(rounds, 12)
    assert taken(rounds) == []


def test_only_holders_of_a_stage_can_have_saved_it() -> None:
    rounds = rounds_of()
    for sender, stage in ((STRANGER, 0), (A, 1), (A, 7), (A, -1)):
        with pytest.raises(RemoteProtocolError):
            rounds.saved(PLAN, sender, 4, stage, "")
    assert taken(rounds) == []


@given(st.lists(st.tuples(st.sampled_from(["save", "spread", "seal", "fail", "learn"]), st.integers(0, 7))))
def test_complete_checkpoints_only_advance_and_are_on_enough_disks(
    calls: list[tuple[str, int]],
) -> None:
    rounds = rounds_of()
    wanted: SpreadWanted[str] | SealWanted[str] | None = None
    held: list[tuple[PeerId, ...]] = []
    newest = -1
    for call, number in calls:
        if call == "save":
            save_all(rounds, number)
        elif call == "learn":
            rounds.learn(number, bytes([number]) * 32)
        elif call == "fail":
            wanted = None
            rounds.failed()
        elif wanted is not None:
            done, wanted = wanted, None
            held = [row[: number % 4] for row in done.keepers]
            if isinstance(done, SealWanted):
                rounds.sealed(bytes([done.step]) * 32, held)
            else:
                rounds.spread(held)
        for event in taken(rounds):
            match event:
                case SpreadWanted() | SealWanted():
                    wanted = event
                case CheckpointWhole():
                    assert all(len(set(row)) >= COPIES_MIN for row in held)
                case NewestChanged():
                    assert event.step > newest
                    newest = event.step
        assert rounds.newest is None or rounds.newest[1] == newest
