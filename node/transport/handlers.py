"""Which protocols are served on streams, by what, and how much of each one peer may ask for. No I/O.

The real network and the simulated one count by it, so they refuse the same.
"""

from collections import Counter
from collections.abc import Sequence

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from crypto.protocols import protocol_bytes
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.seams import Handler, Stream, StreamLimits


async def serve(handler: Handler, stream: Stream, counters: Counter[str]) -> bool:
    """Have a handler serve a stream, and count how that ended. False where the handler failed by a bug of our
    own, which is contained."""
    with contain(f"stream {stream.protocol}") as part:
        try:
            await handler(stream)
        except* RemoteProtocolError:
            counters["streams_broken"] += 1
        except* Unreachable:
            counters["streams_ended_early"] += 1
        except* StreamClosed:
            pass  # how a conversation ends; what broke one was counted where it broke
    if part.error is not None:
        counters["streams_failed"] += 1
    return part.error is None


class Handlers:
    """Handlers by the name of their protocol, and how many streams of each every peer has open here."""

    def __init__(self) -> None:
        self._handlers: dict[str, tuple[Handler, StreamLimits]] = {}
        self._open: Counter[tuple[PeerId, str]] = Counter()

    def __contains__(self, protocol: object) -> bool:
        return protocol in self._handlers

    def add(self, protocol: str, handler: Handler, limits: StreamLimits) -> None:
        """Serve streams of `protocol`; LocalProtocolError if somebody does already."""
        protocol_bytes(protocol)
        if protocol in self._handlers:
            raise LocalProtocolError(f"{protocol} has a handler already")
        self._handlers[protocol] = handler, limits

    def of(self, protocol: str) -> Handler:
        """Return what serves it."""
        return self._handlers[protocol][0]

    def message_bytes_max(self, protocol: str) -> int:
        """The longest message that its streams take."""
        return self._handlers[protocol][1].message_bytes_max

    def first_of(self, names: Sequence[str]) -> str | None:
        """The first name that is served here."""
        return next((name for name in names if name in self._handlers), None)

    def enter(self, peer: PeerId, protocol: str) -> bool:
        """Count one more stream of a peer; False where it has as many as it may. Each needs a `leave`."""
        place = peer, protocol
        if self._open[place] >= self._handlers[protocol][1].streams_per_peer_max:
            return False
        self._open[place] += 1
        return True

    def leave(self, peer: PeerId, protocol: str) -> None:
        """One of them is over."""
        place = peer, protocol
        self._open[place] -= 1
        if self._open[place] <= 0:
            del self._open[place]  # a stranger's name is not kept
