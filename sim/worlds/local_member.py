"""One life of a simulated peer in a run in local mode: the cores of `partition.run.local`, driven by tasks.

Modelled are what takes time, streams between a head and its holders, and copies on a disk. Not here: what
peers share (`sim.worlds.local_runs`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from crypto.identity import PeerId
from gossip.roster import PROTOCOL as ROSTER
from gossip.roster import Roster
from partition.run.conclusions import PROTOCOL as LOCAL
from partition.run.endings import Endings
from partition.run.local.lending import FollowerLending, head_lending
from partition.run.local.seat import CALL_SECONDS_MAX, HEAD_SECONDS_MAX
from partition.run.local.start_barrier import SETTLE_SECONDS, StartBarrier
from partition.run.local.succession import SuccessionRule
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
        self._barrier = StartBarrier(self.run.name, self.begin.inviter)
        self._lent: dict[int, LocalStage] = {}

    # Life

    def open(self) -> None:
        """Take part from now on."""
        if not self.is_opened:
            self.command(LOCAL, self._opened)
        self.own.enter()
        self.tasks.start(self._live())

    def _opened(self, core: Endings, now: float) -> list[Any]:
        core.open(now, self.ending, self.admission)
        greetings = self.admission.greet([*self.admission.admitted, *self.begin.known])
        return core.admitted(self.admission, greetings)

    def close(self) -> None:
        """Take no further part: this life in the run is over."""
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
            self.tasks.start(self._follow())
        if not self.stage:
            self.tasks.start(self._recruit())
        if not self.crew.is_training:
            return
        self.own.report()
        yield self.sleep(self.run.training.open_seconds * self.rng.uniform(0.5, 1.5))
        if self.run.training.stages > 1:
            if self.stage:
                self.tasks.start(self._succeed())
            else:
                self._prepare_regrouping()
                self.tasks.start(self._lend())
        if begin.carried is None:
            yield from self._meet()
        if self.stage:
            self.holding = HeldPlace(self.own, is_further=False)
            self.crew.own_seat = self.holding.rules.seat
            yield from self._hold(self.holding, self.disk.own)
        else:
            yield from self._train()

    def _meet(self) -> Task:
        yield self.sleep(1.0 if self.own.reports else SETTLE_SECONDS)
        inviter, barrier = self.begin.inviter, self._barrier
        if inviter is None:
            return
        until = self.now + barrier.meeting_seconds(self.stage, self.crew.training)
        while self.now < until and barrier.misses_inviter(self.own.reports, self.live()):
            self.greet([inviter])
            yield self.sleep(LOOK_SECONDS)

    def _return(self) -> Task:
        """Tell the members of an earlier life that this one is back."""
        for _ in range(GREETINGS):
            self.greet(self.begin.known)
            yield self.sleep(1.0)

    def _look(self) -> Task:
        """Follow who takes part."""
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

    def _train(self) -> Task:
        own, carried = self.own, (self.begin.carried or {}).get(0, self.disk.own)
        while True:
            is_whole = yield from self._mend()
            if is_whole and not self.finish.has_state:
                if not (yield from own.begin(carried)):
                    self.run.left(self.me, "no member handed over its state")
                    return
                own.has_state = self.finish.has_state = True
                self.finish.schedule.evaluated(own.step)
                self._let_go()
                yield from self._wait_for_agreed()
                continue
            if is_whole or self.finish.has_state:
                is_whole = yield from self._turn()
            if not is_whole:
                own.counts.is_waiting = True
                self._let_go()
                if not self.finish.has_state:
                    yield self.sleep(LOOK_SECONDS)

    def _wait_for_agreed(self) -> Task:
        if self.own.step or self.run.training.stages > 1:
            return
        crew = self.crew
        while self._barrier.holds(
            self.now, crew.reports, agreed=crew.agreed, has_asked=crew.has_asked, live=self.live()
        ):
            self.own.between(is_still=False)
            yield self.sleep(0.1)

    def _turn(self) -> Task:
        """Make one step, and what is due before it; return whether the column is whole."""
        own, schedule = self.own, self.finish.schedule
        own.between(is_still=schedule.is_waiting)
        self._keep()
        yield from self._end_if_due()
        if schedule.is_waiting or schedule.holds_still or own.counts.is_idle or own.is_at_end:
            yield self.sleep(LOOK_SECONDS)
            return True
        execution = self.run.truth.begin(self.me)
        step = own.step
        if not (yield from self._all(("pass", execution, step), CALL_SECONDS_MAX)):
            return False
        yield self.sleep(self.run.training.step_seconds * self.run.slowness(self.me))
        if not (yield from self._all(("apply", execution, step), CALL_SECONDS_MAX)):
            return False
        if own.step != step:
            return True  # it took over another state meanwhile
        own.counts.step, own.counts.samples = step + 1, own.counts.samples + 1
        self.run.counted(self.me, step, self.run.truth.count(execution, step))
        return True

    def _copy(self, stage: int, holder: PeerId) -> Task:
        found = yield self.ask(holder, ("state", stage, 0), EXPORT_SECONDS_MAX)
        if found is not None:
            self.disk.copies[stage] = found
        return found is not None

    def _lend(self) -> Task:
        """Copy the other stages of the column, and hand copies on while they have no holder."""
        while True:
            for stage in range(1, self.run.training.stages):
                deed = head_lending(self.crew, stage)
                if deed in (None, "copy"):
                    self.take_back(stage)
                if deed == "lend" and stage not in self._lent and stage in self.disk.copies:
                    yield from self._lend_one(stage, self.disk.copies[stage])
                column, kept = self.crew.holders_of, self.disk.copies.get(stage)
                is_due = kept is None or self.own.step - kept.step >= self.run.training.save_every
                if deed == "copy" and is_due and column is not None:
                    yield from self._copy(stage, column.attached[stage])
            yield self.sleep(1.0)

    def _lend_one(self, stage: int, state: CountedState) -> Task:
        lent = self._lent[stage] = LocalStage(self, stage)
        lent.enter()
        yield self.sleep(0.01)
        lent.counts.step, lent.has_state, lent.rounds.count = state.step, True, state.rounds
        lent.report()

    def take_back(self, stage: int) -> None:
        if (lent := self._lent.pop(stage, None)) is not None:
            lent.leave()

    def _follow(self) -> Task:
        """Copy the heads' state, as a requester that only follows, and hand it on while there is none."""
        lending, is_lent = FollowerLending(self.crew, self.run.training.stages), False
        own, every = self.own, self.run.training.save_every
        while True:
            now = self.now
            if lending.look(now) == "copy":
                if is_lent:
                    is_lent = own.has_state = False
                    own.counts.step = 0
                    own.report()
                kept = self.disk.copies.get(0)
                if every and (
                    kept is None or any(r.step.reaches(kept.step + every) for r in own.reports.values())
                ):
                    found = yield from own.fetch(0, self.run.training.steps)
                    if found is not None:
                        self.disk.copies[0] = found
                        self._remember()
            elif not is_lent:
                if 0 in self.disk.copies:
                    is_lent = own.has_state = True
                    own.counts.step = self.disk.copies[0].step
                    own.report()
                lending.looked(now, is_lent=is_lent)
            yield self.sleep(1.0)

    def _succeed(self) -> Task:
        """Keep copies for the head, and take its place once it is gone for good."""
        rule = SuccessionRule(self.crew)
        rule.has_copy = 0 in self.disk.copies
        while True:
            yield self.sleep(LOOK_SECONDS)
            head = rule.missed_head(self.now, has_free=any(map(self.run.has_slot, self.live())))
            if head is not None and (head not in self.live() or self.run.is_gone(head)):
                if self.finish.has_state and self.ending.best is None and rule.has_copy:
                    others = {n: each.stage.state for n, each in self.crew.further.items() if each.is_ready}
                    carried = {0: self.disk.copies[0], self.stage: self.own.state, **others}
                    self.run.succeed(self.me, carried)
                return
            keeps_for, kept = rule.keeps_for, self.disk.copies.get(0)
            every = self.run.training.save_every
            is_due = kept is None or self.own.step - kept.step >= every
            if keeps_for is not None and every and is_due and (yield from self._copy(0, keeps_for)):
                rule.has_copy = True

    def admitted(self, peer: PeerId) -> None:
        """Note that a peer has shown that it is a member."""
        stages = [self.own, *self._lent.values(), *(each.stage for each in self.crew.further.values())]
        for roster in [stage.roster for stage in stages if stage.roster is not None]:
            self._introduce(roster, peer)

    def _introduce(self, roster: Roster, peer: PeerId) -> None:
        self.command(ROSTER, lambda _, now: roster.admitted(now, peer))

    def answer(self, asker: PeerId, question: tuple[Any, ...], answer: Callable[[Any], None]) -> None:
        """Answer another member."""
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
                self._work(attachment, tuple(request), answer)
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
