"""A holder that takes its head's place: it keeps copies of the head's stage, and goes on where no head comes.

Not here: when it does (`partition.run.local.succession`).
"""

from collections.abc import Callable
from functools import partial

import trio

from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.averaging.signature import run_key
from node.averaging.snapshot import Snapshot
from node.averaging.transfer import fetch_state
from node.errors import NotListening, Unreachable
from node.local.context import LocalRunsService
from node.local.crew import Crew
from node.local.keeper import Keeper
from node.local.stage_server import close
from node.local.stages import roster_of
from node.protocols.manifest import Run
from partition.run.local.column_messages import MESSAGE_BYTES_MAX, PROTOCOL
from partition.run.local.keeping import FETCH_SHARE
from partition.run.local.succession import SuccessionRule

LOOK_SECONDS = 0.5


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
        """`own` is this member's stage, `bytes_max` bounds a state of the first stage, `step` is this
        member's."""
        self._service = service
        self._now = service.seams.clock.monotonic
        self._run = run
        self._crew = crew
        self._bytes_max = bytes_max
        self._step = step
        self._keeper = Keeper(service, run, door.admission, own, copy_of=0)
        self._not_before = 0.0
        self._rule = SuccessionRule(crew)

    async def wait(self) -> None:
        """Keep copies for the head, and return once it is gone for good and this member can go on."""
        self._rule.has_copy = await self._keeper.load(self._bytes_max) is not None
        while not await self._is_due():
            if (head := self._rule.keeps_for) is not None:
                await self._copy(head)
            await trio.sleep(LOOK_SECONDS)

    async def load(self) -> Snapshot | None:
        """Return the newest copy of the head's stage."""
        return await self._keeper.load(self._bytes_max)

    async def _is_due(self) -> bool:
        has_free = any(offer.has_slot for offer in self._service.offers())
        head = self._rule.missed_head(self._now(), has_free=has_free)
        return head is not None and await self._is_gone(head)

    async def _is_gone(self, head: PeerId) -> bool:
        """Return whether a head is dead: membership says so, or its host does."""
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

    async def _copy(self, head: PeerId) -> None:
        """Fetch the state of the head's stage, if that is due, and put it away."""
        if not self._keeper.is_due(self._step()) or self._now() < self._not_before:
            return
        service, begun = self._service, self._now()
        name, signature = roster_of(self._run, 0)
        fetching = partial(
            fetch_state,
            service.seams.network,
            service.seams.executor,
            [head],
            run_key(name),
            signature,
            0,
            bytes_max=self._bytes_max,
            refuse=service.refuse,
            step_max=self._run.manifest.steps,
            rng=service.seams.rng,
        )
        try:
            found = await fetching()
        except Unreachable:
            return  # it is gone, or hands it over later
        self._keeper.begin(found.table.step)
        await self._keeper.save(found)
        self._rule.has_copy = not self._keeper.error
        self._not_before = self._now() + FETCH_SHARE * (self._now() - begun)
