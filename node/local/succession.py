"""A holder that may replace its head: it keeps copies of the head's stage, and takes over if no new head
comes.

Not here: when it takes over (`partition.run.local.succession`).
"""

from collections.abc import Callable

from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.averaging.snapshot import Snapshot
from node.errors import NotListening, Unreachable
from node.local.context import LocalRunsService
from node.local.courses import follow
from node.local.crew import Crew
from node.local.keeper import Keeper
from node.local.stage_server import close
from node.protocols.manifest import Run
from partition.run.local.column_messages import MESSAGE_BYTES_MAX, PROTOCOL
from partition.run.local.keeping import FIRST_STEP, CopyStage, StageCopy, StageCopying
from partition.run.local.succession import FindGone, SuccessionRule


class Succession:
    """The succession of one holder, which keeps copies of the first stage for its head."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        door: TicketGate,
        crew: Crew,
        *,
        own: int,
        bytes_max: int,
        step: Callable[[], int],
    ) -> None:
        """`own` is this member's stage, `bytes_max` bounds a state of the first stage, and `step` returns
        this member's step."""
        self._service = service
        self._bytes_max = bytes_max
        self._keeper = Keeper(service, run, door.admission, own, copy_of=0, first=FIRST_STEP)
        copying = StageCopying({0: self._keeper.schedule}, step=step, now=self._keeper.now)
        self._rule = SuccessionRule(
            crew, copying, requester=run.requester, live=lambda: service.live(), offering=self._offering
        )

    async def wait(self) -> None:
        """Keep copies of the head's stage. Return once the head is gone for good and this member can take
        over."""
        self._rule.has_copy = await self._keeper.load(self._bytes_max) is not None
        await follow(self._rule.watch(), self._do)

    async def _do(self, deed: CopyStage | FindGone) -> bool | StageCopy | None:
        if isinstance(deed, FindGone):
            return await self._is_gone(deed.head)
        assert deed.holder is not None, "a holder copies from its head"
        return await self._keeper.copy_from(deed.holder, self._bytes_max)

    def _offering(self) -> list[PeerId]:
        return [offer.peer for offer in self._service.offers() if offer.has_slot]

    async def load(self) -> Snapshot | None:
        """Return the newest copy of the head's stage."""
        return await self._keeper.load(self._bytes_max)

    async def _is_gone(self, head: PeerId) -> bool:
        """Return whether a head is dead according to membership or its host."""
        if head not in self._service.live():
            return True
        try:
            stream = await self._service.seams.network.open(
                head, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX
            )
        except Unreachable as error:
            return isinstance(error, NotListening)
        await close(stream)
        return False
