"""Small integers in blocks: x = code * scale, with one scale for every 64 consecutive items.

The scale is the block's largest magnitude over 127 (int8) or 7 (int4), as a bfloat16. Codes are rounded to
the nearest, ties to even, so the bytes are the same on every machine. |x - x'| is at most half a scale, and
the rounded scale is within 2^-9 of the exact one. So for int8, |x - x'| <= (1 + 2^-8) max|block| / 254. A
bfloat16 scale costs 3 %; a float32 scale would cost 6 % without a measurable advantage. A float16 scale would
itself need a scale, because gradients of 1e-9 are common. A block whose values are all below 2^-118 is sent
as zeros.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), but with evenly spaced codes,
which need no table.
"""

from abc import ABC, abstractmethod

import numpy as np

from crypto.errors import RemoteProtocolError
from partition.codecs.base import LARGEST_LOG2, Array, round_bfloat16, widen_bfloat16

BLOCK = 64
_TINY = np.float32(2.0**-118)
"""Below this magnitude, the scale would not be a normal number, so it would be less precise or have no
inverse."""
_OFFSET = 8
"""An int4 code is stored as code + 8, that is, 1 to 15."""
# The two items in every byte, combined into one number, so that each byte needs only one look-up.
_NIBBLES = np.arange(256)
_ITEMS = np.stack((_NIBBLES & 15, _NIBBLES >> 4), axis=1).astype(np.float32) - _OFFSET
_PAIRS = _ITEMS.view(np.uint64).reshape(-1)


class _Blocks(ABC):
    """An encoding with the scales of all blocks, followed by their codes."""

    granule = BLOCK
    item_bytes = 1
    bits: int
    code_max: int

    def coded_bytes(self, count: int) -> int:
        return -(-count // BLOCK) * (2 + BLOCK * self.bits // 8)

    def encode_tile(self, tile: Array, scratch: Array, coded: Array, count: int, start: int) -> None:
        peaks = np.maximum.reduce(scratch.view(np.int32).reshape(-1, BLOCK), axis=1).view(np.float32)
        peaks[peaks < _TINY] = 0
        scales, codes = self._parts(coded, count, start, len(tile))
        round_bfloat16(peaks / np.float32(self.code_max), np.empty_like(peaks), scales)
        widen_bfloat16(scales, peaks)
        inverse = np.divide(1, peaks, out=np.zeros_like(peaks), where=peaks > 0)
        rows = tile.reshape(-1, BLOCK)
        np.multiply(rows, inverse[:, np.newaxis], out=scratch.reshape(rows.shape))
        np.rint(scratch, out=scratch)
        self._write(scratch, codes)

    def check(self, coded: Array, count: int) -> None:
        scales, codes = self._parts(coded, count, 0, -(-count // BLOCK) * BLOCK)
        # Compared as bits of bfloat16, where a number with a set sign bit exceeds the limit too.
        if scales.max() > (127 + LARGEST_LOG2 + 2 - self.bits) << 7:
            raise RemoteProtocolError("a coded tensor with a scale that no encoder writes")
        if not self._are_valid(codes):
            raise RemoteProtocolError("a coded tensor with a code that no encoder writes")

    def decode_tile(self, coded: Array, count: int, start: int, target: Array) -> None:
        scales, codes = self._parts(coded, count, start, len(target))
        wide = np.empty(len(scales), np.float32)
        widen_bfloat16(scales, wide)
        self._read(codes, target)
        rows = target.reshape(-1, BLOCK)
        rows *= wide[:, np.newaxis]

    def _parts(self, coded: Array, count: int, start: int, length: int) -> tuple[Array, Array]:
        """Return scales and codes of `length` items from `start`."""
        scales = coded[: -(-count // BLOCK) * 2].view("<u2")
        codes = coded[scales.nbytes :]
        block, byte = start // BLOCK, start * self.bits // 8
        return scales[block : block + length // BLOCK], codes[byte : byte + length * self.bits // 8]

    @abstractmethod
    def _write(self, whole: Array, codes: Array) -> None:
        """Convert integers in float32 form to codes."""

    @abstractmethod
    def _are_valid(self, codes: Array) -> bool:
        """Return whether `_write` can have written these codes."""

    @abstractmethod
    def _read(self, codes: Array, target: Array) -> None:
        """Convert codes to integers in float32 form."""


class Int8(_Blocks):
    """-127 to 127: 3.88 times smaller than float32."""

    bits = 8
    code_max = 127

    def _write(self, whole: Array, codes: Array) -> None:
        codes.view(np.int8)[:] = whole

    def _are_valid(self, codes: Array) -> bool:
        return bool(codes.view(np.int8).min() >= -self.code_max)

    def _read(self, codes: Array, target: Array) -> None:
        target[:] = codes.view(np.int8)


class Int4(_Blocks):
    """-7 to 7, two per byte, the first in the lower half: 7.53 times smaller than float32."""

    bits = 4
    code_max = 7

    def _write(self, whole: Array, codes: Array) -> None:
        whole += _OFFSET
        pairs = whole.astype(np.uint8).view("<u2")
        pairs |= pairs >> 4
        codes[:] = pairs.view(np.uint8)[::2]

    def _are_valid(self, codes: Array) -> bool:
        return bool(codes.min() >= 16 and (codes & 15).min() >= 1)

    def _read(self, codes: Array, target: Array) -> None:
        np.take(_PAIRS, codes, out=target.view(np.uint64), mode="clip")
