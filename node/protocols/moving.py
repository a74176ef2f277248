"""Moves a stream to a better path between two messages, so that no message is lost or overtaken.

A stream of a run may last hours and may have been opened through a relay, before there was a direct path.
"""

from collections.abc import Awaitable, Callable

import trio

from node.errors import StreamClosed, StreamEnded, Unreachable
from node.seams import Stream

MOVE_SECONDS = 10.0
"""Seconds between two attempts to move a stream."""
READ_SECONDS_MAX = 20.0
"""How long the peer may take to read all earlier messages."""
CLOSE_SECONDS_MAX = 1.0


async def move(stream: Stream, open_stream: Callable[[], Awaitable[Stream]]) -> Stream:
    """Return a new stream to the same peer, once the peer has read everything on the old one; the peer must
    not send. If no better stream can be opened, return the old one.

    Raises:
        StreamClosed: the old stream broke meanwhile, or was not read in time, so messages may be lost.
    """
    try:
        better = await open_stream()
    except (Unreachable, StreamClosed):
        return stream
    is_moved = False
    try:
        if better.has_better_path:
            return stream
        await _be_read(stream)
        is_moved = True
    finally:
        with trio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
            await (stream if is_moved else better).aclose()
    return better


async def _be_read(stream: Stream) -> None:
    """Announce the end, and wait until the peer has read everything and closes."""
    await stream.send_eof()
    with trio.move_on_after(READ_SECONDS_MAX):
        try:
            await stream.receive()
        except StreamEnded:
            return
    raise StreamClosed("the other side did not read everything before its stream was moved")
