"""A copy of the heads' state, kept by a requester that does not train, for later heads.

Members that train keep their own states. Once the last head is gone, no other node has the parameters of the
first stage, and its successor would begin with untrained ones. So the requester fetches them after the first
step and then as often as members save their own states, and lends them while there is no head
(`partition.run.local.lending`).
"""

from gossip.newcomers import likely_steps, middle_step
from node.averaging.participation import Participation
from node.averaging.snapshot import Snapshot
from node.local.courses import follow
from node.local.crew import Crew
from node.local.keeper import Keeper
from node.protocols.manifest import Run
from partition.run.local.keeping import CopyStage, StageCopy, StageCopying
from partition.run.local.lending import FollowerLending, LendStage, TakeBack


class Copies:
    """The copies of one requester."""

    def __init__(self, run: Run, keeper: Keeper, crew: Crew, part: Participation, *, bytes_max: int) -> None:
        """`bytes_max` bounds a state of the first stage."""
        self._run = run
        self._keeper = keeper
        self._part = part
        self._bytes_max = bytes_max
        copying = StageCopying(
            {0: keeper.schedule}, step=lambda: middle_step(part.roster.reports), now=keeper.now
        )
        self._lending = FollowerLending(crew, run.manifest.stages, copying)

    async def run(self) -> None:
        """Fetch and lend copies until cancelled."""
        await follow(self._lending.lend(), self._do)

    async def _do(self, deed: CopyStage | LendStage | TakeBack) -> StageCopy | bool | None:
        match deed:
            case CopyStage():
                return await self._keeper.copy(self._fetch())
            case LendStage():
                return await self._lend()
            case TakeBack():  # there is a head again
                self._part.tell(step=0, samples=0, rounds=0, lineage=self._run.id, has_state=False)
                return None

    async def _fetch(self) -> Snapshot:
        """Return the newest state of the heads, and remember the run. Raises Unreachable."""
        manifest, part = self._run.manifest, self._part
        assert manifest.local is not None, "a run in local mode"
        likely = likely_steps(part.roster.reports, manifest.local.local_steps)
        found = await part.states.fetch(0, manifest.steps, bytes_max=self._bytes_max, likely=likely)
        await self._keeper.remember(self._keeper.part(is_training=False))
        return found

    async def _lend(self) -> bool:
        """Lend the copy, if there is one; return whether there is."""
        found = await self._keeper.load(self._bytes_max)
        if found is None:
            return False
        part = self._part
        part.states.offer(found)
        step, rounds, lineage = found.table.step, found.table.rounds, self._run.id
        part.tell(step=step, samples=0, rounds=rounds, lineage=lineage, has_state=True)
        return True
