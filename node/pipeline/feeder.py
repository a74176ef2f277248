"""The shell around a `partition.steps.feeder.Feeder`: it turns sample numbers into signed frames.

The frames of a step are kept until the next step opens, so that a replay sends the same bytes. While a step
is computed, the data of the next one is read and packed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.content.datasets import Array, Batches
from node.content.sharded import DataMissing
from node.errors import Unreachable
from node.protocols.manifest import Run
from node.seams import Seams
from partition.codecs.codec import Payload, pack, typed
from partition.plan.assignment import feeder_of
from partition.plan.plan import Plan
from partition.steps import feeder as core
from partition.steps.frames import Direction, FrameHeader, make_frame
from partition.steps.messages import EVALUATIONS_IN_FLIGHT_MAX, Open

AHEAD_BYTES_MAX = 64 << 20
"""Maximum size of frames that are made ahead for the next step, because this node may also hold a stage."""
TRIP_BYTES = 1 << 20
"""Approximate amount of frames made in one call of a thread, which takes some milliseconds. A call for each
small micro-batch took longer than making it."""
READS_MAX = 3
"""Maximum number of times that one micro-batch's samples are read."""
COMPARE_SECONDS_MAX = 30.0
"""How long to wait for samples of another trainer, which are needed to compare its frame."""
Send = Callable[..., None]
"""Sends a message like `node.runs.context.RunService.send`."""


class FeederShell:
    """Feeds this trainer's share of one run under one plan."""

    def __init__(
        self,
        signer: Signer,
        run: Run,
        plan: Plan,
        batches: Batches,
        seams: Seams,
        send: Send,
        *,
        ahead_bytes_max: int = AHEAD_BYTES_MAX,
    ) -> None:
        self.core: core.Feeder = seams.core(core.Feeder, signer.peer, plan)
        self._signer = signer
        self._run = run
        self._plan = plan
        self.batches = batches
        self._executor = seams.executor
        self._send = send
        self._payloads: dict[tuple[int, bool], tuple[Payload, Payload]] = {}
        self._ahead: deque[int] = deque()
        self._ahead_of = -1
        self._ahead_bytes = 0
        self._ahead_bytes_max = ahead_bytes_max
        self._pair_bytes = TRIP_BYTES
        self._work: deque[Any] = deque()
        self._more = trio.Event()

    async def run(self) -> None:
        """Feed until cancelled."""
        while True:
            while self._work:
                match self._work.popleft():
                    case core.FeedReady() as event:
                        await self._feed(event)
                    case core.FramesDone() as event:
                        self._forget(event)
            if self._ahead:
                await self._prepare()
                continue
            self._more = trio.Event()
            if not self._work:
                await self._more.wait()

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """Handle a committer's message that opens micro-batches. Raises RemoteProtocolError."""
        if isinstance(message, Open) and not message.train:
            end = message.first + len(message.stages[0].owners)
            if end > self._run.manifest.validations + self._run.manifest.evaluations:
                raise RemoteProtocolError("an Open message names held-out micro-batches that do not exist")
        self.core.receive(now, sender, message)
        self._take_events()
        if isinstance(message, Open) and message.train and message.plan == self.core.plan_hash:
            self._look_ahead(message.step)

    def reconnected(self, peer: PeerId) -> None:
        """Resend what a broken link to `peer` may have lost."""
        self.core.reconnected(peer)
        self._take_events()

    def _take_events(self) -> None:
        self._work.extend(self.core.events)
        self.core.events.clear()
        self._more.set()

    def _forget(self, event: core.FramesDone) -> None:
        first = (event.step + 1) * self._plan.microbatches
        self._payloads = {key: row for key, row in self._payloads.items() if not key[1] or key[0] >= first}

    def _look_ahead(self, step: int) -> None:
        """Plan the micro-batches that this trainer has to feed in the step after `step`."""
        if step <= self._ahead_of:
            return
        self._ahead_of, self._ahead_bytes = step, 0
        count = self._plan.microbatches if step + 1 < self._run.manifest.steps else 0
        first = (step + 1) * self._plan.microbatches
        mine = (n for n in range(first, first + count) if feeder_of(self._plan, True, n) == self.core.me)
        self._ahead = deque(mine)

    async def _prepare(self) -> None:
        """Make frames of the next micro-batches before they are requested."""
        if self._ahead_bytes >= self._ahead_bytes_max:
            self._ahead.clear()
            return
        count = min(len(self._ahead), max(1, TRIP_BYTES // self._pair_bytes))
        numbers = [self._ahead.popleft() for _ in range(count)]
        wanted = [number for number in numbers if (number, True) not in self._payloads]
        for number, pair in await self._executor.run(lambda: self._make_those_here(wanted)):
            self._payloads[number, True] = pair
            self._pair_bytes = max(1, sum(len(payload.data) for payload in pair))
            self._ahead_bytes += self._pair_bytes

    def _make_those_here(self, numbers: Sequence[int]) -> list[tuple[int, tuple[Payload, Payload]]]:
        """Make training frames from samples on this node; missing samples are waited for when a frame is
        requested."""
        made = []
        for number in numbers:
            with suppress(DataMissing):
                made.append((number, self._make(number, train=True)))
        return made

    async def _feed(self, feed: core.FeedReady) -> None:
        key = (feed.microbatch, feed.train)
        if not feed.train:
            # The core never requests a micro-batch that lies this far before another one.
            self._payloads.pop((feed.microbatch - EVALUATIONS_IN_FLIGHT_MAX, False), None)
        if key not in self._payloads:
            self._payloads[key] = await self._make_ready(feed.microbatch, train=feed.train)
        inputs, labels = self._payloads[key]
        if feed.input_to is not None:
            self._send_frame(feed.input_to, feed, inputs, 0, "input")
        if feed.labels_to is not None:
            self._send_frame(feed.labels_to, feed, labels, len(self._plan.stages) - 1, "labels")

    async def _make_ready(self, microbatch: int, *, train: bool) -> tuple[Payload, Payload]:
        """Wait for the samples, and make the frames. Raises Unreachable if no peer has the samples."""
        for attempt in range(READS_MAX):
            await self.batches.ready(microbatch, train=train, again=attempt > 0)
            try:
                return await self._executor.run(lambda: self._make(microbatch, train=train))
            except DataMissing:
                continue  # damaged pieces are fetched again
        raise Unreachable("unknown", "the run's data does not stay on this node's disk")

    def _make(self, microbatch: int, *, train: bool) -> tuple[Payload, Payload]:
        source = self.batches.train if train else self.batches.held_out
        inputs, labels = source(microbatch)
        samples = len(inputs[0])
        return self._pack(inputs, samples), self._pack(labels, samples)

    async def made(self, header: FrameHeader) -> tuple[Any, ...] | None:
        """Return the frame that this node would have sent in place of a trainer's, as (sizes, tensors, codec,
        digest); None if it cannot be made."""
        if header.direction == "gradient" or (header.direction == "input" and header.stage):
            return None
        if not self.batches.rows(header.microbatch, train=header.train):
            return None
        made: tuple[Payload, Payload] | None = None
        with trio.move_on_after(COMPARE_SECONDS_MAX), suppress(Unreachable):
            made = await self._make_ready(header.microbatch, train=header.train)
        if made is None:
            return None
        inputs, labels = made
        payload = labels if header.direction == "labels" else inputs
        return payload.sizes, payload.tensors, payload.codec, payload.digest

    def _pack(self, arrays: Sequence[Array], samples: int) -> Payload:
        manifest = self._run.manifest
        return pack([typed(array) for array in arrays], "zstd", (samples, *manifest.sizes))

    def _send_frame(
        self, peer: PeerId, feed: core.FeedReady, payload: Payload, stage: int, direction: Direction
    ) -> None:
        frame = make_frame(
            self._signer,
            payload,
            plan=self.core.plan_hash,
            step=feed.step,
            microbatch=feed.microbatch,
            attempt=feed.attempt,
            stage=stage,
            direction=direction,
            train=feed.train,
        )
        self._send(peer, frame, payload.data)
