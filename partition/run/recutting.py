"""Moves the borders between stages, or adds stages. A committer pauses between two steps, has all stages
saved, and proposes a plan in which each stage takes its layers from that checkpoint. So no step is lost.

Not here: the choice of borders (`partition.plan.rebalance`), and the saving itself.
"""

from msgspec.structs import replace

from partition.plan.change import Change

RECUT_SECONDS_MAX = 60.0
"""Time limit from the pause to a checkpoint on several disks; after it the steps continue unchanged."""
INF = float("inf")


class Recutting:
    """One member's recut, under one plan. `deadline` is the time of the next `expire`."""

    def __init__(self) -> None:
        self.deadline = INF
        self._wanted: Change | None = None
        self._step: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether borders are to be moved and no plan has done so yet."""
        return self._wanted is not None

    @property
    def paused_at(self) -> int | None:
        """The step at which the run pauses for the checkpoint."""
        return self._step

    def begin(self, wanted: Change) -> None:
        """Begin this change, which gets its checkpoint once no step is open."""
        self._wanted, self._step, self.deadline = wanted, None, INF

    def paused(self, now: float, step: int) -> bool:
        """Note that no step is open after `step` steps; return whether to save that state now."""
        if self._wanted is None:
            return False
        self._step, self.deadline = step, now + RECUT_SECONDS_MAX
        return True

    def saved(self, restorable: tuple[bytes, int] | None) -> Change | None:
        """Return the change to decide, if the newest checkpoint is the awaited one."""
        if self._wanted is None or restorable is None or restorable[1] != self._step:
            return None
        return replace(self._wanted, restored=restorable[0], step=restorable[1])

    def end(self) -> None:
        """End the recut, done or not."""
        self._wanted, self._step, self.deadline = None, None, INF
