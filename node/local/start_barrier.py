"""The start of a run in local mode: its members wait, for a bounded time, for those that agreed to take part.

A member opens its stage in seconds, in which the first one would train alone; the others then take over its
step, so that the rounds of all those steps are lost. Only the start has a barrier: later rounds wait for
nobody (`node.local.rounds`), and a member that comes later takes over the state of the others.

A member that opens its stage says so: its report names the run as its lineage and has no state yet.
"""

from collections.abc import Awaitable, Callable, Collection

import trio

from crypto.identity import PeerId
from node.averaging.door import Door
from node.averaging.participation import Participation
from node.local.catch_up import is_begun
from node.local.crew import Crew

START_SECONDS_MAX = 30.0
"""The first step waits so long at most: a stage opens in some 3 s, on a machine that is busy in 20."""
LOOK_SECONDS = 0.1
SETTLE_SECONDS = 5.0
"""A newcomer listens so long for those that train already."""
MEET_SECONDS = 30.0
"""And so long for the one that asked it, as long as that one is alive."""
GREET_SECONDS = 0.5


class StartBarrier:
    """That of one member. `inviter` has asked it to take part."""

    def __init__(
        self,
        run: bytes,
        crew: Crew,
        door: Door,
        live: Callable[[], Collection[PeerId]],
        inviter: PeerId | None,
    ) -> None:
        self._run = run
        self._crew = crew
        self._door = door
        self._live = live
        self._inviter = inviter
        self._seen: set[PeerId] = set()

    def announce(self, part: Participation) -> None:
        """Say that this member is opening its stage."""
        part.tell(step=0, samples=0, rounds=0, lineage=self._run, has_state=False)

    async def meet_inviter(self, part: Participation, stage: int) -> None:
        """Wait for those that train already, and for the word of whoever asked this node, which says whether
        there is a state to go on from: a head that begins before it has heard of the others would begin with
        untrained numbers."""
        await part.settle(SETTLE_SECONDS)
        inviter = self._inviter
        if inviter is None:
            return
        # A head is in the roster of another stage only if it has a copy of that (`node.local.stage_copies`).
        seconds = SETTLE_SECONDS if stage else MEET_SECONDS
        with trio.move_on_after(0 if stage and self._crew.training else seconds):
            while inviter not in self._crew.reports and inviter in self._live():
                self._door.greet([inviter])  # it answers where the run is over
                await trio.sleep(GREET_SECONDS)

    async def hold(self, meanwhile: Callable[[], Awaitable[None]], tell: Callable[[str], None]) -> None:
        """Return once the first step may be made; `tell` for how many it waits, and "" afterwards."""
        said, until = 0, trio.current_time() + START_SECONDS_MAX
        while self._holds and trio.current_time() < until:
            count = len(self.awaited)
            if count not in (0, said):
                said = count
                tell(f"waiting for {count} {'member' if count == 1 else 'members'} that agreed to begin")
            await meanwhile()
            await trio.sleep(LOOK_SECONDS)
        if said:
            tell("")

    @property
    def _holds(self) -> bool:
        """Whether the first step waits: no longer once somebody has made it."""
        return not is_begun(self._crew.reports.values()) and bool(self.awaited or not self._crew.has_asked)

    @property
    def awaited(self) -> frozenset[PeerId]:
        """The members that are opening their stages, those that agreed here and have not been heard of yet,
        and the inviter, which knows whom else it has asked."""
        reports = self._crew.reports
        self._seen.update(reports)
        members = {peer: report for peer, report in reports.items() if report.lineage == self._run}
        opening = {peer for peer, report in members.items() if not report.has_state}
        unheard = self._crew.agreed - self._seen  # who was heard and is gone has left
        inviter = members.keys() & {self._inviter}
        return frozenset((opening | unheard | inviter).intersection(self._live()))
