"""Courses of local mode: the order of a member's actions, with a driver of a few lines."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from crypto.identity import PeerId
from partition.run.conclusions import Conclusion, Said, Sends
from partition.run.ending import Ending
from partition.run.local.column import ColumnHolders
from partition.run.local.courses import AskToHold, AttachTo, ColumnBroken, Course, Sleep, StageLost
from partition.run.local.crew import MemberCrew
from partition.run.local.head_course import DIVERGED_MAX, DropStep, HeadCourse, MakeStep
from partition.run.local.holder import StageHolder
from partition.run.local.keeping import FETCH_SHARE, CopySchedule, CopyStage, StageCopy, StageCopying
from partition.run.local.member_ending import FETCH_SECONDS, FetchResult, MemberEnding
from partition.run.local.member_stage import (
    CATCH_UPS_MAX,
    KeepState,
    MemberStage,
    NotTaken,
    RestoreOwnState,
    StageCounts,
    TryState,
    UseRound,
)
from partition.run.local.recruiting import (
    ANSWER_SECONDS,
    DECLINED_SECONDS,
    UNANSWERED_SECONDS,
    Recruitment,
)
from partition.run.local.round_schedule import RoundSchedule
from partition.run.local.seat import SeatedHead, StageSeat
from partition.run.local.start_barrier import StartBarrier
from partition.run.local.succession import FREE_SECONDS, GONE_SECONDS, FindGone, SuccessionRule
from partition.run.local_settings import LocalSettings

RUN, STEPS = bytes(32), 40
ME, OTHER, THIRD, FREE, FOLLOWER, LOST = (PeerId(bytes([number]) * 32) for number in range(1, 7))


@dataclass(frozen=True)
class Claim:
    """The report of a holder at the first step."""

    has_state = True
    lineage = RUN

    @property
    def step(self) -> "Claim":
        return self

    def reaches(self, count: int) -> bool:
        return count <= 1


class Player:
    """One member that sees the reports of `others` about its stage. `answers` maps classes of deeds to their
    outcomes."""

    def __init__(self, *, stages: int = 1, save_every: int = 0, others: Collection[PeerId] = ()) -> None:
        self.now = 0.0
        self.deeds: list[object] = []
        self.answers: dict[type, Callable[[Any], Any]] = {}
        self.ending = Ending(ME, RUN, LocalSettings(), STEPS)
        self.crew = MemberCrew(
            ME,
            self.ending,
            replicas=1,
            is_training=True,
            reports=lambda: dict.fromkeys(others, Claim()),
            admitted=lambda: [OTHER, THIRD],
        )
        self.crew.has_asked = True
        self.stage = MemberStage(
            StageCounts(STEPS),
            RoundSchedule(LocalSettings(), needs_all=False),
            self.ending,
            saves=CopySchedule(save_every),
            reports=lambda: dict.fromkeys(others, Claim()),
            now=lambda: self.now,
        )
        self.finish = MemberEnding(
            RUN, LocalSettings(), self.crew,
            requester=ME, stage=0, stages=stages, tell=self._tell, now=lambda: self.now, live=lambda: [OTHER],
        )  # fmt: skip
        self.head = HeadCourse(
            self.stage, self.crew, self.finish, StartBarrier(RUN, None), stages=stages, live=lambda: [OTHER]
        )

    def preferred(self) -> Conclusion | None:
        return self.ending.best

    def _tell(self, order: Callable[[float], Sends]) -> None:
        order(self.now)

    def play(self, course: Course[Any], seconds: float = 5.0) -> None:
        """Follow a course to its end, or for this long."""
        answer: Any = None
        while self.now < seconds:
            try:
                deed = course.throw(answer) if isinstance(answer, Exception) else course.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(deed, Sleep):
                self.now += deed.seconds
                continue
            self.deeds.append(deed)
            try:
                answer = self.answers[type(deed)](deed) if type(deed) in self.answers else None
            except ColumnBroken as error:
                answer = error

    def of(self, *kinds: type) -> list[object]:
        return [deed for deed in self.deeds if isinstance(deed, kinds)]

    def step(self, _: object) -> bool:
        self.now += 0.5
        self.stage.counts.step += 1
        return False


def in_column() -> tuple[Player, ColumnHolders]:
    """Return a head of two stages and its column, which another member joins once it is asked."""
    player = Player(stages=2)
    column = player.crew.holders_of = ColumnHolders(2)

    def attach(deed: AttachTo) -> bool:
        column.took(deed.stage, deed.peer, [])
        return True

    player.answers = {AttachTo: attach, MakeStep: player.step}
    return player, column


def test_a_head_repeats_a_broken_step_from_its_start() -> None:
    player, column = in_column()

    def fail_once(deed: MakeStep) -> bool:
        if len(player.of(MakeStep)) == 2:
            column.lost(1)
            raise ColumnBroken("its holder is gone")
        return player.step(deed)

    player.answers[MakeStep] = fail_once
    player.play(player.head.train(), 1.2)
    asked, dropped, made = AttachTo(1, OTHER), DropStep("its holder is gone", is_news=True), MakeStep()
    assert player.of(AttachTo, DropStep, MakeStep) == [asked, made, made, dropped, asked, made, made]
    assert not player.stage.counts.is_waiting


def test_a_head_without_holders_makes_no_step() -> None:
    player, _ = in_column()
    player.answers[AttachTo] = lambda _: False
    player.play(player.head.train(), 1.2)
    assert player.of(AttachTo)
    assert not player.of(MakeStep)
    assert {deed.is_news for deed in player.of(DropStep) if isinstance(deed, DropStep)} == {False}
    assert not player.finish.has_state


def test_steps_that_stay_infinite_end_the_run_of_a_lone_member() -> None:
    player = Player()

    def diverge(deed: MakeStep) -> bool:
        player.step(deed)
        return True

    player.answers[MakeStep] = diverge
    player.play(player.head.train(), 60.0)
    assert len(player.of(MakeStep)) == DIVERGED_MAX
    ended = player.preferred()
    assert ended is not None
    assert ended.outcome == "failed"


def test_a_missed_round_makes_a_stage_catch_up() -> None:
    player = Player(others=[OTHER])
    player.answers = {UseRound: lambda _: len(player.of(UseRound)) == 2, MakeStep: player.step}
    player.play(player.stage.between(is_still=True))
    player.play(player.stage.between(is_still=True))
    assert player.of(UseRound, TryState) == [UseRound(), UseRound(), TryState(None, frozenset())]


def test_holders_of_unusable_states_are_passed_over() -> None:
    player = Player(others=[OTHER, THIRD])
    player.answers[TryState] = lambda deed: NotTaken("", () if deed.passed_over else [OTHER])
    player.play(player.stage.catch_up(), 60.0)
    tried = [deed.passed_over for deed in player.deeds if isinstance(deed, TryState)]
    assert tried == [frozenset(), *[frozenset([OTHER])] * (CATCH_UPS_MAX - 1)]
    assert player.deeds[-1] == RestoreOwnState(None)


def test_attempts_end_once_every_state_was_unusable() -> None:
    player = Player(others=[OTHER, THIRD])
    player.answers[TryState] = lambda deed: NotTaken("", [THIRD if deed.passed_over else OTHER])
    player.play(player.stage.catch_up())
    assert len(player.of(TryState)) == 2
    assert player.deeds[-1] == RestoreOwnState(None)


def test_a_needed_state_that_nobody_hands_over_loses_the_stage() -> None:
    player = Player(others=[OTHER])
    player.answers[TryState] = lambda _: NotTaken("no answer")
    player.play(player.stage.catch_up(is_needed=False), 60.0)
    assert len(player.of(TryState)) == CATCH_UPS_MAX
    with pytest.raises(StageLost, match="no member handed over its state: no answer"):
        player.play(player.stage.catch_up(), 60.0)
    assert not player.of(RestoreOwnState)


def test_copies_wait_for_their_step_and_for_the_previous_copy() -> None:
    player, seconds = Player(), 2.0
    schedules = {1: CopySchedule(5), 2: CopySchedule(5)}
    copying = StageCopying(schedules, step=lambda: player.stage.step, now=lambda: player.now)

    def copy(_: CopyStage) -> StageCopy:
        player.now += seconds
        return StageCopy(player.stage.step, is_stored=True)

    def copied(step: int, stage: int) -> int:
        player.stage.counts.step = step
        player.play(copying.copy(stage, OTHER), 1e9)
        return len(player.of(CopyStage))

    player.answers[CopyStage] = copy
    assert copied(4, 1) == 0
    assert copied(5, 1) == 1
    assert copied(50, 2) == 1
    player.now += FETCH_SHARE * seconds
    assert copied(5, 1) == 1
    assert copied(6, 2) == 2


def test_the_first_copy_of_another_stage_is_due_early() -> None:
    schedule = CopySchedule(5, first=1)
    assert [step for step in range(4) if schedule.is_due(0.0, step)] == [1, 2, 3]
    schedule.step = 2
    assert [step for step in range(9) if schedule.is_due(0.0, step)] == [7, 8]
    assert not CopySchedule(0, first=1).is_due(0.0, 100)


class Offering:
    """Free nodes."""

    def __init__(self, free: Sequence[PeerId] = (FREE,)) -> None:
        self.free = free

    def live(self) -> Sequence[PeerId]:
        return self.free

    offered = preferred = live


def test_a_column_awaits_the_answer_of_a_free_node() -> None:
    player, _ = in_column()
    recruitment = Recruitment(player.crew, Offering(), 2)
    hopes: list[bool] = []

    def ask(_: AskToHold) -> bool:
        hopes.extend(recruitment.is_hopeful(player.now + seconds) for seconds in (0.0, 1.9, ANSWER_SECONDS))
        return False

    player.answers[AskToHold] = ask
    player.play(recruitment.recruit(lambda: player.now), 1.0)
    assert player.of(AskToHold) == [AskToHold(1, FREE)]
    assert hopes == [True, True, False]
    assert not recruitment.is_hopeful(player.now), "the node that declined is still awaited"


@pytest.mark.parametrize(("answer", "seconds"), [(False, DECLINED_SECONDS), (None, UNANSWERED_SECONDS)])
def test_a_node_without_an_answer_is_soon_asked_again(answer: bool | None, seconds: float) -> None:
    player, _ = in_column()
    asked: list[float] = []

    def ask(_: AskToHold) -> bool | None:
        asked.append(player.now)
        return answer

    player.answers[AskToHold] = ask
    player.play(Recruitment(player.crew, Offering(), 2).recruit(lambda: player.now), 60.0)
    assert asked[1] - asked[0] == seconds


def test_a_column_does_not_await_nodes_that_never_answer() -> None:
    player, _ = in_column()
    nodes = Offering([PeerId(bytes([number]) * 32) for number in range(10, 14)])
    recruitment = Recruitment(player.crew, nodes, 2)
    hopeful_at: list[float] = []

    def ask(_: AskToHold) -> None:
        for _tenth in range(20):
            player.now += 0.1
            hopeful_at.extend([player.now] if recruitment.is_hopeful(player.now) else [])

    player.answers[AskToHold] = ask
    player.play(recruitment.recruit(lambda: player.now), 25.0)
    assert len(player.of(AskToHold)) > 2 * len(nodes.free)
    assert max(hopeful_at) <= 2.5 * len(nodes.free)


def missed_after(requester: PeerId, offering: Collection[PeerId], others: Collection[PeerId] = ()) -> float:
    """Return after how many seconds a holder replaces its head, OTHER, which is dead. THIRD is a member."""
    player = Player(others=others)
    seat = player.crew.own_seat = StageSeat(1)
    head = SeatedHead(OTHER, lambda: None)
    assert seat.take(0.0, head, keeps_copies=True)
    seat.leave(head)
    copying = StageCopying({}, step=lambda: 0, now=lambda: player.now)
    rule = SuccessionRule(
        player.crew, copying,
        requester=requester, live=lambda: [ME, THIRD, FREE, FOLLOWER], offering=lambda: offering,
    )  # fmt: skip
    rule.has_copy = True
    player.answers[FindGone] = lambda _: True
    player.play(rule.watch(), 60.0)
    assert player.of(FindGone) == [FindGone(OTHER)]
    return player.now


def test_a_head_is_replaced_soon_unless_another_node_may_come() -> None:
    assert missed_after(FOLLOWER, []) == GONE_SECONDS
    assert missed_after(FOLLOWER, [ME, OTHER, THIRD]) == GONE_SECONDS
    assert missed_after(FOLLOWER, [THIRD, FREE]) == FREE_SECONDS


@pytest.mark.parametrize("requester", [ME, OTHER, LOST])
def test_a_requester_that_cannot_ask_a_free_node_is_not_awaited(requester: PeerId) -> None:
    assert missed_after(requester, [FREE]) == GONE_SECONDS


def test_the_head_of_another_column_may_ask_a_free_node() -> None:
    assert missed_after(OTHER, [FREE], others=[FOLLOWER]) == FREE_SECONDS


def test_a_state_is_saved_at_the_scheduled_steps() -> None:
    player = Player(save_every=3)
    player.answers[MakeStep] = player.step
    player.play(player.head.train(), 5.0)
    assert player.stage.step == 10
    assert len(player.of(KeepState)) == 3


def test_a_member_releases_a_stage_that_failed() -> None:
    player = Player(stages=2)
    holder = StageHolder(player.stage, 1, player.ending, player.finish)
    player.play(holder.work(), 2.0)
    assert player.finish.has_state
    holder.seat.failure = "its process is gone"
    with pytest.raises(StageLost, match="its process is gone"):
        player.play(holder.work(), 4.0)


def test_a_result_that_no_member_hands_over_is_given_up() -> None:
    player = Player()
    player.finish.has_state = True
    player.ending.set_peers(0.0, [OTHER])
    found = Conclusion(RUN, "done", "", 10, "ab" * 32, OTHER)
    player.ending.receive(0.0, OTHER, Said(RUN, found, holds=True, is_settled=False))
    assert player.preferred() == found
    player.answers[FetchResult] = lambda _: False
    player.play(player.finish.obtain(found), 2 * FETCH_SECONDS)
    assert player.preferred() is None
    assert FETCH_SECONDS <= player.now < FETCH_SECONDS + 2.0
