"""The state that a run returns to when a stage has lost its last replica.

It is the newest whole checkpoint or, if there is none, the initial parameters of all stages, which every
member can make.
"""

from crypto.errors import RemoteProtocolError
from partition.plan.plan import FIRST_VALUES, NO_HASH, Plan, plan_hash
from partition.run.messages import Checkpointed

WayBack = tuple[bytes, int]
"""The name of a checkpoint, or FIRST_VALUES for the initial parameters, and its number of steps."""


class WaysBack:
    """One member's knowledge of checkpoints. Only a member that knows of every checkpoint may restart the run
    from its beginning; any other member could discard the work of others. A member knows of every checkpoint
    if it has taken part since the first plan, or if it has learned of a checkpoint from the committer or from
    a plan."""

    def __init__(self, save_every: int) -> None:
        """`save_every` is the minimum number of steps between two checkpoints, 0 if none are made."""
        self._save_every = save_every
        self._is_informed = False

    def entered(self, plan: Plan) -> WayBack | None:
        """Note the plan in force. Return the checkpoint that the plan returned to, if any."""
        self._is_informed |= not plan.height or plan.restored != NO_HASH
        return None if plan.restored in (NO_HASH, FIRST_VALUES) else (plan.restored, plan.step)

    def told(self, message: Checkpointed) -> WayBack | None:
        """Note the committer's message. Return the whole checkpoint that it announces, if any.

        Raises RemoteProtocolError for initial parameters with a step above 0.
        """
        is_beginning = message.checkpoint == FIRST_VALUES
        if is_beginning and message.step:
            raise RemoteProtocolError(
                f"the initial parameters of a run were announced with {message.step} steps"
            )
        self._is_informed = True
        return None if is_beginning else (message.checkpoint, message.step)

    def news(self, plan: Plan | None, newest: WayBack | None) -> Checkpointed | None:
        """Return the message to send as the committer of `plan`, given the `newest` checkpoint; None if there
        is nothing to announce."""
        is_known = newest is not None or (self._is_informed and self._save_every)
        if (
            plan is None or plan.is_final or not is_known
        ):  # a final plan's result is whole, and the run returns to nothing else
            return None
        name, step = newest or (FIRST_VALUES, 0)
        return Checkpointed(plan_hash(plan), step, name)

    def find(self, newest: WayBack | None, furthest: int) -> WayBack | None:
        """Return the state from which a stage without a replica can be restored; None if there is none.

        `newest` is the newest whole checkpoint known here. Without a checkpoint, the run may restart from its
        beginning if that repeats at most as many steps as lie between two checkpoints.
        """
        if newest is not None:
            return newest
        is_young = self._is_informed and furthest <= self._save_every
        return (FIRST_VALUES, 0) if is_young and self._save_every else None
