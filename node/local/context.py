"""What local mode needs of the node: the shape of `node.runs.runs.Runs`."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.averaging.service import Averaging
from node.content.datasets import Dataset
from node.content.graphs import Models
from node.events import Event
from node.placement.admission import Machine
from node.placement.leases import Offer
from node.protocols.manifest import Run
from node.protocols.runs import Reply, Request
from node.seams import Seams
from node.storage.guests import Guests


class Service(Protocol):
    """`live` are those believed alive, `offers` what they offer; `provide` tells the DHT of a result."""

    seams: Seams
    signer: Signer
    models: Models
    guests: Guests

    @property
    def machine(self) -> Machine: ...

    averaging: Averaging
    live: Callable[[], Collection[PeerId]]
    offers: Callable[[], Sequence[Offer]]
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
