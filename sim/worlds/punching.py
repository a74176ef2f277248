"""Better paths for simulated peers that reach each other through a relay: dialling back, and hole punching.

This repeats the glue code of `node.transport.puncher`. Budgets and observed addresses use a node's cores.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from crypto.contact import make_address
from crypto.identity import PeerId
from node.transport.paths import IMPROVE_SECONDS
from node.transport.punching import RETRY_SECONDS, TRANSPORTS, Transport
from sim.network.instants import after
from sim.network.machines import TcpLink, carry
from sim.network.routers import Endpoint
from sim.worlds.crossing import SimPath, Traveller, dial, latencies
from sim.worlds.joining import DialGround
from sim.worlds.open_paths import OpenPaths, pair_of


class SimPuncher:
    """Improves `paths` of the peers that are `here`: the path of each pair at most every
    `IMPROVE_SECONDS`."""

    def __init__(
        self, ground: DialGround, here: Mapping[PeerId, Traveller], counters: Counter[str], paths: OpenPaths
    ) -> None:
        self._ground = ground
        self._links = ground.links
        self._here = here
        self._counters = counters
        self._paths = paths
        self._improved: dict[tuple[PeerId, PeerId], float] = {}
        paths.improve = self.improve

    def improve(self, path: SimPath) -> None:
        """Make the peer that was reached through a relay dial the other peer, and punch a hole."""
        now, pair = self._ground.now, pair_of(path.first.peer, path.other.peer)
        if path.is_over or self._improved.get(pair, -IMPROVE_SECONDS) + IMPROVE_SECONDS > now:
            return
        if any(each.way != "relayed" for each in self._paths.between(*pair)):
            return
        self._improved[pair] = now
        if not self.offer(path.other, path.first, now):
            self._punch(path.other, path.first, now)

    def offer(self, one: Traveller, other: Traveller, now: float) -> bool:
        """Make a peer that cannot be dialled, or not by datagram, open a path to `other`."""
        best = self._paths.best(one, other)
        if one.machine.site is None or (best is not None and best.way != "relayed"):
            return False
        made = dial(one, other, now)
        if made is None:
            return False
        ready_at = after(now, 2 * sum(latencies(self._links, one, other)))
        self._paths.open(one, other, "direct", (made,), ready_at)
        return True

    def _punch(self, one: Traveller, other: Traveller, now: float, *, is_second: bool = False) -> None:
        """Make both peers dial each other simultaneously at their outside addresses, and once more soon
        afterwards."""
        if not one.budget.may_start(other.peer, now) or not other.budget.may_answer(one.peer, now):
            return
        self._counters["punches begun"] += 1
        worked = False
        paid: set[str] = set()
        for transport in TRANSPORTS:
            places = tuple(
                self._offered(*ends, transport, now, paid) for ends in ((one, other), (other, one))
            )
            paid = {place[0] for place in places if place is not None}
            if all(places):
                worked |= self._dial_both(one, other, places, transport, now)
        one.budget.ended(other.peer, worked=worked)
        self._counters["punches worked"] += worked
        if not worked and not is_second:
            self._ground.at(after(now, RETRY_SECONDS), self._punch_again, one, other)

    def _punch_again(self, one: Traveller, other: Traveller) -> None:
        if all(self._here.get(end.peer) is end for end in (one, other)):
            self._punch(one, other, self._ground.now, is_second=True)

    def _offered(
        self, one: Traveller, other: Traveller, transport: Transport, now: float, paid: Collection[str]
    ) -> Endpoint | None:
        """Return where `one` dials `other`: the address that `other` offers, if the budget admits it."""
        family = one.machine.family(other.machine)
        own = other.machine.cards[family]
        place = own.inner if family == 6 or own.site is None else None
        if place is None:
            seen = other.seen.place(transport, now)
            place = None if seen is None else (seen.host, seen.port)
        if place is None:
            return None
        admitted = one.budget.admit(other.peer, [str(make_address(*place))], now, paid)
        return (admitted[0].host, admitted[0].port) if admitted else None

    def _dial_both(
        self,
        one: Traveller,
        other: Traveller,
        places: "tuple[Endpoint | None, ...]",
        transport: Transport,
        now: float,
    ) -> bool:
        """Exchange crossing packets: the first ones open the mappings on the way out, later ones get in."""
        ends = ((one, other, places[0]), (other, one, places[1]))
        sources: list[Endpoint | None] = []
        for _ in range(2):
            sources = [
                None if to is None else carry(transport, near.machine, far.machine, to, now)
                for near, far, to in ends
            ]
        for (near, far, to), source in zip(ends, sources, strict=True):
            if source is None or to is None:
                continue
            back = carry(transport, far.machine, near.machine, source, now)
            if back != to:
                continue
            if transport == "udp":
                far.heard[near.peer], near.heard[far.peer] = (source, now), (back, now)
                self._counters["punched by udp"] += 1
                return False  # messages then go by datagram, but a path is still wanted
            made = TcpLink(near.machine, far.machine, to, source)
            ready_at = after(now, sum(latencies(self._links, one, other)))
            self._paths.open(one, other, "punched", (made,), ready_at)
            return True
        return False
