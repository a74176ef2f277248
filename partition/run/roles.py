"""This node's roles in a run, as the driver reports them to the member's core."""

from typing import Protocol

from partition.run.way_back import WayBack


class Roles(Protocol):
    """This node's roles under the plan in force."""

    @property
    def committed(self) -> int | None:
        """The steps that this node's committer has committed; None if it does not commit, or its replicas are
        not synced yet."""

    @property
    def best(self) -> WayBack | None:
        """The checkpoint of the state that validated best, if the run keeps that one."""

    def holds(self, checkpoint: WayBack) -> bool:
        """Return whether a copy of a checkpoint is here, with every stage."""

    @property
    def can_tell(self) -> bool:
        """Whether this node can show a newcomer how the next plan came about."""
