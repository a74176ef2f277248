"""Knows which runs and services occupy this node's slots, and whether the node computes now."""

from collections.abc import Callable, Mapping
from typing import Protocol

from crypto.facts import Signer
from node.averaging.service import Averaging
from node.placement.slots import LeaseSlots
from node.runs.local_mode import LocalMode
from node.runs.member import RunMember
from node.runs.vacating import is_standby
from node.seams import Seams

TRAINING_SECONDS = 60.0
"""How long a program that averages counts as training after its latest step or its start; longer than most
steps take."""


class OccupancyOwner(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    signer: Signer
    averaging: Averaging
    members: dict[bytes, RunMember]
    local: LocalMode


class Occupancy:
    """The occupancy of one node, whose owner gives it this number of `slots`."""

    def __init__(self, owner: OccupancyOwner, slots: int) -> None:
        self._owner = owner
        self.beside: Callable[[], Mapping[bytes, bytes]] = dict
        """The services that hold slots of this node, each with its graph."""
        self.slots = LeaseSlots(owner.seams, slots, self._hosted)

    def _hosted(self) -> list[bytes]:
        """Return the runs and services that occupy a slot here. Standbys are not included, because they make
        room immediately."""
        owner = self._owner
        exact = [
            run
            for run, member in owner.members.items()
            if member.hosts and not is_standby(member, owner.signer.peer)
        ]
        local = [run for run, member in owner.local.members.items() if member.crew.is_training]
        return [*exact, *local, *self.beside()]

    def is_computing(self) -> bool:
        """Return whether this node computes or is about to: a stage, the steps of its own run, or the
        training and averaging of a program in its process."""
        owner = self._owner
        now = owner.seams.clock.monotonic()
        return (
            bool(self.slots.taken() or owner.local.members)
            or any(member.plan and not member.is_witness for member in owner.members.values())
            or any(now - run.stepped_at < TRAINING_SECONDS for run in owner.averaging.runs)
        )
