"""The heap engine: drives any number of sans-IO cores from one event heap, without trio.

It does what `node.services.driver.Driver` does, many times cheaper; `tests/test_drivers_agree.py`
holds that both give the same trace. Events are ordered by (time, port, kind, sender, number on the
link). So a core has one defined order within an instant: it is killed or started, then it receives
what arrived (by sender, then number), then it is called, then it is woken if its deadline has come.

Not here: streams, transports and whole nodes; those run on `sim.seams` under trio.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from node.services.driver import Core, Sends
from sim.network.instants import instant
from sim.network.links import Link, Links
from sim.trace import Trace, TracedCore

WAKES_AT_ONCE_MAX = 1_000
"""A core woken so often within one microsecond never lets its deadline move: a bug, not a load."""

Order = Callable[[Any, float], Sends]
"""What local code does to a core: `order(core, now)` returns what to send."""


# The kinds of events, in their order within one instant of one port.
_KILL, _START, _DELIVER, _CALL, _WAKE = range(5)


@dataclass(frozen=True)
class Wire:
    """How one protocol's messages travel as bytes, if an experiment wants the real codec."""

    message_type: Any
    message_bytes_max: int


class _Port:
    """One core of one peer. `wake_at` is the earliest wake in the heap that still counts; `routes`
    are the links to those it has sent to, with who is at the other end.
    """

    __slots__ = (
        "alive", "core", "index", "peer", "protocol", "routes", "wake_at", "wakes", "wire", "woken_at"
    )  # fmt: skip

    def __init__(self, index: int, peer: PeerId, protocol: str, core: Core, wire: Wire | None) -> None:
        self.index = index
        self.peer = peer
        self.protocol = protocol
        self.core = core
        self.wire = wire
        self.alive = False
        self.routes: dict[PeerId, tuple[Link, _Port]] = {}
        self.wake_at = math.inf
        self.woken_at = -math.inf
        self.wakes = 0


class Engine:
    """Runs cores over `links`.

    `trace` records everything (slow). `wires` names the protocols whose messages are encoded and
    decoded by the real codec; all others pass as structs. `publish(now, peer, event)` is called
    with every event a core learns.

    `counters` tells what happened: delivered, lost (by the link model), missed (nobody there), refused
    (the receiver raised RemoteProtocolError), tied (events at the same instant as the one before
    them at the same port).
    """

    def __init__(
        self,
        links: Links,
        *,
        trace: Trace | None = None,
        wires: dict[str, Wire] | None = None,
        publish: Callable[[float, PeerId, Any], None] | None = None,
    ) -> None:
        self.now = 0.0
        self.counters: Counter[str] = Counter()
        self._links = links
        self._trace = trace
        self._wires = wires or {}
        self._publish = publish
        self._ports: list[_Port] = []
        self._by_name: dict[tuple[PeerId, str], _Port] = {}
        self._ports_of: dict[PeerId, list[_Port]] = {}
        self._heap: list[tuple[float, int, int, bytes, int, Any]] = []
        self._number = 0

    def add(self, peer: PeerId, core: Core, *, protocol: str = "", at: float = 0.0) -> None:
        """`core` begins to act for `peer` at the instant `at`; before that it receives nothing.

        A peer that was killed may be given a new core: what is on its way still reaches it.
        """
        if self._trace is not None:
            core = TracedCore(core, peer, protocol, self._trace)
        port = self._by_name.get((peer, protocol))
        if port is None:
            port = _Port(len(self._ports), peer, protocol, core, self._wires.get(protocol))
            self._ports.append(port)
            self._by_name[peer, protocol] = port
            self._ports_of.setdefault(peer, []).append(port)
        self._push(at, port, _START, core)

    def kill(self, peer: PeerId, at: float) -> None:
        """At `at` all cores of `peer` stop, without a word. What they sent before still arrives."""
        for port in self._ports_of.get(peer, ()):
            self._push(at, port, _KILL, None)

    def call(self, at: float, peer: PeerId, order: Order, *, protocol: str = "") -> None:
        """At `at` local code of `peer` acts on its core."""
        self._push(at, self._by_name[peer, protocol], _CALL, order)

    def command(self, peer: PeerId, order: Order, *, protocol: str = "") -> None:
        """Local code of `peer` acts on its core now, before anything else happens, as the driver of a real
        node has it; from within `publish`, say. Nothing if it is not running."""
        port = self._by_name[peer, protocol]
        if port.alive:
            self._turn(self.now, port, _CALL, order)
            if port.core.deadline < port.wake_at:
                self._plan_wake(self.now, port)

    def run(self, until: float) -> None:
        """Let everything happen up to the instant `until`, and at it."""
        heap, ports, counters = self._heap, self._ports, self.counters
        last_time, last_index = -1.0, -1
        delivered = tied = 0
        while heap and heap[0][0] <= until:
            now, index, kind, sender, _, payload = heappop(heap)
            port = ports[index]
            self.now = now
            if kind == _WAKE and now != port.wake_at:
                continue  # an earlier deadline took this one's place
            if now == last_time and index == last_index:
                tied += 1
            last_time, last_index = now, index
            if kind == _DELIVER:
                if not port.alive:
                    counters["missed"] += 1
                    continue
                delivered += 1
                self._deliver(now, port, sender, payload)
            else:
                self._turn(now, port, kind, payload)
            if port.alive and port.core.deadline < port.wake_at:
                self._plan_wake(now, port)
        counters["delivered"] += delivered
        counters["tied"] += tied
        self.now = until

    def _deliver(self, now: float, port: _Port, sender: bytes, payload: Any) -> None:
        core, wire = port.core, port.wire
        try:
            if wire is not None:
                payload = decode(payload, wire.message_type, bytes_max=wire.message_bytes_max)
            sends = core.receive(now, PeerId(sender), payload)
        except RemoteProtocolError:
            self.counters["refused"] += 1
            return
        if sends or core.events:
            self._pass_on(now, port, sends)

    def _turn(self, now: float, port: _Port, kind: int, payload: Any) -> None:
        """Everything but a delivery."""
        if kind == _START:
            if port.alive:
                raise LocalProtocolError("this peer has a core for this protocol already")
            port.alive, port.core, port.wake_at = True, payload, math.inf
        elif kind == _KILL:
            port.alive = False
        elif kind == _WAKE:
            port.wake_at = math.inf
            if port.alive and port.core.deadline <= now:
                self._check_wakes(now, port)
                self._pass_on(now, port, port.core.wake(now))
        elif port.alive:
            core = port.core
            sends = core.call(now, payload) if isinstance(core, TracedCore) else payload(core, now)
            self._pass_on(now, port, sends)

    def _pass_on(self, now: float, port: _Port, sends: Sends) -> None:
        events = port.core.events
        if events:
            drained = events[:]
            events.clear()
            if self._publish is not None:
                for event in drained:
                    self._publish(now, port.peer, event)
        peer, wire, routes, heap = port.peer, port.wire, port.routes, self._heap
        for receiver, message in sends:
            route = routes.get(receiver) or self._find_route(port, receiver)
            if route is None:
                continue
            link, target = route
            payload = message if wire is None else encode(message)
            sequence, due = link.post(now)
            if not target.alive:
                self.counters["missed"] += 1
            elif due == math.inf:
                self.counters["lost"] += 1
            else:
                heappush(heap, (due, target.index, _DELIVER, peer, sequence, payload))

    def _find_route(self, port: _Port, receiver: PeerId) -> tuple[Link, _Port] | None:
        target = self._by_name.get((receiver, port.protocol))
        link = self._links.link(port.peer, receiver, port.protocol)
        if target is None:
            # Nobody yet: a number is used up all the same, as on the simulated network.
            link.post(self.now)
            self.counters["missed"] += 1
            return None
        route = port.routes[receiver] = link, target
        return route

    def _plan_wake(self, now: float, port: _Port) -> None:
        # Only an earlier deadline is pushed. One that moved later is found when the earlier entry
        # comes up, so a core that postpones its deadline with every message costs no heap entries.
        at = instant(max(now, port.core.deadline))
        if at < port.wake_at:
            port.wake_at = at
            self._push(at, port, _WAKE, None)

    def _check_wakes(self, now: float, port: _Port) -> None:
        port.wakes = port.wakes + 1 if port.woken_at == now else 1
        port.woken_at = now
        if port.wakes > WAKES_AT_ONCE_MAX:
            raise LocalProtocolError(f"woken {port.wakes} times at {now}: its deadline does not move on")

    def _push(self, at: float, port: _Port, kind: int, payload: Any) -> None:
        # The running number makes each entry unique, so that payloads are never compared.
        self._number += 1
        heappush(self._heap, (instant(max(at, self.now)), port.index, kind, b"", self._number, payload))
