"""The interfaces that serving needs of its node: its view of the swarm, and this machine as it serves."""

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
    """The node's view of the swarm: `live` are the members believed alive, `named` those of some names, which
    raises UsageError, `offers` what they offer. `knowledge` is what was measured of them, `learn` looks up
    more. `refuse` counts a peer's violations."""

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
    """This machine as its owner gives it to services: `machine` describes one slot, `accepts` returns why a
    service is not taken, `bounds_of` what a peer may have here. `expect_stage` has a process loaded for a
    stage, `publish` emits an event."""

    slots: LeaseSlots
    machine: Callable[[], Machine]
    accepts: Callable[[Service], str | None]
    bounds_of: Callable[[PeerId], PeerBounds]
    expect_stage: Callable[[], None]
    publish: Callable[[Event], None]
