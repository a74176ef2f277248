"""One member's record of a run's validations, and of the checkpoint whose state validated best.

If a run keeps its best state (`train.keep`), that checkpoint stays on every disk that has it until the run
has ended. At the end, the committer restores it with a plan. Not here: which state is the best
(`partition.steps.validation`).
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import trio
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from node.checkpoints.store import BEST_RECORD_MAX, SERIES_MAX, Best, best_name
from node.events import RunEvaluated
from node.protocols.manifest import Run
from node.runs.context import RunService
from partition.plan.plan import NO_HASH, Plan
from partition.steps.validation import Series

KEEP_SECONDS_MAX = 60.0
"""Longest wait at the end for the checkpoint of the best state to become complete. After that, the last state
is the result."""


class BestStateCommitter(Protocol):
    """The part of `node.pipeline.committer.CommitterShell` that the best state uses."""

    def take_last(self) -> None: ...


class BestState:
    """The best state of one run at one member. `bring_back` proposes a plan that restores a checkpoint;
    `note_best` receives the number of steps of the best state."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        committer: Callable[[], BestStateCommitter | None],
        bring_back: Callable[[bytes, int], None],
        note_best: Callable[[int | None], None],
    ) -> None:
        self._service = service
        self._run = run
        self._committer = committer
        self._bring_back = bring_back
        self._note_best = note_best
        self._wanted: int | None = None
        self._writing = trio.Lock()
        self.known = _read(service, run)
        self._lacking = ""

    @property
    def series(self) -> Series | None:
        """The validations up to the newest one received."""
        return self.known.series[-1] if self.known.series else None

    @property
    def detail(self) -> str:
        """A note for people on how a successful run ended; usually empty."""
        validation, series = self._run.manifest.validation, self.series
        if self._lacking or validation is None or series is None:
            return self._lacking
        if 0 < validation.patience <= series.since:
            return f"its validations stopped improving after step {series.best_step}"
        return ""

    @property
    def step(self) -> int | None:
        """The number of steps of the best state, if the run keeps it."""
        return self.series.best_step if self.series is not None and self._keeps else None

    @property
    def checkpoint(self) -> tuple[bytes, int] | None:
        """The best state that is complete as a checkpoint, and its step."""
        known = self.known
        return None if known.checkpoint is None else (known.checkpoint, known.step)

    @property
    def _keeps(self) -> bool:
        validation = self._run.manifest.validation
        return validation is not None and validation.keep == "best"

    def begin(self, plan: Plan) -> None:
        """Begin with a new plan, and forget validations of steps that it takes back."""
        self._wanted = None
        if plan.is_final and plan.restored != NO_HASH:
            self._know(Best(self.known.series, plan.restored, plan.step))
        elif plan.restored != NO_HASH:
            kept = tuple(series for series in self.known.series if series.step <= plan.step)
            self._know(replace(self.known, series=kept))

    def heard(self, event: RunEvaluated) -> None:
        """Add a validation by this node or by the committer."""
        if event.step is None or (self.series is not None and event.step <= self.series.step):
            return
        series = Series(event.step, min(event.best_step, event.step), event.best, event.since)
        self._know(replace(self.known, series=(*self.known.series, series)[-SERIES_MAX:]))

    def learned(self, newest: tuple[bytes, int] | None) -> None:
        """Handle the news that a checkpoint is complete."""
        if newest is not None and newest[1] == self.step:
            self._know(Best(self.known.series, *newest))
        if self._wanted is not None:
            self._try(self._wanted)

    def found(self, step: int) -> None:
        """As the committer, mark the state after `step` steps as the best so far, so that its checkpoint is
        kept."""
        self._note_best(step)

    def wanted(self, step: int) -> None:
        """As the committer, bring this state back as the result, because all steps are done."""
        self._wanted = step
        self._try(step)
        if self._wanted is not None:
            self._service.start_task(self._give_up, step, of=self._run)

    def _try(self, step: int) -> None:
        if self.checkpoint is not None and self.checkpoint[1] == step:
            self._wanted = None
            self._bring_back(*self.checkpoint)

    async def _give_up(self, step: int) -> None:
        await trio.sleep(KEEP_SECONDS_MAX)
        committer = self._committer()
        if self._wanted == step and committer is not None:
            self._wanted = None
            self._lacking = (
                f"the state of step {step} validated best but was not stored; the result is the last state"
            )
            committer.take_last()

    def _know(self, best: Best) -> None:
        if best != self.known:
            self.known = best
            self._note_best(self.step)
            if self._keeps:
                self._service.start_task(self._write, of=self._run)

    async def _write(self) -> None:
        """Store the record of the best state."""
        seams = self._service.seams
        async with self._writing:
            data = encode(self.known)
            # A failing disk is reported where the checkpoint itself is stored.
            with trio.CancelScope(shield=True):
                try:
                    await seams.executor.run(partial(seams.storage.write, best_name(self._run.text), data))
                except OSError:
                    return


def _read(service: RunService, run: Run) -> Best:
    data = service.seams.storage.read(best_name(run.text))
    try:
        best: Best = Best() if data is None else decode(data, Best, bytes_max=BEST_RECORD_MAX)
    except RemoteProtocolError:
        return Best()  # damaged: treated as missing
    return best
