"""The choice of a codec for a link: the one that gets a micro-batch through fastest, at the least loss.

A run limits the loss (`Frames`), and a calibration measures each codec's cost and compression on this
machine; the rest follows from the link's measured rate. Encoding, sending and decoding of a micro-batch
overlap with those of other micro-batches, so only the longest of the three counts. On a fast link a codec
would be slower than the sending that it saves, so tensors are sent raw. Therefore a codec is never the
bottleneck.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from partition.codecs.base import Array
from partition.codecs.codec import CODECS, Codec, coded_bytes, pack, typed, unpack
from partition.model.graph import FLOATING, ITEM_BYTES, DataType

Frames = Literal["exact", "bfloat16", "int8", "int4"]
"""The codecs that a run allows between its stages. `int4` applies to gradients, with error feedback;
activations are then sent as int8."""

TIE = 0.95
"""zstd is used only if it needs at most this share of the time without it, because measured rates are not
more precise."""
LOSS_PAYS = 0.8
"""A lossier codec is used only if it needs at most this share of the time of a less lossy one. A smaller gain
is not worth the loss, nor the computing time that the stage could use otherwise."""
_ROUNDS = 3
_SHORT = 1 << 10
"""Number of items of a second, short tensor that calibration times to find a codec's fixed cost."""


@dataclass(frozen=True)
class Cost:
    """A codec's cost and compression on this machine, including digests.

    `zstd_share` is the share of the bytes that remains after zstd, 1 without zstd; it depends on the data.
    """

    fixed_seconds: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float
    zstd_share: float = 1.0


def allowed(frames: Frames, *, is_gradient: bool) -> tuple[Codec, ...]:
    """Return the codecs that a run allows for one direction, the least lossy first."""
    last = {"exact": "zstd", "bfloat16": "bfloat16+zstd", "int8": "int8+zstd"}
    most = last.get(frames, "int4+zstd" if is_gradient else "int8+zstd")
    return tuple(codec for codec in CODECS if CODECS.index(codec) <= CODECS.index(most))


def narrowest(frames: Frames, *, is_gradient: bool) -> Codec:
    """Return the codec that makes tensors smallest, for a link that has not been measured."""
    return allowed(frames, is_gradient=is_gradient)[-1]


def choose(
    codecs: Sequence[Codec],
    size_bytes: int,
    dtype: DataType,
    link_bytes_per_second: float,
    costs: Mapping[Codec, Cost],
) -> Codec:
    """Return the codec that gets a tensor (or a bundle of one type) through fastest.

    `codecs` are the `allowed` codecs, the least lossy first; those without costs are skipped. A later codec
    must be faster by a margin, TIE or LOSS_PAYS. The result is `raw` if there is nothing to choose from.
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
    """Return the longest of the times for encoding, sending and decoding."""
    count = size_bytes // ITEM_BYTES[dtype]
    sent = coded_bytes(dtype, count, codec) * cost.zstd_share
    return max(
        cost.fixed_seconds + size_bytes / cost.encode_bytes_per_second,
        sent / link_bytes_per_second,
        cost.fixed_seconds + size_bytes / cost.decode_bytes_per_second,
    )


def calibrate(clock: Callable[[], float], sample: Array) -> dict[Codec, Cost]:
    """Time every codec on this machine. This takes about 0.1 s on one core, so run it in a thread and not in
    an event loop.

    `clock` returns seconds; `time.thread_time` counts only this thread's time. `sample` is about 1 MiB of a
    float32 activation. It should be a real one, because it determines how well zstd compresses, which is
    little for normally distributed values. The fastest of a few rounds counts.
    """
    long = sample.reshape(-1)
    return {codec: _measure(clock, codec, long) for codec in CODECS}


def _measure(clock: Callable[[], float], codec: Codec, long: Array) -> Cost:
    short = long[:_SHORT]
    begin_encode, begin_decode, _ = _seconds(clock, codec, short)
    encode, decode, sent = _seconds(clock, codec, long)
    # Do not divide by zero if the clock is too coarse, or if the machine was busy during the first
    # measurement.
    grown = long.nbytes - short.nbytes
    return Cost(
        fixed_seconds=max(begin_encode, begin_decode),
        encode_bytes_per_second=grown / max(encode - begin_encode, encode / 2, 1e-9),
        decode_bytes_per_second=grown / max(decode - begin_decode, decode / 2, 1e-9),
        zstd_share=min(1.0, sent / coded_bytes("float32", len(long), codec)),
    )


def _seconds(clock: Callable[[], float], codec: Codec, array: Array) -> tuple[float, float, int]:
    """Return the shortest time to encode and to decode, and the number of encoded bytes."""
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
