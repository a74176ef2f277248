"""Uploads of blobs: a file is read one chunk at a time, as fast as its receiver reads.

A receiver that stops reading costs a permit (`node.protocols.permits`), an open file and a chunk in memory,
but only for some seconds.
"""

import io
import os
from dataclasses import dataclass
from functools import partial
from typing import IO

from crypto.encoding import encode
from node.protocols.permits import Permit
from node.protocols.runs import BLOB_BYTES_MAX, Blob
from node.seams import Executor, Stream

CHUNK_BYTES = 256 * 1024
"""Number of bytes read and sent in one piece. No other part of an upload is in memory."""
STALL_SECONDS_MAX = 8.0
"""Time limit for one chunk; a receiver slower than 32 kB/s is useless."""


@dataclass(frozen=True)
class FilePart:
    """`length` bytes of an open file from `offset` on; the sender closes it."""

    file: IO[bytes]
    offset: int
    length: int


Body = bytes | FilePart
"""The body after a Blob."""


def whole(file: IO[bytes] | None, *, bytes_max: int = BLOB_BYTES_MAX) -> FilePart | None:
    """Return all of an open file; None if there is no file, or if it is too long (the file is then
    closed)."""
    if file is None:
        return None
    length = file.seek(0, os.SEEK_END)
    if length > bytes_max:
        file.close()
        return None
    return FilePart(file, 0, length)


async def send_blob(stream: Stream, body: Body, permit: Permit, executor: Executor) -> None:
    """Answer with a Blob and its chunks. The permit is lost if a chunk is not read in time."""
    part = FilePart(io.BytesIO(body), 0, len(body)) if isinstance(body, bytes) else body
    with part.file:
        permit.waits(STALL_SECONDS_MAX)
        await stream.send(encode(Blob(part.length)))
        sent = 0
        while sent < part.length:
            permit.works()
            wanted = min(CHUNK_BYTES, part.length - sent)
            chunk = await executor.run(partial(_read, part.file, part.offset + sent, wanted))
            if not chunk:
                return  # the file became shorter; the receiver sees that the stream ends early
            permit.waits(STALL_SECONDS_MAX)
            await stream.send(chunk)
            sent += len(chunk)


def _read(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)
