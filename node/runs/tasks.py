"""The tasks of the runs service. A task that fails ends its run on this node, never the node itself."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import trio

from node.containment import contain, failure_text, place_of
from node.protocols.manifest import Run
from node.runs.local_mode import LocalMode
from node.runs.member import RunMember
from partition.run.messages import REASON_LENGTH_MAX


class TasksOwner(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    @property
    def members(self) -> Mapping[bytes, RunMember]: ...
    @property
    def local(self) -> LocalMode: ...
    async def ended(
        self, membership: RunMember, outcome: str, detail: str, weights: str, *, is_here: bool
    ) -> None: ...


class RunTasks:
    """The tasks of one node's runs. They run in `nursery`, once it is set."""

    def __init__(self, owner: TasksOwner) -> None:
        self._owner = owner
        self.nursery: trio.Nursery | None = None

    def start(self, task: Callable[..., Awaitable[object]], *arguments: object, of: Run | None) -> None:
        """Run `task(*arguments)` in the background until it or the node ends. If the task is `of` a run, its
        failure ends that run here, never the node."""
        assert self.nursery is not None, "Runs.run was not started"
        self.nursery.start_soon(self.run, of, task, *arguments)

    async def run(self, of: Run | None, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run a task in the caller's task, with failures contained as in `start`."""
        if of is None:
            with contain(place_of(task)):
                await task(*arguments)
            return
        with self.containing(of, place_of(task)):
            await task(*arguments)

    @contextmanager
    def containing(self, run: Run, place: str) -> Iterator[None]:
        """If the block fails unexpectedly, end the run as failed, and nothing else, because its half-done
        work cannot be trusted."""
        with contain(f"run {place}") as part:
            yield
        if part.error is not None and self.nursery is not None:
            self.nursery.start_soon(self._fail, run, part.error)

    async def _fail(self, run: Run, error: Exception) -> None:
        owner = self._owner
        member, local = owner.members.get(run.id), owner.local.members.get(run.id)
        if member is None and local is None:
            return  # the run had already ended
        reason = failure_text(error)[:REASON_LENGTH_MAX]
        if local is not None:
            with contain("run in local mode ending after a failure"):
                await owner.local.give_up(run.id, "failed", reason)
        if member is None:
            return
        with contain("run ending after a failure") as ending:
            await member.fail(reason)
        if ending.error is not None and owner.members.get(run.id) is member:
            with contain("run closing after a failure"):
                await member.close_stage()
            with contain("run ending after a failure"):
                await owner.ended(member, "failed", reason, "", is_here=False)
