"""Vacates slots of this machine while the node keeps running, because its owner or another run needs them.

Each run's part is handed over as when the node leaves: the run pauses between two steps and another node
takes the stage, so nothing is computed twice. If no node takes the stage in time, it is closed anyway, and
the run continues from another replica or from its newest checkpoint.
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
    """Start handing over the stages of the selected runs. The returned dictionary says, by run id, whether
    that has succeeded; all values are False at first."""
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
    """Return whether this node is only a standby of the run."""
    return member.plan is not None and me in member.plan.standbys


async def make_room(runs: VacatingService, me: PeerId, run: bytes, free: int) -> None:
    """Stop being a standby of other runs if their stages use the last of `free` slots, so that `run` gets a
    slot here. Returns once those stages are closed."""
    following = [
        member for member in runs.members.values() if is_standby(member, me) and member.run.id != run
    ]
    for member in following[max(0, free - 1) :]:
        await _hand_over(member, MADE_ROOM, {})
        # the member may still act on the plan without this node, which has just arrived
        await member.hosting.vacate()


def of_others(me: PeerId) -> Callable[[RunMember], bool]:
    """Return a predicate for members of runs that other peers requested."""
    return lambda member: member.run.requester != me


def of_runs(wanted: Collection[bytes]) -> Callable[[RunMember], bool]:
    """Return a predicate for members of these runs."""
    return lambda member: member.run.id in wanted
