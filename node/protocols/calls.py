"""Requests to other nodes: one stream, one question, one answer, with a time limit. The answer may be a blob.

Not here: the limit of one peer's concurrent requests (`node.protocols.permits`, `StreamLimits`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from crypto.contact import Address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import StreamClosed, Unreachable
from node.protocols.runs import (
    BLOB_BYTES_MAX,
    BLOB_CHUNK_BYTES,
    REQUEST_BYTES_MAX,
    RUNS_PROTOCOL,
    Blob,
    Reply,
    Request,
)
from node.seams import MESSAGE_BYTES_USUAL, Network, Stream
from partition.run.asks import Declined

CLOSE_SECONDS_MAX = 1.0
"""Time limit for ending a conversation in order, even if the asking task is cancelled."""


@asynccontextmanager
async def conversation(
    network: Network,
    peer: PeerId,
    protocol: str,
    *,
    seconds: float,
    message_bytes_max: int = MESSAGE_BYTES_USUAL,
    at: Address | None = None,
) -> AsyncIterator[Stream]:
    """Yield a stream to `peer`, at its address `at` if given, for at most `seconds`. The stream is always
    closed at the end.

    Raises:
        Unreachable: no path, or the time is up. Also whatever the block raises.
    """
    with trio.move_on_after(seconds) as scope:
        stream = await network.open(peer, protocol, message_bytes_max=message_bytes_max, at=at)
        try:
            yield stream
        finally:
            with trio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                await stream.aclose()
    if scope.cancelled_caught:
        raise Unreachable("timeout", f"no answer in {seconds:.0f} s")


async def call(
    network: Network,
    peer: PeerId,
    protocol: str,
    request: object,
    kind: Any,
    *,
    seconds: float,
    reply_bytes_max: int,
) -> Any:
    """Send one request to `peer`; return its answer, which has the type `kind`.

    Raises:
        Unreachable: no path, no answer, or no answer in time. RemoteProtocolError: a malformed answer.
    """
    message_bytes_max = max(MESSAGE_BYTES_USUAL, reply_bytes_max)
    talk = conversation(network, peer, protocol, seconds=seconds, message_bytes_max=message_bytes_max)
    try:
        async with talk as stream:
            await stream.send(encode(request))
            return decode(await stream.receive(), kind, bytes_max=reply_bytes_max)
    except StreamClosed as error:
        raise Unreachable("refused", f"no answer: {error}") from None


async def ask(network: Network, peer: PeerId, request: Request, *, seconds: float) -> Reply:
    """Send one request about a run. Raises Unreachable, also for a malformed answer."""
    try:
        reply: Reply = await call(
            network, peer, RUNS_PROTOCOL, request, Reply, seconds=seconds, reply_bytes_max=REQUEST_BYTES_MAX
        )
    except RemoteProtocolError as error:
        raise Unreachable("refused", f"no answer: {error}") from None
    return reply


async def fetch(
    network: Network, peer: PeerId, request: Request, *, seconds: float, bytes_max: int = BLOB_BYTES_MAX
) -> bytes:
    """Send a request whose answer is a Blob of at most `bytes_max`; return its bytes. Raises Unreachable."""
    parts = bytearray()

    async def take(chunk: bytes) -> None:
        parts.extend(chunk)

    await fetch_into(take, network, peer, request, seconds=seconds, bytes_max=bytes_max)
    return bytes(parts)


async def fetch_into(
    take: Callable[[bytes], Awaitable[None]],
    network: Network,
    peer: PeerId,
    request: Request,
    *,
    seconds: float,
    bytes_max: int,
) -> None:
    """Fetch like `fetch`, but pass each chunk to `take` as it arrives, so that only one is in memory.

    Raises:
        Unreachable: as in `fetch`; the chunks taken by then are useless. Also whatever `take` raises.
    """
    talk = conversation(network, peer, RUNS_PROTOCOL, seconds=seconds, message_bytes_max=BLOB_CHUNK_BYTES)
    try:
        async with talk as stream:
            await stream.send(encode(request))
            left = _announced(read_reply(await stream.receive()), bytes_max)
            while left:
                chunk = await stream.receive()
                if not chunk or len(chunk) > left:
                    raise RemoteProtocolError("the blob's size differs from the announced size")
                left -= len(chunk)
                await take(chunk)
    except (StreamClosed, RemoteProtocolError) as error:
        raise Unreachable("refused", f"no answer: {error}") from None


def _announced(reply: Reply, bytes_max: int) -> int:
    """Return how many bytes follow. Raises Unreachable if none do, or too many."""
    if isinstance(reply, Declined):
        raise Unreachable("busy" if reply.is_busy else "refused", reply.reason)
    if not isinstance(reply, Blob):
        raise Unreachable("refused", "the answer does not match the request")
    if reply.size_bytes > bytes_max:
        raise Unreachable(
            "refused", (f"{reply.size_bytes} bytes were offered, but at most {bytes_max} are wanted")
        )
    return reply.size_bytes


def read_reply(data: bytes) -> Reply:
    """Decode a reply. Raises RemoteProtocolError."""
    reply: Reply = decode(data, Reply, bytes_max=REQUEST_BYTES_MAX)
    return reply
