"""Steps whose loss or gradient is not finite: all replicas skip them, or the run ends.

A skip is sent as an Apply that counts the successive skips, so the next committer knows their number too.
After SKIPPED_MAX the run is given up, because parameters that diverge at every step do not recover.
"""

from partition.steps.committer_events import divergence
from partition.steps.messages import SKIPPED_MAX, Apply, Diverged


class Divergence:
    """One committer's record of diverged steps. `reason` is why the step that is being applied is skipped."""

    def __init__(self, *, skips: bool) -> None:
        """`skips`: the run continues without a diverged step."""
        self._skips = skips
        self._skipped = 0
        self.reason = ""

    def applied(self, apply: Apply | None) -> None:
        """Note that the latest step is final on all replicas."""
        self._skipped = 0 if apply is None else apply.skipped
        self.reason = ""

    def skip(self, plan: bytes, step: int, attempt: int, reason: str) -> Apply | str:
        """Return the Apply by which all replicas skip the open step, or the reason why the run is over."""
        if not self._skips:
            return reason
        if self._skipped == SKIPPED_MAX:
            return f"{reason} ({SKIPPED_MAX} steps before it were skipped in a row)"
        self.reason = reason
        return Apply(plan=plan, step=step, attempt=attempt, samples=1, skipped=self._skipped + 1)


def reported(message: Diverged, stage: int) -> tuple[str, bool]:
    """Return the reason that a replica's report gives, and whether a later step may still be finite.

    It may not if the state itself is not finite, or if the result on held-out samples is not finite.
    """
    where = f"{f'step {message.step}' if message.train else 'held out'}: in stage {stage + 1}"
    return divergence(f"{where} {message.reason}"), message.train and message.microbatch is not None
