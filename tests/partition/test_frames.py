"""Frames are signed over the header, which holds the digest of the payload."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import IdentitySigner
from crypto.identity import Identity
from partition.codecs.codec import (
    DIMENSIONS_MAX,
    SIDE_MAX,
    SIZES_MAX,
    Codec,
    Payload,
    TensorHeader,
    pack,
    typed,
    unpack,
)
from partition.model.graph import TENSORS_MAX
from partition.plan.plan import STEPS_MAX
from partition.steps.frames import (
    FRAME_PURPOSE,
    HEADER_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    Frame,
    FrameHeader,
    OpenedFrame,
    check_signed,
    make_frame,
    open_frame,
)

ALICE, BOB = (IdentitySigner(Identity(bytes([number]) * 32), "test") for number in (1, 2))
TENSOR = np.arange(12, dtype=np.float32).reshape(3, 4)
MASK = np.array([True, False, True])


PAYLOAD = pack([typed(TENSOR), typed(MASK)], "zstd", (3,))


def frame_of_alice(payload: Payload = PAYLOAD) -> Frame:
    return make_frame(
        ALICE,
        payload,
        plan=bytes(32),
        step=4,
        attempt=6,
        microbatch=9,
        stage=1,
        direction="input",
        train=True,
    )


FRAME = frame_of_alice()
HEADER: FrameHeader = decode(FRAME.header.body, FrameHeader, bytes_max=HEADER_BYTES_MAX)


def signed_by_alice(**changes: Any) -> Frame:
    """A header with odd values, signed by Alice herself."""
    return Frame(ALICE.sign(FRAME_PURPOSE, encode(replace(HEADER, **changes))))


def opened_by_bob(frame: Frame, data: bytes | memoryview = PAYLOAD.data) -> OpenedFrame:
    return open_frame(ALICE.peer, frame, memoryview(data))


def test_a_frame_is_decoded_as_it_was_sent() -> None:
    sent: Frame = decode(encode(FRAME), Frame, bytes_max=10_000)
    opened = opened_by_bob(sent)
    assert opened.author == ALICE.peer
    assert opened.header == FrameHeader(
        bytes(32),
        4,
        6,
        9,
        1,
        "input",
        True,
        (3,),
        (TensorHeader("float32", (3, 4)), TensorHeader("bool", (3,))),
        "zstd",
        opened.payload.digest,
    )
    (tensor, mask) = unpack(opened.payload, bytes_max=51)
    assert np.array_equal(tensor[1], TENSOR)
    assert np.array_equal(mask[1], MASK)


def test_the_largest_values_fit_a_header() -> None:
    huge = 2**63 - 1
    tensors = (TensorHeader("bfloat16", (SIDE_MAX,) * DIMENSIONS_MAX),) * TENSORS_MAX
    frame = signed_by_alice(
        step=STEPS_MAX, attempt=huge, microbatch=huge, sizes=(SIDE_MAX,) * SIZES_MAX, tensors=tensors
    )
    assert opened_by_bob(frame, bytes(8 * TENSORS_MAX)).header.microbatch == huge


def test_a_frame_of_another_author_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="signed by a peer that did not send it"):
        open_frame(BOB.peer, FRAME, PAYLOAD.data)


def test_an_altered_header_cannot_serve_as_evidence() -> None:
    body = encode(replace(HEADER, microbatch=8))
    check_signed(BOB, opened_by_bob(FRAME).fact)
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        check_signed(BOB, opened_by_bob(Frame(replace(FRAME.header, body=body))).fact)


def test_a_fact_signed_for_another_purpose_cannot_serve_as_evidence() -> None:
    fact = ALICE.sign("contact", FRAME.header.body)
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        check_signed(BOB, opened_by_bob(Frame(fact)).fact)


def test_altered_data_is_refused_when_it_is_unpacked() -> None:
    opened = opened_by_bob(FRAME, bytes(PAYLOAD.data[:-1]) + b"\0")
    with pytest.raises(RemoteProtocolError, match="wrong digest"):
        unpack(opened.payload, bytes_max=51)


def test_an_oversize_frame_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        opened_by_bob(FRAME, bytes(PAYLOAD_BYTES_MAX + 1))


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8"])
def test_a_frame_of_impossible_length_is_refused_before_signature_checks(
    codec: Codec,
) -> None:
    payload = pack([typed(np.arange(100, dtype=np.float32))], codec)
    frame = frame_of_alice(payload)
    longest = 400 if codec == "raw" else 408
    for data in (b"", bytes(longest + 1), bytes(48 << 20), *([bytes(longest - 1)] if codec == "raw" else [])):
        with pytest.raises(RemoteProtocolError, match="bytes for tensors"):
            opened_by_bob(Frame(replace(frame.header, signature=bytes(64))), data)


def test_an_opened_frame_uses_the_received_memory() -> None:
    data = memoryview(bytes(PAYLOAD.data))
    assert opened_by_bob(FRAME, data).payload.data.obj is data.obj


def test_an_oversize_header_is_refused() -> None:
    fact = ALICE.sign(FRAME_PURPOSE, bytes(HEADER_BYTES_MAX + 1))
    with pytest.raises(RemoteProtocolError, match="at most"):
        opened_by_bob(Frame(fact))


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 64},
        {"step": -1},
        {"attempt": 2**63},
        {"direction": "sideways"},
        {"digest": b"1"},
        {"sizes": (0,)},
        {"sizes": (1,) * (SIZES_MAX + 1)},
        {"tensors": (("float32", (0, 4)),)},
        {"tensors": (("float32", (2**40,)),)},
        {"tensors": (("float32", (1,) * (DIMENSIONS_MAX + 1)),)},
        {"tensors": (("object", (1,)),)},
        {"tensors": (("float32", (1,)),) * (TENSORS_MAX + 1)},
        {"codec": "pickle"},
    ],
)
def test_an_impossible_header_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match="not a valid message"):
        opened_by_bob(signed_by_alice(**changes))


@given(st.binary(max_size=100), st.binary(max_size=70), st.binary(max_size=40))
def test_random_facts_are_refused(body: bytes, signature: bytes, author: bytes) -> None:
    fact = replace(FRAME.header, body=body, signature=signature, author=author)
    with pytest.raises(RemoteProtocolError):
        opened_by_bob(Frame(fact), b"")


@given(st.integers(0, len(FRAME.header.body) - 1), st.integers(1, 255))
def test_no_byte_of_the_header_can_be_altered(place: int, change: int) -> None:
    body = bytearray(FRAME.header.body)
    body[place] ^= change
    with pytest.raises(RemoteProtocolError):
        check_signed(BOB, opened_by_bob(Frame(replace(FRAME.header, body=bytes(body)))).fact)
