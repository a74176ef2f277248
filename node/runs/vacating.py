"""Giving this machine's slots back while the node goes on: its owner wants it, or it is another run's turn.

Each run's part is handed over as when the node leaves: the run pauses between two steps, another takes the
stage, nothing is computed twice. Where nobody can take it in time the stage is closed all the same, and the
run goes on from another replica or its newest checkpoint.
"""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from crypto.identity import PeerId
from node.protocols.manifest import Run
from node.runs.member import RunMember


class Service(Protocol):
    """What is needed of `node.runs.runs.Runs`."""

    members: dict[bytes, RunMember]

    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...


async def vacate(runs: Service, reason: str, which: Callable[[RunMember], bool]) -> dict[str, bool]:
    """Hand over the stages of these runs; of each by its id, whether that came about in time."""
    found: dict[str, bool] = {}
    holding = [member for member in runs.members.values() if member.hosting.core.occupies]
    for member in filter(which, holding):
        found[member.run.text] = False
        runs.start_task(_hand_over, member, reason, found, of=member.run)
    return found


async def _hand_over(member: RunMember, reason: str, found: dict[str, bool]) -> None:
    found[member.run.text] = await member.leave()
    if not found[member.run.text]:
        await member.hosting.vacate()
        member.fail_stage(reason)


def of_others(me: PeerId) -> Callable[[RunMember], bool]:
    """Return what selects the runs that others asked for."""
    return lambda member: member.run.requester != me


def of_runs(wanted: Collection[bytes]) -> Callable[[RunMember], bool]:
    """Return what selects these runs."""
    return lambda member: member.run.id in wanted
