"""Who is here: the SWIM core driven over datagrams, and its events told to the rest of the node."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import Annotated

import msgspec
import trio

from crypto.contact import Address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId, short_peer
from dht.keys import node_number
from gossip import member as core
from gossip.messages import MEMBERS_MAX, MESSAGE_BYTES_MAX, Message
from gossip.settings import PRESETS
from gossip.swim import PROTOCOL, Swim
from node import events
from node.seams import Clock, Network
from node.services.capacity import Capacity
from node.services.driver import Driver, Sends

METADATA_VERSION = 1
LEAVE_SECONDS = 0.6
"""How long a leaving node still answers and gossips its goodbye."""

FLOPS_PER_SECOND_MAX = 1e16
"""No device of today multiplies fp32 matrices as fast; a claim beyond it is not read at all."""

Text = Annotated[str, msgspec.Meta(max_length=64)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """What a member's SWIM fact carries beside name and addresses: its capacity, in its own words."""

    version: int
    accepts_runs: bool
    device: Text
    cores: Size
    memory_free_bytes: Size
    memory_total_bytes: Size
    flops_per_second: Annotated[float, msgspec.Meta(ge=0, le=FLOPS_PER_SECOND_MAX)]
    location: Text


def encode_metadata(capacity: Capacity, *, accepts_runs: bool) -> bytes:
    """The metadata of a node with this capacity."""
    return encode(
        Metadata(
            METADATA_VERSION,
            accepts_runs,
            capacity.device,
            capacity.cores,
            capacity.memory_free_bytes,
            capacity.memory_total_bytes,
            min(capacity.flops_per_second, FLOPS_PER_SECOND_MAX),
            capacity.location,
        )
    )


@lru_cache(maxsize=MEMBERS_MAX)
def read_metadata(data: bytes) -> Metadata | None:
    """A member's claim, None where this version cannot read it."""
    try:
        metadata: Metadata = decode(data, Metadata, bytes_max=core.METADATA_BYTES_MAX)
    except RemoteProtocolError:
        return None
    return metadata


class Listed(Collection[PeerId]):
    """Peers of some statuses, by peer id. Whether one is among them is asked at every event, so no list is
    made for that."""

    def __init__(self, swim: Swim, statuses: frozenset[core.Status]) -> None:
        self._swim = swim
        self._statuses = statuses

    def __contains__(self, peer: object) -> bool:
        return isinstance(peer, bytes) and self._swim.status(PeerId(peer)) in self._statuses

    def __iter__(self) -> Iterator[PeerId]:
        return iter(sorted(peer for peer, held in self._swim.statuses.items() if held in self._statuses))

    def __len__(self) -> int:
        if self._statuses == _LIVE:
            return self._swim.live
        return sum(1 for _ in self)


_LIVE = frozenset({core.Status.ALIVE, core.Status.SUSPECT})
_GONE = frozenset({core.Status.DEAD, core.Status.LEFT})


class Membership:
    """The service. `run` drives; `gone` is told of every member that died or left, `forgotten` of those that
    are no longer listed."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        rng: Random,
        signer: Signer,
        profile: core.Profile,
        preset: str,
        *,
        publish: Callable[[events.Event], None],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        met: Callable[[PeerId, Sequence[Address]], None],
        gone: Callable[[PeerId], None],
        forgotten: Callable[[PeerId], None],
        observe: Callable[[core.Event], None],
        look_up: Callable[[bytes, Callable[[Sequence[PeerId]], None]], None] | None = None,
        make: Callable[..., Swim] = Swim,
    ) -> None:
        """`observe` is told of every event of the core as it is; `make` makes the core. With `look_up`, which
        finds the peers nearest to a key and hands them on, only the neighbourhood of this node is listed."""
        self._network = network
        self._clock = clock
        self._publish = publish
        self._met = met
        self._gone = gone
        self._forgotten = forgotten
        self._refuse = refuse
        self._observe = observe
        self._has_left = False
        # The wall clock in milliseconds is above any incarnation of an earlier life.
        incarnation = int(clock.wall() * 1000)
        self._look_up = look_up
        place = None if look_up is None else node_number
        swim = make(signer, profile, PRESETS[preset], rng, incarnation, clock.monotonic(), place=place)
        swim.locate(network.host_of)
        self._swim = swim
        self._driver = Driver(
            swim,
            PROTOCOL,
            Message,
            message_bytes_max=MESSAGE_BYTES_MAX,
            network=network,
            clock=clock,
            publish=self._on_event,
            refuse=refuse,
        )
        self.run = self._driver.run

    @property
    def live(self) -> "Listed":
        """Those believed alive, this node included: looked at when it is used."""
        return Listed(self._swim, _LIVE)

    @property
    def gone(self) -> "Listed":
        """Those listed as dead, or as having left."""
        return Listed(self._swim, _GONE)

    @property
    def members(self) -> tuple[core.Member, ...]:
        """Everyone listed, the dead too."""
        return self._swim.members

    def round_trip_seconds(self, peer: PeerId) -> float | None:
        """Return how long a datagram to `peer` and back took lately; None where it was not asked."""
        return self._swim.coordinates.round_trip_seconds_to(peer)

    def command(self, order: Callable[[Swim, float], Sends]) -> None:
        """Let local code act on the core: `order(core, now)` returns what to send."""
        self._driver.command(lambda now: order(self._swim, now))

    def update(self, profile: core.Profile) -> None:
        """Tell others of another name, address or metadata."""
        self._driver.command(lambda now: self._swim.update(now, profile))

    def join(self, peers: Sequence[PeerId]) -> None:
        """Exchange member lists with these peers."""
        self._driver.command(lambda now: self._swim.join(now, peers))

    def suspect(self, peer: PeerId) -> None:
        """Something else hints that `peer` is gone: probe it at once."""
        self._driver.command(lambda now: self._swim.hint_suspect(now, peer))

    async def leave(self) -> None:
        """Say goodbye, and stay a moment so that it spreads."""
        self._has_left = True
        self._driver.command(self._swim.leave)
        await trio.sleep(LEAVE_SECONDS)

    def _on_event(self, event: core.Event) -> None:
        self._observe(event)
        match event:
            case core.MemberUp() | core.MemberChanged():
                self._network.learn(event.peer, event.addresses)
                self._publish(self._joined(event))
                self._met(event.peer, event.addresses)
            case core.MemberSuspected():
                at = self._clock.wall()
                reason = event.reason
                self._publish(events.MemberSuspected(at=at, peer=event.peer, by=event.accuser, reason=reason))
            case core.MemberRefuted():
                self._publish(events.MemberRefuted(at=self._clock.wall(), peer=event.peer))
            case core.MemberDown():
                at = self._clock.wall()
                self._publish(events.MemberLost(at=at, peer=event.peer, reason=event.reason))
                self._gone(event.peer)
            case core.MemberLeft():
                self._publish(events.MemberLeft(at=self._clock.wall(), peer=event.peer))
                self._gone(event.peer)
            case core.MemberForgotten():
                self._forgotten(event.peer)
            case core.CandidateFound():
                self._network.learn(event.peer, event.addresses)  # it is to be pinged there
            case core.NeighbourhoodLookupWanted():
                if self._look_up is not None:
                    self._look_up(event.key, self._meet)
            case core.FactsRefused():
                self._refuse(event.sender, RemoteProtocolError(event.reason))

    def _meet(self, peers: Sequence[PeerId]) -> None:
        """Exchange lists with those that a lookup has found, unless this node has said goodbye."""
        if peers and not self._has_left:
            self.join(peers)

    def _joined(self, event: core.MemberUp | core.MemberChanged) -> events.MemberJoined:
        known = self._swim.member(event.peer)
        through = known.found_through if known is not None else None
        return events.MemberJoined(
            at=self._clock.wall(),
            peer=event.peer,
            name=event.name,
            addresses=tuple(address.short for address in event.addresses),
            found_through=self._found_through(event.peer, through),
            capacity=self._capacity(event.metadata),
        )

    def _found_through(self, peer: PeerId, through: PeerId | None) -> str:
        if through is None:
            return ""
        return "itself" if through == peer else self._name_of(through)

    def _name_of(self, peer: PeerId) -> str:
        known = self._swim.member(peer)
        return short_peer(peer) if known is None else known.name

    def _capacity(self, data: bytes) -> events.CapacityMeasured | None:
        metadata = read_metadata(data)
        if metadata is None:
            return None
        return events.CapacityMeasured(
            at=self._clock.wall(),
            device=metadata.device,
            cores=metadata.cores,
            memory_free_bytes=metadata.memory_free_bytes,
            memory_total_bytes=metadata.memory_total_bytes,
            flops_per_second=metadata.flops_per_second,
            location=metadata.location,
        )
