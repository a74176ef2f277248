"""A participant of a named averaging run that is listed and keeps up with the others' steps, but contributes
nothing."""

from typing import Any, Literal

import numpy as np
import torch
import trio

from node.averaging.rounds import RoundWish
from node.library.sync import SyncNode
from node.portal import LoopCall
from tests.hostile.participant import LyingParticipant

FOLLOW_SECONDS = 0.02
WISH_SECONDS = 1.0
LINEAGE = b"\xff" * 32
"""The largest hash. It wins no tie, so nobody asks this participant for its state."""
Silence = Literal["absent", "ready"]


class SilentParticipant(LyingParticipant):
    """With `absent`, it is listed but wants no group. With `ready`, it also says that it wants a group, and
    takes its place in one; but it neither proposes a group nor sends anything in one."""

    def __init__(
        self,
        me: SyncNode,
        optimizer: torch.optim.Optimizer,
        run_id: str,
        *,
        silence: Silence = "absent",
        samples: int = 0,
        **options: Any,
    ) -> None:
        """It claims this many samples of every batch. `options` are the options of the run."""
        super().__init__(me, optimizer, run_id, value=0.0, **options)
        self._silence, self._samples = silence, samples
        self._is_batch = "target_batch_size" in options
        self._vector = np.zeros(self._layout.items, self._layout.dtype)
        self._call: LoopCall[None] = self._portal.begin(self._follow)

    async def _follow(self) -> None:
        while True:
            step = max((each.claimed_step for each in self.run.roster.reports.values()), default=0)
            self.run.tell(step=step, samples=self._samples, rounds=step, lineage=LINEAGE, has_state=True)
            await trio.sleep(FOLLOW_SECONDS)
            if self._silence == "ready":
                wanted = RoundWish(round=step if self._is_batch else None, patience_seconds=WISH_SECONDS)
                with trio.move_on_after(WISH_SECONDS):
                    await self.run._search.find(self._vector, wanted, 0)

    def close(self) -> None:
        """Leave the run. Raises the error that ended its part in the run before, if any."""
        if self._call.future.done():
            self._call.future.result()
        self._portal.cancel(self._call)
        super().close()
