"""Turns messages into Noise records and back.

No I/O: bytes in, bytes out.

A message consists of a head of eight bytes (its length and its payload's length), its bytes, and its payload,
cut into records. A record is two bytes of length and a ciphertext of at most 65,535 bytes. A message begins
in a record of its own, so that it is complete without the next message. Its payload does too, so that each
record of the payload is decrypted straight into its final memory. Long messages leave in chunks of many
records. Each chunk is one write, encrypted into one buffer that is lent until the last chunk has left. A mark
is a peer's statement about the conversation: a head whose first length no message can have.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.noise import NOISE_BYTES_MAX, TAG_BYTES, CipherState, Data
from node.transport.buffer_pool import Pool

MESSAGE_BYTES_MAX = 64 * 2**20
"""Maximum size of one message, which is in memory at both ends. The caller splits anything longer."""
PAYLOAD_BYTES_MAX = 64 * 2**20
"""Maximum size of one payload, which is sent with a message: an activation or a part. The receiver may allow
less."""
RECORD_PLAIN_BYTES_MAX = NOISE_BYTES_MAX - TAG_BYTES
CHUNK_BYTES_MAX = 2**20
"""Size of one write. Measured: less costs system calls, more only keeps the event loop busy for longer."""

_LENGTH_BYTES = 4
_HEAD_BYTES = 2 * _LENGTH_BYTES
_NO_PAYLOAD = bytes(_LENGTH_BYTES)
_RECORD_HEADER_BYTES = 2
_RECORD_BYTES_MAX = _RECORD_HEADER_BYTES + NOISE_BYTES_MAX
_CHUNK_RECORDS = CHUNK_BYTES_MAX // _RECORD_BYTES_MAX
_FIRST_READ_BYTES = 2**12
"""Size of a reader's own buffer until part of one record fills half of it: enough for most messages, and for
silent or slow peers."""
_READ_BYTES = 2 * _RECORD_BYTES_MAX
"""Size of the buffer from then on: one whole record and part of the next."""
_LONG_READ_BYTES = CHUNK_BYTES_MAX
"""Size of the buffer inside a message of which more than this is still to come. Measured for 64 MiB, compared
with a quarter of the size: a sixth less time, because of fewer system calls and turns of the event loop."""

_NOTHING = memoryview(b"")
_NO_LENGTH = 2**32 - 1
_SMALL_BYTES_MAX = RECORD_PLAIN_BYTES_MAX - _HEAD_BYTES


class Mark(IntEnum):
    """Marks between messages. Each conversation has exactly one CLOSE from each peer."""

    END = 0
    """The sender sends no more in this conversation, but still reads."""
    CLOSE = 1
    """The sender neither sends nor reads any more. After both peers' marks the connection may carry another
    conversation."""


class RecordWriter:
    """Turns the messages of one direction into bytes."""

    def __init__(self, cipher: CipherState, pool: Pool) -> None:
        self._cipher = cipher
        self._pool = pool

    def whole(self, message: bytes) -> bytes | None:
        """Return all bytes to write for a message without payload; None if the message does not fit one
        record."""
        if len(message) > _SMALL_BYTES_MAX:
            return None
        sealed = self._cipher.encrypt(len(message).to_bytes(_LENGTH_BYTES, "big") + _NO_PAYLOAD + message)
        return len(sealed).to_bytes(_RECORD_HEADER_BYTES, "big") + sealed

    def mark(self, mark: Mark) -> bytes:
        """Return the bytes to write for a mark."""
        sealed = self._cipher.encrypt(
            _NO_LENGTH.to_bytes(_LENGTH_BYTES, "big") + mark.to_bytes(_LENGTH_BYTES, "big")
        )
        return len(sealed).to_bytes(_RECORD_HEADER_BYTES, "big") + sealed

    def chunks(self, message: Data, *payload: Data) -> Iterator[memoryview]:
        """Yield the bytes to write for a message and its payload, whose pieces arrive joined.

        Each chunk must be written before the next one is requested. Either all chunks are written, or nothing
        more: a half-sent message ends the connection. Raises LocalProtocolError for more than
        MESSAGE_BYTES_MAX or PAYLOAD_BYTES_MAX.
        """
        view = memoryview(message).cast("B")
        pieces = [memoryview(piece).cast("B") for piece in payload]
        payload_bytes = sum(map(len, pieces))
        for what, length, bytes_max in (
            ("message", len(view), MESSAGE_BYTES_MAX),
            ("payload", payload_bytes, PAYLOAD_BYTES_MAX),
        ):
            if length > bytes_max:
                raise LocalProtocolError(
                    f"a {what} of {length} bytes is too long; at most {bytes_max} are allowed"
                )
        head = len(view).to_bytes(_LENGTH_BYTES, "big") + payload_bytes.to_bytes(_LENGTH_BYTES, "big")
        chunk = self._buffer(len(view) + payload_bytes)
        at = 0
        for plain in chain(_cut([memoryview(head), view]), _cut(pieces)):
            if at + _RECORD_HEADER_BYTES + len(plain) + TAG_BYTES > len(chunk):
                yield chunk[:at]
                at = 0
            at = self._put(plain, chunk, at)
        yield chunk[:at]

    def _buffer(self, content_bytes: int) -> memoryview:
        """Return a buffer. A small message gets its own; a large one borrows memory for this message only."""
        if content_bytes + _HEAD_BYTES <= RECORD_PLAIN_BYTES_MAX:
            # There is one record for the message and one for the payload.
            return memoryview(bytearray(_HEAD_BYTES + content_bytes + 2 * (_RECORD_HEADER_BYTES + TAG_BYTES)))
        return self._pool.lend(_CHUNK_RECORDS * _RECORD_BYTES_MAX)

    def _put(self, plain: bytes | memoryview, chunk: memoryview, at: int) -> int:
        sealed_bytes = len(plain) + TAG_BYTES
        body = at + _RECORD_HEADER_BYTES
        chunk[at:body] = sealed_bytes.to_bytes(_RECORD_HEADER_BYTES, "big")
        self._cipher.encrypt_into(plain, chunk[body : body + sealed_bytes])
        return body + sealed_bytes


def _cut(pieces: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the joined pieces as full records; the last may be shorter.

    Only the record in which two pieces meet, and the last one, are copied.
    """
    rest = b""
    for piece in pieces:
        at = 0
        if rest:
            at = RECORD_PLAIN_BYTES_MAX - len(rest)
            rest += piece[:at]
            if len(rest) < RECORD_PLAIN_BYTES_MAX:
                continue
            yield rest
        while len(piece) - at >= RECORD_PLAIN_BYTES_MAX:
            yield piece[at : at + RECORD_PLAIN_BYTES_MAX]
            at += RECORD_PLAIN_BYTES_MAX
        rest = bytes(piece[at:])
    if rest:
        yield rest


class RecordReader:
    """Turns the bytes of one direction into messages. Fill `space`, report the count to `filled`, and call
    `next_message`.

    `message_bytes_max` may be changed between two messages. `held_bytes` is the memory of the unfinished
    message, without the reader's own buffer.
    """

    def __init__(
        self, cipher: CipherState, pool: Pool, *, message_bytes_max: int = MESSAGE_BYTES_MAX
    ) -> None:
        self._cipher = cipher
        self._pool = pool
        self.message_bytes_max = message_bytes_max
        self._own_buffer = _NOTHING
        self._buffer = self._own_buffer
        self._start = self._end = 0
        self._long: _LongMessage | None = None

    @property
    def inside(self) -> bool:
        """Whether a message has begun and is not complete."""
        return self._end > self._start or self._long is not None

    @property
    def held_bytes(self) -> int:
        borrowed = 0 if self._buffer is self._own_buffer else len(self._buffer)
        return borrowed + (0 if self._long is None else self._long.come_bytes)

    def release(self) -> None:
        """Release the reader's own buffer too, between two messages, so that an idle connection holds
        none."""
        if not self.inside and self._buffer is self._own_buffer:
            self._own_buffer = self._buffer = _NOTHING
            self._start = self._end = 0

    def rest(self) -> bytes:
        """Take out the received bytes that do not belong to a message yet."""
        rest = bytes(self._buffer[self._start : self._end])
        self._start = self._end = 0
        return rest

    def space(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        if not self._own_buffer:
            self._own_buffer = self._buffer = memoryview(bytearray(_FIRST_READ_BYTES))
        if self._long is None:
            self._give_back()
        elif self._buffer is self._own_buffer and self._long.missing_bytes > _LONG_READ_BYTES:
            self._move(self._pool.lend(_LONG_READ_BYTES))
        if self._buffer is self._own_buffer and self._is_too_small(self._own_buffer):
            self._own_buffer = memoryview(bytearray(_READ_BYTES))
            self._move(self._own_buffer)
        if len(self._buffer) - self._end < min(_RECORD_BYTES_MAX, len(self._buffer) // 2):
            self._move(self._buffer)
        return self._buffer[self._end :]

    def _is_too_small(self, own: memoryview) -> bool:
        return len(own) < _READ_BYTES and self._end - self._start >= len(own) // 2

    def _give_back(self) -> None:
        """Return a borrowed buffer once its remaining bytes fit the reader's own one."""
        if self._buffer is not self._own_buffer and self._end - self._start <= _RECORD_BYTES_MAX:
            if self._is_too_small(self._own_buffer):
                self._own_buffer = memoryview(bytearray(_READ_BYTES))
            self._move(self._own_buffer)

    def _move(self, buffer: memoryview) -> None:
        """Move the unread bytes to the beginning of `buffer`, and use that buffer from now on."""
        rest = bytes(self._buffer[self._start : self._end])
        buffer[: len(rest)] = rest
        self._buffer = buffer
        self._start, self._end = 0, len(rest)

    def filled(self, count: int) -> None:
        """Note that `count` bytes were written to the beginning of `space`."""
        self._end += count

    def next_message(self, payload_bytes_max: int = 0) -> "tuple[bytes, memoryview] | Mark | None":
        """Return the next complete message and its payload, or a mark; None if more bytes are needed.

        Raises RemoteProtocolError, which ends the stream, also for a payload of more than
        `payload_bytes_max`.
        """
        whole: tuple[bytes, memoryview] | Mark | None
        while (record := self._next_record()) is not None:
            if self._long is None:
                whole = self._begin(self._cipher.decrypt(record), payload_bytes_max)
            else:
                self._cipher.decrypt_into(record, self._long.room(len(record) - TAG_BYTES))
                whole = self._long.whole()
            if whole is not None:
                self._long = None
                self._give_back()
                return whole
        return None

    def _next_record(self) -> memoryview | None:
        """Return the next ciphertext, valid until `space` is called."""
        body = self._start + _RECORD_HEADER_BYTES
        if self._end < body:
            return None
        end = body + int.from_bytes(self._buffer[self._start : body], "big")
        if self._end < end:
            return None
        self._start = end
        if self._start == self._end:
            self._start = self._end = 0
        return self._buffer[body:end]

    def _begin(self, plain: bytes, payload_bytes_max: int) -> "tuple[bytes, memoryview] | Mark | None":
        message_bytes = int.from_bytes(plain[:_LENGTH_BYTES], "big")
        payload_bytes = int.from_bytes(plain[_LENGTH_BYTES:_HEAD_BYTES], "big")
        if message_bytes == _NO_LENGTH:
            if len(plain) != _HEAD_BYTES or payload_bytes > Mark.CLOSE:
                raise RemoteProtocolError("an unknown mark")
            return Mark(payload_bytes)
        if message_bytes > self.message_bytes_max or payload_bytes > payload_bytes_max:
            raise RemoteProtocolError(
                f"a message of {message_bytes} bytes and a payload of {payload_bytes}, but at most"
                f" {self.message_bytes_max} and {payload_bytes_max} are allowed"
            )
        first = plain[_HEAD_BYTES:]
        if len(plain) < _HEAD_BYTES or len(first) != min(RECORD_PLAIN_BYTES_MAX - _HEAD_BYTES, message_bytes):
            raise RemoteProtocolError("a first record that does not fit its message")
        if len(first) == message_bytes and not payload_bytes:
            return first, _NOTHING
        payload = self._pool.lend(payload_bytes) if payload_bytes else _NOTHING
        self._long = _LongMessage(first, self._pool.lend(message_bytes), payload)
        return None


class _LongMessage:
    """A message of several records, each decrypted straight to its final memory: first those of the message,
    then those of its payload.

    Lent memory has no pages before it is written, so a false length takes no memory (memory from malloc has
    pages if it was used before). The message is copied once, when it is complete.
    """

    def __init__(self, first: bytes, memory: memoryview, payload: memoryview) -> None:
        self._memory = memory
        self._payload = payload
        self.come_bytes = len(first)
        memory[: len(first)] = first
        self._gaps = [gap for gap in (memory[len(first) :], payload) if len(gap)]

    @property
    def missing_bytes(self) -> int:
        return sum(map(len, self._gaps))

    def room(self, count: int) -> memoryview:
        """Return the memory for the next `count` bytes.

        Only the last record may be short. So a message cannot come in small pieces, each of which would cost
        as much as a full record.
        """
        gap = self._gaps[0]
        if count != min(RECORD_PLAIN_BYTES_MAX, len(gap)):
            raise RemoteProtocolError("a record that does not fit its message")
        self.come_bytes += count
        if count == len(gap):
            del self._gaps[0]
        else:
            self._gaps[0] = gap[count:]
        return gap[:count]

    def whole(self) -> tuple[bytes, memoryview] | None:
        """Return the message and its payload, once they are complete."""
        if self._gaps:
            return None
        return bytes(self._memory), self._payload.toreadonly()
