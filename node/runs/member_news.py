"""Passes news about other members to the runs that this node is in: dead, suspected, back, or process ended.

The news comes from membership (`node.services.membership`) and from the links. Each run decides how to react.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from crypto.identity import PeerId
from node.events import Event, MemberChanged, MemberJoined, MemberLost, MemberRefuted, MemberSuspected
from node.pipeline.links import Links
from node.placement.slots import LeaseSlots
from node.protocols.manifest import Run
from node.runs.member import RunMember
from node.runs.queue import Queue
from node.seams import Seams
from partition.run.reliability import RunLosses

PROCESS_ENDED = "its process has ended"


class NewsService(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    members: dict[bytes, RunMember]
    slots: LeaseSlots
    queue: Queue
    links: Links
    losses: RunLosses

    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...
    def containing(self, run: Run, place: str) -> AbstractContextManager[None]: ...


class MemberNews:
    """Passes news to the runs, the queue and the slots. If a run fails while handling it, only that run
    ends."""

    def __init__(self, runs: NewsService) -> None:
        self._runs = runs

    def heard(self, event: Event) -> None:
        """Handle an event of membership about a member."""
        runs = self._runs
        match event:
            case MemberSuspected():
                self._each("member suspected", lambda member: member.member_suspected(event.peer))
            case MemberLost():
                runs.losses.note(runs.seams.clock.monotonic(), event.peer)
            case MemberJoined() | MemberChanged() | MemberRefuted():
                self._changed()

    def lost(self, peer: PeerId) -> None:
        """Handle a member that is dead or has left."""
        runs = self._runs
        runs.slots.release_all(peer)
        runs.queue.withdraw(peer)
        for member in list(runs.members.values()):
            runs.start_task(member.planner_lost, peer, of=member.run)
        self._changed()

    def closed(self, peer: PeerId) -> None:
        """Handle its host's report that nothing listens at a member's address. If its stream also ended and
        could not be reopened, its process and its stages are gone: the run goes on without it before
        membership confirms the death."""
        if self._runs.links.is_closed(peer, news=True):
            self._without(peer)

    def link_broken(self, suspect: Callable[[PeerId], None], peer: PeerId) -> None:
        """Handle a broken link: `suspect` the peer, and continue without it if its process has ended."""
        suspect(peer)
        if self._runs.links.is_closed(peer):
            self._without(peer)

    def reconnected(self, peer: PeerId) -> None:
        """Handle a new link to `peer` in place of a broken one."""
        self._each("reconnected", lambda member: member.reconnected(peer))

    def _changed(self) -> None:
        self._runs.queue.members_changed()
        self._each("members changed", lambda member: member.members_changed())

    def _without(self, peer: PeerId) -> None:
        for member in list(self._runs.members.values()):
            if member.plan is not None and member.plan.stage_of(peer) is not None and member.core.commits:
                with self._runs.containing(member.run, "member closed"):
                    member.absent(peer, PROCESS_ENDED)

    def _each(self, place: str, act: Callable[[RunMember], None]) -> None:
        for member in list(self._runs.members.values()):
            with self._runs.containing(member.run, place):
                act(member)
