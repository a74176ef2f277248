"""The end of a simulated run in local mode for one member: evaluations, results, and copies of them."""

from blake3 import blake3

from partition.run.conclusions import Conclusion
from partition.run.local.fetched import next_deed
from sim.worlds.local_column import ColumnLife
from sim.worlds.tasks import Task

FETCH_SECONDS = 120.0
FETCHES_MIN = 5
RESULT_SECONDS = 10.0


class EndingLife(ColumnLife):
    """A member that evaluates, and agrees on the end."""

    result = ""
    """The result that is here, by name."""

    def _evaluate_if_due(self) -> Task:
        own, schedule, is_at_end = self.own, self.schedule, self.own.is_at_end
        is_mine = schedule.look(
            self.now, own.step, own.rounds, self.crew.training,
            axes=1, is_at_end=is_at_end, is_idle=own.is_waiting,
        )  # fmt: skip
        if not is_mine:
            return
        if not (yield from self._ask_all_to_settle()):
            return
        step, ending = own.step, self.ending
        loss = self.run.loss(step)
        schedule.evaluated(step)
        self._tell(lambda _: ending.evaluate(step, 1, loss, ()))
        reason = schedule.concludes(step, own.rounds, self.crew.training, axes=1, is_at_end=is_at_end)
        if reason is None or not (yield from self._ask_all_to_settle()) or ending.best is not None:
            return
        self.result = blake3(self.me + step.to_bytes(8, "big")).hexdigest()
        self._propose("done", reason, self.result)

    def _judge(self) -> Task:
        ending, conclusion = self.ending, self.ending.best
        if conclusion is None or ending.holds or not ending.is_here:
            return
        if not self.own.is_waiting:
            if not self.schedule.may_judge(self.own.step, is_at_end=self.own.is_at_end):
                return
            if not (yield from self._ask_all_to_settle()) or conclusion != ending.best:
                return
            self.schedule.is_waiting = True
        self._tell(lambda now: ending.hold(now, conclusion))

    def evaluation_heard(self) -> None:
        self.schedule.evaluated(self.own.step)

    def preferred_changed(self, conclusion: Conclusion) -> None:
        """Fetch the result of this conclusion."""
        self.tasks.start(self._fetch(conclusion))

    def _fetch(self, conclusion: Conclusion) -> Task:
        ending, begun, attempts = self.ending, self.now, 0
        is_here = conclusion.outcome != "done"
        stages = self.run.training.stages
        while conclusion == ending.best and not ending.holds:
            for holder in () if is_here else ending.holders:
                if (yield self.ask(holder, ("result", conclusion.weights), RESULT_SECONDS)):
                    is_here, self.result = True, conclusion.weights
                    break
            if is_here:
                judges = self.crew.judges(self.stage, stages, has_state=self.has_state)
                deed = next_deed(ending, conclusion, judges=judges, trusts=self.crew.trusts(self.stage))
                if deed == "try":
                    self._tell(lambda _: ending.fetched(conclusion))
                    return
                if deed == "hold":
                    self._tell(lambda now: ending.hold(now, conclusion))
                    return
            attempts += 1
            if attempts >= FETCHES_MIN and self.now - begun >= FETCH_SECONDS:
                self._tell(lambda now: ending.give_up(now, conclusion, is_missing=True))
            yield self.sleep(1.0)
