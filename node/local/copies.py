"""A copy of the heads' state, kept by a requester that does not train, for later heads.

Members that train keep their own states. Once the last head is gone, no other node has the parameters of the
first stage, and its successor would begin with untrained ones. So the requester fetches them as often as
members save their own states, and lends them while there is no head (`partition.run.local.lending`).
"""

from gossip.claims import lower_median
from gossip.newcomers import likely_steps
from node.averaging.participation import Participation
from node.errors import Unreachable
from node.local.courses import follow
from node.local.crew import Crew
from node.local.keeper import Keeper
from node.protocols.manifest import Run
from partition.run.admission import Admission
from partition.run.local.keeping import FETCH_SHARE, CopyStage
from partition.run.local.lending import FollowerLending, LendStage, TakeBack


class Copies:
    """The copies of one requester."""

    def __init__(self, run: Run, keeper: Keeper, crew: Crew, admission: Admission, *, bytes_max: int) -> None:
        """`bytes_max` bounds a state of the first stage."""
        self._run = run
        self._keeper = keeper
        self._crew = crew
        self._admission = admission
        self._bytes_max = bytes_max
        self._lending = FollowerLending(crew, run.manifest.stages)
        self._not_before = 0.0

    async def run(self, part: Participation) -> None:
        """Fetch and lend copies until cancelled."""

        async def do(deed: CopyStage | LendStage | TakeBack) -> bool | None:
            match deed:
                case CopyStage():
                    await self._copy_if_due(part)
                    return None
                case LendStage():
                    return await self._lend(part)
                case TakeBack():  # there is a head again
                    part.tell(step=0, samples=0, rounds=0, lineage=self._run.id, has_state=False)
                    return None

        await follow(self._lending.lend(self._keeper.now), do)

    async def _copy_if_due(self, part: Participation) -> None:
        steps = [report.step for report in part.roster.reports.values() if report.has_state]
        if self._keeper.is_due(lower_median(steps)) and self._keeper.now() >= self._not_before:
            await self._copy(part)

    async def _copy(self, part: Participation) -> None:
        """Fetch and store the newest state of the heads."""
        assert self._run.manifest.local is not None, "a run in local mode"
        begun, manifest = self._keeper.now(), self._run.manifest
        likely = likely_steps(part.roster.reports, self._run.manifest.local.local_steps)
        try:
            found = await part.states.fetch(0, manifest.steps, bytes_max=self._bytes_max, likely=likely)
        except Unreachable:
            return  # the holder is gone, or not ready to hand over its state
        self._keeper.begin(found.table.step)
        await self._keeper.remember(self._keeper.part(is_training=False))
        await self._keeper.save(found)
        self._not_before = self._keeper.now() + FETCH_SHARE * (self._keeper.now() - begun)

    async def _lend(self, part: Participation) -> bool:
        """Lend the copy, if there is one; return whether there is."""
        found = await self._keeper.load(self._bytes_max)
        if found is None:
            return False
        part.states.offer(found)
        step, rounds, lineage = found.table.step, found.table.rounds, self._run.id
        part.tell(step=step, samples=0, rounds=rounds, lineage=lineage, has_state=True)
        return True
