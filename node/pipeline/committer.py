"""The shell around the `partition.steps.committer.Committer` of one plan: time, events for people, and
messages.

A lost member leads to a new plan, which has a new committer object.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol

import trio
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from crypto.noise import Data
from node.events import ReplicaDropped, RunEvaluated, RunResumed, StepCommitted
from node.protocols.manifest import CORRECT, Run
from node.protocols.notices import RunEvent
from node.seams import Seams
from node.waker import Waker
from partition.plan.plan import Plan
from partition.run.failures import Failures
from partition.run.settings import RunSettings
from partition.run.verdicts import PeersLost, TrainingOver, Verdicts
from partition.steps import committer as core
from partition.steps.frames import FrameHeader, check_signed, read_header
from partition.steps.messages import BadFrame, Counted, Open, Progress, Save, Work
from partition.steps.routes import ATTEMPTS_PER_PLAN
from partition.steps.save_interval import SaveInterval
from partition.steps.validation import Series
from partition.steps.witness import Witness

VOUCHES_MAX = 64
"""Maximum number of queued frames to compare with this node's own data, one at a time. Further frames are
judged without the comparison."""


class StepReceipts(Protocol):
    """The part of `node.runs.receipts.Receipts` that this file uses."""

    def counted(self, run: Run, plan: Plan, microbatches: Mapping[PeerId, int]) -> None: ...


class CommitterService(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    signer: Signer
    settings: RunSettings
    refuse: Callable[[PeerId, RemoteProtocolError], None]

    @property
    def receipts(self) -> StepReceipts: ...
    def send(self, peer: PeerId, message: Any, *payload: Data) -> None: ...


class RunBestState(Protocol):
    """The part of `node.runs.best.BestState` that this file uses."""

    @property
    def series(self) -> Series | None: ...
    def found(self, step: int) -> None: ...
    def wanted(self, step: int) -> None: ...


def _make_core(
    service: CommitterService, run: Run, plan: Plan, saved: int, series: Series | None
) -> core.Committer:
    manifest = run.manifest
    made: core.Committer = service.seams.core(
        core.Committer,
        service.signer.peer,
        plan,
        steps=manifest.steps,
        evaluations=manifest.evaluations,
        metrics=len(manifest.metrics),
        save_every=manifest.save_every,
        saved=saved,
        skips_diverged=manifest.on_divergence == "continue",
        validations=manifest.validations,
        validation=manifest.validation,
        series=series,
    )
    return made


class CommitterShell:
    """Commits one run's steps from this node. `run` returns None when training is done, or the reason why it
    failed."""

    def __init__(
        self,
        service: CommitterService,
        run: Run,
        plan: Plan,
        publish: Callable[[RunEvent], None],
        *,
        absent: Callable[[PeerId, str], None],
        paused: Callable[[int], None],
        stalled_since: float,
        saved: int,
        failures: Failures,
        lost_steps: int = 0,
        stepped: Callable[[int, float, Mapping[PeerId, int], Mapping[PeerId, int]], None],
        best: RunBestState,
    ) -> None:
        """`absent` is called with the peers that the next plan must exclude, `paused` when no step is open.
        `stepped` is called with a step's seconds, and with each replica's nanoseconds per micro-batch, as
        stated by the replica and as measured by its neighbours. `failures` are those of earlier plans.
        Nothing was computed since `stalled_since`, `saved` is the step of the newest checkpoint, and
        `lost_steps` must be computed again. `best` is this member's record of validations."""
        self.core = _make_core(service, run, plan, saved, best.series)
        self._best = best
        self._signer = service.signer
        self._run = run
        self._plan = plan
        self._clock = clock = service.seams.clock
        self._send = service.send
        self._publish = publish
        self._absent = absent
        self._paused = paused
        self._stepped = stepped
        self._receipts = service.receipts
        self._witness = Witness(plan)
        self._stalled_since = stalled_since
        self._verdicts = Verdicts(plan, failures)
        self._open_seconds_max = service.settings.start_seconds_max
        self._refuse = service.refuse
        self._to_vouch: deque[tuple[PeerId, BadFrame]] = deque()
        self.made: Callable[[FrameHeader], Awaitable[tuple[Any, ...] | None]] | None = None
        """Returns the corresponding frame made from this node's own data, for comparison with a trainer's
        frame."""
        self.refused: tuple[int, bool] | None = None
        """The micro-batch whose data ended the run, and whether it is a training micro-batch."""
        self._lost_steps = lost_steps
        self.saving = SaveInterval(run.manifest.save_every)
        self._moved: Counter[PeerId] = Counter()
        self._events: deque[Any] = deque()
        self._waker = Waker(clock, lambda: self.core.deadline)
        self._step_started = clock.monotonic()

    async def run(self) -> str | None:
        """Train and evaluate; return why it failed, None if it did not."""
        self._pass_on(self.core.start(self._clock.monotonic()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_up)
            reason = await self._follow()
            nursery.cancel_scope.cancel()
        return reason

    async def _follow(self) -> str | None:
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, core.TrainingEvaluated):
                    self._evaluated(event)
                elif isinstance(event, core.TrainingFailed):
                    self.refused = event.microbatch
                verdict = self._verdicts.judge(event)
                if isinstance(verdict, TrainingOver):
                    return verdict.reason
                if verdict is not None:
                    self._lost(verdict)
                self._note(event)
            if self._to_vouch:
                await self._vouch(*self._to_vouch.popleft())
                continue
            if (sends := await self._waker.wake_when_due(self.core)) is not None:
                self._pass_on(sends)

    async def _vouch(self, sender: PeerId, message: BadFrame) -> None:
        """Check whether the unusable value reported in a frame is also in this node's own data."""
        try:
            header = read_header(message.frame)
            if self.made is not None and message.frame.author != self._signer.peer:
                payload = await self.made(header)
                if payload == (header.sizes, header.tensors, header.codec, header.digest):
                    self.core.vouched.add(header.digest)
            self._pass_on(self.core.receive(self._clock.monotonic(), sender, message))
        except RemoteProtocolError as error:
            self._refuse(sender, error)

    def _note(self, event: Any) -> None:
        match event:
            case core.StepApplied():
                self._step_applied(event)
            case core.MicrobatchesMoved():
                self._moved[event.peer] += event.count
            case core.Resumed():
                self._resumed(event)
            case core.StepsPaused():
                self._paused(event.step)
            case core.Validated():
                self._validated(event)
            case core.BestWanted():
                self._best.wanted(event.step)

    def _lost(self, lost: PeersLost) -> None:
        for peer in lost.peers:
            self._absent(peer, lost.reason)

    async def _give_up(self) -> None:
        """Have the next plan exclude replicas that have not opened their stage in time."""
        await trio.sleep(self._open_seconds_max)
        self._lost(self._verdicts.late(self.core.phase, self._open_seconds_max))

    # Messages of other members

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """Handle a step message of a replica. Raises RemoteProtocolError."""
        self._verdicts.heard(sender, message)
        if isinstance(message, Progress | Counted):
            self._witness.heard(now, sender, message)
        elif isinstance(message, BadFrame):
            check_signed(self._signer, message.frame)
            if message.of_values and len(self._to_vouch) < VOUCHES_MAX:
                self._to_vouch.append((sender, message))
                self._waker.stir()
                return
        self._pass_on(self.core.receive(now, sender, message))

    def suspect(self, peer: PeerId) -> None:
        """Reassign the unfinished work of a member that may be dead."""
        self._pass_on(self.core.suspect(self._clock.monotonic(), peer))

    @property
    def paused_at(self) -> int | None:
        """The number of steps at which the run is paused with no step open; None if it is not paused."""
        return self.core.step if self.core.phase == "paused" else None

    def revise(self, steps: int, rate: int) -> None:
        """From the currently open step on: end after `steps`, and multiply the learning rate by `rate`
        millionths."""
        self.core.steps, self.core.losses.rate = steps, rate

    def take_last(self) -> None:
        """End with the current state, because the best state cannot be brought back."""
        self._pass_on(self.core.take_last(self._clock.monotonic()))

    def pause(self) -> None:
        """Open no further step after the current one."""
        self._pass_on(self.core.pause(self._clock.monotonic()))

    def unpause(self) -> None:
        """Open steps again."""
        self._pass_on(self.core.unpause(self._clock.monotonic()))

    def checkpoint_took(self, step: int, seconds: float) -> None:
        """Record a stage's time for the checkpoint of a step, which decides when the next one follows."""
        self.saving.checkpoint_took(step, seconds)
        self.core.saves.every = self.saving.steps

    def checkpoint_ended(self) -> None:
        """Record that copying has ended, so that its effect on the steps is known."""
        self.saving.ended()
        self.core.saves.every = self.saving.steps

    def save(self) -> None:
        """Have every stage copied after the current step."""
        self._pass_on(self.core.save(self._clock.monotonic()))

    def reconnected(self, peer: PeerId) -> None:
        """Resend what a broken link to `peer` may have lost."""
        self._pass_on(self.core.reconnected(peer))

    def _pass_on(self, sends: list[tuple[PeerId, object]]) -> None:
        for event in self.core.events:
            if isinstance(event, core.Validated) and event.is_kept:
                self._best.found(event.step)
        self._events.extend(self.core.events)
        self.core.events.clear()
        self._waker.stir()
        for peer, message in sends:
            if isinstance(message, Open):
                self._witness.opened(self._clock.monotonic(), message)
            self._send(peer, message)
        if any(isinstance(message, Save) for _, message in sends):
            self.saving.began()

    def dropped(self, after: Plan) -> list[ReplicaDropped]:
        """Return the peers that the plan `after` has lost, with the number of micro-batches of the open step
        that others compute for them."""
        return [
            ReplicaDropped(
                at=self._clock.wall(),
                run=self._run.text,
                step=self.core.step,
                stage=number,
                peer=PeerId(peer),
                microbatches_replayed=self._moved[PeerId(peer)] + self.core.open_count(PeerId(peer)),
            )
            for number, old in enumerate(self._plan.stages)
            for peer in old.replicas
            if after.stage_of(PeerId(peer)) is None
        ]

    # Events for people

    def _step_applied(self, event: core.StepApplied) -> None:
        now = self._clock.monotonic()
        seconds = now - self._step_started
        rows, manifest = event.work, self._run.manifest
        busy = [
            [work for peer, work in zip(stage.replicas, row, strict=True) if peer in stage.computing]
            for stage, row in zip(self._plan.stages, rows, strict=True)
        ]
        is_known = all(work.busy_nanoseconds for row in busy for work in row)
        self._publish(
            StepCommitted(
                at=self._clock.wall(),
                run=self._run.text,
                step=event.step,
                loss=event.loss,
                samples=0 if event.diverged else manifest.microbatches * manifest.microbatch,
                counted=event.samples,
                seconds=seconds,
                replicas=event.replicas,
                utilisation=tuple(_utilisation(row, seconds) for row in busy) if is_known else (),
                bubble=1 - _utilisation([work for row in busy for work in row], seconds) if is_known else 0.0,
                sent_bytes=tuple(sum(work.sent_bytes for work in row) for row in rows),
                returned_bytes=tuple(sum(work.returned_bytes for work in row) for row in rows),
                replayed=sum(work.replayed for row in rows for work in row),
                rounding=_rounding([work for row in rows for work in row]),
                height=event.attempt // ATTEMPTS_PER_PLAN,
                diverged=event.diverged,
            )
        )
        self._step_started = now
        self._moved.clear()
        pace, stages = self.core.pace, self._plan.stages
        peers = [PeerId(peer) for stage in stages for peer in stage.replicas]
        said = {peer: pace.nanoseconds(peer) for peer in peers}
        self._receipts.counted(self._run, self._plan, pace.take_counted())
        self._stepped(event.step, seconds, said, self._witness.nanoseconds())
        self.saving.step_took(seconds)
        self.core.saves.every = self.saving.steps

    def _resumed(self, event: core.Resumed) -> None:
        now = self._clock.monotonic()
        self._step_started = now
        if self._plan.height and not self._plan.is_final:
            self._publish(
                RunResumed(
                    at=self._clock.wall(),
                    run=self._run.text,
                    height=self._plan.height,
                    step=event.step,
                    replayed=event.replayed,
                    lost_steps=self._lost_steps,
                    filled=event.filled,
                    seconds=now - self._stalled_since,
                )
            )

    def _evaluated(self, event: core.TrainingEvaluated) -> None:
        self._publish(self._told(event))

    def _validated(self, event: core.Validated) -> None:
        series = event.series
        named = {"best_step": series.best_step, "best": series.best, "since": series.since}
        self._publish(replace(self._told(event.sums), step=event.step, **named))

    def _told(self, event: core.TrainingEvaluated) -> RunEvaluated:
        samples = max(1, event.samples)
        named = dict(zip(self._run.manifest.metrics, event.metrics, strict=True))
        return RunEvaluated(
            at=self._clock.wall(),
            run=self._run.text,
            accuracy=named[CORRECT] / samples if CORRECT in named else None,
            loss=event.loss / samples,
            samples=event.samples,
            metrics=event.metrics,
        )


def _rounding(rows: Sequence[Work]) -> tuple[float, float]:
    """Return the relative errors of activations and of gradients: the norm of the error divided by the
    norm."""
    found = []
    for direction in range(2):
        pairs = [work.rounding[direction] for work in rows if len(work.rounding) > direction]
        error, norm = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        # A replica may state any number, and the root of a negative one would be complex.
        ratio = error / norm if error >= 0 and norm > 0 else 0.0
        found.append(ratio**0.5 if isfinite(ratio) else 0.0)
    return found[0], found[1]


def _utilisation(row: "list[Work] | tuple[Work, ...]", seconds: float) -> float:
    """Return the share of `seconds` in which the replicas of `row` computed, on average."""
    busy = sum(work.busy_nanoseconds for work in row) / 1e9
    return min(1.0, busy / max(1e-9, seconds * len(row)))
