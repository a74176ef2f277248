"""The end of a run at its committer: the result is collected from replicas, kept, and announced, or the run
fails."""

from dataclasses import dataclass, field

from crypto.identity import PeerId
from partition.plan.change import Change, successor
from partition.plan.plan import Plan, plan_hash
from partition.run.asks import Ask, Asks, Declined, Done, EndRun, HandOverStage, Reply, Unanswered
from partition.run.collection import COLLECT_SECONDS_MAX
from partition.run.events import Event, ResultWanted, RunOver
from partition.run.run_end import RunEnd
from partition.run.settings import RunSettings
from partition.run.standing import RunStanding
from tests.partition.test_run_member import FOUR, ONE, PEERS, PLAN, REQUESTER, THREE, TWO

SETTINGS = RunSettings()
WEIGHTS = "ab" * 32


@dataclass
class Committer:
    """The committer's end, in a run whose last step is committed."""

    plan: Plan | None = PLAN
    me: PeerId = REQUESTER
    live: list[PeerId] = field(default_factory=lambda: list(PEERS))
    newest: tuple[bytes, int] | None = None
    now: float = 0.0

    def __post_init__(self) -> None:
        self.asks = Asks()
        self.events: list[Event] = []
        self.standing = RunStanding(self.events)
        self.end = RunEnd(
            self.me,
            plan=lambda: self.plan,
            standing=self.standing,
            asks=self.asks,
            events=self.events,
            live=lambda: self.live,
            newest=lambda: self.newest,
            settings=SETTINGS,
        )

    def over(self, reason: str | None = None) -> "Committer":
        self.standing.state = "running"
        self.end.training_over(self.now, reason)
        return self

    def at(self, now: float) -> "Committer":
        self.now = now
        while self.end.deadline <= now:
            self.end.wake(now)
        return self

    def asked(self) -> list[Ask]:
        return list(self.at(self.now).asks.take())

    def wanted(self) -> tuple[PeerId, int]:
        """Return which replica is asked for which stage."""
        (ask,) = self.asked()
        assert isinstance(ask.request, HandOverStage)
        self.open = ask
        return ask.peer, ask.request.stage

    def reply(self, reply: Reply) -> None:
        self.end.replied(self.now, self.open.number, reply)

    def hand_over_all(self) -> None:
        for _ in PLAN.stages:
            self.wanted()
            self.reply(Done())

    def said(self) -> tuple[str, str]:
        """Return the outcome and its detail as they are announced to others."""
        request = self.asked()[0].request
        assert isinstance(request, EndRun)
        return request.outcome, request.detail

    def results_wanted(self) -> int:
        return sum(isinstance(event, ResultWanted) for event in self.events)


def test_each_stage_is_collected_in_turn_then_kept_and_announced() -> None:
    node = Committer().over()
    assert node.wanted() == (ONE, 0)
    node.reply(Done())
    assert node.wanted() == (THREE, 1)
    node.reply(Done())
    assert node.asked() == []
    assert node.results_wanted() == 1
    node.end.result_kept(node.now, PLAN, WEIGHTS, "its validations stopped improving")
    asked = node.asked()
    request = EndRun(plan_hash(PLAN), "done", "its validations stopped improving", WEIGHTS)
    assert [(ask.peer, ask.request) for ask in asked] == [(peer, request) for peer in (ONE, TWO, THREE, FOUR)]
    for ask in asked:
        node.end.replied(node.now, ask.number, Done())
    node.at(node.now)
    assert node.events[-1] == RunOver("done", "its validations stopped improving", WEIGHTS)


def test_a_committer_hands_over_its_own_stage_first_and_asks_no_dead() -> None:
    node = Committer(me=TWO, live=[REQUESTER, ONE, FOUR]).over()
    assert node.wanted() == (TWO, 0)
    node.reply(Declined("its process has ended"))
    assert node.wanted() == (ONE, 0)
    node.reply(Done())
    assert node.wanted() == (FOUR, 1)


def test_a_stage_that_nobody_hands_over_is_asked_for_again() -> None:
    node = Committer().over()
    for peer in (ONE, TWO):
        assert node.wanted() == (peer, 0)
        node.reply(Unanswered("timeout"))
    assert node.asked() == []
    node.at(node.now + SETTINGS.retry_seconds)
    assert node.wanted() == (ONE, 0)


def test_a_run_fails_once_a_stage_is_missing_too_long() -> None:
    node = Committer(newest=(bytes(32), 4)).over()
    node.wanted()
    node.reply(Done())
    for peer in (THREE, FOUR):
        node.now = COLLECT_SECONDS_MAX
        assert node.wanted() == (peer, 1)
        node.reply(Unanswered("timeout"))
    outcome, detail = node.said()
    assert outcome == "failed"
    assert "stage 2 was not handed over: timeout; timeout" in detail
    assert "the checkpoint of step 4 is kept" in detail


def test_stages_that_make_no_result_are_collected_again() -> None:
    node = Committer().over()
    node.hand_over_all()
    node.end.result_spoilt(node.now, PLAN, "no stage handed a.weight over")
    assert node.asked() == []
    node.at(node.now + SETTINGS.retry_seconds)
    node.hand_over_all()
    assert node.results_wanted() == 2
    node.now = COLLECT_SECONDS_MAX
    node.end.result_spoilt(node.now, PLAN, "no stage handed a.weight over")
    assert node.said() == ("failed", "no stage handed a.weight over")


def test_a_result_that_cannot_be_kept_ends_the_run_at_once() -> None:
    node = Committer().over()
    node.hand_over_all()
    node.end.result_lost(node.now, PLAN, "no space")
    assert node.said() == ("failed", "no space")


def test_a_new_plan_in_force_discards_the_result_of_the_previous_one() -> None:
    node = Committer().over()
    node.hand_over_all()
    node.plan = successor(PLAN, Change(lost=(TWO,)))
    node.end.entered(node.now)
    node.end.result_kept(node.now, PLAN, WEIGHTS, "")
    assert (node.asked(), node.end.is_told) == ([], False)
    node.over()
    node.end.result_kept(node.now, PLAN, WEIGHTS, "")
    assert not node.end.is_told, "the result of an earlier plan was announced"


def test_a_failed_training_is_announced_with_what_can_be_recovered() -> None:
    assert Committer().over("the loss is NaN").said() == ("failed", "the loss is NaN")
    outcome, detail = Committer(newest=(bytes(32), 8)).over("the loss is NaN").said()
    assert outcome == "failed"
    assert detail.startswith("the loss is NaN; the checkpoint of step 8 is kept: `peerloom checkpoint export")
    node = Committer(newest=(bytes(32), 8))
    node.plan = None
    node.end.finish(0.0, "failed", "it is over here")
    assert (node.asked(), node.end.is_told) == ([], False)
