"""Half the bytes: bfloat16, and float16 with a scale.

bfloat16 keeps float32's range and 8 bits of precision, so each value comes back with a relative error of at
most 2^-8. float16 keeps 11 bits but only from 2^-14 to 2^16, so a gradient of 1e-8 would become zero.
Therefore each tile is first multiplied by the power of two that brings its largest value to between 2^14 and
2^15.
"""

import numpy as np

from crypto.errors import RemoteProtocolError
from partition.codecs.base import LARGEST_LOG2, TILE, Array, round_bfloat16, widen_bfloat16

_FLOAT16_LOG2 = 14
_SHIFT_MIN, _SHIFT_MAX = _FLOAT16_LOG2 - LARGEST_LOG2, 126
"""Above 126 the inverse factor would not be a normal number; tiles of such small values lose bits instead."""
_BFLOAT16_FINITE_MAX = 0x7F7F
_FLOAT16_CODE_MAX = 0x7800
"""2^15: the largest value to which a tile's maximum may be rounded up."""


class Bfloat16Frames:
    """Two bytes per item, rounded to the nearest, ties to even."""

    granule = 1
    item_bytes = 2

    def coded_bytes(self, count: int) -> int:
        return 2 * count

    def encode_tile(self, tile: Array, scratch: Array, coded: Array, count: int, start: int) -> None:
        round_bfloat16(tile, scratch, coded[: 2 * count].view("<u2")[start : start + len(tile)])

    def check(self, coded: Array, count: int) -> None:
        _check_halves(coded[: 2 * count].view("<u2"), _BFLOAT16_FINITE_MAX)

    def decode_tile(self, coded: Array, count: int, start: int, target: Array) -> None:
        widen_bfloat16(coded[: 2 * count].view("<u2")[start : start + len(target)], target)


class Float16Frames:
    """Two bytes per item, rounded to the nearest, ties to even; then two bytes for each tile, its power of
    two."""

    granule = 1
    item_bytes = 2

    def coded_bytes(self, count: int) -> int:
        return 2 * (count + -(-count // TILE))

    def encode_tile(self, tile: Array, scratch: Array, coded: Array, count: int, start: int) -> None:
        _, exponent = np.frexp(scratch.view(np.int32).max().view(np.float32))
        shift = min(max(_FLOAT16_LOG2 + 1 - int(exponent), _SHIFT_MIN), _SHIFT_MAX)
        coded[2 * count :].view("<i2")[start // TILE] = shift
        np.multiply(tile, np.float32(2.0**shift), out=scratch)
        with np.errstate(under="ignore"):
            coded[: 2 * count].view("<f2")[start : start + len(tile)] = scratch

    def check(self, coded: Array, count: int) -> None:
        _check_halves(coded[: 2 * count].view("<u2"), _FLOAT16_CODE_MAX)
        shifts = coded[2 * count :].view("<i2")
        if shifts.min() < _SHIFT_MIN or shifts.max() > _SHIFT_MAX:
            raise RemoteProtocolError("a coded tensor with a scale that no encoder writes")

    def decode_tile(self, coded: Array, count: int, start: int, target: Array) -> None:
        shift = int(coded[2 * count :].view("<i2")[start // TILE])
        target[:] = coded[: 2 * count].view("<f2")[start : start + len(target)]
        target *= np.float32(2.0**-shift)


def _check_halves(bits: Array, most: int) -> None:
    # Tile by tile, so that the whole is never copied.
    for start in range(0, len(bits), TILE):
        if (bits[start : start + TILE] & 0x7FFF).max() > most:
            raise RemoteProtocolError("a coded tensor with a value that is not finite")
