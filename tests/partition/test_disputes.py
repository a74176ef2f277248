"""A receiver cannot use a frame, or claims so: which member is excluded. See also `test_steps_walk`."""

from typing import Any

import pytest
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from partition.plan.assignment import feeder_of
from partition.plan.plan import StagePlan, plan_hash
from partition.steps.committer import Committer, ReplicaFailed, TrainingFailed
from partition.steps.frame_complaints import USELESS
from partition.steps.messages import BadFrame, Counted, Open, Sends
from tests.partition.fake_stage import peer
from tests.partition.small_plan import FIRST, LAST, MIDDLES, PLAN, PLAN_HASH, SECOND, TRAINER, frame, synced

HERE, THERE = MIDDLES
OTHER = peer("first1")
WIDE = replace(
    PLAN,
    roster=tuple(sorted((*PLAN.roster, OTHER))),
    stages=(StagePlan(0, 1, (FIRST, OTHER), (1, 1)), *PLAN.stages[1:]),
    microbatches=4,
)


def counting(plan: Any = PLAN) -> Committer:
    core = Committer(TRAINER, plan, steps=9, evaluations=0)
    core.start(0.0)
    for stage in plan.stages:
        for who in stage.replicas:
            core.receive(0.0, PeerId(who), replace(synced(0), plan=plan_hash(plan)))
    core.events.clear()
    return core


def accuse(
    core: Committer,
    accuser: PeerId,
    author: PeerId,
    number: int,
    direction: Any = "input",
    *,
    values: bool = False,
    **other: Any,
) -> Sends:
    stage = core.plan.stage_of(accuser)
    sent = frame(author, number, direction, stage=stage, plan=core.plan_hash, step=core.step, **other)
    message = BadFrame(
        plan=core.plan_hash, frame=sent.fact, reason="a digest that does not fit", of_values=values
    )
    return core.receive(1.0, accuser, message)


def owners(sends: Sends) -> list[list[int]]:
    opened = next(message for _, message in sends if isinstance(message, Open))
    return [list(stage.owners) for stage in opened.stages]


def lost(core: Committer) -> list[PeerId]:
    events = [event for event in core.events if isinstance(event, ReplicaFailed)]
    assert all(event.reason.startswith(USELESS) for event in events)
    return [event.peer for event in events]


def next_step(core: Committer) -> None:
    """Have the core act as if this attempt had been committed."""
    core.step += 1
    core._synced.clear()
    core._open_step()


def test_the_micro_batch_goes_to_another_receiver_and_nobody_is_blamed() -> None:
    core = counting()
    assert owners(accuse(core, HERE, FIRST, 0)) == [[0, 0], [1, 1], [0, 0]]
    assert accuse(core, HERE, FIRST, 0) == []  # it no longer owns it
    assert core.events == []


def test_an_author_accused_by_two_receivers_is_excluded() -> None:
    core = counting()
    accuse(core, HERE, FIRST, 0)
    accuse(core, THERE, FIRST, 0)
    assert lost(core) == [FIRST]


def test_an_accuser_of_two_authors_is_excluded() -> None:
    core = counting(WIDE)
    before = owners([(TRAINER, core._open_message())])
    assert before == [[0, 1, 0, 1], [0, 1, 0, 1], [0] * 4]
    assert owners(accuse(core, HERE, FIRST, 0))[:2] == [before[0], [1, 1, 0, 1]]
    assert owners(accuse(core, HERE, FIRST, 2))[:2] == [[0, 1, 1, 1], [1, 1, 0, 1]]
    accuse(core, HERE, OTHER, 2)
    assert lost(core) == [HERE]


def test_counts_of_a_replaced_author_are_void() -> None:
    core = counting(WIDE)
    for number in (0, 2):
        core.receive(
            1.0, LAST, Counted(plan=core.plan_hash, step=0, microbatch=number, stage=2, samples=1, loss=1.0)
        )
    sends = accuse(core, HERE, LAST, 0, "gradient")
    assert owners(sends)[1] == [1, 1, 0, 1]
    # The last stage has no further receiver left, so the second receiver uses the same one.
    assert owners(accuse(core, HERE, LAST, 2, "gradient"))[1] == [1, 1, 1, 1]
    core = counting(WIDE)
    core.receive(1.0, FIRST, Counted(plan=core.plan_hash, step=0, microbatch=0, stage=0, samples=0, loss=0.0))
    for number in (2, 0):
        sends = accuse(core, HERE, FIRST, number)
    assert owners(sends)[0] == [1, 1, 0, 1]
    opened = next(message for _, message in sends if isinstance(message, Open))
    assert opened.stages[0].counted == ()


def test_both_parties_are_excluded_if_the_work_cannot_move() -> None:
    core = counting()
    assert feeder_of(PLAN, True, 0) == TRAINER
    accuse(core, FIRST, TRAINER, 0)
    assert lost(core) == [FIRST]
    core = counting()
    next_step(core)
    core.events.clear()
    assert feeder_of(PLAN, True, 2) == SECOND
    accuse(core, FIRST, SECOND, 2)
    assert lost(core) == [FIRST, SECOND]


def test_input_that_two_receivers_cannot_use_is_blamed_on_the_data() -> None:
    two = replace(WIDE, trainers=(TRAINER, SECOND))
    for author, is_vouched in ((TRAINER, False), (SECOND, True), (SECOND, False)):
        core = counting(two)
        number = next(number for number in range(4) if feeder_of(two, True, number) == author)
        first = owners([(TRAINER, core._open_message())])[0][number]
        if is_vouched:
            core.vouched.add(bytes(32))
        accusers = [FIRST, OTHER] if first == 0 else [OTHER, FIRST]
        assert accuse(core, accusers[0], author, number, values=True) != []
        assert lost(core) == []
        accuse(core, accusers[1], author, number, values=True)
        ended = [event for event in core.events if isinstance(event, TrainingFailed)]
        if author == SECOND and not is_vouched:
            assert (ended, lost(core)) == ([], [SECOND]), (
                "the data was blamed although the author may have spoiled its frame"
            )
        else:
            assert [event.microbatch for event in ended] == [(number, True)]
            assert lost(core) == []


def test_input_that_the_only_receiver_rejects_is_blamed_on_the_data() -> None:
    core = counting()
    accuse(core, FIRST, TRAINER, 0, values=True)
    (event,) = [event for event in core.events if isinstance(event, TrainingFailed)]
    assert event.reason == "step 0: the model cannot take the data: a digest that does not fit"
    assert lost(core) == []


def test_two_members_that_dispute_in_three_steps_are_both_excluded() -> None:
    core = counting()
    for step in range(3):
        assert lost(core) == []
        accuse(core, HERE, FIRST, 2 * step)
        if step < 2:
            next_step(core)
    assert lost(core) == [FIRST, HERE]


def test_a_peer_that_rejects_its_own_frames_is_excluded() -> None:
    plan = replace(PLAN, trainers=(TRAINER, FIRST), microbatches=8)
    core = counting(plan)
    number = next(number for number in range(8) if feeder_of(plan, True, number) == FIRST)
    accuse(core, FIRST, FIRST, number)
    assert lost(core) == [FIRST]


def test_senseless_accusations_have_no_effect_or_are_refused() -> None:
    core = counting()
    assert accuse(core, THERE, FIRST, 0) == []  # the other member owns it
    core.receive(1.0, HERE, Counted(plan=PLAN_HASH, step=0, microbatch=0, stage=1, samples=0, loss=0.0))
    assert accuse(core, HERE, FIRST, 0) == []  # this member has used it
    assert accuse(core, THERE, FIRST, 1, train=False) == []
    with pytest.raises(RemoteProtocolError, match="from a peer that must not send it"):
        accuse(core, THERE, TRAINER, 1)
    sent = frame(FIRST, 1, plan=bytes(32))
    with pytest.raises(RemoteProtocolError, match="of another plan"):
        core.receive(1.0, THERE, BadFrame(plan=PLAN_HASH, frame=sent.fact, reason=""))
    with pytest.raises(RemoteProtocolError):
        core.receive(1.0, THERE, BadFrame(plan=PLAN_HASH, frame=Fact(FIRST, b"x", b""), reason=""))
    assert core.events == []
