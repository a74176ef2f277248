"""The announcement of a run's end: its committer tells each live member, for a bounded time.

A newer plan may come into force meanwhile. A member that follows the newer plan no longer knows the old one,
so the announcement then names the newer plan. A member that cannot be reached gives up the run after a period
of silence, and finds the result by itself.
"""

from collections import Counter
from collections.abc import Collection

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan, committee, plan_hash
from partition.run.asks import Asks, Declined, Done, EndRun, Reply
from partition.run.settings import RunSettings

DECLINES_MAX = 5
"""Number of declines after which a member counts as told. A member declines if it does not know the named
plan: either a newer plan has reached it, or it has already forgotten the run."""

INF = float("inf")


class Completion:
    """The announcement of the end. `deadline` is the time of the next `wake`. `is_over` becomes true once all
    live members know, or the time is up."""

    def __init__(
        self,
        me: PeerId,
        now: float,
        outcome: str,
        detail: str,
        weights: str,
        asks: Asks,
        settings: RunSettings,
    ) -> None:
        self.outcome = outcome
        self.detail = detail
        self.weights = weights
        self.is_over = False
        self.deadline = now
        self._me = me
        self._asks = asks
        self._settings = settings
        self._until = now + self._settings.end_seconds_max
        self._told: set[PeerId] = set()
        self._asked: dict[int, PeerId] = {}
        self._declined: Counter[PeerId] = Counter()
        self._again: dict[PeerId, float] = {}

    def changed(self, now: float) -> None:
        """Check again soon, because the plan or the live members have changed."""
        if not self.is_over:
            self.deadline = min(self.deadline, now)

    def wake(self, now: float, plan: Plan, live: Collection[PeerId]) -> bool:
        """Send the announcement to live members of `plan` that do not know yet. Return whether the
        announcement is over."""
        left = [peer for peer in plan.members if peer != self._me and peer in live and peer not in self._told]
        self.is_over = not left or now >= self._until
        busy, name = list(self._asked.values()), plan_hash(plan)
        for peer in left:
            if not self.is_over and peer not in busy and self._again.get(peer, now) <= now:
                request = EndRun(name, self.outcome, self.detail, self.weights)
                self._again.pop(peer, None)
                self._asked[self._asks.put(peer, request, self._settings.end_seconds_max)] = peer
        later = [self._again[peer] for peer in left if peer in self._again]
        self.deadline = INF if self.is_over else min([self._until, *later])
        return self.is_over

    def replied(self, now: float, number: int, reply: Reply) -> None:
        """Handle the answer to one of `asks`."""
        peer = self._asked.pop(number, None)
        if peer is None:
            return
        self._declined[peer] += isinstance(reply, Declined)
        if isinstance(reply, Done) or self._declined[peer] >= DECLINES_MAX:
            self._told.add(peer)
        else:
            self._again[peer] = now + self._settings.retry_seconds
        self.changed(now)


def answer_end(mine: Plan | None, sender: PeerId, plan: bytes) -> Declined | None:
    """Answer `sender`, which announces the end of a run under the plan with this hash. `mine` is the plan in
    force here. Returns None to accept.

    Raises:
        RemoteProtocolError: `sender` has no vote in the run.
    """
    if mine is None or plan_hash(mine) != plan:
        return Declined("no such plan here")
    if sender not in (mine.committer, *committee(mine)):
        raise RemoteProtocolError("a run was ended by a peer that has no vote in it")
    return None
