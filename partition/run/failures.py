"""Failures that end a run: what failed under successive plans, as one member saw it.

A failed peer is replaced, and a stage without a replica returns to a checkpoint. Neither helps where the data
or the step itself fails: the next peer fails at the same place, forever. So a failure that follows the step
rather than the peer ends the run, and so do repeated rollbacks without progress.
"""

from crypto.identity import PeerId

PEERS_MAX = 2
"""A step that fails on this many peers is not a fault of the peers."""
ROLLBACKS_MAX = 5
"""Rollbacks to a checkpoint without new progress that a run may make. Peers also die, and several deaths in a
row may take the same stage with them."""


class Failures:
    """One member's record, over all plans of one run."""

    def __init__(self) -> None:
        self._step = -1
        self._peers: set[PeerId] = set()
        self._furthest = -1
        self._rollbacks = 0

    def note(self, peer: PeerId, step: int | None, reason: str) -> str | None:
        """Note that a peer failed, in computing `step` if not None. Return why the run is over, None if it
        continues."""
        if step is None:
            return None
        if step != self._step:
            self._step, self._peers = step, set()
        self._peers.add(peer)
        if len(self._peers) < PEERS_MAX:
            return None
        return f"step {step} failed on {len(self._peers)} peers, so it is not theirs: {reason}"

    def went_back(self, step: int, furthest: int, reason: str) -> str | None:
        """Note that the run returns to a checkpoint after `step` steps, having reached `furthest`; `reason`
        is why members were lost. Return why the run is over, None if it continues."""
        if furthest > self._furthest:
            self._furthest, self._rollbacks = furthest, 0
        self._rollbacks += 1
        if self._rollbacks <= ROLLBACKS_MAX:
            return None
        over = f"{self._rollbacks} times it went back to step {step} and got no further than {self._furthest}"
        return f"{over}; the last time: {reason}" if reason else over
