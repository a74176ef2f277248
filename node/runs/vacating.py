"""Vacates this machine's slots while the node goes on: its owner wants it, or it is another run's turn.

Each run's part is handed over as when the node leaves: the run pauses between two steps, another takes the
stage, nothing is computed twice. Where nobody can take it in time the stage is closed all the same, and the
run goes on from another replica or its newest checkpoint.
"""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from crypto.identity import PeerId
from node.protocols.manifest import Run
from node.runs.member import RunMember

MADE_ROOM = "another run has a stage in its place"


class VacatingService(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    members: dict[bytes, RunMember]

    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...


async def vacate(runs: VacatingService, reason: str, which: Callable[[RunMember], bool]) -> dict[str, bool]:
    """Hand over the stages of these runs; return by run id whether that succeeded in time."""
    found: dict[str, bool] = {}
    holding = [member for member in runs.members.values() if member.hosts]
    for member in filter(which, holding):
        found[member.run.text] = False
        runs.start_task(_hand_over, member, reason, found, of=member.run)
    return found


async def _hand_over(member: RunMember, reason: str, found: dict[str, bool]) -> None:
    found[member.run.text] = await member.leave()
    if not found[member.run.text]:
        await member.hosting.vacate()
        member.fail_stage(reason)


def is_standby(member: RunMember, me: PeerId) -> bool:
    """Return whether this node only follows a stage of the run."""
    return member.plan is not None and me in member.plan.standbys


async def make_room(runs: VacatingService, me: PeerId, run: bytes, free: int) -> None:
    """Stop following stages of other runs where they use the last of `free` slots: another run is to have a
    stage of its own here. Returns once they are closed."""
    following = [
        member for member in runs.members.values() if is_standby(member, me) and member.run.id != run
    ]
    for member in following[max(0, free - 1) :]:
        await _hand_over(member, MADE_ROOM, {})
        await member.hosting.vacate()  # the plan without this node may be news that it still acts on


def of_others(me: PeerId) -> Callable[[RunMember], bool]:
    """Return a predicate for the runs that others asked for."""
    return lambda member: member.run.requester != me


def of_runs(wanted: Collection[bytes]) -> Callable[[RunMember], bool]:
    """Return a predicate for these runs."""
    return lambda member: member.run.id in wanted
