"""The start of a member of a run in local mode: it announces itself, meets the others, and waits for them.

Not here: how long (`partition.run.local.start_barrier`).
"""

from collections.abc import Awaitable, Callable, Collection

import trio

from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.averaging.participation import Participation
from node.local.crew import Crew
from partition.run.local.start_barrier import SETTLE_SECONDS, StartBarrier

LOOK_SECONDS = 0.1
GREET_SECONDS = 0.5


class MemberStart:
    """The start of one member. `inviter` has asked it to take part."""

    def __init__(
        self,
        run: bytes,
        crew: Crew,
        door: TicketGate,
        live: Callable[[], Collection[PeerId]],
        inviter: PeerId | None,
        now: Callable[[], float],
    ) -> None:
        self._run = run
        self._crew = crew
        self._door = door
        self._live = live
        self._inviter = inviter
        self._now = now
        self._barrier = StartBarrier(run, inviter)

    def announce(self, part: Participation) -> None:
        """Say that this member is opening its stage."""
        part.tell(step=0, samples=0, rounds=0, lineage=self._run, has_state=False)

    async def meet_inviter(self, part: Participation, stage: int) -> None:
        """Wait for those that train already, and for the report of the member that asked this node."""
        await part.settle(SETTLE_SECONDS)
        inviter, barrier, crew = self._inviter, self._barrier, self._crew
        if inviter is None:
            return
        with trio.move_on_after(barrier.meeting_seconds(stage, crew.training)):
            while barrier.misses_inviter(crew.reports, self._live()):
                self._door.greet([inviter])  # it answers where the run is over
                await trio.sleep(GREET_SECONDS)

    async def hold(self, meanwhile: Callable[[], Awaitable[None]], tell: Callable[[str], None]) -> None:
        """Return once the first step may be made; `tell` how many members it waits for, and "" afterwards."""
        crew, barrier = self._crew, self._barrier
        while barrier.holds(
            self._now(),
            crew.reports,
            agreed=crew.agreed,
            has_asked=crew.has_asked,
            live=self._live(),
        ):
            awaited = barrier.awaited(crew.reports, crew.agreed, self._live())
            if awaited and (news := barrier.news(len(awaited))) is not None:
                tell(news)
            await meanwhile()
            await trio.sleep(LOOK_SECONDS)
        if (news := barrier.news(0)) is not None:
            tell(news)
