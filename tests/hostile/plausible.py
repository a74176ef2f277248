"""A participant of the optimizer's run that lies plausibly in everything it sends, differently at each
moment.

It enters the same groups with the same code as others. Its claimed step, samples and weight, the values it
sends in a round and the state it hands out are lies that are near enough to be believed. It also falls silent
at every point of a round.
"""

from random import Random
from typing import Any

import numpy as np
import torch
import trio

from node.averaging.rounds import RoundWish
from node.library.sync import SyncNode
from node.optimizer.state import copy_state
from node.portal import LoopCall
from tests.hostile.participant import LyingParticipant

TALK_SECONDS = 0.05
STEPS_AHEAD = (-1, 0, 0, 0, 1, 2, 4, 100, 2**20, 2**52)
SAMPLES = (0, 1, 16, 64, 10**6, 2**52)
WEIGHTS = (0.0, 1e-9, 1.0, 16.0, 64.0, 1e6, 1e12)
FACTORS = (0.0, -1.0, 1.0, 3.0, 1e3, 1e30)
"""Factors by which the values that the liar sends and hands out differ from small random ones."""
SILENT_AFTER_SECONDS = (0.0, 0.02, 0.1, 0.3, 1.0, 1.5)
"""How long the liar takes part in a round before it falls silent: not at all, until the start, until some
point of it, or usually to the end."""


class PlausibleLiar(LyingParticipant):
    """Lies, at random with `rng`, until it is closed; `said` contains the kinds of its lies."""

    def __init__(
        self, me: SyncNode, optimizer: torch.optim.Optimizer, run_id: str, *, rng: Random, **options: Any
    ) -> None:
        """`options` are the options of the run."""
        super().__init__(me, optimizer, run_id, value=0.0, **options)
        self.said: set[tuple[str, float]] = set()
        self.entered = self.averaged = 0
        """Numbers of rounds that the liar began and completed."""
        self._rng = rng
        self._is_batch = "target_batch_size" in options
        self._calls: list[LoopCall[None]] = [self._portal.begin(each) for each in (self._tell, self._average)]

    async def _tell(self) -> None:
        while True:
            step = max(0, self._step + self._lie("step", STEPS_AHEAD))
            rounds = max(0, self._step + self._lie("rounds", STEPS_AHEAD))
            samples, has_state = self._lie("samples", SAMPLES), self._rng.random() < 0.8
            lineage = self._rng.choice([bytes(32), b"\xff" * 32, *self._lineages])
            self.run.tell(step=step, samples=samples, rounds=rounds, lineage=lineage, has_state=has_state)
            if has_state:
                with torch.no_grad():
                    for slot in self._layout.slots:
                        slot.tensor.detach().normal_().mul_(self._lie("state", FACTORS))
                self._session.offer(step, rounds, lineage, copy_state(self._layout, [self._optimizer], {}))
            await trio.sleep(TALK_SECONDS)

    async def _average(self) -> None:
        numbers = np.random.default_rng(self._rng.randrange(2**32))
        while True:
            numbers_sent = numbers.standard_normal(self._layout.items) * self._lie("vector", FACTORS)
            vector = numbers_sent.astype(self._layout.dtype)
            wanted = RoundWish(round=self._step if self._is_batch else None, patience_seconds=1.0)
            self.entered += 1
            with trio.move_on_after(self._lie("silence", SILENT_AFTER_SECONDS)):
                found = await self.run.average(vector, self._lie("weight", WEIGHTS), wanted)
                self.averaged += found.vector is not None
            await trio.sleep(TALK_SECONDS)

    @property
    def _step(self) -> int:
        """Return the step of the honest peers: the median of the claimed steps."""
        claims = sorted(each.claimed_step for each in self.run.roster.reports.values())
        return claims[len(claims) // 2] if claims else 0

    @property
    def _lineages(self) -> list[bytes]:
        return [bytes(each.lineage) for each in self.run.roster.reports.values()]

    def _lie(self, kind: str, choices: tuple[Any, ...]) -> Any:
        chosen = self._rng.choice(choices)
        self.said.add((kind, chosen))
        return chosen

    def close(self) -> None:
        """Leave the run."""
        for call in self._calls:
            self._portal.cancel(call)
        super().close()
