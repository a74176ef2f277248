"""The one place for a stage that this node has, and to whom it is promised.

One stage a node, so that measured rates stay true. PLACEHOLDER: a promise is kept in memory only.
"""

from dataclasses import dataclass
from math import inf

from crypto.identity import PeerId
from node.runs.requests import LeaseBody
from node.seams import Clock


@dataclass(frozen=True)
class _Promise:
    body: LeaseBody
    planner: PeerId
    until: float


class Slot:
    """At most one lease, which ends by itself unless its stage is opened in time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._promise: _Promise | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is promised."""
        return self._live() is None

    def promise(self, body: LeaseBody, planner: PeerId) -> None:
        """Hold the slot for `planner`'s plan; only a free one is promised."""
        until = self._clock.monotonic() + body.silence_seconds_max
        self._promise = _Promise(body, planner, until)

    def holds(self, run: bytes, plan: bytes, stage: int) -> bool:
        """Whether it is promised to exactly this stage."""
        live = self._live()
        return live is not None and (live.body.run, live.body.plan, live.body.stage) == (run, plan, stage)

    def release(self, planner: PeerId, plan: bytes | None = None) -> None:
        """Forget what was promised to `planner` (for `plan` only, if given); others' promises stand."""
        promise = self._promise
        if promise is not None and promise.planner == planner and plan in (None, promise.body.plan):
            self._promise = None

    def _live(self) -> _Promise | None:
        until = -inf if self._promise is None else self._promise.until
        return self._promise if self._clock.monotonic() < until else None
