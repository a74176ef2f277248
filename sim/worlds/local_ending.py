"""The end of a simulated run in local mode for one member: evaluations, results, and copies of them."""

from blake3 import blake3

from partition.run.conclusions import Conclusion
from partition.run.local.member_ending import EvaluateModel, FetchResult, MakeResult, ModelLoss, TryResult
from sim.worlds.local_column import ColumnLife
from sim.worlds.tasks import Task

RESULT_SECONDS = 10.0


class EndingLife(ColumnLife):
    """A member that evaluates, and agrees on the end."""

    result = ""
    """The names of the results that are here."""

    def do_at_end(self, deed: EvaluateModel | MakeResult | TryResult) -> Task:
        """Carry out a command about the end of the run."""
        yield from self._ask_all_to_settle()
        match deed:
            case EvaluateModel():
                return ModelLoss(self.run.loss(self.own.step), 1)
            case MakeResult():
                if self.ending.best is not None:
                    return None
                self.result = blake3(self.me + self.own.step.to_bytes(8, "big")).hexdigest()
                return self.result
            case TryResult(conclusion=conclusion):
                return "" if conclusion == self.ending.best else None

    def preferred_changed(self, conclusion: Conclusion) -> None:
        """Fetch the result of this conclusion."""
        self.tasks.start(self.follow(self.finish.obtain(conclusion), self._fetch))

    def _fetch(self, deed: FetchResult) -> Task:
        for holder in deed.holders:
            if (yield self.ask(holder, ("result", deed.weights), RESULT_SECONDS)):
                self.result = deed.weights
                return True
        return False
