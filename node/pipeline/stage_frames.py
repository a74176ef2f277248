"""The frames of one stage: received frames are kept; outgoing frames are packed, signed and sent.

The core keeps outgoing frames as drafts, since a frame may be sent again under a different plan or attempt.
The bytes are in a `node.pipeline.frame_store`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from node.errors import StageFailed
from node.pipeline.codec_choice import LinkCodecs
from node.pipeline.frame_store import FrameStore
from node.pipeline.work_meter import WorkMeter
from node.seams import Seams
from partition.codecs.codec import Codec, Payload
from partition.steps import replica as core
from partition.steps.frame_archive import FrameArchive
from partition.steps.frames import (
    PAYLOAD_BYTES_MAX,
    Direction,
    FrameHeader,
    OpenedFrame,
    Outgoing,
    make_frame,
    read_header,
)


@dataclass(frozen=True)
class FrameDraft:
    """A frame without the plan and attempt that it is signed for, since it may be sent again under a
    different plan."""

    payload: Payload
    step: int
    microbatch: int
    stage: int
    direction: Direction
    train: bool


class StageFrames:
    """The frames of one replica's core."""

    def __init__(
        self,
        signer: Signer,
        core: core.Replica,
        seams: Seams,
        send: Callable[..., None],
        codecs: LinkCodecs,
        archive: FrameArchive,
        meter: WorkMeter,
        bytes_max: int,
    ) -> None:
        """`archive` keeps training frames for audits, and `meter` counts what is sent. At most `bytes_max`
        are kept in memory."""
        self._signer = signer
        self._core = core
        self._clock = seams.clock
        self._send = send
        self._codecs = codecs
        self._archive = archive
        self._meter = meter
        self._store = seams.part(FrameStore)(seams.storage, seams.executor, bytes_max)

    async def keep(self, frame: OpenedFrame) -> OpenedFrame:
        """Return a received frame in memory that it may stay in until its step is applied. Raises StageFailed
        if there is no room."""
        kept = replace(frame, payload=await self._store.keep(frame.payload))
        self._note(kept.header, kept.fact, kept.payload)
        return kept

    def codec_towards(self, towards: int) -> Codec:
        """Return the codec of frames for the next stage (`towards` +1) or the previous one (-1)."""
        stages, other = self._core.plan.stages, self._core.stage + towards
        receivers = [PeerId(peer) for peer in stages[other].replicas] if 0 <= other < len(stages) else []
        return self._codecs.codec(receivers, is_gradient=towards < 0)

    async def draft(
        self,
        work: core.ForwardReady | core.BackwardReady,
        payload: Payload | None,
        towards: int,
        direction: Direction,
        *,
        train: bool,
    ) -> FrameDraft | None:
        """Return the frame for a result sent to the next (`towards` +1) or previous (-1) stage; None if there
        is no result. Raises StageFailed if the frame is too long or there is no room."""
        if payload is None:
            return None
        if len(payload.data) > PAYLOAD_BYTES_MAX:
            raise StageFailed(
                f"a frame has {len(payload.data)} bytes; at most {PAYLOAD_BYTES_MAX} can be sent"
            )
        await self._codecs.learn(payload, is_gradient=direction == "gradient")
        payload = await self._store.keep(payload)
        return FrameDraft(payload, work.step, work.microbatch, self._core.stage + towards, direction, train)

    def send(self, peer: PeerId, outgoing: Outgoing) -> None:
        """Sign a frame for the plan and attempt in force, and send it."""
        draft = outgoing.frame
        assert isinstance(draft, FrameDraft)
        key = (draft.microbatch, draft.direction) if draft.train else None
        self._meter.sent(len(draft.payload.data), key, is_gradient=draft.direction == "gradient")
        frame = make_frame(
            self._signer,
            draft.payload,
            plan=self._core.plan_hash,
            step=draft.step,
            microbatch=draft.microbatch,
            attempt=outgoing.attempt,
            stage=draft.stage,
            direction=draft.direction,
            train=draft.train,
        )
        self._note(read_header(frame.header), frame.header, draft.payload)
        self._send(peer, frame, draft.payload.data)

    def _note(self, header: FrameHeader, fact: Fact, payload: Payload) -> None:
        """Keep a training frame for later audits."""
        if header.train:
            self._archive.note(self._clock.monotonic(), self._core.plan.run, header, fact, payload)
