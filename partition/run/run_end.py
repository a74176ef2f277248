"""The end of a run, as its committer decides it: with or without a collected result, announced to all
members.

A committer collects the result under the plan in force (`partition.run.collection`) and has it stored
(`ResultWanted`). Then it tells every live member, under any plan that comes into force meanwhile
(`partition.run.completion`), and ends the run (`RunOver`).
"""

from collections.abc import Callable, Collection

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.run.asks import Asks, Reply
from partition.run.collection import ResultCollection
from partition.run.completion import Completion
from partition.run.events import Event, ResultWanted, RunOver
from partition.run.messages import REASON_LENGTH_MAX
from partition.run.settings import RunSettings
from partition.run.standing import RunStanding
from partition.run.way_back import WayBack

REASON_SHOWN_MAX = REASON_LENGTH_MAX - 110
"""Maximum length of a displayed failure reason, in characters. The note about the newest checkpoint must fit
behind it."""
INF = float("inf")


class RunEnd:
    """One member's part in the end. `plan` returns the plan in force, None if the run is over here; `live`
    the live peers; `newest` the newest whole checkpoint. It puts `asks` and adds to the member's `events`."""

    def __init__(
        self,
        me: PeerId,
        *,
        plan: Callable[[], Plan | None],
        standing: RunStanding,
        asks: Asks,
        events: list[Event],
        live: Callable[[], Collection[PeerId]],
        newest: Callable[[], WayBack | None],
        settings: RunSettings,
    ) -> None:
        self._me = me
        self._plan = plan
        self._standing = standing
        self._asks = asks
        self._events = events
        self._live = live
        self._newest = newest
        self._settings = settings
        self._collection: ResultCollection | None = None
        self._completion: Completion | None = None

    @property
    def is_told(self) -> bool:
        """Whether this node is announcing that the run is over."""
        return self._completion is not None

    @property
    def deadline(self) -> float:
        """The time of the next `wake`."""
        part = self._completion or self._collection
        return INF if part is None else part.deadline

    def entered(self, now: float) -> None:
        """Note that a new plan is in force. The committer collects the result anew, but an end that was
        announced already stays."""
        self._collection = None
        self.changed(now)

    def changed(self, now: float) -> None:
        """Act on a change of the live members."""
        if self._completion is not None:
            self._completion.changed(now)

    # The result

    def training_over(self, now: float, reason: str | None) -> None:
        """As the committer: collect the result after the last step. If training failed for a `reason`, end
        the run instead."""
        plan = self._plan()
        self._standing.change("training over", "the last step is committed" if reason is None else reason)
        if reason is not None:
            self.fail(now, reason)
        elif plan is not None:
            self._collection = ResultCollection(self._me, now, plan, self._asks, self._settings)

    def result_kept(self, now: float, plan: Plan, weights: str, detail: str) -> None:
        """Announce the result, which was collected under this plan and is stored here; `weights` is its hash
        in hex."""
        if self._is_collected(plan):
            self.finish(now, "done", detail, weights)

    def result_spoilt(self, now: float, plan: Plan, reason: str) -> None:
        """Collect again, because the stages handed over under this plan cannot be joined."""
        if self._is_collected(plan) and self._collection is not None:
            self._collection.spoilt(now, reason)
            self._look(now, self._collection)

    def result_lost(self, now: float, plan: Plan, reason: str) -> None:
        """End the run without a result, because the result cannot be stored here."""
        if self._is_collected(plan):
            self.fail(now, reason)

    def _is_collected(self, plan: Plan) -> bool:
        return self._collection is not None and self._collection.plan == plan and self._completion is None

    # The announcement

    def fail(self, now: float, reason: str) -> None:
        """End the run for all members, with a note on what can be recovered."""
        newest, plan = self._newest(), self._plan()
        if newest is not None and plan is not None:
            look = f"`peerloom checkpoint export {plan.run.hex()[:8]} --out FILE`"
            reason = f"{reason[:REASON_SHOWN_MAX]}; the checkpoint of step {newest[1]} is kept: {look}"
        self.finish(now, "failed", reason)

    def finish(self, now: float, outcome: str, detail: str, weights: str = "") -> None:
        """Tell every live member that the run is over, under any later plan too."""
        if self._completion is None and self._plan() is not None:
            detail = detail[:REASON_LENGTH_MAX]
            self._completion = Completion(self._me, now, outcome, detail, weights, self._asks, self._settings)
            self.wake(now)

    def wake(self, now: float) -> None:
        """Do the work that is due."""
        collection, completion, plan = self._collection, self._completion, self._plan()
        if completion is not None and not completion.is_over and plan is not None:
            if completion.wake(now, plan, self._live()):
                self._events.append(RunOver(completion.outcome, completion.detail, completion.weights))
        elif completion is None and collection is not None:
            collection.wake(now, self._live())
            self._look(now, collection)

    def replied(self, now: float, number: int, reply: Reply) -> None:
        """Handle the answer to one of `asks`."""
        if self._completion is not None:
            self._completion.replied(now, number, reply)
        elif self._collection is not None:
            was_whole = self._collection.is_whole
            self._collection.replied(now, number, reply)
            if self._collection.is_whole and not was_whole:
                self._events.append(ResultWanted(self._collection.plan))

    def _look(self, now: float, collection: ResultCollection) -> None:
        if collection.failure:
            self.fail(now, collection.failure)
