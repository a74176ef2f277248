"""`/peerloom/frames/1`: the messages about signed frames of committed steps."""

from typing import Annotated

import msgspec

from crypto.facts import Fact
from partition.plan.plan import Count, Hash, Peer, StepNumber
from partition.steps.frames import Direction

FRAMES_PROTOCOL = "/peerloom/frames/1"
ROWS_MAX = 256
QUESTION_BYTES_MAX = 512
ANSWER_BYTES_MAX = 32 * 1024

Stage = Annotated[int, msgspec.Meta(ge=0, lt=64)]


class WhichFrames(msgspec.Struct, frozen=True, tag="which"):
    """A question: which frames of this step of a run does the recipient have? Answered by FramesHere."""

    run: Hash
    step: StepNumber


class FrameRow(msgspec.Struct, frozen=True, array_like=True):
    """A frame that is kept; `stage` is its destination."""

    stage: Stage
    direction: Direction
    microbatch: Count
    author: Peer


class ShowFrame(msgspec.Struct, frozen=True, tag="show"):
    """A request to send this frame. Answered by FrameShown, followed by the data of the frame's payload."""

    run: Hash
    step: StepNumber
    row: FrameRow


class FramesHere(msgspec.Struct, frozen=True, tag="here"):
    """The first of the frames that are kept; empty for a peer that is not a member of the run."""

    rows: Annotated[tuple[FrameRow, ...], msgspec.Meta(max_length=ROWS_MAX)] = ()


class FrameShown(msgspec.Struct, frozen=True, tag="shown"):
    """The signed header. If not `has_data`, the payload is no longer kept."""

    header: Fact | None = None
    has_data: bool = False


Question = WhichFrames | ShowFrame
Answer = FramesHere | FrameShown
