"""The data of `node.placement.turns`: wishes for a slot, waiting and served runs, and the use of
requesters."""

from dataclasses import dataclass
from math import inf

PRIORITY = 5
GIVEN_WEIGHT_MIN = 1.1
"""Minimum weight of a contributor: it gave what a slot computes in six minutes. A requester with less counts
as having contributed nothing."""


@dataclass(frozen=True)
class SlotWish:
    """A run's wish for one slot. `priority` and `deadline` (on the caller's clock, inf for none) order the
    runs of one requester. `asker` is the asking peer. `network` is the network where the requester was seen,
    empty for a local one."""

    run: bytes
    requester: bytes
    priority: int = PRIORITY
    deadline: float = inf
    asker: bytes = b""
    network: bytes = b""


@dataclass
class WaitingRun:
    wish: SlotWish
    since: float
    asked: float
    interval_seconds: float = 0.0
    made_room: bool = False
    inherited: float | None = None
    """Since when another run of the requester had the slot that it gives up for this run."""


@dataclass
class ServedRun:
    wish: SlotWish
    charged: float
    begun: float
    held: float
    risen: float
    group: bytes | None
    """The group of newcomers that the run counts with."""
    seconds_left: float | None = None
    is_preempted: bool = False


@dataclass
class RequesterUse:
    """A requester's use. `tag` is in seconds divided by its weight, and includes its start; `served` is in
    seconds."""

    tag: float = 0.0
    weight: float = 1.0
    phase: float = 0.0
    served: float = 0.0
    since: float = 0.0
    """When the requester came, or last got a slot."""
    is_known: bool = False
    is_founder: bool = False
    """Whether the requester came when nothing distinguished one key from another."""
    group: bytes | None = None
    """The group of newcomers that the requester counts with; None if it counts by itself."""
    lot: bytes = b""
    """Decides between those that came at once."""

    @property
    def has_given(self) -> bool:
        return self.weight >= GIVEN_WEIGHT_MIN

    @property
    def is_new(self) -> bool:
        return self.group is not None and not self.is_known and self.weight < GIVEN_WEIGHT_MIN
