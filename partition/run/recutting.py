"""The procedure that moves borders between stages, or adds stages. The committer pauses between two steps,
has all stages saved, and proposes a plan in which each stage takes its layers from that checkpoint. So no
step is lost.

Not here: the choice of borders (`partition.plan.rebalance`), and the saving itself.
"""

from msgspec.structs import replace

from partition.plan.change import Change

RECUT_SECONDS_MAX = 60.0
"""Time limit from the pause until the checkpoint is on several disks. If it passes, steps continue with the
present borders."""
INF = float("inf")


class Recutting:
    """One member's change of borders under one plan. `deadline` is the time at which it is given up."""

    def __init__(self) -> None:
        self.deadline = INF
        self._wanted: Change | None = None
        self._step: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether a change of borders is wanted that no plan has made yet."""
        return self._wanted is not None

    @property
    def paused_at(self) -> int | None:
        """The number of steps after which the run paused for the checkpoint; None if it has not paused."""
        return self._step

    def begin(self, wanted: Change) -> None:
        """Begin this change. Its checkpoint is made once no step is open."""
        self._wanted, self._step, self.deadline = wanted, None, INF

    def paused(self, now: float, step: int) -> bool:
        """Note that no step is open after `step` steps; return whether to save that state now."""
        if self._wanted is None:
            return False
        self._step, self.deadline = step, now + RECUT_SECONDS_MAX
        return True

    def saved(self, restorable: tuple[bytes, int] | None) -> Change | None:
        """Return the change to decide if the newest checkpoint is the awaited one, otherwise None."""
        if self._wanted is None or restorable is None or restorable[1] != self._step:
            return None
        return replace(self._wanted, restored=restorable[0], step=restorable[1])

    def end(self) -> None:
        """End the change, whether done or given up."""
        self._wanted, self._step, self.deadline = None, None, INF
