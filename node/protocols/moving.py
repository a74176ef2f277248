"""Moves what a node says on a stream to a better path, between two messages: none is lost or overtaken.

A stream that carries a run for hours may have been opened through a relay, before there was a direct path.
"""

from collections.abc import Awaitable, Callable

import trio

from node.errors import StreamClosed, StreamEnded, Unreachable
from node.seams import Stream

MOVE_SECONDS = 10.0
"""From one attempt to move a stream to the next."""
READ_SECONDS_MAX = 20.0
"""What the other side gets to read all that was sent before."""
CLOSE_SECONDS_MAX = 1.0


async def move(stream: Stream, open_stream: Callable[[], Awaitable[Stream]]) -> Stream:
    """Return another stream to the same peer, once the other side has read all of this one, on which it says
    nothing itself; this one where no better one can be opened.

    Raises:
        StreamClosed: this one broke meanwhile, or was not read in time: what was sent may be lost.
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
    """Say that nothing more comes, and wait until the other side has read all and closes."""
    await stream.send_eof()
    with trio.move_on_after(READ_SECONDS_MAX):
        try:
            await stream.receive()
        except StreamEnded:
            return
    raise StreamClosed("the other side has not read all before a stream was moved")
