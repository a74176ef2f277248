"""This node's roles in a run, as the driver reports them to the member's core."""

from typing import Protocol

from partition.run.way_back import WayBack


class Roles(Protocol):
    """This node's roles under the plan in force."""

    @property
    def committed(self) -> int | None:
        """The number of steps that this node's committer has committed; None if this node does not commit, or
        its replicas are not synced yet."""

    @property
    def best(self) -> WayBack | None:
        """The checkpoint of the state with the best validation, if the run keeps its best state."""

    def holds(self, checkpoint: WayBack) -> bool:
        """Return whether a copy of a checkpoint, with every stage, is on this node."""

    @property
    def can_tell(self) -> bool:
        """Whether this node can show a newcomer how the next plan came about."""
