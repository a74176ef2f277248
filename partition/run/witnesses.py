"""Promises to be a witness of a run: a member with a vote and without a stage.

A witness votes on plans and keeps the chain of plans and checkpoints, so it needs no slot. Promises are kept
in memory only. If a restart loses them, the run finds other witnesses.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from crypto.identity import PeerId

WITNESSED_MAX = 8
"""Maximum number of other nodes' runs in which a node is a witness. Each may make the node fetch the run's
data."""
PROMISES_MAX = 64
"""Maximum number of promises remembered. To make room, the oldest promise to the planner with the most
promises is forgotten."""
PROMISES_PER_PEER_MAX = 8


@dataclass(frozen=True)
class _Promise:
    run: bytes
    planner: PeerId
    until: float


class WitnessPromises:
    """The promises of one node, keyed by the hash of the plan."""

    def __init__(self) -> None:
        self._promises: OrderedDict[bytes, _Promise] = OrderedDict()

    def promise(self, now: float, run: bytes, plan: bytes, planner: PeerId, seconds: float) -> None:
        """Promise to vote in `plan` for `seconds`. If a planner has too many promises, its oldest one is
        forgotten."""
        self._promises.pop(plan, None)
        theirs = [name for name, row in self._promises.items() if row.planner == planner]
        if len(theirs) >= PROMISES_PER_PEER_MAX:
            del self._promises[theirs[0]]
        self._promises[plan] = _Promise(run, planner, now + seconds)
        if len(self._promises) > PROMISES_MAX:
            # Forget a promise to the planner with the most, so that a few frequent askers displace only one
            # another.
            count = Counter(row.planner for row in self._promises.values())
            del self._promises[max(self._promises, key=lambda name: count[self._promises[name].planner])]

    def holds(self, now: float, run: bytes, plan: bytes) -> bool:
        """Return whether this node has agreed to vote in exactly this plan."""
        row = self._promises.get(plan)
        return row is not None and row.run == run and now < row.until

    def release(self, plan: bytes, planner: PeerId) -> None:
        """Forget the promise to `planner` for `plan`."""
        row = self._promises.get(plan)
        if row is not None and row.planner == planner:
            del self._promises[plan]
