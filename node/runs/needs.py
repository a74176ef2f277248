"""The interfaces through which runs use their node: its view of the swarm, and its other services."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.averaging.service import Averaging
from node.checkpoints.replication import CheckpointReplicator
from node.checkpoints.service import Checkpoints
from node.events import Event
from node.offering import NamedData
from node.placement.admission import Machine
from node.placement.leases import Offer
from node.placement.places import Places
from node.protocols.manifest import Run
from node.runs.settings import RunServiceSettings
from node.services.measurements import Measurements
from node.storage.guests import Guests
from partition.run.settings import RunSettings


@dataclass(frozen=True)
class SwarmView:
    """The node's view of the swarm, and its announcements to it.

    `live` returns the members believed alive, `gone` those known to be dead or to have left. `offers` returns
    the offers known now, and `search` looks for more in the DHT. `suspect` has a member probed immediately,
    `refuse` counts a peer's violations, and `provide` announces in the DHT that this node has a run's content
    (a hash and a purpose).
    """

    live: Callable[[], Collection[PeerId]]
    gone: Callable[[], Collection[PeerId]]
    offers: Callable[[], Sequence[Offer]]
    search: Callable[[], Awaitable[Sequence[Offer]]]
    suspect: Callable[[PeerId], None]
    refuse: Callable[[PeerId, RemoteProtocolError], None]
    provide: Callable[[str, str], Awaitable[None]]


@dataclass(frozen=True)
class RunHost:
    """This machine as its owner offers it to runs. `machine` and `rate` (FLOP/s) describe one slot, `accepts`
    returns why a run is refused, `publish` emits an event, and `observe` receives the messages that this node
    sends in runs."""

    accepts: Callable[[Run], str | None]
    machine: Callable[[], Machine]
    rate: Callable[[], float]
    own_data: Callable[[], Sequence[NamedData]]
    publish: Callable[[Event], None]
    observe: Callable[[object], None]
    settings: RunSettings
    limits: RunServiceSettings
    slots: int = 1


@dataclass(frozen=True)
class Beside:
    """The node's other services that runs use."""

    measurements: Measurements
    checkpoints: Checkpoints
    copies: CheckpointReplicator
    guests: Guests
    averaging: Averaging
    places: Places
