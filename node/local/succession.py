"""A holder that takes its head's place: it keeps copies of the head's stage, and goes on where no head comes.

The head asks the holder of the first other stage for that (`Attach.keeps`), so one death takes no stage with
it. A free node that a requester finds goes first (`node.local.copies`): it takes nobody's memory but its own.
"""

from collections.abc import Callable
from functools import partial

import trio

from crypto.identity import PeerId
from node.averaging.door import Door
from node.averaging.signature import run_key
from node.averaging.snapshot import Snapshot
from node.averaging.transfer import fetch_state
from node.errors import NotListening, Unreachable
from node.local import column
from node.local.context import Service
from node.local.copies import FETCH_SHARE
from node.local.crew import Crew
from node.local.due import Due
from node.local.keeper import Keeper
from node.local.stages import roster_of
from node.protocols.manifest import Run

LOOK_SECONDS = 0.5
GONE_SECONDS = 2.0
"""A holder waits so long for a head after the last one has died, which may start again at once."""
FREE_SECONDS = 20.0
"""As much where a free node may come to be the head."""


class Succession:
    """A holder waits for its head to be gone for good, and keeps what it needs to take its place."""

    def __init__(
        self,
        service: Service,
        run: Run,
        door: Door,
        crew: Crew,
        *,
        own: int,
        bytes_max: int,
        step: Callable[[], int],
    ) -> None:
        """`own` is this member's stage, `bytes_max` bounds a state of the first stage, `step` is this
        member's."""
        self._service = service
        self._run = run
        self._crew = crew
        self._bytes_max = bytes_max
        self._step = step
        self._keeper = Keeper(service, run, door.admission, own, copy_of=0)
        self._not_before = 0.0
        self._is_here = False
        self._due = Due()

    async def wait(self) -> None:
        """Keep copies for the head, and return once it is gone for good and this member can go on."""
        self._is_here = await self._keeper.load(self._bytes_max) is not None
        while not await self._is_due():
            if (head := self._crew.head) is not None and self._keeps:
                await self._copy(head)
            await trio.sleep(LOOK_SECONDS)

    async def load(self) -> Snapshot | None:
        """Return the newest copy of the head's stage."""
        return await self._keeper.load(self._bytes_max)

    @property
    def _keeps(self) -> bool:
        return any(server.keeps_copies for server in self._crew.servers)

    @property
    def _last_head(self) -> PeerId | None:
        return next((server.last_head for server in self._crew.servers if server.last_head), None)

    async def _is_due(self) -> bool:
        waited = self._due.waited("a head", self._crew.head is None and self._is_here and self._keeps)
        if waited < GONE_SECONDS or self._last_head is None:
            return False
        free = [offer for offer in self._service.offers() if offer.has_slot]
        if free and waited < FREE_SECONDS:
            return False
        return await self._is_gone(self._last_head)

    async def _is_gone(self, head: PeerId) -> bool:
        """Whether a head is dead: membership says so, or its host does."""
        if head not in self._service.live():
            return True
        try:
            stream = await self._service.seams.network.open(
                head, column.PROTOCOL, message_bytes_max=column.MESSAGE_BYTES_MAX
            )
        except Unreachable as error:
            return isinstance(error, NotListening)
        await column.close(stream)
        return False

    async def _copy(self, head: PeerId) -> None:
        """Fetch the state of the head's stage, if that is due, and put it away."""
        if not self._keeper.is_due(self._step()) or trio.current_time() < self._not_before:
            return
        service, begun = self._service, trio.current_time()
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
        self._is_here = not self._keeper.error
        self._not_before = trio.current_time() + FETCH_SHARE * (trio.current_time() - begun)
