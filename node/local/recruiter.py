"""The recruiter of a member of a run in local mode: it asks nodes with a free slot to take part.

Not here: which nodes, and for which stage (`partition.run.local.recruiting`).
"""

from collections.abc import Collection
from contextlib import suppress

import trio

from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.errors import Unreachable
from node.local.context import LocalRunsService
from node.protocols.manifest import Run
from node.protocols.runs import Join
from partition.run.asks import Done
from partition.run.local.crew import MemberCrew
from partition.run.local.recruiting import LOOK_SECONDS, Recruitment

JOIN_SECONDS_MAX = 30.0


class _OfferedNodes:
    """The nodes that the service knows, for one run."""

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
        while True:
            candidates = self.choice.look(self._now())
            if candidates is not None:
                for stage, peer in candidates:
                    await self._ask(stage, peer)
                self.choice.asked(self._now())
            await trio.sleep(LOOK_SECONDS)  # offers have no event

    async def _ask(self, stage: int, peer: PeerId) -> None:
        self.choice.asking(self._now(), peer)
        chain = self._door.chain_for(peer)
        if chain is None:
            return
        with suppress(Unreachable):
            answer = await self._service.ask(peer, Join(self._run.fact, chain, stage), JOIN_SECONDS_MAX)
            if isinstance(answer, Done):
                self.choice.agreed(self._now(), stage, peer)
