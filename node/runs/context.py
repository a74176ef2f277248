"""The interface of the node that a run's membership uses: the part of `node.runs.runs.Runs`."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from crypto.noise import Data
from node.checkpoints.replication import CheckpointReplicator
from node.checkpoints.service import Checkpoints
from node.content.dataset_store import Lanes
from node.content.datasets import Dataset
from node.content.graphs import Models
from node.events import Event
from node.pipeline.spans import Spans
from node.placement.admission import Machine
from node.placement.leases import Offer
from node.placement.places import Places
from node.protocols.manifest import Run
from node.protocols.runs import Reply, Request
from node.runs.audits import Audits
from node.runs.readiness import Readiness
from node.runs.receipts import Receipts
from node.runs.settings import RunServiceSettings
from node.seams import Seams
from node.services.measurements import Measurements
from node.storage.guests import Guests
from partition.plan.plan import Plan
from partition.run.reliability import RunLosses
from partition.run.settings import RunSettings


class RunMembership(Protocol):
    """A member of `run` on this node; the service compares members by identity."""

    run: Run


class RunService(Protocol):
    """The runs service. `live` returns the peers believed alive, `gone` those known to be dead or to have
    left."""

    seams: Seams
    signer: Signer
    models: Models
    guests: Guests

    @property
    def machine(self) -> Machine: ...

    live: Callable[[], Collection[PeerId]]
    gone: Callable[[], Collection[PeerId]]
    offers: Callable[[], Sequence[Offer]]
    publish: Callable[[Event], None]
    refuse: Callable[[PeerId, RemoteProtocolError], None]
    checkpoints: Checkpoints
    copies: CheckpointReplicator
    spans: Spans
    audits: Audits
    measurements: Measurements
    readiness: Readiness
    receipts: Receipts
    places: Places
    losses: RunLosses
    settings: RunSettings
    limits: RunServiceSettings

    def link_rate(self, peer: PeerId) -> float | None: ...
    def send(self, peer: PeerId, message: Any, *payload: Data) -> None: ...
    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...
    async def ask(self, peer: PeerId, request: Request, seconds: float) -> Reply: ...
    async def load_data(self, run: Run, holders: Sequence[PeerId], lanes: Lanes | None = None) -> Dataset: ...
    def follow(self, plan: bytes, member: RunMembership) -> None: ...
    def publish_plan(self, run: Run, plan: Plan) -> None: ...
    def publish_lease(self, run: Run, plan: Plan, stage: int) -> None: ...
    def forgotten(self, member: RunMembership) -> None: ...
    def released(self, member: RunMembership) -> None: ...
    async def ended(
        self, member: RunMembership, outcome: str, detail: str, weights: str, *, is_here: bool
    ) -> None: ...
