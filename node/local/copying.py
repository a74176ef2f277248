"""Fetches copies of other members' stages, each from the single member that holds it."""

from collections.abc import Callable

from crypto.identity import PeerId
from node.averaging.signature import run_key
from node.averaging.transfer import fetch_state
from node.errors import Unreachable
from node.local.context import LocalRunsService
from node.local.keeper import Keeper
from node.local.stages import roster_of
from node.protocols.manifest import Run
from partition.run.local.keeping import FETCH_SHARE


class StageCopier:
    """Fetches copies for one member. The member's own `step` decides when a copy is due."""

    def __init__(self, service: LocalRunsService, run: Run, step: Callable[[], int]) -> None:
        self._service = service
        self._now = service.seams.clock.monotonic
        self._run = run
        self._step = step
        self._not_before = 0.0

    async def copy(self, stage: int, holder: PeerId, keeper: Keeper, bytes_max: int) -> bool | None:
        """Fetch and store the state of a stage if a copy is due. Return whether a copy is here, or None if
        none was made."""
        service, begun = self._service, self._now()
        if begun < self._not_before or not keeper.is_due(self._step()):
            return None
        name, signature = roster_of(self._run, stage)
        try:
            found = await fetch_state(
                service.seams.network,
                service.seams.executor,
                [holder],
                run_key(name),
                signature,
                0,
                bytes_max=bytes_max,
                refuse=service.refuse,
                step_max=self._run.manifest.steps,
                rng=service.seams.rng,
            )
        except Unreachable:
            return None  # the holder is gone, or not ready to hand over its state
        keeper.begin(found.table.step)
        await keeper.save(found)
        self._not_before = self._now() + FETCH_SHARE * (self._now() - begun)
        return not keeper.error
