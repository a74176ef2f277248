"""The protocols served on streams, their handlers, and the limits for each peer. No I/O.

Every stream that another peer opens takes up a place in one register (`crypto.registers`). Each peer, each
network and each protocol has a budget, and so have all together; a silent stream makes room for a new one.
The real and the simulated network use the same register, so they refuse and evict alike.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.protocols import protocol_bytes
from crypto.registers import Budget, PlaceHolder, Register
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.seams import Handler, Stream, StreamLimits
from node.transport.settings import TRANSPORT

H = TypeVar("H", bound=PlaceHolder)


async def serve(handler: Handler, stream: Stream, counters: Counter[str]) -> bool:
    """Let a handler serve a stream, and count the outcome. Return False if the handler failed because of a
    bug in this program; the exception is contained."""
    with contain(f"stream {stream.protocol}") as part:
        try:
            await handler(stream)
        except* RemoteProtocolError:
            counters["streams_broken"] += 1
        except* Unreachable:
            counters["streams_ended_early"] += 1
        except* StreamClosed:
            pass  # the normal end of a conversation; errors were counted where they occurred
    if part.error is not None:
        counters["streams_failed"] += 1
    return part.error is None


class Handlers(Generic[H]):
    """Handlers by protocol name, and the register of peers that have, or may open, streams here. A place in
    it is a connection in the real network, and a stream in the simulated one."""

    def __init__(self, budget: Budget = TRANSPORT.inbound) -> None:
        self._handlers: dict[str, tuple[Handler, StreamLimits]] = {}
        self.register: Register[H] = Register(budget)

    def __contains__(self, protocol: object) -> bool:
        return protocol in self._handlers

    @property
    def limits(self) -> dict[str, StreamLimits]:
        """The limits of each served protocol."""
        return {protocol: limits for protocol, (_, limits) in self._handlers.items()}

    def add(self, protocol: str, handler: Handler, limits: StreamLimits) -> None:
        """Serve streams of `protocol`. Raises LocalProtocolError if the protocol has a handler already."""
        protocol_bytes(protocol)
        if protocol in self._handlers:
            raise LocalProtocolError(f"{protocol} has a handler already")
        self._handlers[protocol] = handler, limits
        self.register.open(protocol, limits.budget)

    def of(self, protocol: str) -> Handler:
        """Return the handler of a protocol."""
        return self._handlers[protocol][0]

    def message_bytes_max(self, protocol: str) -> int:
        """Return the size of the longest message that streams of a protocol accept."""
        return self._handlers[protocol][1].message_bytes_max

    def first_of(self, names: Sequence[str]) -> str | None:
        """Return the first of these protocol names that is served here; None if none is."""
        return next((name for name in names if name in self._handlers), None)
