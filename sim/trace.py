"""A digest of all actions of the cores, which shows whether two drivers, or two runs, behave the same.

A core is wrapped in `TracedCore`, in the same way under every driver. Each (peer, protocol) has a running
hash over its actions in order; the digest combines these hashes, sorted by name. So it does not depend on how
peers are interleaved within one instant, an order that no driver promises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.services.driver import Core, Sends

C = TypeVar("C", bound=Core)

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class TraceEntry:
    """One line of a trace. `what` is received, woken, called, refused, sent or learnt."""

    time: float
    peer: PeerId
    protocol: str
    what: str
    data: bytes


class Trace:
    """Collects entries. With `keep` it also stores them, to find where two runs diverge."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._chains: dict[tuple[PeerId, str], Any] = {}
        self._kept: dict[tuple[PeerId, str], list[TraceEntry]] = {}
        self.count = 0

    def add(self, time: float, peer: PeerId, protocol: str, what: str, data: bytes) -> None:
        """Append one entry to the chain of (peer, protocol). The times within a chain must not decrease."""
        name = (peer, protocol)
        chain = self._chains.get(name)
        if chain is None:
            chain = self._chains[name] = blake2b(digest_size=_DIGEST_BYTES)
            self._kept[name] = []
        chain.update(f"{time:.6f} {what} {len(data)} ".encode() + data)
        self.count += 1
        if self._keep:
            self._kept[name].append(TraceEntry(time, peer, protocol, what, data))

    def digest(self) -> str:
        """Return one hash over all chains, in hexadecimal."""
        total = blake2b(digest_size=_DIGEST_BYTES)
        for peer, protocol in sorted(self._chains):
            total.update(peer + protocol.encode() + b"\0" + self._chains[peer, protocol].digest())
        return total.hexdigest()

    def entries(self) -> list[TraceEntry]:
        """Return all kept entries in canonical order: time, peer, protocol, order within the chain."""
        merged = [entry for name in sorted(self._kept) for entry in self._kept[name]]
        return sorted(merged, key=lambda entry: (entry.time, entry.peer, entry.protocol))


class TracedCore(Generic[C]):
    """A core that behaves like `core` and records all inputs and outputs."""

    def __init__(self, core: C, peer: PeerId, protocol: str, trace: Trace) -> None:
        self.core = core
        self._peer = peer
        self._protocol = protocol
        self._trace = trace

    @property
    def events(self) -> list[Any]:
        return self.core.events

    @events.setter
    def events(self, events: list[Any]) -> None:
        self.core.events = events

    @property
    def deadline(self) -> float:
        return self.core.deadline

    def receive(self, now: float, sender: PeerId, message: Any) -> Sends:
        self._add(now, "received", sender + encode(message))
        try:
            sends = self.core.receive(now, sender, message)
        except RemoteProtocolError as error:
            self._add(now, "refused", str(error).encode())
            raise
        return self._outcome(now, sends)

    def wake(self, now: float) -> Sends:
        self._add(now, "woken", b"")
        return self._outcome(now, self.core.wake(now))

    def call(self, now: float, order: Callable[[C, float], Sends]) -> Sends:
        """Let local code act on the core."""
        self._add(now, "called", b"")
        return self._outcome(now, order(self.core, now))

    def _outcome(self, now: float, sends: Sends) -> Sends:
        for event in self.core.events:
            self._add(now, "learnt", type(event).__name__.encode() + b" " + encode(event))
        for receiver, message in sends:
            self._add(now, "sent", receiver + encode(message))
        return sends

    def _add(self, now: float, what: str, data: bytes) -> None:
        self._trace.add(now, self._peer, self._protocol, what, data)
