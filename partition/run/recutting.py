"""How a committer moves the borders between stages: it pauses between two steps, has all stages saved, and
proposes a plan in which each stage takes its layers from that checkpoint. So no step is lost.

Not here: which borders (`partition.plan.rebalance`), and what is saved where.
"""

from partition.run.messages import Recut

RECUT_SECONDS_MAX = 60.0
"""From the pause to a checkpoint on several disks; after that the steps go on as they were."""
INF = float("inf")


class Recutting:
    """One member's, under one plan. `deadline` is when `expire` wants to be called."""

    def __init__(self) -> None:
        self.deadline = INF
        self._cuts: tuple[int, ...] = ()
        self._step: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether borders are to be moved, and no plan says so yet."""
        return bool(self._cuts)

    @property
    def paused_at(self) -> int | None:
        """The step at which all wait for the checkpoint."""
        return self._step

    def begin(self, cuts: tuple[int, ...]) -> None:
        """Move the borders to `cuts` once no step is open."""
        self._cuts, self._step, self.deadline = cuts, None, INF

    def paused(self, now: float, step: int) -> bool:
        """Note that no step is open after `step` steps; whether their state is to be saved now."""
        if not self._cuts:
            return False
        self._step, self.deadline = step, now + RECUT_SECONDS_MAX
        return True

    def saved(self, plan: bytes, restorable: tuple[bytes, int] | None) -> Recut | None:
        """Return what to tell all members, if the newest checkpoint is the one that was waited for."""
        if not self._cuts or restorable is None or restorable[1] != self._step:
            return None
        return Recut(plan, restorable[1], restorable[0], self._cuts)

    def end(self) -> None:
        """Wish for nothing any more."""
        self._cuts, self._step, self.deadline = (), None, INF
