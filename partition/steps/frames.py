"""Frames: activations, gradients, inputs and labels on their way between stages, signed.

The signature is over the header, and the header holds the BLAKE3 digest of the payload, so that
anyone can show later who sent what. Whether the digest fits the payload is checked where the
payload is unpacked (`partition.codec.unpack`, in the stage's process), not on the event loop.
"""

from typing import Annotated, Literal

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from partition.codec import SIZES_MAX, Codec, Digest, Payload, Side, TensorHeader
from partition.model.graph import TENSORS_MAX
from partition.plan.plan import Count, Hash

FRAME_PURPOSE = "frame"
HEADER_BYTES_MAX = 8_192
"""Its tensors are most of it: 64 of eight dimensions are some 3 kB."""
PAYLOAD_BYTES_MAX = 48 * 1024 * 1024
"""Below the 64 MiB of one stream message."""

Direction = Literal["input", "labels", "gradient"]
"""`input` goes down the stages, `labels` straight to the last, `gradient` back up."""


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a frame is: its place in the run, and all of its payload but the data.

    `stage` is the stage it is for; `step` the committed steps before it, which is also the version
    of the parameters that made it. `train` is False for evaluation, which leaves no trace.
    """

    plan: Hash
    step: Count
    microbatch: Count
    stage: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    direction: Direction
    train: bool
    sizes: Annotated[tuple[Side, ...], msgspec.Meta(max_length=SIZES_MAX)]
    tensors: Annotated[tuple[TensorHeader, ...], msgspec.Meta(max_length=TENSORS_MAX)]
    codec: Codec
    digest: Digest


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    """A signed header and the payload's encoded bytes."""

    header: Fact
    data: bytes


class OpenedFrame(msgspec.Struct, frozen=True):
    """A frame whose signature holds; the payload is still to be unpacked."""

    author: bytes
    header: FrameHeader
    payload: Payload


def make_frame(
    signer: Signer,
    payload: Payload,
    *,
    plan: bytes,
    step: int,
    microbatch: int,
    stage: int,
    direction: Direction,
    train: bool,
) -> Frame:
    """A frame by this peer."""
    header = FrameHeader(
        plan,
        step,
        microbatch,
        stage,
        direction,
        train,
        payload.sizes,
        payload.tensors,
        payload.codec,
        payload.digest,
    )
    return Frame(signer.sign(FRAME_PURPOSE, encode(header)), payload.data)


def open_frame(signer: Signer, sender: PeerId, frame: Frame) -> OpenedFrame:
    """Check a frame that came from `sender`; else RemoteProtocolError."""
    if len(frame.data) > PAYLOAD_BYTES_MAX:
        raise RemoteProtocolError(f"a frame of {len(frame.data)} bytes, at most {PAYLOAD_BYTES_MAX}")
    header: FrameHeader = decode(frame.header.body, FrameHeader, bytes_max=HEADER_BYTES_MAX)
    if signer.check(FRAME_PURPOSE, frame.header) != sender:
        raise RemoteProtocolError("a frame signed by another peer than the one that sent it")
    payload = Payload(header.sizes, header.tensors, header.codec, header.digest, frame.data)
    return OpenedFrame(sender, header, payload)
