"""The state that a run goes back to when a stage has lost its last replica.

The newest checkpoint that is whole, else the first values of all stages, which every member can make itself.
"""

from crypto.errors import RemoteProtocolError
from partition.plan.plan import FIRST_VALUES, NO_HASH, Plan, plan_hash
from partition.run.messages import Checkpointed

WayBack = tuple[bytes, int]
"""The name of a checkpoint, FIRST_VALUES where there is none, and its number of steps."""


class WaysBack:
    """One member's knowledge of checkpoints. Only a member that knows of every checkpoint may have the run
    begin anew: one that has been in since the first plan, or was told since it came. Any other could throw
    the work of others away."""

    def __init__(self, save_every: int) -> None:
        """`save_every` is how many steps lie between two checkpoints at least, 0 where none are made."""
        self._save_every = save_every
        self._is_informed = False

    def entered(self, plan: Plan) -> WayBack | None:
        """Note the plan in force; return the checkpoint that it went back to, if it did."""
        self._is_informed |= not plan.height or plan.restored != NO_HASH
        return None if plan.restored in (NO_HASH, FIRST_VALUES) else (plan.restored, plan.step)

    def told(self, message: Checkpointed) -> WayBack | None:
        """Note the committer's message; return the whole checkpoint, if there is one.

        Raises RemoteProtocolError: the beginning of a run is before its first step.
        """
        is_beginning = message.checkpoint == FIRST_VALUES
        if is_beginning and message.step:
            raise RemoteProtocolError(f"the first values of a run, after {message.step} steps")
        self._is_informed = True
        return None if is_beginning else (message.checkpoint, message.step)

    def news(self, plan: Plan | None, newest: WayBack | None) -> Checkpointed | None:
        """Return the message to send as the committer of `plan`, which knows of `newest`; None for
        nothing."""
        is_known = newest is not None or (self._is_informed and self._save_every)
        if (
            plan is None or plan.is_final or not is_known
        ):  # then the result is whole, and nothing else is gone back to
            return None
        name, step = newest or (FIRST_VALUES, 0)
        return Checkpointed(plan_hash(plan), step, name)

    def find(self, newest: WayBack | None, furthest: int) -> WayBack | None:
        """Return the state that a stage without a replica is restored from, None if there is none.

        `newest` is the newest whole checkpoint that this member knows of. Without one the run may begin anew,
        as long as at most as many steps would be computed again as lie between two checkpoints.
        """
        if newest is not None:
            return newest
        is_young = self._is_informed and furthest <= self._save_every
        return (FIRST_VALUES, 0) if is_young and self._save_every else None
