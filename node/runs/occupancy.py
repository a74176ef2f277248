"""The occupancy of a node: the runs and services that have its slots, and whether it computes now."""

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
"""How long after its last step, or its beginning, a program that averages counts as training: longer than a
step of most."""


class OccupancyOwner(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    signer: Signer
    averaging: Averaging
    members: dict[bytes, RunMember]
    local: LocalMode


class Occupancy:
    """The occupancy of one node, which has as many `slots` as its owner gives."""

    def __init__(self, owner: OccupancyOwner, slots: int) -> None:
        self._owner = owner
        self.beside: Callable[[], Mapping[bytes, bytes]] = dict
        """The other holders of this node's slots (services), each with its graph."""
        self.slots = LeaseSlots(owner.seams, slots, self._hosted)

    def _hosted(self) -> list[bytes]:
        """Return what has a slot here. A run that this node only follows makes room at once."""
        owner = self._owner
        exact = [
            run
            for run, member in owner.members.items()
            if member.hosts and not is_standby(member, owner.signer.peer)
        ]
        local = [run for run, member in owner.local.members.items() if member.crew.is_training]
        return [*exact, *local, *self.beside()]

    def is_computing(self) -> bool:
        """Return whether this node computes, or is about to: a stage, the steps of its own run, or the
        training and averaging of a program in its process."""
        owner = self._owner
        now = owner.seams.clock.monotonic()
        return (
            bool(self.slots.taken() or owner.local.members)
            or any(member.plan and not member.is_witness for member in owner.members.values())
            or any(now - run.stepped_at < TRAINING_SECONDS for run in owner.averaging.runs)
        )
