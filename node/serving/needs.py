"""The interfaces that serving needs from its node: the node's view of the swarm, and this machine's resources
for serving."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.events import Event
from node.placement.admission import Machine
from node.placement.leases import Offer
from node.placement.slots import LeaseSlots
from node.protocols.services import Service
from node.services.discovery import Discovery
from partition.plan.observed import Knowledge
from partition.serve.bounds import PeerBounds


@dataclass(frozen=True)
class ServingSwarm:
    """The node's view of the swarm. `live` are the members believed alive. `named` returns members by name,
    and raises UsageError. `offers` are what members offer. `knowledge` holds measurements of them, and
    `learn` looks up more. `refuse` counts a peer's violations of the protocol."""

    discovery: Discovery
    live: Callable[[], Collection[PeerId]]
    named: Callable[[Sequence[str]], list[PeerId]]
    offers: Callable[[], Sequence[Offer]]
    round_trip_seconds: Callable[[PeerId], float | None]
    knowledge: Callable[[], Knowledge]
    learn: Callable[[Collection[PeerId]], Awaitable[Knowledge]]
    refuse: Callable[[PeerId, RemoteProtocolError], None]


@dataclass(frozen=True)
class ServingMachine:
    """This machine as its owner offers it to services. `machine` describes one slot. `accepts` returns why a
    service is not accepted. `bounds_of` returns a peer's limits here. `expect_stage` loads a process in
    advance for a stage. `publish` emits an event."""

    slots: LeaseSlots
    machine: Callable[[], Machine]
    accepts: Callable[[Service], str | None]
    bounds_of: Callable[[PeerId], PeerBounds]
    expect_stage: Callable[[], None]
    publish: Callable[[Event], None]
