"""Failures that end a run: one member's record of what failed, over successive plans.

A failed peer is replaced, and a stage without a replica returns to a checkpoint. Neither helps if the data or
the step itself is at fault: every replacement fails at the same step, forever. So a failure that follows the
step rather than the peer ends the run. Repeated rollbacks without progress end it too.
"""

from crypto.identity import PeerId

PEERS_MAX = 2
"""Number of peers on which a step must fail to count as the step's own fault."""
ROLLBACKS_MAX = 5
"""Number of rollbacks to a checkpoint that a run may make without new progress. It is more than one because
several peers of the same stage may die in a row."""


class Failures:
    """One member's record, over all plans of one run."""

    def __init__(self) -> None:
        self._step = -1
        self._peers: set[PeerId] = set()
        self._furthest = -1
        self._rollbacks = 0

    def note(self, peer: PeerId, step: int | None, reason: str) -> str | None:
        """Note that a peer failed; `step` is the step that it was computing, or None. Return the reason if
        the run is over, None if it continues."""
        if step is None:
            return None
        if step != self._step:
            self._step, self._peers = step, set()
        self._peers.add(peer)
        if len(self._peers) < PEERS_MAX:
            return None
        return f"step {step} failed on {len(self._peers)} peers, so the peers are not at fault: {reason}"

    def went_back(self, step: int, furthest: int, reason: str) -> str | None:
        """Note that the run returns to a checkpoint after `step` steps, having reached `furthest`. `reason`
        is why members were lost. Return the reason if the run is over, None if it continues."""
        if furthest > self._furthest:
            self._furthest, self._rollbacks = furthest, 0
        self._rollbacks += 1
        if self._rollbacks <= ROLLBACKS_MAX:
            return None
        over = (
            f"the run went back to step {step} {self._rollbacks} times and got no "
            f"further than step {self._furthest}"
        )
        return f"{over}; the last time: {reason}" if reason else over
