"""The shell around a `partition.steps.trainer.Trainer`: it turns sample numbers into signed frames.

Frames of a step are kept until the step is applied, so that a replay sends the same bytes.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from crypto.facts import Signer
from crypto.identity import PeerId
from node.events import ReplicaDropped, RunEvaluated, StepCommitted
from node.runs.data import Array, Batches
from node.runs.manifest import Run
from node.seams import Clock, Executor
from partition.codec import Payload, pack, typed
from partition.plan.plan import Plan
from partition.steps import trainer as core
from partition.steps.frames import Direction, Frame, make_frame
from partition.steps.messages import EVALUATIONS_IN_FLIGHT_MAX

CORRECT = "correct"
"""The metric that counts right answers: over the samples it is the accuracy."""

Send = Callable[[PeerId, Any], None]
RunEvent = StepCommitted | ReplicaDropped | RunEvaluated


class TrainerShell:
    """Feeds one run from this node. `run` returns None when trained, or why it failed."""

    def __init__(
        self,
        signer: Signer,
        run: Run,
        plan: Plan,
        batches: Batches,
        executor: Executor,
        clock: Clock,
        send: Send,
        publish: Callable[[RunEvent], None],
    ) -> None:
        manifest = run.manifest
        self.core = core.Trainer(
            signer.peer,
            plan,
            steps=manifest.steps,
            evaluations=manifest.evaluations,
            metrics=len(manifest.metrics),
        )
        self._signer = signer
        self._run = run
        self._plan = plan
        self._batches = batches
        self._executor = executor
        self._clock = clock
        self._send = send
        self._publish = publish
        self._frames: dict[tuple[int, bool], tuple[Frame, Frame]] = {}
        self._work: deque[Any] = deque()
        self._more = trio.Event()
        self._step_started = clock.monotonic()

    async def run(self) -> str | None:
        """Train and evaluate. Returns why it failed, None if it did not."""
        self._pass_on(self.core.start(self._clock.monotonic()))
        while True:
            while self._work:
                event = self._work.popleft()
                match event:
                    case core.FeedReady():
                        await self._feed(event)
                    case core.StepApplied():
                        self._step_applied(event)
                    case core.ReplicaLost():
                        self._replica_lost(event)
                    case core.TrainingEvaluated():
                        self._evaluated(event)
                        return None
                    case core.TrainingFailed():
                        return event.reason
            self._more = trio.Event()
            if not self._work:
                await self._more.wait()

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """A step message of a replica. Raises RemoteProtocolError."""
        self._pass_on(self.core.receive(now, sender, message))

    def drop(self, peer: PeerId) -> None:
        """A member was declared dead or has left."""
        self._pass_on(self.core.drop(self._clock.monotonic(), peer))

    def reconnected(self, peer: PeerId) -> None:
        """A link to `peer` was opened anew: send again what it may have lost."""
        self._pass_on(self.core.reconnected(peer))

    def _pass_on(self, sends: list[tuple[PeerId, object]]) -> None:
        self._work.extend(self.core.events)
        self.core.events.clear()
        self._more.set()
        for peer, message in sends:
            self._send(peer, message)

    async def _feed(self, feed: core.FeedReady) -> None:
        if feed.train and feed.step != self.core.step:
            return  # the step was finished while this waited in the queue
        key = (feed.microbatch, feed.train)
        if not feed.train:
            # The core never feeds so far past one it still waits for.
            self._frames.pop((feed.microbatch - EVALUATIONS_IN_FLIGHT_MAX, False), None)
        if key not in self._frames:
            self._frames[key] = await self._executor.run(lambda: self._make_frames(feed))
        inputs, labels = self._frames[key]
        if feed.input_to is not None:
            self._send(feed.input_to, inputs)
        if feed.labels_to is not None:
            self._send(feed.labels_to, labels)

    def _make_frames(self, feed: core.FeedReady) -> tuple[Frame, Frame]:
        source = self._batches.train if feed.train else self._batches.test
        inputs, labels = source(feed.microbatch)
        last = len(self._plan.stages) - 1
        return (
            self._frame(feed, self._pack(inputs), 0, "input"),
            self._frame(feed, self._pack(labels), last, "labels"),
        )

    def _pack(self, array: Array) -> Payload:
        manifest = self._run.manifest
        return pack([typed(array)], "zstd", (len(array), *manifest.sizes))

    def _frame(self, feed: core.FeedReady, payload: Payload, stage: int, direction: Direction) -> Frame:
        return make_frame(
            self._signer,
            payload,
            plan=self.core.plan_hash,
            step=feed.step,
            microbatch=feed.microbatch,
            stage=stage,
            direction=direction,
            train=feed.train,
        )

    def _step_applied(self, event: core.StepApplied) -> None:
        now = self._clock.monotonic()
        self._frames.clear()
        self._publish(
            StepCommitted(
                at=self._clock.wall(),
                run=self._run.text,
                step=event.step,
                loss=event.loss,
                samples=event.samples,
                seconds=now - self._step_started,
                replicas=event.replicas,
            )
        )
        self._step_started = now

    def _replica_lost(self, event: core.ReplicaLost) -> None:
        self._publish(
            ReplicaDropped(
                at=self._clock.wall(),
                run=self._run.text,
                step=event.step,
                stage=event.stage,
                peer=event.peer,
                microbatches_replayed=event.replayed,
            )
        )

    def _evaluated(self, event: core.TrainingEvaluated) -> None:
        samples = max(1, event.samples)
        named = dict(zip(self._run.manifest.metrics, event.metrics, strict=True))
        self._publish(
            RunEvaluated(
                at=self._clock.wall(),
                run=self._run.text,
                accuracy=named[CORRECT] / samples if CORRECT in named else None,
                loss=event.loss / samples,
                samples=event.samples,
                metrics=event.metrics,
            )
        )
