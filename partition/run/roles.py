"""This node's roles in a run, as the driver reports them to the member's core."""

from typing import Protocol


class Roles(Protocol):
    """This node's roles under the plan in force."""

    @property
    def committed(self) -> int | None:
        """How many steps this node's committer has committed; None where it does not commit, or does not know
        yet because its replicas are not synced."""

    @property
    def restorable(self) -> tuple[bytes, int] | None:
        """The newest checkpoint that is whole somewhere, and its step."""

    @property
    def can_restore(self) -> bool:
        """Whether a copy of `restorable` is here, or may be at a member, of now or before, that lives."""

    @property
    def can_tell(self) -> bool:
        """Whether a newcomer can be told how the next plan came about."""
