"""This node's roles in a run, as the driver reports them to the member's core."""

from typing import Protocol

from partition.run.way_back import WayBack


class Roles(Protocol):
    """This node's roles under the plan in force."""

    @property
    def committed(self) -> int | None:
        """How many steps this node's committer has committed; None where it does not commit, or does not know
        yet because its replicas are not synced."""

    @property
    def best(self) -> WayBack | None:
        """The checkpoint of the state that validated best, where the run keeps that one."""

    def holds(self, checkpoint: WayBack) -> bool:
        """Return whether a copy of a checkpoint is here, of every stage."""

    @property
    def can_tell(self) -> bool:
        """Whether a newcomer can be told how the next plan came about."""
