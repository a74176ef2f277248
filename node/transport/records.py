"""Messages to Noise records and back. No I/O: bytes in, bytes out.

A message is four bytes of length and its bytes, cut into records; a record is two bytes of length
and a ciphertext of at most 65,535 bytes. A message begins with a record of its own, so that nothing
waits for the next one. A long message leaves in chunks of many records, each chunk for one write,
encrypted into one buffer that is used again and again.
"""

from collections.abc import Iterator

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.noise import NOISE_BYTES_MAX, TAG_BYTES, CipherState

MESSAGE_BYTES_MAX = 64 * 2**20
"""One message: an activation or a part, whole in memory at both ends. More is the caller's to cut."""
RECORD_PLAIN_BYTES_MAX = NOISE_BYTES_MAX - TAG_BYTES
CHUNK_BYTES_MAX = 2**20
"""One write. Measured: less costs system calls, more only keeps the event loop busy for longer."""

_LENGTH_BYTES = 4
_RECORD_HEADER_BYTES = 2
_RECORD_BYTES_MAX = _RECORD_HEADER_BYTES + NOISE_BYTES_MAX
_CHUNK_RECORDS = CHUNK_BYTES_MAX // _RECORD_BYTES_MAX
_READ_BYTES = 4 * _RECORD_BYTES_MAX
"""A reader's buffer: holds at least one whole record, and several arrive with one system call."""


class RecordWriter:
    """One direction's messages to bytes."""

    def __init__(self, cipher: CipherState) -> None:
        self._cipher = cipher
        self._chunk: bytearray | None = None

    def chunks(self, message: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        """The bytes to write. Each chunk must be written before the next is asked for.

        All of them must be written, or nothing more: a half-sent message ends the connection.
        Raises LocalProtocolError for a message of more than MESSAGE_BYTES_MAX.
        """
        view = memoryview(message).cast("B")
        if len(view) > MESSAGE_BYTES_MAX:
            raise LocalProtocolError(f"a message of {len(view)} bytes, at most {MESSAGE_BYTES_MAX} allowed")
        first = min(len(view), RECORD_PLAIN_BYTES_MAX - _LENGTH_BYTES)
        plain: bytes | memoryview = len(view).to_bytes(_LENGTH_BYTES, "big") + view[:first]
        chunk = self._buffer(len(view))
        at, end = 0, first
        while True:
            at = self._put(plain, chunk, at)
            if end == len(view):
                yield chunk[:at]
                return
            if at + _RECORD_BYTES_MAX > len(chunk):
                yield chunk[:at]
                at = 0
            plain = view[end : end + RECORD_PLAIN_BYTES_MAX]
            end += len(plain)

    def _buffer(self, message_bytes: int) -> memoryview:
        """Small messages get a small buffer of their own; a large one is made at the first need and kept."""
        if message_bytes + _LENGTH_BYTES <= RECORD_PLAIN_BYTES_MAX:
            return memoryview(bytearray(_RECORD_HEADER_BYTES + _LENGTH_BYTES + message_bytes + TAG_BYTES))
        if self._chunk is None:
            self._chunk = bytearray(_CHUNK_RECORDS * _RECORD_BYTES_MAX)
        return memoryview(self._chunk)

    def _put(self, plain: bytes | memoryview, chunk: memoryview, at: int) -> int:
        sealed_bytes = len(plain) + TAG_BYTES
        body = at + _RECORD_HEADER_BYTES
        chunk[at:body] = sealed_bytes.to_bytes(_RECORD_HEADER_BYTES, "big")
        self._cipher.encrypt_into(plain, chunk[body : body + sealed_bytes])
        return body + sealed_bytes


class RecordReader:
    """One direction's bytes to messages: fill `space`, say how much with `filled`, ask `next_message`.

    `message_bytes_max` may be moved between two messages. `held_bytes` is what the message that has
    begun occupies, beyond the fixed buffer.
    """

    def __init__(self, cipher: CipherState, *, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self._cipher = cipher
        self.message_bytes_max = message_bytes_max
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._start = self._end = 0
        self._pieces: list[bytes] = []
        self._missing_bytes = 0
        self.held_bytes = 0

    @property
    def inside(self) -> bool:
        """Whether a message has begun and is not whole."""
        return self._end > self._start or bool(self._pieces)

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if len(self._buffer) - self._end < _RECORD_BYTES_MAX:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._buffer[self._end :]

    def filled(self, count: int) -> None:
        """`count` bytes were written to the beginning of `space`."""
        self._end += count

    def next_message(self) -> bytes | None:
        """The next whole message, None if more bytes are needed; RemoteProtocolError ends the stream."""
        while (record := self._next_record()) is not None:
            # Full records bound their number: a message in crumbs would cost a hundredfold in memory.
            is_full = len(record) == RECORD_PLAIN_BYTES_MAX
            piece = record if self._pieces else self._begin(record)
            self._missing_bytes -= len(piece)
            if self._missing_bytes < 0 or (self._missing_bytes and not is_full):
                raise RemoteProtocolError("a record that does not fit its message")
            self._pieces.append(piece)
            self.held_bytes += len(piece)
            if not self._missing_bytes:
                pieces, self._pieces, self.held_bytes = self._pieces, [], 0
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return None

    def _begin(self, record: bytes) -> bytes:
        if len(record) < _LENGTH_BYTES:
            raise RemoteProtocolError("a message without its length")
        self._missing_bytes = int.from_bytes(record[:_LENGTH_BYTES], "big")
        if self._missing_bytes > self.message_bytes_max:
            raise RemoteProtocolError(
                f"a message of {self._missing_bytes} bytes, at most {self.message_bytes_max} allowed"
            )
        return record[_LENGTH_BYTES:]

    def _next_record(self) -> bytes | None:
        body = self._start + _RECORD_HEADER_BYTES
        if self._end < body:
            return None
        end = body + int.from_bytes(self._buffer[self._start : body], "big")
        if self._end < end:
            return None
        plain = self._cipher.decrypt(self._buffer[body:end])
        self._start = end
        if self._start == self._end:
            self._start = self._end = 0
        return plain
