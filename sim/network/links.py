"""All links of one simulation: the arrival time or the loss of each message. Pure: no trio, no clock.

The fate of a message is a keyed hash of (seed, sender, receiver, protocol, instant of sending, its number
within that instant on this link). So it does not depend on other links, or on the order in which a driver
asks. Pairs of peers cost no memory, because a distance is computed from both ends. The scenario's player sets
splits, blocks and temporary losses here. These affect messages sent from then on; messages already in flight
arrive.
"""

import struct
from collections import Counter
from collections.abc import Collection
from hashlib import blake2b
from typing import Protocol

from crypto.errors import LocalProtocolError
from crypto.identity import PeerId
from node.transport.datagram_paths import ANSWER_SECONDS
from sim.network.clocks import LocalClock
from sim.network.instants import TICKS_PER_SECOND, ticks
from sim.network.machines import Internet
from sim.network.model import NetworkModel
from sim.network.places import Place
from sim.seeds import draw

_DRAWS = struct.Struct("<6I")
_MESSAGE = struct.Struct("<QI")
_RANGE = 2.0**32
_SPREAD = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
STREAM_TRIPS = 7
"""Number of one-way trips for a single message by stream: two for TCP's handshake, two for Noise's, then the
hello, its answer, and the message."""
_ANSWER_TICKS = round(ANSWER_SECONDS * TICKS_PER_SECOND)
_ANSWERS_KEPT = 4_096
"""Number of pairs of peers beyond which expired entries are dropped."""
_BITS = 32
"""Number of bits in a drawn figure. `_SPREAD` is odd, so the upper half of its product with a random 64-bit
number is random."""


class Ways(Protocol):
    """How messages pass through routers (`sim.worlds.routed`)."""

    def trips(self, own: Place, receiver: Place, tick: int, *, by_stream: bool) -> tuple[int, ...] | None:
        """Return the travel time of each copy of a message in ticks; an empty tuple if it is lost, None if no
        router affects it."""


class SimLinks:
    """The links under one model and seed. `counters` counts the fates of messages: lost (by chance), cut (by
    a split or a block), duplicated (extra copies that were made), filtered (by a NAT)."""

    def __init__(self, model: NetworkModel, seed: int) -> None:
        self.model = model
        self.counters: Counter[str] = Counter()
        self.is_limited = model.is_limited
        self.has_translators = any(access.nat != "none" for access in model.access)
        self.ways: Ways | None = None
        """How messages pass through the routers in front of the peers; None without routers."""
        self._internet = Internet() if model.has_routers else None
        self._seed = seed
        self._base, self._span = _distances(model)
        self._jitter_ticks = ticks(model.jitter_seconds) if model.jitter_seconds > 0 else 0
        self._reorder_ticks = ticks(model.reorder_seconds)
        # An effect happens if the drawn figure is below its bound; a message is kept if the figure is not
        # below its bound.
        self._kept_range = (1.0 - model.loss) * _RANGE
        self._reordered_range = model.reordering * _RANGE
        self._copied_range = model.duplication * _RANGE
        self._fates_differ = bool(
            model.loss or model.jitter_seconds or model.duplication or model.reordering
        ) or any(access.loss for access in model.access)
        self._places: dict[PeerId, Place] = {}
        self._splits: dict[int, dict[PeerId, int]] = {}
        self._split_number = 0
        self._blocked: dict[PeerId, dict[PeerId, None]] = {}
        self._lossy: dict[PeerId, float] = {}
        self._deaf: dict[PeerId, None] = {}
        self._mute: dict[PeerId, None] = {}
        # The ticks from which, for a moment, messages from one peer to another by a protocol go by stream.
        self._answers: dict[tuple[PeerId, PeerId, str], tuple[int, ...]] = {}
        # Messages that arrive by stream, at or from a peer behind a NAT.
        self._by_stream: set[tuple[PeerId, PeerId, int]] = set()
        self._is_parted = False
        self.is_even = not self._fates_differ and not self.has_translators and self._internet is None

    @property
    def has_answers(self) -> bool:
        """Whether any message has to be answered by a stream."""
        return bool(self._answers)

    # Places of peers.

    def place(self, peer: PeerId, number: int) -> None:
        """Give a peer the region, the access and the clock of its number. This must come before all other
        calls for that peer; a peer that was never placed gets values drawn from its name."""
        if peer in self._places:
            raise LocalProtocolError("this peer has a place already")
        place = self._settle(peer, number)
        if self._internet is not None:
            # The first peer must be reachable.
            access = place.access
            router = access.router if number else "none"
            place.machine = self._internet.machine(peer, number, router, access.behind_one)

    def at(self, peer: PeerId) -> Place:
        """Return the place of a peer."""
        return self._places.get(peer) or self._settle(peer, peer)

    def region(self, peer: PeerId) -> str:
        """Return the name of a peer's region; empty without regions."""
        regions = self.model.regions
        return regions[self.at(peer).region].name if regions else ""

    def clock(self, peer: PeerId) -> LocalClock:
        """Return the clock of a peer."""
        return self.at(peer).clock

    def latency_seconds(self, sender: PeerId, receiver: PeerId) -> float:
        """Return the one-way latency in seconds, without jitter and queues."""
        return self.latency_ticks(self.at(sender), self.at(receiver)) / TICKS_PER_SECOND

    def latency_ticks(self, sender: Place, receiver: Place) -> int:
        """Return the one-way latency in whole microseconds, without jitter and queues."""
        base = self._base[sender.region][receiver.region]
        span = self._span[sender.region][receiver.region]
        if not span:
            return base
        share = ((sender.key ^ receiver.key) * _SPREAD & _MASK) >> _BITS
        return base + (share * span >> _BITS)

    def sender(self, peer: PeerId, protocol: str) -> "Sender":
        """Return the `Sender` for messages of `peer` by `protocol`. The peer's driver keeps it."""
        return Sender(self, self.at(peer), protocol, self._seed)

    # Temporary disturbances of links.

    def split(self, *sides: Collection[PeerId]) -> int:
        """Let no message pass between the sides until `heal`. All peers that are in no side form one further
        side. Several splits may be active; return the number of this one, for `heal`."""
        self._split_number += 1
        self._splits[self._split_number] = {
            peer: number for number, side in enumerate(sides) for peer in side
        }
        self._take_sides()
        return self._split_number

    def heal(self, number: int | None = None) -> None:
        """End the split with this number, or all splits."""
        if number is None:
            self._splits.clear()
        else:
            self._splits.pop(number, None)
        self._take_sides()

    def block(self, one: PeerId, other: PeerId) -> None:
        """Block messages from `one` to `other`; the other direction stays open."""
        self._blocked.setdefault(one, {})[other] = None
        self._look()

    def unblock(self, one: PeerId, other: PeerId) -> None:
        """Undo `block`."""
        self._blocked.get(one, {}).pop(other, None)
        if not self._blocked.get(one, True):
            del self._blocked[one]
        self._look()

    def block_datagrams(self, peer: PeerId, *, blocked: bool = True) -> None:
        """Drop all datagrams from and to the peer, but no streams; with `blocked=False`, undo that."""
        self.at(peer).has_datagrams = not blocked
        if blocked:
            self._mute[peer] = None
        else:
            self._mute.pop(peer, None)
        self._look()

    def deafen(self, peer: PeerId, *, deaf: bool = True) -> None:
        """Let the peer receive nothing, while others still receive its messages; with `deaf=False`, undo
        that."""
        self.at(peer).deaf = deaf
        if deaf:
            self._deaf[peer] = None
        else:
            self._deaf.pop(peer, None)
        self._look()

    def disturb(self, peer: PeerId, loss: float) -> None:
        """From now on, lose this additional share of the datagrams from and to `peer`; 0 ends it."""
        place = self.at(peer)
        place.kept_share = (1.0 - place.access.loss) * (1.0 - loss)
        if loss:
            self._lossy[peer] = loss
        else:
            self._lossy.pop(peer, None)
        self._look()

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        """Return whether a message that `one` sends now may reach `other`, that is, no split or block is
        between them."""
        return self.connects(self.at(one), self.at(other))

    def connects(self, one: Place, other: Place) -> bool:
        """Do the same as `reaches` for two places."""
        if one.sides != other.sides or other.deaf:
            return False
        blocked = self._blocked.get(one.peer)
        return blocked is None or other.peer not in blocked

    def may_open(self, other: PeerId, now: float) -> bool:
        """Return whether any peer may open streams to `other`, which is always so at a public address."""
        place = self.at(other)
        if place.machine is not None and (card := place.machine.cards[4]).site is not None:
            return card.site.lets_in("tcp", card.inner, now)
        nat = place.nat
        return nat is None or nat.lets_streams_in(now)

    def lets_in(self, one: PeerId, other: PeerId, now: float) -> bool:
        """Return whether the NATs let a datagram pass that `one` sends and that reaches `other` at the
        instant `now`."""
        arrival = (one, other, round(now * TICKS_PER_SECOND))
        if arrival in self._by_stream:
            self._by_stream.remove(arrival)
            return True
        before, behind = self.at(one).nat, self.at(other).nat
        if (before is not None and not before.lets_out()) or (
            behind is not None and not behind.lets_in(one, now)
        ):
            self.counters["filtered"] += 1
            return False
        if before is not None:
            before.got_through(other, now)
        return True

    def fate(self, name: bytes, sender: Place, receiver: Place, tick: int, count: int) -> tuple[int, ...]:
        """Return the travel time of each copy of one message in ticks; an empty tuple if it never arrives."""
        if self._is_parted and not (
            self.connects(sender, receiver) and sender.has_datagrams and receiver.has_datagrams
        ):
            self.counters["cut"] += 1
            return ()
        # `latency_ticks` is inlined here, because this runs for every message.
        latency = self._base[sender.region][receiver.region]
        span = self._span[sender.region][receiver.region]
        if span:
            share = ((sender.key ^ receiver.key) * _SPREAD & _MASK) >> _BITS
            latency += share * span >> _BITS
        if not self._fates_differ and not self._lossy:
            return (latency,)
        data = name + receiver.peer + _MESSAGE.pack(tick, count)
        lot, jitter, turn, held, twin, twin_jitter = _DRAWS.unpack(
            blake2b(data, digest_size=_DRAWS.size).digest()
        )
        if lot >= self._kept_range * sender.kept_share * receiver.kept_share:
            self.counters["lost"] += 1
            return ()
        trip = latency + (jitter * self._jitter_ticks >> _BITS)
        if turn < self._reordered_range:
            trip += held * self._reorder_ticks >> _BITS
        if twin >= self._copied_range:
            return (trip,)
        self.counters["duplicated"] += 1
        # A copy takes its own path and a different instant, so that each arrival is unique.
        other = latency + (twin_jitter * self._jitter_ticks >> _BITS)
        return (trip, other if other != trip else trip + 1)

    def by_stream(self, sender: Place, receiver: Place, tick: int) -> tuple[int, ...]:
        """Return the travel time of one message by stream in ticks; an empty tuple if no stream can be
        opened, or every packet is lost."""
        if not (
            self.connects(sender, receiver)
            and self.connects(receiver, sender)
            and self._kept_range * sender.kept_share * receiver.kept_share
            and self.may_open(receiver.peer, tick / TICKS_PER_SECOND)
        ):
            self.counters["cut"] += 1
            return ()
        there, back = self.latency_ticks(sender, receiver), self.latency_ticks(receiver, sender)
        trip = max(1, (STREAM_TRIPS + 1) // 2 * there + STREAM_TRIPS // 2 * back)
        if self.has_translators:
            self._by_stream.add((sender.peer, receiver.peer, tick + trip))
        return (trip,)

    def expect_answer(self, sender: PeerId, receiver: PeerId, protocol: str, tick: int, arrival: int) -> None:
        """Send messages of `sender` to `receiver` by stream for a moment from `arrival` on, because they
        answer a message that came by stream while datagrams are blocked."""
        over = tick - _ANSWER_TICKS
        if len(self._answers) >= _ANSWERS_KEPT:
            self._answers = {key: begun for key, begun in self._answers.items() if begun[-1] >= over}
        key = sender, receiver, protocol
        kept = (begun for begun in self._answers.get(key, ()) if begun >= over)
        self._answers[key] = (*kept, arrival)

    def answers_by_stream(self, sender: PeerId, receiver: PeerId, protocol: str, tick: int) -> bool:
        """Return whether a message sent now answers a message that came by stream."""
        found = self._answers.get((sender, receiver, protocol), ())
        return any(0 <= tick - begun <= _ANSWER_TICKS for begun in found)

    def _settle(self, peer: PeerId, who: int | bytes) -> Place:
        place = self._places[peer] = Place(peer, self.model, self._seed, who)
        place.sides = tuple(split.get(peer) for split in self._splits.values())
        return place

    def _take_sides(self) -> None:
        splits = tuple(self._splits.values())
        for peer, place in self._places.items():
            place.sides = tuple(split.get(peer) for split in splits)
        self._look()

    def _look(self) -> None:
        self._is_parted = bool(self._splits or self._blocked or self._deaf or self._mute)
        is_plain = not (self.has_translators or self._internet is not None)
        self.is_even = is_plain and not (self._fates_differ or self._is_parted or self._lossy)


class Sender:
    """The messages that one peer sends by one protocol."""

    __slots__ = ("_counts", "_first", "_links", "_name", "_protocol", "_tick", "place")

    def __init__(self, links: SimLinks, place: Place, protocol: str, seed: int) -> None:
        self.place = place
        self._links = links
        self._protocol = protocol
        self._name = draw(seed, "fate", place.peer, protocol)[:32]
        # The receivers at the latest tick: the first one, and the number of messages to each of the others.
        self._tick = -1
        self._first = place
        self._counts: dict[PeerId, int] | None = None

    def trips(self, tick: int, receiver: Place, *, by_stream: bool = False) -> tuple[int, ...]:
        """Send one message to `receiver` at this tick, as a datagram or `by_stream`. Return the travel time
        of each copy in ticks; an empty tuple if it never arrives."""
        links, own = self._links, self.place
        if links.ways is not None:
            found = links.ways.trips(own, receiver, tick, by_stream=by_stream)
            if found is not None:
                return found
        if by_stream:
            trips = links.by_stream(own, receiver, tick)
            for trip in () if own.has_datagrams and receiver.has_datagrams else trips:
                links.expect_answer(receiver.peer, own.peer, self._protocol, tick, tick + trip)
            return trips
        if links.has_answers and links.answers_by_stream(own.peer, receiver.peer, self._protocol, tick):
            return links.by_stream(own, receiver, tick)
        nat = self.place.nat
        if nat is not None:
            nat.sent(receiver.peer, tick / TICKS_PER_SECOND)
        count = 0
        if tick != self._tick:
            self._tick, self._first, self._counts = tick, receiver, None
        else:
            if self._counts is None:
                self._counts = {self._first.peer: 1}
            count = self._counts.get(receiver.peer, 0)
            self._counts[receiver.peer] = count + 1
        return self._links.fate(self._name, self.place, receiver, tick, count)


def _distances(model: NetworkModel) -> tuple[list[list[int]], list[list[int]]]:
    """Return, for each pair of regions, the shortest latency in ticks, and the width of its range."""
    count = max(1, len(model.regions))
    everywhere = (model.nearest_seconds, model.farthest_seconds)
    bases, spans = [], []
    for one in range(count):
        pairs = []
        for other in range(count):
            if model.regions and one == other:
                pairs.append(model.regions[one].inside_seconds)
            elif model.between_seconds:
                pairs.append((model.between_seconds[one][other],) * 2)
            else:
                pairs.append(everywhere)
        bases.append([ticks(low) for low, _ in pairs])
        spans.append([ticks(high) - ticks(low) for low, high in pairs])
    return bases, spans
