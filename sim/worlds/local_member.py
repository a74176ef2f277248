"""One life of a simulated peer (from a start to the next stop) in a run in local mode: tasks that drive the
cores of `partition.run.local`.

It models the time that actions take, the streams between a head and its holders, and the copies on a disk.
Not here: the state that peers share (`sim.worlds.local_runs`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from crypto.identity import PeerId
from gossip.newcomers import middle_step
from gossip.roster import PROTOCOL as ROSTER
from gossip.roster import Roster
from partition.run.conclusions import PROTOCOL as LOCAL
from partition.run.endings import Endings
from partition.run.local.column import WorkHere
from partition.run.local.courses import AttachTo, StageLost
from partition.run.local.head_course import BeginSteps, DropStep, MakeStep, TryFirstValues
from partition.run.local.keeping import FIRST_STEP, CopySchedule, CopyStage, StageCopy, StageCopying
from partition.run.local.lending import FollowerLending, LendStage, TakeBack, lend_stages
from partition.run.local.member_ending import EvaluateModel, MakeResult, TryResult
from partition.run.local.regrouping import DropFurther
from partition.run.local.seat import CALL_SECONDS_MAX, HEAD_SECONDS_MAX
from partition.run.local.start_barrier import SETTLE_SECONDS, GreetPeers, Settle, TellStart
from partition.run.local.succession import FindGone, SuccessionRule
from sim.worlds.local_column import EXPORT_SECONDS_MAX
from sim.worlds.local_context import CountedState
from sim.worlds.local_ending import EndingLife
from sim.worlds.local_life import LOOK_SECONDS, HeldPlace
from sim.worlds.local_stage import LocalStage
from sim.worlds.tasks import Task

GREETINGS = 10


class SimulatedMember(EndingLife):
    """One life in one run."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lent: dict[int, LocalStage] = {}

    # Life

    def open(self) -> None:
        """Begin to take part."""
        if not self.is_opened:
            self.command(LOCAL, self._opened)
        self.own.enter()
        self.tasks.start(self._live())

    def _opened(self, core: Endings, now: float) -> list[Any]:
        core.open(now, self.ending, self.admission)
        greetings = self.admission.greet([*self.admission.admitted, *self.begin.known])
        return core.admitted(self.admission, greetings)

    def close(self) -> None:
        """End this life's part in the run."""
        self.tasks.is_over = True
        self.finish.has_state = False
        for attachment in [*self._streams.values(), *self._attaching]:
            attachment.end()
        for holding in self._holdings:
            holding.rules.seat.close()
        for stage in [self.own, *self._lent.values(), *(each.stage for each in self.crew.further.values())]:
            stage.leave()
        self.crew.holders_of = self.crew.own_seat = None

    def _live(self) -> Task:
        begin = self.begin
        self.tasks.start(self._look())
        if begin.is_resumed:
            self.tasks.start(self._return())
        if not self.crew.is_training:
            follower = FollowerLending(self.crew, self.run.training.stages, self._copying(0))
            self.tasks.start(self.follow(follower.lend(), self._do_follow))
        if not self.stage:
            self.tasks.start(self.follow(self._recruitment.recruit(lambda: self.now), self.do_in_column))
        if not self.crew.is_training:
            return
        self.own.report()
        yield self.sleep(self.run.training.open_seconds * self.rng.uniform(0.5, 1.5))
        if self.run.training.stages > 1:
            if self.stage:
                self.tasks.start(self._succeed())
            else:
                self._prepare_regrouping()
                lending = lend_stages(self.crew, self._copying(*range(1, self.run.training.stages)))
                self.tasks.start(self.follow(lending, self._do_copy))
        if begin.carried is None:
            meeting = self.barrier.meet(self.crew, self.stage, self.live, lambda: self.now)
            yield from self.follow(meeting, self._do_meet)
        try:
            if self.stage:
                self.holding = HeldPlace(self.own, is_further=False)
                self.crew.own_seat = self.holding.rules.seat
                yield from self._hold(self.holding)
            else:
                yield from self.follow(self.life_as_head.train(), self._do)
        except StageLost as lost:
            self.run.left(self.me, str(lost))

    def _do_meet(self, deed: Settle | GreetPeers) -> Task:
        match deed:
            case Settle():
                yield self.sleep(1.0 if self.own.rostered else SETTLE_SECONDS)
            case GreetPeers(peers=peers):
                self.greet(peers)

    def _return(self) -> Task:
        """Announce the return to the members known from before a restart."""
        for _ in range(GREETINGS):
            self.greet(self.begin.known)
            yield self.sleep(1.0)

    def _look(self) -> Task:
        """Update the list of members that take part."""
        number = 0
        while True:
            number += 1
            if number % 4 == 1:
                self.own.introduce()
            self.finish.look()
            claims = self.own.roster.claims if self.own.roster else {}
            self._admit(partial(self.admission.show, peers=claims))
            for attachment in [each for each in self.run.attachments if each.holder == self.me]:
                if self.now - attachment.seated.silent_since >= HEAD_SECONDS_MAX:
                    attachment.end()
            yield self.sleep(LOOK_SECONDS)

    def _do(self, deed: object) -> Task:
        """Carry out a command for a head."""
        match deed:
            case MakeStep():
                yield from self._make_step()
                return False
            case DropStep():
                self._let_go()
            case EvaluateModel() | MakeResult() | TryResult():
                return (yield from self.do_at_end(deed))
            case WorkHere() | AttachTo() | DropFurther():
                return (yield from self.do_in_column(deed))
            case TryFirstValues() | BeginSteps() | TellStart():
                pass  # there are no parameters, and no screens
            case _:
                return (yield from self.own.do(deed))
        return None

    def _make_step(self) -> Task:
        own, execution = self.own, self.run.truth.begin(self.me)
        step = own.step
        yield from self._all(("pass", execution, step), CALL_SECONDS_MAX)
        yield self.sleep(self.run.training.step_seconds * self.run.slowness(self.me))
        yield from self._all(("apply", execution, step), CALL_SECONDS_MAX)
        if own.step == step:  # if not, it took over a different state meanwhile
            own.counts.step, own.counts.samples = step + 1, own.counts.samples + 1
            self.run.counted(self.me, step, self.run.truth.count(execution, step))

    # Copies of other members' stages

    def _do_copy(self, deed: CopyStage | LendStage | TakeBack) -> Task:
        match deed:
            case CopyStage(stage=stage, holder=holder):
                return (yield from self._copy(stage, holder))
            case LendStage(stage=stage):
                if stage not in self._lent and stage in self.disk.copies:
                    yield from self._lend_one(stage, self.disk.copies[stage])
            case TakeBack(stage=stage):
                self.take_back(stage)
        return None

    def _copying(self, *stages: int) -> StageCopying:
        own, every = self.own, self.run.training.save_every
        step = (lambda: own.step) if self.crew.is_training else (lambda: middle_step(own.rostered))
        schedules = {stage: CopySchedule(every, first=FIRST_STEP) for stage in stages}
        return StageCopying(schedules, step=step, now=lambda: self.now)

    def _copy(self, stage: int, holder: PeerId | None) -> Task:
        """Fetch and store a copy of a stage; return None if no member hands over its state."""
        if holder is None:
            _, found = yield from self.own.fetch_likely()
        else:
            found = yield self.ask(holder, ("state", stage, 0), EXPORT_SECONDS_MAX)
        if found is None:
            return None
        self.disk.copies[stage] = found
        return StageCopy(found.step, is_stored=True)

    def _lend_one(self, stage: int, state: CountedState) -> Task:
        lent = self._lent[stage] = LocalStage(self, stage)
        lent.enter()
        yield self.sleep(0.01)
        lent.counts.step, lent.has_state, lent.rounds.count = state.step, True, state.rounds
        lent.report()

    def take_back(self, stage: int) -> None:
        if (lent := self._lent.pop(stage, None)) is not None:
            lent.leave()

    def _do_follow(self, deed: CopyStage | LendStage | TakeBack) -> Task:
        """Carry out a command for a requester that only follows the run: it lends a copy in its own
        roster."""
        own = self.own
        match deed:
            case CopyStage(stage=stage):
                copied = yield from self._copy(stage, None)
                if copied is not None:
                    self._remember()
                return copied
            case LendStage():
                own.has_state = 0 in self.disk.copies
                own.counts.step = self.disk.copies[0].step if own.has_state else 0
            case TakeBack():
                own.has_state, own.counts.step = False, 0
        if own.has_state or isinstance(deed, TakeBack):
            own.report()
        return own.has_state

    def _succeed(self) -> Task:
        """Keep copies for the head, and replace the head once it is gone for good."""
        requester = self.run.requester
        rule = SuccessionRule(
            self.crew, self._copying(0), requester=requester, live=self.live, offering=self.offered
        )
        rule.has_copy = 0 in self.disk.copies

        def do(deed: CopyStage | FindGone) -> Task:
            if isinstance(deed, CopyStage):
                return (yield from self._copy(deed.stage, deed.holder))
            return deed.head not in self.live() or self.run.is_gone(deed.head)

        yield from self.follow(rule.watch(), do)
        if self.finish.has_state and self.ending.best is None and rule.has_copy:
            others = {n: each.stage.state for n, each in self.crew.further.items() if each.is_ready}
            self.run.succeed(self.me, {0: self.disk.copies[0], self.stage: self.own.state, **others})

    def admitted(self, peer: PeerId) -> None:
        """Handle a peer that has proved to be a member."""
        stages = [self.own, *self._lent.values(), *(each.stage for each in self.crew.further.values())]
        for roster in [stage.roster for stage in stages if stage.roster is not None]:
            self._introduce(roster, peer)

    def _introduce(self, roster: Roster, peer: PeerId) -> None:
        self.command(ROSTER, lambda _, now: roster.admitted(now, peer))

    def answer(self, asker: PeerId, question: tuple[Any, ...], answer: Callable[[Any], None]) -> None:
        """Answer a request of another member."""
        match question:
            case ("state", stage, step):
                found = next((each for each in self._stages if each.number == stage), None)
                is_here = found is not None and found.has_state and found.step >= step
                answer(found.state if is_here and found is not None else None)
            case ("result", weights):
                answer(self.result == weights)
            case ("attach", attachment, step, chain, keeps, column):
                answer(self._attached(attachment, step, chain, keeps_copies=keeps, column=column))
            case ("work", attachment, *request):
                self._do_work(attachment, tuple(request), answer)
            case ("settle", attachment):
                holding = self._serving(attachment)
                if holding is None:
                    answer(False)
                else:
                    self.tasks.start(self._settled(holding, attachment, answer))
            case ("join", _, stage, is_beside):
                answer(self._stands_in(asker, stage) if is_beside else self.run.training.stages == 1)

    @property
    def _stages(self) -> Sequence[LocalStage]:
        return [self.own, *(each.stage for each in self.crew.further.values()), *self._lent.values()]
