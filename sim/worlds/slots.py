"""The one place for a stage that each peer of a world of cores has, and to which plan it is promised."""

from collections.abc import Callable
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.run.timeouts import SILENCE_SECONDS_MAX


@dataclass(frozen=True)
class _Promise:
    plan: bytes
    planner: PeerId
    until: float


class Slots:
    """Those of all peers, over all runs. A promise ends by itself unless its stage is opened in time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._promises: dict[PeerId, _Promise] = {}

    def is_free(self, peer: PeerId) -> bool:
        """Return whether nothing is promised."""
        promise = self._promises.get(peer)
        return promise is None or promise.until <= self._now()

    def promise(self, peer: PeerId, plan: bytes, planner: PeerId) -> None:
        """Hold the slot for `planner`'s plan."""
        self._promises[peer] = _Promise(plan, planner, self._now() + SILENCE_SECONDS_MAX)

    def holds(self, peer: PeerId, plan: bytes) -> bool:
        """Return whether it is promised to this plan."""
        return not self.is_free(peer) and self._promises[peer].plan == plan

    def release(self, peer: PeerId, plan: bytes) -> None:
        """Forget what was promised for this plan."""
        if self.holds(peer, plan):
            del self._promises[peer]

    def release_all(self, peer: PeerId, planner: PeerId) -> None:
        """Forget what was promised to a planner that is gone."""
        promise = self._promises.get(peer)
        if promise is not None and promise.planner == planner:
            del self._promises[peer]
