"""Handles of runs for programs: `me.train(...)` and `me.run(id)` return one.

    run = await me.train("digits.toml", steps=100)
    async for event in run: ...
    result = await run.result("model.safetensors")

A handle holds only the run's id. Any node can make one from an id, whether it is in the run or not, and the
run continues without the handle.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from node.api.progress import ProgressLine
from node.commands import Commands, LocalNode
from node.errors import PeerloomError, RunFailed
from node.events import Event, NodeStopped, RunEnded
from node.runs.metrics import metric_rows
from partition.run.states import OVER

POLL_SECONDS = 2.0
"""Seconds between questions to members about a run of which this node is not a member."""


@dataclass(frozen=True)
class LastRound:
    """The newest averaging round of a run in local mode, as reported by a member.

    `number` counts that member's rounds, and `step` the local steps that it had made. `peers` are the ids of
    the peers whose tensors were included. If there is an `error`, nothing was averaged. `rounding` is the
    relative error that the run's codec added, and the round took `seconds`.
    """

    number: int
    step: int
    peers: tuple[str, ...]
    error: str
    rounding: float
    seconds: float


@dataclass(frozen=True)
class OtherResult:
    """A member of a run in local mode with a different outcome. `weights` is the hash (hex) of its result,
    empty if the run failed there."""

    peer: str
    weights: str


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run. `out` is the file with its weights, if requested. Numbers that were not measured
    are None. `last_round` is None in exact mode, and if no member that was asked had one. `others` is empty
    unless members could not agree (`partition.run.ending`)."""

    run: str
    status: str
    step: int
    loss: float | None
    accuracy: float | None
    out: str = ""
    last_round: LastRound | None = None
    others: tuple[OtherResult, ...] = ()


class RunHandle:
    """One run, identified by its id: see `node.api.handles`."""

    def __init__(self, node: LocalNode, run: str) -> None:
        self._node = node
        self._run = run

    def __repr__(self) -> str:
        return f"<run {self._run} {self.status}>"

    @property
    def id(self) -> str:
        """The run's id: 16 hexadecimal digits."""
        return self._run

    @property
    def status(self) -> str:
        """The run's state as this node knows it; "unknown" if this node is not a member. Use `show` to ask
        the members."""
        view = self._node.state.runs.get(self._run)
        return "unknown" if view is None else view.status

    @property
    def metrics(self) -> tuple[dict[str, Any], ...]:
        """The measurements, one row for each step, by name: loss, seconds, accuracy, the model's own metrics,
        and the joules of this machine if its hardware counts them."""
        view = self._node.state.runs.get(self._run)
        events = (event for _, event in self._node.history.after(0))
        return () if view is None else tuple(metric_rows(view, events, self._node.energy.joules))

    async def show(self) -> dict[str, Any]:
        """Return the run's state, as this node knows it or else as its members report it.

        Raises RunFailed if no member that was asked knows the run.
        """
        return await Commands(self._node).show(self._run)

    async def events(self) -> AsyncIterator[Event]:
        """Yield the run's events from now on, until it ends. If the run is already over, yield none.

        Raises RunFailed if this node is not a member of the run, because then it gets no events; `show` asks
        the members.
        """
        with self._node.watch() as coming:
            if self._run not in self._node.state.runs:
                raise RunFailed(
                    f"run {self._run[:8]} is not running on this node", "ask its members with run.show()"
                )
            if self.status in OVER:
                return
            async for event in coming:
                if getattr(event, "run", None) == self._run:
                    yield event
                if (
                    isinstance(event, NodeStopped | RunEnded)
                    and getattr(event, "run", self._run) == self._run
                ):
                    return

    def __aiter__(self) -> AsyncIterator[Event]:
        return self.events()

    async def stop(self) -> dict[str, Any]:
        """End the run for all its members. Raises UsageError if a different node requested it."""
        return await self._node.runs.stopping.stop(self._run)

    async def pause(self) -> dict[str, Any]:
        """Make all members wait after this step, with a checkpoint. Raises UsageError, as in `stop`."""
        return await self._node.runs.revising.revise(self._run, {"is_paused": True})

    async def resume(self) -> dict[str, Any]:
        """Let a paused run continue. Raises UsageError, as in `stop`."""
        return await self._node.runs.revising.revise(self._run, {"is_paused": False})

    async def revise(
        self,
        learning_rate: float | None = None,
        steps: int | None = None,
        priority: int | None = None,
        goal: float | None = None,
        goal_seconds: int | None = None,
    ) -> dict[str, Any]:
        """Change the run from its next step on, on all members alike. None keeps a value.

        `goal` is a rate in samples a second; this node raises an alert if the run is slower over
        `goal_seconds`. 0 means no goal.

        Raises UsageError if a number is out of bounds, or a different node requested the run.
        """
        return await Commands(self._node).revise(
            self._run,
            learning_rate=learning_rate,
            steps=steps,
            priority=priority,
            samples_per_second=goal,
            goal_seconds=goal_seconds,
        )

    async def result(self, out: str = "") -> RunResult:
        """Wait for the end of the run. If `out` names a file, write the run's weights to it (safetensors).

        Raises RunFailed if the run failed or was stopped, or nobody knows it.
        """
        document = await self._ended()
        if document["status"] != "done":
            reason = document["detail"] or "no reason given"
            raise RunFailed(f"run {self._run[:8]} {document['status']}: {reason}")
        if out:
            await Commands(self._node).fetch(self._run, out)
        numbers = document["step"], document["loss"], document["accuracy"]
        others = tuple(OtherResult(**row) for row in document.get("other_results", ()))
        return RunResult(self._run, "done", *numbers, out, _last_round(document.get("last_round")), others)

    async def watch(self, show: Callable[[str], None] | None = None) -> RunResult:
        """Show one line that follows the run until it ends, and return the run's result.

        `show` is called with each text; by default the line is rewritten in the terminal or notebook. Raises
        RunFailed, as in `result`.
        """
        with ProgressLine(show, time.monotonic) as line:
            if self._run in self._node.state.runs:
                line.show(self._node.state.runs[self._run])
                async for _ in self.events():
                    line.show(self._node.state.runs[self._run])
        return await self.result()

    async def _ended(self) -> dict[str, Any]:
        while True:
            if self._run in self._node.state.runs:
                async for _ in self.events():
                    pass
            document = await self.show()
            if document["status"] in OVER:
                return document
            if self._node.stopping.is_set():
                raise PeerloomError("the node is stopping")
            await trio.sleep(POLL_SECONDS)


def _last_round(document: Mapping[str, Any] | None) -> LastRound | None:
    """Return the round that a run's document contains (`node.state_documents.round_document`)."""
    if document is None:
        return None
    return LastRound(
        number=document["round"],
        step=document["step"],
        peers=tuple(document["peers"]),
        error=document["error"],
        rounding=document["rounding"],
        seconds=document["seconds"],
    )
