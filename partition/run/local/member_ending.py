"""A member's way to the end of a run in local mode: it evaluates, proposes, fetches, tries and holds results.

Not here: the turns (`partition.run.local.evaluating`), and the agreement (`partition.run.ending`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from math import isfinite

from crypto.identity import PeerId
from partition.run.conclusions import Conclusion, Sends
from partition.run.local.courses import Course, Sleep
from partition.run.local.crew import MemberCrew
from partition.run.local.evaluating import EvaluationSchedule
from partition.run.local.head_watch import HeadWatch, stranded_reason
from partition.run.local.member_stage import MemberStage
from partition.run.local_settings import LocalSettings

FETCHES_MIN = 5
FETCH_SECONDS = 120.0
"""How long, and how often at least, a member tries to fetch a result that others claim to hold."""
FETCH_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class ModelLoss:
    """A model's mean loss over some samples (inf if it is not finite), and the sums of its metrics."""

    loss: float
    samples: int
    metrics: tuple[float, ...] = ()


@dataclass(frozen=True)
class EvaluateModel:
    """Evaluate the present model. The answer is `ModelLoss`."""


@dataclass(frozen=True)
class MakeResult:
    """Store the model as the result. The answer is its hash; None if another conclusion came meanwhile."""


@dataclass(frozen=True)
class TryResult:
    """Evaluate a fetched result. The answer is its fault, "" if it has none; None if another conclusion came
    meanwhile."""

    conclusion: Conclusion


@dataclass(frozen=True)
class FetchResult:
    """Fetch a result from one of these peers, which claim to hold it. The answer is whether it is here."""

    holders: tuple[PeerId, ...]
    weights: str


class MemberEnding:
    """The end of one run for one member, which holds `stage` of `stages`, counted from 0."""

    def __init__(
        self,
        run: bytes,
        settings: LocalSettings,
        crew: MemberCrew,
        *,
        requester: PeerId,
        stage: int,
        stages: int,
        tell: Callable[[Callable[[float], Sends]], None],
        now: Callable[[], float],
        live: Callable[[], Collection[PeerId]],
    ) -> None:
        """`tell` lets a call act on the core of the end. `live` returns the nodes that are believed alive."""
        self.schedule = EvaluationSchedule(settings, crew.ending)
        self.heads = HeadWatch(now(), is_holder=bool(stage))
        self.is_over = False
        """Whether the run is over here."""
        self.has_state = False
        self.diverged = 0
        """Number of successive latest steps that were not finite."""
        self._run = run
        self._ending = crew.ending
        self._crew = crew
        self._requester = requester
        self._stage = stage
        self._stages = stages
        self._tell = tell
        self._now = now
        self._live = live

    # Members

    def look(self) -> None:
        """Update the members that take part, and the signs of heads."""
        crew = self._crew
        self.heads.follow(self._now(), crew.reports, crew.head, is_training=crew.is_training)
        self.follow_peers()

    def follow_peers(self) -> None:
        """Pass the members that take part to the core of the end."""
        is_stranded, crew = self.heads.is_stranded(self._now()), self._crew
        self._ending.can_go_on = self.has_state and not (self.diverged or is_stranded)
        trainers, voters = crew.electorate(self._stage, self._stages, has_state=self.has_state)
        far = {*crew.admitted(), self._requester}.intersection(self._live())
        peers = {*crew.others, *crew.column_peers, *(far if is_stranded else ())}
        self._tell(partial(self._ending.set_peers, peers=peers, trainers=trainers, voters=voters))

    def end_if_stranded(self, step: int) -> None:
        """Propose to end the run as failed if no head has come for this stage for too long."""
        if self.heads.is_stranded(self._now()) and self._ending.best is None:
            self.follow_peers()  # members that only follow must be told too
            self.propose("failed", stranded_reason(self._stage), step)

    # Results

    def propose(self, outcome: str, reason: str, step: int, weights: str = "") -> None:
        """Propose this end of the run."""
        is_done, ending = outcome == "done", self._ending
        conclusion = Conclusion(
            self._run, "done" if is_done else "failed", reason, step, weights, self._crew.me
        )
        self.schedule.is_waiting = True
        self._tell(lambda now: ending.propose(now, conclusion))

    def evaluate(self, own: MemberStage) -> Course[None]:
        """Evaluate if it is this member's turn, and propose a result if the run is over."""
        schedule, ending, is_at_end = self.schedule, self._ending, own.is_at_end
        is_mine = schedule.look(
            self._now(), own.step, own.rounds, self._crew.training,
            axes=own.axes, is_at_end=is_at_end, is_idle=own.counts.is_waiting,
        )  # fmt: skip
        if not is_mine:
            return
        found: ModelLoss = yield EvaluateModel()
        if not isfinite(found.loss):
            yield from self.recover("the held-out loss is not finite", own)
            return
        step = own.step
        schedule.evaluated(step)
        self._tell(lambda _: ending.evaluate(step, found.samples, found.loss, found.metrics))
        training = self._crew.training
        reason = schedule.concludes(step, own.rounds, training, axes=own.axes, is_at_end=is_at_end)
        if reason is not None and (weights := (yield MakeResult())) is not None:
            self.propose("done", reason, own.step, weights)

    def recover(self, reason: str, own: MemberStage) -> Course[None]:
        """Resume from another member's parameters, because those here are no longer finite; or propose to end
        the run if no other member has any."""
        if self._crew.training:
            yield from own.catch_up()
        elif self._ending.best is None:
            self.propose("failed", reason, own.step)

    def judge(self, own: MemberStage) -> Course[None]:
        """Try the proposed result once the run may be over. Hold it if it is good enough, refuse it if it is
        not. Until then, training continues."""
        ending, conclusion = self._ending, self._ending.best
        if conclusion is None or ending.holds or not ending.is_here:
            return
        if own.counts.is_waiting:  # without its other stages, this member can neither train nor try a result
            self._tell(lambda now: ending.hold(now, conclusion))
            return
        if not self.schedule.may_judge(own.step, is_at_end=own.is_at_end):
            return
        fault: str | None = yield TryResult(conclusion)
        if fault is None:
            return
        self.schedule.is_waiting = not fault
        if fault:
            self._tell(lambda now: ending.give_up(now, conclusion))
        else:
            self._tell(lambda now: ending.hold(now, conclusion))

    def obtain(self, conclusion: Conclusion) -> Course[None]:
        """Fetch the result of this conclusion, then hold it or have it tried."""
        ending, begun, attempts = self._ending, self._now(), 0
        is_here = conclusion.outcome != "done"
        while conclusion == ending.best and not ending.holds and not self.is_over:
            if not is_here:
                is_here = yield FetchResult(tuple(ending.holders), conclusion.weights)
            if is_here:
                judges = self._crew.judges(self._stage, self._stages, has_state=self.has_state)
                if judges and conclusion.weights and not ending.is_decided:
                    self._tell(lambda _: ending.fetched(conclusion))  # `judge` tries it
                    return
                if judges or self._crew.trusts(self._stage) or ending.is_decided:
                    self._tell(lambda now: ending.hold(now, conclusion))
                    return
            attempts += 1
            if attempts >= FETCHES_MIN and self._now() - begun >= FETCH_SECONDS:
                self._tell(lambda now: ending.give_up(now, conclusion, is_missing=True))
            yield Sleep(FETCH_AGAIN_SECONDS)
