"""The interface through which local mode uses the node (implemented by `node.runs.runs.Runs`), and the
training data."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.averaging.service import Averaging
from node.content.datasets import Dataset
from node.content.graphs import Models
from node.errors import StageFailed
from node.events import Event
from node.placement.admission import Machine
from node.placement.leases import Offer
from node.placement.places import Places
from node.protocols.manifest import Run, own_data_of
from node.protocols.runs import Reply, Request
from node.runs.manifest_builder import fits
from node.runs.own_data import OwnDataSets
from node.runs.readiness import Readiness
from node.runs.receipts import Receipts
from node.seams import Seams
from node.services.measurements import Measurements
from node.storage.guests import Guests
from partition.model.graph import Graph


class LocalRunsService(Protocol):
    """The run service of a node. `live` are peers believed alive, and `offers` are their offers; `provide`
    announces a result in the DHT."""

    seams: Seams
    signer: Signer
    models: Models
    guests: Guests
    own_data: OwnDataSets
    places: Places
    receipts: Receipts
    readiness: Readiness
    measurements: Measurements

    @property
    def machine(self) -> Machine: ...

    averaging: Averaging
    live: Callable[[], Collection[PeerId]]
    offers: Callable[[], Sequence[Offer]]
    sends_less: Callable[[], bool]
    accepts: Callable[[Run], str | None]
    publish: Callable[[Event], None]
    refuse: Callable[[PeerId, RemoteProtocolError], None]
    provide: Callable[[str, str], Awaitable[None]]

    @property
    def has_slot(self) -> bool: ...
    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...
    def is_over(self, run: bytes) -> bool: ...
    def note_guests(self) -> None: ...
    async def ask(self, peer: PeerId, request: Request, seconds: float) -> Reply: ...
    async def load_data(self, run: Run, holders: Sequence[PeerId]) -> Dataset: ...


async def training_data(
    service: LocalRunsService, run: Run, graph: Graph, holders: Sequence[PeerId]
) -> Dataset:
    """Return the data that a member trains on: the run's data, from this node or other members, or the
    member's own set.

    Raises:
        StageFailed: the data does not fit the run. UsageError, Unreachable: it cannot be loaded.
    """
    if own_data_of(run.manifest) is not None:
        return await service.own_data.find(run, graph)
    dataset = await service.load_data(run, holders)
    if not fits(dataset, run.manifest, graph):
        raise StageFailed("this node's data does not match the run's manifest. Has it changed?")
    return dataset
