"""Frames: activations, gradients, inputs and labels on their way between stages, signed.

The signature is over the header, and the header holds the BLAKE3 digest of the payload, so that the sender of
a payload can be proved later. A frame comes over a stream that proves its sender, so its signature is checked
only where it is to be shown to others (`check_signed`): most never are, and in a small run the check takes
longer than all else about a frame. Whether the digest fits the payload is checked where the payload is
unpacked (`partition.codecs.codec.unpack`, in the stage's process), not on the event loop.

On the wire a Frame is a message, and the payload's data goes beside it as a payload of the stream, so that
megabytes are never encoded or decoded. These copies are made on the way from tensor to tensor:

    the sender's stage     into the memory that it shares with its node
    the sender's node      out of it, for the stage may write there again; encrypting, into what is written
    the receiver's node    decrypting, into memory where it stays until the step is applied; into what it
                           shares with its stage
    the receiver's stage   out of it, for a node may be wrong too; into a tensor that may be written to

Nothing else does: packing, digesting, signing, queueing and sending again work on the same bytes, wherever
they lie. The node's memory for them is bounded (`node.pipeline.frame_store`); beyond, one more copy, to the
disk.
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
"""Tensors take most of it: 64 of eight dimensions are some 3 kB."""
PAYLOAD_BYTES_MAX = 48 * 1024 * 1024
"""Below the 64 MiB of one stream payload."""

Direction = Literal["input", "labels", "gradient"]
"""`input` goes down the stages, `labels` straight to the last, `gradient` back up."""


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """A frame's place in the run, and all of its payload but the data.

    `stage` is the stage it is for; `step` the committed steps before it, which is also the version
    of the parameters that made it. `attempt` is that of the Open it is sent under; the same payload goes out
    under a later one. `train` is False for evaluation, which leaves no trace.
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
    """A signed FrameHeader. The payload's data goes beside it, as it is."""

    header: Fact


NO_FACT = Fact(b"", b"", b"")
"""The fact of a frame that nobody has to be shown."""


class OpenedFrame(msgspec.Struct, frozen=True):
    """A received frame; the payload is still to be unpacked. `fact` is the header, its signature
    unchecked."""

    author: bytes
    header: FrameHeader
    payload: Payload
    fact: Fact = NO_FACT


@dataclass(frozen=True)
class Outgoing:
    """A frame for the shell to send, as the shell handed it in, to be signed for `plan` and `attempt`.

    Once another plan is in force it need not be sent any more: the core asks again when that plan opens.
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
    """Make a frame by this peer, to be sent with `payload.data` beside it."""
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
    """Check a frame that came from `sender` with `data` beside it; else raise RemoteProtocolError. The
    payload shares the memory of `data`. Its signature is still to be checked."""
    if len(data) > PAYLOAD_BYTES_MAX:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes, at most {PAYLOAD_BYTES_MAX}")
    header = read_header(frame.header)
    check_length(header.tensors, header.codec, len(data))
    if frame.header.author != sender:
        raise RemoteProtocolError("a frame signed by another peer than the one that sent it")
    payload = Payload(header.sizes, header.tensors, header.codec, header.digest, data)
    return OpenedFrame(sender, header, payload, frame.header)


def check_signed(signer: Signer, fact: Fact) -> None:
    """Raise RemoteProtocolError unless a frame's header was signed by its author, as anybody can see."""
    signer.check(FRAME_PURPOSE, fact)


def read_header(fact: Fact) -> FrameHeader:
    """Return the header in a fact, whose signature is still to be checked; else raise RemoteProtocolError."""
    header: FrameHeader = decode(fact.body, FrameHeader, bytes_max=HEADER_BYTES_MAX)
    return header
