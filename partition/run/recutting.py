"""How a committer moves the borders between stages, or makes more stages: it pauses between two steps, has
all stages saved, and proposes a plan in which each stage takes its layers from that checkpoint. So no step is
lost.

Not here: which borders (`partition.plan.rebalance`), and what is saved where.
"""

from msgspec.structs import replace

from partition.plan.change import Change

RECUT_SECONDS_MAX = 60.0
"""From the pause to a checkpoint on several disks; after that the steps go on as they were."""
INF = float("inf")


class Recutting:
    """One member's, under one plan. `deadline` is when `expire` wants to be called."""

    def __init__(self) -> None:
        self.deadline = INF
        self._wanted: Change | None = None
        self._step: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether borders are to be moved, and no plan says so yet."""
        return self._wanted is not None

    @property
    def paused_at(self) -> int | None:
        """The step at which all wait for the checkpoint."""
        return self._step

    def begin(self, wanted: Change) -> None:
        """Make this change, which says nothing of a checkpoint yet, once no step is open."""
        self._wanted, self._step, self.deadline = wanted, None, INF

    def paused(self, now: float, step: int) -> bool:
        """Note that no step is open after `step` steps; whether their state is to be saved now."""
        if self._wanted is None:
            return False
        self._step, self.deadline = step, now + RECUT_SECONDS_MAX
        return True

    def saved(self, restorable: tuple[bytes, int] | None) -> Change | None:
        """Return what is to be decided, if the newest checkpoint is the one that was waited for."""
        if self._wanted is None or restorable is None or restorable[1] != self._step:
            return None
        return replace(self._wanted, restored=restorable[0], step=restorable[1])

    def end(self) -> None:
        """Wish for nothing any more."""
        self._wanted, self._step, self.deadline = None, None, INF
