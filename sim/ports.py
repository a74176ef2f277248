"""Ports: each holds one core of one peer, and queues the input that the core cannot take yet.

Not here: the calendar and the events at a port (`sim.engine`).
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crypto.errors import LocalProtocolError
from crypto.identity import PeerId
from node.services.driver import Core, Sends
from sim.network.links import Sender
from sim.network.places import Place
from sim.network.sizes import SentTraffic, envelope_bytes

WAKES_AT_ONCE_MAX = 1_000
"""Maximum number of wakes of one core within one microsecond. A core that exceeds it does not move its
deadline, which is a bug."""

Order = Callable[[Any, float], Sends]
"""An order of local code to a core: `order(core, now)` returns the messages to send."""


@dataclass(frozen=True)
class Wire:
    """The wire format of one protocol's messages, for experiments that use the real codec."""

    message_type: Any
    message_bytes_max: int


class _Gone:
    """A stand-in for a killed core, so that nothing of that core stays in memory."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.deadline = math.inf

    def receive(self, now: float, sender: PeerId, message: Any) -> Sends:  # noqa: ARG002 - the shape of a core
        raise LocalProtocolError("a dead core received something")

    def wake(self, now: float) -> Sends:  # noqa: ARG002 - the shape of a core
        raise LocalProtocolError("a dead core was woken")


GONE = _Gone()


class CorePort:
    """One core of one peer and, after a kill, the new core. `is_open`: alive, and neither frozen nor busy. If
    it is not open, messages go to `backlog` and local calls to `orders` until the instant `until`. `wake_at`
    is the earliest planned wake that is still valid, `wake_for` its deadline. `others` are all ports of the
    protocol. `pace_ticks` is the time that a message takes."""

    __slots__ = (
        "alive", "backlog", "core", "envelope_bytes", "index", "is_open", "orders", "others", "pace_ticks",
        "peer", "place", "protocol", "sender", "until", "wake_at", "wake_for", "wakes", "wire", "woken_at",
    )  # fmt: skip

    def __init__(self, index: int, protocol: str, sender: Sender, others: "dict[PeerId, CorePort]") -> None:
        self.index = index
        self.peer = sender.place.peer
        self.place: Place = sender.place
        self.protocol = protocol
        self.sender = sender
        self.others = others
        self.envelope_bytes = envelope_bytes(protocol)
        self.wire: Wire | None = None
        self.core: Core = GONE
        self.alive = self.is_open = False
        self.backlog: list[tuple[PeerId, Any]] = []
        self.orders: list[Order] = []
        self.until = 0.0
        self.pace_ticks = 0
        self.wake_at = self.wake_for = math.inf
        self.woken_at = -math.inf
        self.wakes = 0

    def count_wake(self, now: float) -> None:
        """Count a wake of the core. Raises LocalProtocolError if its deadline does not move."""
        self.wakes = self.wakes + 1 if self.woken_at == now else 1
        self.woken_at = now
        if self.wakes > WAKES_AT_ONCE_MAX:
            raise LocalProtocolError(f"woken {self.wakes} times at {now}: its deadline does not move on")


class PortTable:
    """All ports, by number, protocol and peer, with counts of sent messages. A port is never removed, so a
    peer that returns after a kill keeps its ports and counts.
    """

    def __init__(self, wires: "dict[str, Wire]") -> None:
        self.all: list[CorePort] = []
        # Messages sent by each port. In arrays, because boxed integers would be allocated for each message.
        self.sent, self.sent_bytes = array("Q"), array("Q")
        self._wires = wires
        self._by_protocol: dict[str, dict[PeerId, CorePort]] = {}
        self._by_peer: dict[PeerId, list[CorePort]] = {}

    def open(self, peer: PeerId, protocol: str, find_sender: Callable[[PeerId, str], Sender]) -> CorePort:
        """Return the port of a peer for a protocol; create it if needed."""
        others = self._by_protocol.setdefault(protocol, {})
        port = others.get(peer)
        if port is None:
            port = others[peer] = CorePort(len(self.all), protocol, find_sender(peer, protocol), others)
            port.wire = self._wires.get(protocol)
            self.all.append(port)
            self.sent.append(0)
            self.sent_bytes.append(0)
            self._by_peer.setdefault(peer, []).append(port)
        return port

    def get(self, peer: PeerId, protocol: str) -> CorePort:
        """Return the port of a peer for a protocol. Raises KeyError if there is none."""
        return self._by_protocol[protocol][peer]

    def of(self, peer: PeerId) -> Sequence[CorePort]:
        """Return all ports of a peer."""
        return self._by_peer.get(peer, ())

    def traffic(self, peer: PeerId | None = None) -> dict[str, SentTraffic]:
        """Return the traffic sent for each protocol by `peer`, over all its restarts, or by all peers."""
        sums: dict[str, SentTraffic] = {}
        for port in self.all if peer is None else self.of(peer):
            own = SentTraffic(self.sent[port.index], self.sent_bytes[port.index])
            sums[port.protocol] = sums.get(port.protocol, SentTraffic()) + own
        return sums
