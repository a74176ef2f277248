"""The recruiter of a member of a run in local mode. It asks nodes with a free slot to take part.

Not here: which nodes are asked, and for which stage (`partition.run.local.recruiting`).
"""

from collections.abc import Collection

from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.errors import Unreachable
from node.local.context import LocalRunsService
from node.local.courses import follow
from node.protocols.manifest import Run
from node.protocols.runs import Join
from partition.run.asks import Done
from partition.run.local.courses import AskToHold
from partition.run.local.crew import MemberCrew
from partition.run.local.recruiting import Recruitment

JOIN_SECONDS_MAX = 30.0


class _OfferedNodes:
    """The nodes that the service knows, as possible members of one run."""

    def __init__(self, service: LocalRunsService, run: Run) -> None:
        self._service = service
        self._run = run

    def live(self) -> Collection[PeerId]:
        return self._service.live()

    def offered(self) -> set[PeerId]:
        return {offer.peer for offer in self._service.offers()}

    def preferred(self) -> list[PeerId]:
        service = self._service
        return [offer.peer for offer in service.places.preferred(self._run, service.offers())]


class Recruiter:
    """The recruiter of one member."""

    def __init__(
        self, service: LocalRunsService, run: Run, door: TicketGate, crew: MemberCrew, stages: int
    ) -> None:
        self.choice = Recruitment(crew, _OfferedNodes(service, run), stages)
        self._service = service
        self._now = service.seams.clock.monotonic
        self._run = run
        self._door = door

    async def run(self) -> None:
        """Ask nodes to take part, until cancelled."""
        await follow(self.choice.recruit(self._now), self.ask)

    async def ask(self, deed: AskToHold) -> bool | None:
        """Ask a node to take part; return whether it will, None if it gave no answer."""
        chain = self._door.chain_for(deed.peer)
        if chain is None:
            return False
        request = Join(self._run.fact, chain, deed.stage, is_beside=deed.is_beside)
        try:
            return isinstance(await self._service.ask(deed.peer, request, JOIN_SECONDS_MAX), Done)
        except Unreachable:
            return None
