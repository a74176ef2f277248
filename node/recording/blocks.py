"""The file of a record: blocks of zstandard. Each block has a hash that covers all earlier blocks, so that
changes are detected.

    file    magic, then blocks
    block   length of the data (4 bytes, little endian), CRC-32 of that, CRC-32 of each 64 bytes of the data,
            hash (16 bytes), data

The hash is blake2b over the previous hash, the length and the data. If it does not match, the checksums
identify the changed piece, and trying all values of each of its bytes identifies the byte. If a file ends
within a block, for example because its machine crashed, it is read up to the last complete block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

import zstandard

MAGIC = b"peerloom record 1\n"
PIECE_BYTES = 64
HASH_BYTES = 16
HEAD_BYTES = 8
BLOCK_BYTES_MAX = 8 << 20
"""Maximum size of one compressed block."""
UNPACKED_BYTES_MAX = 64 << 20
"""Maximum size of one block after decompression, because a file may come from an unknown person."""
_LEVEL = 3


@dataclass(frozen=True)
class Damage:
    """Damage of a file: the number of the block, the offset in bytes, and a description."""

    block: int
    offset: int
    text: str


def pack_block(data: bytes, before: bytes) -> tuple[bytes, bytes]:
    """Return a block and its hash. `before` is the previous block's hash, or MAGIC for the first."""
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    name = _hash(before, packed)
    return _head(len(packed)) + _sums(packed) + name + packed, name


def read_blocks(data: bytes) -> Iterator[bytes | Damage]:
    """Yield the content of each block. The last value may be the damage at which reading ended."""
    if data[: len(MAGIC)] != MAGIC:
        wrong = next((at for at, byte in enumerate(MAGIC) if data[at : at + 1] != bytes([byte])), 0)
        yield Damage(0, wrong, f"byte {wrong} differs from the header of a record of this version")
        return
    offset, before, number = len(MAGIC), MAGIC, 0
    while offset < len(data):
        head = data[offset : offset + HEAD_BYTES]
        length = int.from_bytes(head[:4], "little")
        if len(head) == HEAD_BYTES and (head != _head(length) or length > BLOCK_BYTES_MAX):
            end = offset + HEAD_BYTES - 1
            yield Damage(number, offset, f"block {number}: its length, bytes {offset} to {end}, was changed")
            return
        sums_at = offset + HEAD_BYTES
        hash_at = sums_at + 4 * -(-length // PIECE_BYTES)
        start = hash_at + HASH_BYTES
        packed = data[start : start + length]
        if len(packed) < length:
            yield Damage(number, offset, f"block {number}, from byte {offset} on, is cut off")
            return
        if _hash(before, packed) != data[hash_at:start] or _sums(packed) != data[sums_at:hash_at]:
            yield _find(data, number, before, sums_at, hash_at, packed)
            return
        try:
            if zstandard.frame_content_size(packed) > UNPACKED_BYTES_MAX:
                raise zstandard.ZstdError("it unpacks to more than a block may hold")
            yield zstandard.ZstdDecompressor().decompress(packed, max_output_size=UNPACKED_BYTES_MAX)
        except zstandard.ZstdError as error:
            yield Damage(number, start, f"block {number}: {error}")
            return
        before, offset, number = data[hash_at:start], start + length, number + 1


def _hash(before: bytes, packed: bytes) -> bytes:
    return blake2b(before + len(packed).to_bytes(4, "little") + packed, digest_size=HASH_BYTES).digest()


def _head(length: int) -> bytes:
    data = length.to_bytes(4, "little")
    return data + crc32(data).to_bytes(4, "little")


def _sums(packed: bytes) -> bytes:
    pieces = (packed[at : at + PIECE_BYTES] for at in range(0, len(packed), PIECE_BYTES))
    return b"".join(crc32(piece).to_bytes(4, "little") for piece in pieces)


def _find(data: bytes, number: int, before: bytes, sums_at: int, hash_at: int, packed: bytes) -> Damage:
    """Locate the change in a damaged block."""
    start, kept, name = hash_at + HASH_BYTES, data[sums_at:hash_at], data[hash_at : hash_at + HASH_BYTES]
    found = _sums(packed)
    wrong = [at for at in range(0, len(kept), 4) if kept[at : at + 4] != found[at : at + 4]]
    if not wrong:
        return Damage(
            number, hash_at, f"block {number}: its hash, bytes {hash_at} to {start - 1}, was changed"
        )
    if _hash(before, packed) == name:
        at = sums_at + wrong[0]
        return Damage(number, at, f"block {number}: its checksum, bytes {at} to {at + 3}, was changed")
    first, end = wrong[0] // 4 * PIECE_BYTES, (wrong[-1] // 4 + 1) * PIECE_BYTES
    if len(wrong) == 1 and (mended := _mended(packed, first, kept[wrong[0] : wrong[0] + 4])) is not None:
        at, byte = mended
        if _hash(before, packed[:at] + bytes([byte]) + packed[at + 1 :]) == name:
            said = f"byte {start + at} is 0x{packed[at]:02x} and was 0x{byte:02x}"
            return Damage(number, start + at, f"block {number}: {said}")
    last = min(end, len(packed)) - 1
    return Damage(
        number, start + first, f"block {number}: bytes {start + first} to {start + last} were changed"
    )


def _mended(packed: bytes, first: int, wanted: bytes) -> tuple[int, int] | None:
    """Return the offset and value of the single byte that makes a piece match its checksum."""
    piece = bytearray(packed[first : first + PIECE_BYTES])
    for at, now in enumerate(piece):
        for byte in range(256):
            piece[at] = byte
            if byte != now and crc32(piece).to_bytes(4, "little") == wanted:
                return first + at, byte
        piece[at] = now
    return None
