"""The rows of `node.placement.turns`: wishes for a slot, waiting and served runs, and requesters' use."""

from dataclasses import dataclass
from math import inf

PRIORITY = 5
GIVEN_WEIGHT_MIN = 1.1
"""A requester of this weight gave what a slot computes in six minutes; one of less counts as a stranger."""


@dataclass(frozen=True)
class SlotWish:
    """A run's wish for one slot. `priority` and `deadline` (in the clock of the caller, inf for none) order
    the runs of one requester; `asker` is the asking peer, `network` that where the requester was seen, empty
    for a local one."""

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
    """Since when the requester's other run had the slot that it gives up for this one."""


@dataclass
class ServedRun:
    wish: SlotWish
    charged: float
    begun: float
    held: float
    risen: float
    group: bytes | None
    """The newcomers that it counts with."""
    seconds_left: float | None = None
    is_preempted: bool = False


@dataclass
class RequesterUse:
    """A requester's use: `tag` in seconds divided by its weight, from its start; `served` in seconds."""

    tag: float = 0.0
    weight: float = 1.0
    phase: float = 0.0
    served: float = 0.0
    since: float = 0.0
    """The time when its requester came, or had a slot last."""
    is_known: bool = False
    is_founder: bool = False
    """Whether it came when there was nothing to tell keys apart by."""
    group: bytes | None = None
    """The newcomers it counts with; None where it counts for itself."""

    @property
    def has_given(self) -> bool:
        return self.weight >= GIVEN_WEIGHT_MIN

    @property
    def is_new(self) -> bool:
        return self.group is not None and not (self.is_known or self.has_given)
