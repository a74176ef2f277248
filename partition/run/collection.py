"""The committer's collection of a run's result: it asks replicas to hand over their stages, one at a time.

A missing stage is requested again for a bounded time. If its replica is dead, a plan without that replica
comes into force meanwhile, and the collection starts anew under the new plan. Not here: the content of a
stage, and how stages are joined.
"""

from collections.abc import Collection
from typing import assert_never

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.run.asks import Asks, Declined, Done, HandOverStage, Reply, Unanswered
from partition.run.settings import RunSettings

COLLECT_SECONDS_MAX = 120.0
"""How long the collection under one plan requests a missing stage again. If the stage's last replica is
dead, a plan without it comes into force meanwhile; detecting its death takes half a minute over slow
links."""
HAND_OVER_SECONDS_MAX = 120.0
"""Time limit for handing over one stage."""

INF = float("inf")


class ResultCollection:
    """The collection under one plan. `deadline` is the time of the next `wake`. `failure` is the reason, to
    display, why there will be no result; it is empty while a result is possible."""

    def __init__(self, me: PeerId, now: float, plan: Plan, asks: Asks, settings: RunSettings) -> None:
        self.plan = plan
        self.deadline = now
        self.failure = ""
        self._me = me
        self._asks = asks
        self._settings = settings
        self._until = now + COLLECT_SECONDS_MAX
        self._stage = 0
        self._left: list[PeerId] | None = None
        self._asked: int | None = None
        self._reasons: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether all stages have been handed over."""
        return self._stage == len(self.plan.stages)

    def wake(self, now: float, live: Collection[PeerId]) -> None:
        """Ask the next replica of the first missing stage."""
        self.deadline = INF
        if self._asked is not None or self.is_whole or self.failure:
            return
        if self._left is None:
            replicas = [PeerId(peer) for peer in self.plan.stages[self._stage].replicas]
            self._left = [peer for peer in replicas if peer == self._me]
            self._left += [peer for peer in replicas if peer != self._me and peer in live]
        if self._left:
            request = HandOverStage(self.plan, self._stage)
            self._asked = self._asks.put(self._left.pop(0), request, HAND_OVER_SECONDS_MAX)
        else:
            reasons = "; ".join(self._reasons) or "none of its replicas is reachable"
            self._wait(now, f"stage {self._stage + 1} was not handed over: {reasons}")

    def replied(self, now: float, number: int, reply: Reply) -> None:
        """Handle the answer to one of `asks`."""
        if number != self._asked:
            return
        self._asked = None
        match reply:
            case Done():
                self._begin(self._stage + 1)
            case Declined(reason) | Unanswered(reason):
                self._reasons.append(reason)
            case _:
                assert_never(reply)
        self.deadline = now

    def spoilt(self, now: float, reason: str) -> None:
        """Start again, because the collected stages cannot be joined."""
        self._begin(0)
        self._wait(now, reason)

    def _begin(self, stage: int) -> None:
        self._stage, self._left = stage, None
        self._reasons.clear()

    def _wait(self, now: float, reason: str) -> None:
        if now >= self._until:
            self.failure = reason
        else:
            self._begin(self._stage)
            self.deadline = now + self._settings.retry_seconds
