"""Frames: signed activations, gradients, inputs and labels on their way between stages.

The signature covers the header, and the header holds the BLAKE3 digest of the payload, so the sender of a
payload can be proved later. A frame comes over a stream that proves its sender. So its signature is checked
only if it is to be shown to others (`check_signed`): most frames never are, and in a small run the check
takes longer than all other work on a frame. The digest is compared with the payload when the payload is
unpacked (`partition.codecs.codec.unpack`, in the stage's process), not on the event loop.

On the wire a Frame is a message, and its data travels separately as a payload of the stream, so that
megabytes are never encoded or decoded. The following copies are made on the way from tensor to tensor:

    the sender's stage     into the memory that it shares with its node
    the sender's node      out of that memory, because the stage may overwrite it; and when encrypting, into
                           the buffer that is written
    the receiver's node    when decrypting, into memory where the data stays until the step is applied; and
                           into the memory that the node shares with its stage
    the receiver's stage   out of that memory, because the stage does not trust the node; and into a tensor
                           that may be written to

Nothing else copies: packing, digesting, signing, queueing and repeated sending work on the same bytes in
place. The node's memory for them is bounded (`node.pipeline.frame_store`); beyond that, one more copy goes to
the disk.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from partition.codecs.codec import SIZES_MAX, Codec, Digest, Payload, Side, TensorHeader, check_length
from partition.model.graph import TENSORS_MAX
from partition.plan.plan import Count, Hash, StepNumber

FRAME_PURPOSE = "frame"
HEADER_BYTES_MAX = 8_192
"""Maximum size of a header. Tensors take most of it: 64 of eight dimensions are about 3 kB."""
PAYLOAD_BYTES_MAX = 48 * 1024 * 1024
"""Maximum size of a payload, below the 64 MiB of one stream payload."""

Direction = Literal["input", "labels", "gradient"]
"""`input` goes to the next stage, `labels` directly to the last stage, `gradient` to the previous stage."""


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """A frame's position in the run, and everything about its payload except the data.

    `stage` is the receiving stage. `step` is the number of steps committed before it, which is also the
    version of the parameters that made it. `attempt` is the attempt of the Open under which it is sent; the
    same payload may be sent again under a later attempt. `train` is False for evaluation, which changes
    nothing.
    """

    plan: Hash
    step: StepNumber
    attempt: Count
    microbatch: Count
    stage: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    direction: Direction
    train: bool
    sizes: Annotated[tuple[Side, ...], msgspec.Meta(max_length=SIZES_MAX)]
    tensors: Annotated[tuple[TensorHeader, ...], msgspec.Meta(max_length=TENSORS_MAX)]
    codec: Codec
    digest: Digest


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    """A signed FrameHeader. The payload's data is sent separately, unencoded."""

    header: Fact


NO_FACT = Fact(b"", b"", b"")
"""The fact of a frame that never needs to be shown to others."""


class OpenedFrame(msgspec.Struct, frozen=True):
    """A received frame whose payload is not unpacked yet. `fact` is the header, with its signature
    unchecked."""

    author: bytes
    header: FrameHeader
    payload: Payload
    fact: Fact = NO_FACT


@dataclass(frozen=True)
class Outgoing:
    """A frame for the driver to send, as the driver handed it in. It must be signed for `plan` and `attempt`.

    Once a new plan is in force it need not be sent any more, because the core asks for it again when that
    plan opens its step.
    """

    frame: object
    attempt: int
    plan: bytes


def make_frame(
    signer: Signer,
    payload: Payload,
    *,
    plan: bytes,
    step: int,
    attempt: int,
    microbatch: int,
    stage: int,
    direction: Direction,
    train: bool,
) -> Frame:
    """Return a frame by this peer. It must be sent together with `payload.data`."""
    header = FrameHeader(
        plan,
        step,
        attempt,
        microbatch,
        stage,
        direction,
        train,
        payload.sizes,
        payload.tensors,
        payload.codec,
        payload.digest,
    )
    return Frame(signer.sign(FRAME_PURPOSE, encode(header)))


def open_frame(sender: PeerId, frame: Frame, data: memoryview) -> OpenedFrame:
    """Check a frame from `sender` that came with `data`. The payload shares the memory of `data`; the
    signature is not checked here. Raises RemoteProtocolError if the frame is invalid."""
    if len(data) > PAYLOAD_BYTES_MAX:
        raise RemoteProtocolError(f"a frame has {len(data)} bytes, at most {PAYLOAD_BYTES_MAX} are allowed")
    header = read_header(frame.header)
    check_length(header.tensors, header.codec, len(data))
    if frame.header.author != sender:
        raise RemoteProtocolError("a frame is signed by a peer that did not send it")
    payload = Payload(header.sizes, header.tensors, header.codec, header.digest, data)
    return OpenedFrame(sender, header, payload, frame.header)


def check_signed(signer: Signer, fact: Fact) -> None:
    """Check that a frame's header was signed by its author. Raises RemoteProtocolError if not."""
    signer.check(FRAME_PURPOSE, fact)


def read_header(fact: Fact) -> FrameHeader:
    """Return the header in a fact; the signature is not checked here. Raises RemoteProtocolError if the
    header is invalid."""
    header: FrameHeader = decode(fact.body, FrameHeader, bytes_max=HEADER_BYTES_MAX)
    return header
