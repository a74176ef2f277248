"""The engine: drives any number of sans-IO cores from one calendar of events, without trio.

It does the work of `node.services.driver.Driver` at a small part of the cost; `tests/test_drivers_agree.py`
checks that both give the same trace. Events are ordered by (time, port, kind, sender, number of the message).
So within an instant the order for each core is defined: it is killed or started; frozen or thawed; receives
the messages that have arrived (by sender, then number); is called; and is woken if its deadline has come.

A frozen peer behaves like a stopped process: it runs nothing, and its messages wait. At the thaw it receives
them in the order of arrival, then finds that its deadline has long passed. A slow peer is frozen for a while
after each message.

Message sizes, for limits and counters, are the length of the message as encoded by the real codec plus a
datagram's envelope. A message that travels as a struct is encoded once to find its length. This takes about a
microsecond, far less than a core spends on it, and a cheaper estimate would be wrong for some messages. If
bandwidth is unlimited and nobody counts bytes, sizes are not computed.

Not here: streams, transports and whole nodes. They run on `sim.seams` under trio.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from gossip.messages import ByStream
from node.services.driver import Core, Sends
from sim.event_queue import Calendar
from sim.network.clocks import LocalClock, SkewedCore, act
from sim.network.instants import TICKS_PER_SECOND, after, instant
from sim.network.links import SimLinks
from sim.network.pace import handling_ticks
from sim.network.places import RIGHT
from sim.network.queues import LinkQueue, Parcel
from sim.network.sizes import SentTraffic
from sim.ports import GONE, CorePort, Order, PortTable, Wire
from sim.trace import Trace, TracedCore

# The kinds of events, in their order within one instant at one port.
_CARRY, _KILL, _START, _FREEZE, _THAW, _DELIVER, _CALL, _WAKE = range(8)
_NO_SENDER = PeerId(b"")
_NOBODY = -1
"""The port of events that concern no core. It sorts before all others within an instant."""


class Engine:
    """Runs cores over `links`.

    `trace` records all inputs and outputs (slow). `wires` names the protocols whose messages are encoded and
    decoded by the real codec; all other messages are passed as structs. `publish(now, peer, event)` is called
    with every event of a core. With `count_bytes`, `traffic` reports bytes too.
    """

    def __init__(
        self,
        links: SimLinks,
        *,
        trace: Trace | None = None,
        wires: dict[str, Wire] | None = None,
        publish: Callable[[float, PeerId, Any], None] | None = None,
        count_bytes: bool = False,
    ) -> None:
        self.now = 0.0
        self._links = links
        self._trace = trace
        self._publish = publish
        self._weighs = count_bytes or links.is_limited
        self._carrier = LinkQueue() if links.is_limited else None
        self._carry_at = math.inf
        self._counts: Counter[str] = Counter()
        self._delivered = self._tied = 0
        self._ports = PortTable(wires or {})
        self._sent, self._sent_bytes = self._ports.sent, self._ports.sent_bytes
        self._calendar = Calendar()
        self._number = 0
        self._until = 0.0

    def add(
        self,
        peer: PeerId,
        core: Core,
        *,
        protocol: str = "",
        at: float = 0.0,
        clock: LocalClock = RIGHT,
    ) -> None:
        """Run `core` for `peer` from the instant `at` on; it receives nothing before. The core's times and
        deadlines are those of `clock`. A killed peer may be given a new core, which also receives messages
        that were sent before it started and arrive later.
        """
        if self._trace is not None:
            core = TracedCore(core, peer, protocol, self._trace)
        if clock != RIGHT:
            core = SkewedCore(core, clock)
        self._push(at, self._ports.open(peer, protocol, self._links.sender), _START, core)

    def kill(self, peer: PeerId, at: float) -> None:
        """Stop all cores of `peer` at `at`, without a goodbye. Messages that it sent before still arrive."""
        for port in self._ports.of(peer):
            self._push(at, port, _KILL, None)

    def freeze(self, peer: PeerId, at: float, seconds: float) -> None:
        """Freeze all cores of `peer` at `at` for `seconds`."""
        for port in self._ports.of(peer):
            self._push(at, port, _FREEZE, seconds)

    def slow(self, peer: PeerId, factor: float) -> None:
        """Slow down `peer`: from now on each message takes its cores `factor` times the time of
        `sim.network.pace`. The usual factor 1 takes no time."""
        for port in self._ports.of(peer):
            port.pace_ticks = handling_ticks(factor)

    def call(self, at: float, peer: PeerId, order: Order, *, protocol: str = "") -> None:
        """Let local code of `peer` act on its core at `at`, or at the thaw if the peer is frozen then."""
        self._push(at, self._ports.get(peer, protocol), _CALL, order)

    def command(self, peer: PeerId, order: Order, *, protocol: str = "") -> None:
        """Let local code of `peer` act on its core now, before anything else happens, like
        `node.services.driver.Driver.command`. It may be called from within `publish`, for example. A frozen
        peer acts at the thaw, a stopped one never."""
        port = self._ports.get(peer, protocol)
        self._turn(self.now, port, _CALL, order)
        if port.is_open and port.core.deadline < port.wake_for:
            self._plan_wake(self.now, port, port.core.deadline)

    @property
    def counters(self) -> Counter[str]:
        """Return the number of messages per fate. Each sent or duplicated message is delivered, lost (by
        chance), cut (by a split or a block), filtered (by a NAT), overflowed (a queue was full), missed (no
        core was there), or still in flight. refused counts delivered messages for which the receiver raised
        RemoteProtocolError. tied counts events at the same instant and port as the event before them."""
        counters = self._links.counters + self._counts
        counters["delivered"], counters["tied"] = self._delivered, self._tied
        counters["sent"] = sum(self._sent)
        counters["overflowed"] = 0 if self._carrier is None else self._carrier.overflowed
        return counters

    @property
    def under_way(self) -> int:
        """Return the number of messages that are in flight or wait for a thaw. The cost grows with this
        number."""
        waiting = sum(len(port.backlog) for port in self._ports.all)
        carried = 0 if self._carrier is None else self._carrier.under_way
        return sum(entry[2] == _DELIVER for entry in self._calendar) + waiting + carried

    def traffic(self, peer: PeerId | None = None) -> dict[str, SentTraffic]:
        """Return the traffic sent for each protocol by `peer`, over all its restarts, or by all peers."""
        return self._ports.traffic(peer)

    def run(self, until: float) -> None:
        """Play all events up to and including the instant `until`, or up to an earlier one if `halt` sets it
        during the run."""
        self._until = until
        take, ports = self._calendar.take, self._ports.all
        is_free = not self._links.has_translators
        last_time, last_index = -1.0, -1
        while (entry := take(self._until)) is not None:
            now, index, kind, sender, _, payload = entry
            self.now = now
            if kind == _CARRY:
                self._carry(now)
                continue
            port = ports[index]
            if kind == _WAKE:
                if now != port.wake_at:
                    continue  # an earlier deadline has replaced this one
                if port.is_open and (deadline := port.core.deadline) > now:
                    port.wake_at = math.inf  # the deadline was postponed meanwhile
                    self._plan_wake(now, port, deadline)
                    continue
            if now == last_time and index == last_index:
                self._tied += 1
            last_time, last_index = now, index
            if kind == _DELIVER:
                if is_free and port.is_open:
                    self._deliver(now, port, sender, payload)
                else:
                    self._deliver_with_care(now, port, sender, payload)
            else:
                self._turn(now, port, kind, payload)
            if port.is_open:
                # Read once per event, because a core may take long to compute it.
                deadline = port.core.deadline
                if deadline < port.wake_for:
                    self._plan_wake(now, port, deadline)
        self.now = self._until

    def halt(self, at: float) -> None:
        """End the current `run` after this instant, because code outside the cores acts then."""
        self._until = min(self._until, max(at, self.now))

    def carry(self, sender: PeerId, receiver: PeerId, size_bytes: int, land: Callable[[float], None]) -> None:
        """Send part of a stream now. `land` is called with the time of its arrival, before that time."""
        one, other = self._links.at(sender), self._links.at(receiver)
        trip = self._links.latency_ticks(one, other)
        carrier = self._carrier
        if carrier is None:
            land((round(self.now * TICKS_PER_SECOND) + trip) / TICKS_PER_SECOND)
            return
        carrier.send(
            self.now,
            one.up,
            Parcel(sender, "", other.down, size_bytes, (trip,), lambda due, _: land(due), None, waits=True),
        )
        if carrier.deadline < self._carry_at:
            self._plan_carry(carrier.deadline)

    def _deliver_with_care(self, now: float, port: CorePort, sender: PeerId, payload: Any) -> None:
        """Deliver a message, unless a fault prevents that."""
        links = self._links
        if not port.alive:
            self._counts["missed"] += 1
        elif links.has_translators and not links.lets_in(sender, port.peer, now):
            return
        elif port.is_open:
            self._deliver(now, port, sender, payload)
        else:
            port.backlog.append((sender, payload))

    def _deliver(self, now: float, port: CorePort, sender: PeerId, payload: Any) -> None:
        core, wire = port.core, port.wire
        self._delivered += 1
        if port.pace_ticks:
            self._take_time(now, port)
        try:
            if wire is not None:
                payload = decode(payload, wire.message_type, bytes_max=wire.message_bytes_max)
            sends = core.receive(now, sender, payload)
        except RemoteProtocolError:
            self._counts["refused"] += 1
            return
        if sends or core.events:
            self._pass_on(now, port, sends)

    def _turn(self, now: float, port: CorePort, kind: int, payload: Any) -> None:
        """Handle any event other than a delivery."""
        if kind == _WAKE:
            port.wake_at = port.wake_for = math.inf
            if port.is_open and port.core.deadline <= now:
                port.count_wake(now)
                self._pass_on(now, port, port.core.wake(now))
        elif kind == _CALL:
            if port.is_open:
                self._pass_on(now, port, act(port.core, now, payload))
            elif port.alive:
                port.orders.append(payload)
        elif kind == _START:
            if port.alive:
                raise LocalProtocolError("this peer has a core for this protocol already")
            port.alive = port.is_open = True
            port.core = payload
        elif kind == _KILL:
            self._counts["missed"] += len(port.backlog)
            port.alive = port.is_open = False
            port.core, port.until = GONE, 0.0
            port.wake_at = port.wake_for = math.inf
            port.backlog, port.orders = [], []
        elif port.alive:
            self._freeze_or_thaw(now, port, kind, payload)

    def _freeze_or_thaw(self, now: float, port: CorePort, kind: int, seconds: float) -> None:
        if kind == _FREEZE:
            port.until = max(port.until, after(now, seconds) if seconds else 0.0)
            if port.until > now:
                port.is_open = False
                self._push(port.until, port, _THAW, 0.0)
        elif not port.is_open and port.until <= now:  # unless it was frozen again meanwhile
            port.is_open = True
            backlog, port.backlog = port.backlog, []
            for sender, payload in backlog:
                self._deliver(now, port, sender, payload)
            orders, port.orders = port.orders, []
            for order in orders:
                self._push(now, port, _CALL, order)

    def _take_time(self, now: float, port: CorePort) -> None:
        """Make the core busy with a message: it counts as frozen after this instant."""
        busy_until = max(round(port.until * TICKS_PER_SECOND), round(now * TICKS_PER_SECOND))
        port.until = (busy_until + port.pace_ticks) / TICKS_PER_SECOND
        self._push(after(now, 0.0), port, _FREEZE, 0.0)

    def _pass_on(self, now: float, port: CorePort, sends: Sends) -> None:
        events = port.core.events
        if events:
            drained = events[:]
            events.clear()
            if self._publish is not None:
                for event in drained:
                    self._publish(now, port.peer, event)
        if not sends:
            return
        self._sent[port.index] += len(sends)
        links = self._links
        if self._weighs or not links.is_even:
            self._send_with_care(now, port, sends)
            return
        peer, place, wire, others, add = port.peer, port.place, port.wire, port.others, self._calendar.add
        latency_ticks, tick, number = links.latency_ticks, round(now * TICKS_PER_SECOND), self._number
        if links.has_answers or any(type(message) is ByStream for _, message in sends):
            self._send_with_care(now, port, sends)
            return
        for receiver, message in sends:
            target = others.get(receiver)
            if target is None:
                self._counts["missed"] += 1
                continue
            number += 1
            due = (tick + latency_ticks(place, target.place)) / TICKS_PER_SECOND
            payload = message if wire is None else encode(message)
            add((due, target.index, _DELIVER, peer, number, payload))
        self._number = number

    def _send_with_care(self, now: float, port: CorePort, sends: Sends) -> None:
        """Send messages over links that do more than delay; otherwise like the end of `_pass_on`."""
        peer, wire, carrier, add = port.peer, port.wire, self._carrier, self._calendar.add
        tick = round(now * TICKS_PER_SECOND)
        for receiver, sent in sends:
            by_stream = type(sent) is ByStream
            message = sent.message if by_stream else sent
            data = encode(message) if wire is not None or self._weighs else b""
            size_bytes = port.envelope_bytes + len(data)
            if self._weighs:
                self._sent_bytes[port.index] += size_bytes
            target = port.others.get(receiver)
            if target is None:
                self._counts["missed"] += 1
                continue
            payload = message if wire is None else data
            trips = port.sender.trips(tick, target.place, by_stream=by_stream)
            self._number += 1
            if carrier is None:
                for trip in trips:
                    due = (tick + trip) / TICKS_PER_SECOND
                    add((due, target.index, _DELIVER, peer, self._number, payload))
                continue
            item = (target.index, payload)
            down = target.place.down
            parcel = Parcel(peer, port.protocol, down, size_bytes, trips, self._land, item)
            carrier.send(now, port.place.up, parcel)
        if carrier is not None and carrier.deadline < self._carry_at:
            self._plan_carry(carrier.deadline)

    def _carry(self, now: float) -> None:
        """Advance the peers' queues."""
        carrier = self._carrier
        if carrier is None or now != self._carry_at:
            return  # an earlier deadline has replaced this one
        carrier.advance(now)
        self._carry_at = math.inf
        if carrier.deadline < math.inf:
            self._plan_carry(carrier.deadline)

    def _plan_carry(self, at: float) -> None:
        self._carry_at = at
        self._number += 1
        self._calendar.add((at, _NOBODY, _CARRY, _NO_SENDER, self._number, None))

    def _land(self, due: float, parcel: Parcel) -> None:
        # A new number, because two copies of a message may leave a queue at the same instant.
        index, payload = parcel.item
        self._number += 1
        self._calendar.add((due, index, _DELIVER, parcel.sender, self._number, payload))

    def _plan_wake(self, now: float, port: CorePort, deadline: float) -> None:
        # Only an earlier deadline is pushed. A later one is found when the entry for the earlier one is
        # reached. So a core that postpones its deadline with every message adds no entries.
        port.wake_for = deadline
        at = instant(deadline if deadline > now else now)
        if at < port.wake_at:
            port.wake_at = at
            self._number += 1
            self._calendar.add((at, port.index, _WAKE, _NO_SENDER, self._number, None))

    def _push(self, at: float, port: CorePort, kind: int, payload: Any) -> None:
        # The running number makes each entry unique, so that payloads are never compared.
        self._number += 1
        at = instant(max(at, self.now))
        self._calendar.add((at, port.index, kind, _NO_SENDER, self._number, payload))
