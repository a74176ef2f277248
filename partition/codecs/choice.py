"""The choice of a codec for a link: the one that gets a micro-batch through soonest, at the least loss.

A run limits the loss (`Frames`); a calibration gives each codec's cost and gain on this machine; the rest
follows from the link's measured rate. Encoding, sending and decoding of one micro-batch overlap those of
others, so the longest of the three counts: over a fast link that is the sending of raw tensors until a codec
is slower than it saves, so no codec is ever the bottleneck.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from partition.codecs.base import Array
from partition.codecs.codec import CODECS, Codec, coded_bytes, pack, typed, unpack
from partition.model.graph import FLOATING, ITEM_BYTES, DataType

Frames = Literal["exact", "bfloat16", "int8", "int4"]
"""The codecs that a run allows between its stages. `int4` is for gradients, with feedback; activations go as
int8."""

TIE = 0.95
"""zstd must be done in this share of the time without it: measured rates are no better."""
LOSS_PAYS = 0.8
"""A lossier codec must take this share of the time of one that keeps more: a smaller gain is not worth a
loss, nor the computing that a stage could do instead."""
_ROUNDS = 3
_SHORT = 1 << 10
"""Items of a second tensor that calibration times: a codec's fixed cost."""


@dataclass(frozen=True)
class Cost:
    """A codec's cost and gain on this machine, digests included.

    `zstd_share` is the share of the bytes that zstd leaves, 1 without it; it depends on the data.
    """

    fixed_seconds: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float
    zstd_share: float = 1.0


def allowed(frames: Frames, *, is_gradient: bool) -> tuple[Codec, ...]:
    """The codecs of a run for one direction, the least lossy first."""
    last = {"exact": "zstd", "bfloat16": "bfloat16+zstd", "int8": "int8+zstd"}
    most = last.get(frames, "int4+zstd" if is_gradient else "int8+zstd")
    return tuple(codec for codec in CODECS if CODECS.index(codec) <= CODECS.index(most))


def narrowest(frames: Frames, *, is_gradient: bool) -> Codec:
    """Return the codec that makes tensors smallest: for a link that nobody has measured."""
    return allowed(frames, is_gradient=is_gradient)[-1]


def choose(
    codecs: Sequence[Codec],
    size_bytes: int,
    dtype: DataType,
    link_bytes_per_second: float,
    costs: Mapping[Codec, Cost],
) -> Codec:
    """Return the codec that gets a tensor (or a bundle of one type) through soonest.

    `codecs` are the `allowed` ones, the least lossy first; those without costs are left out. A later one must
    be faster by a margin, TIE or LOSS_PAYS. `raw` if there is nothing to choose from.
    """
    best: Codec = "raw"
    least = inf
    for codec in codecs:
        if codec not in costs or (dtype not in FLOATING and codec not in ("raw", "zstd")):
            continue
        seconds = seconds_of(codec, size_bytes, dtype, link_bytes_per_second, costs[codec])
        if seconds < (TIE if codec in (f"{best}+zstd", "zstd") else LOSS_PAYS) * least:
            best, least = codec, seconds
    return best


def seconds_of(
    codec: Codec, size_bytes: int, dtype: DataType, link_bytes_per_second: float, cost: Cost
) -> float:
    """Return the longest of encoding, sending and decoding."""
    count = size_bytes // ITEM_BYTES[dtype]
    sent = coded_bytes(dtype, count, codec) * cost.zstd_share
    return max(
        cost.fixed_seconds + size_bytes / cost.encode_bytes_per_second,
        sent / link_bytes_per_second,
        cost.fixed_seconds + size_bytes / cost.decode_bytes_per_second,
    )


def calibrate(clock: Callable[[], float], sample: Array) -> dict[Codec, Cost]:
    """Time every codec on this machine: some 0.1 s on one core, for an executor and not an event loop.

    `clock` gives seconds; `time.thread_time` counts only this thread's. `sample` is 1 MiB or so of a float32
    activation: a real one, since it decides the gain of zstd, which is small for normal numbers. The fastest
    of a few rounds counts.
    """
    long = sample.reshape(-1)
    return {codec: _measure(clock, codec, long) for codec in CODECS}


def _measure(clock: Callable[[], float], codec: Codec, long: Array) -> Cost:
    short = long[:_SHORT]
    begin_encode, begin_decode, _ = _seconds(clock, codec, short)
    encode, decode, sent = _seconds(clock, codec, long)
    # A clock too coarse to tell, or a machine that was busy the first time, must not divide by zero.
    grown = long.nbytes - short.nbytes
    return Cost(
        fixed_seconds=max(begin_encode, begin_decode),
        encode_bytes_per_second=grown / max(encode - begin_encode, encode / 2, 1e-9),
        decode_bytes_per_second=grown / max(decode - begin_decode, decode / 2, 1e-9),
        zstd_share=min(1.0, sent / coded_bytes("float32", len(long), codec)),
    )


def _seconds(clock: Callable[[], float], codec: Codec, array: Array) -> tuple[float, float, int]:
    """Return the least time to encode and to decode, and the bytes in between."""
    encode = decode = inf
    sent = 0
    for _ in range(_ROUNDS):
        begun = clock()
        payload = pack([typed(array)], codec)
        packed = clock()
        unpack(payload, bytes_max=array.nbytes)
        encode, decode = min(encode, packed - begun), min(decode, clock() - packed)
        sent = len(payload.data)
    return encode, decode, sent
