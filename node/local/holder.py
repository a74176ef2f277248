"""A stage of this node that works for the head of a column, and is averaged with the others that are held.

A node has one of its own, and further ones where it stands in for machines that are gone
(`node.local.merging`). A further one ends once another node holds the stage and has gone on.
"""

from collections.abc import Callable

import trio

from crypto.identity import PeerId
from node.averaging.door import Door
from node.averaging.snapshot import Snapshot
from node.errors import StageFailed
from node.local.column import MATES_MAX, Attach, Attached, Refusal, StageServer
from node.local.due import Due
from node.local.held_stage import AveragedStage
from partition.run.ending import Ending

LOOK_SECONDS = 0.5
"""How often a holder looks what is to be done, while no head calls for it."""
GREETED_MAX = 32
"""Members that a stage without a head tells that it is there."""
RENEWALS_MAX = 3
"""How often a newcomer takes over a newer state for a head that is further: a member may claim any step."""
SPARE_SECONDS = 10.0
"""A further stage that has had no head for so long ends, if others hold it: a column that lost another stage
has its head back sooner."""


class ColumnHolder:
    """One stage. `work` runs it until it fails, or a further one is not needed any more."""

    def __init__(
        self,
        held: AveragedStage,
        number: int,
        door: Door,
        ending: Ending,
        steps: int,
        *,
        payload_bytes_max: int,
        is_further: bool = False,
    ) -> None:
        self.held = held
        self.is_still: Callable[[], bool] = lambda: False
        """Whether the numbers are not to change any more."""
        self.begun: Callable[[], None] = lambda: None
        """Called once the stage can work."""
        self.alone: Callable[[], None] = lambda: None
        """Called now and then while there is no head."""
        self.number = number
        self._is_further = is_further
        self._door = door
        self._ending = ending
        self._steps = steps
        self._due = Due()
        self._has_worked = False
        self._renewals = 0
        self._wanted_step: int | None = None
        self.server = StageServer(
            held.trainer.stage,
            number,
            accept=self._accept,
            apply=self._applied,
            payload_bytes_max=payload_bytes_max,
        )

    def _accept(self, peer: PeerId, attach: Attach) -> Attached | Refusal:
        """A head wants this stage. Raises RemoteProtocolError: it is no member."""
        self._door.check(peer, attach.chain)
        held = self.held
        if attach.step > self._steps:
            return Refusal("a step beyond the end of the run")
        if not held.has_state:
            return Refusal("its state is not here yet")
        if self._is_older(attach.step):
            self._wanted_step = attach.step
            return Refusal("its state is of an earlier step", is_older=True)
        return Attached(self._door.admission.chain, tuple(held.training[:MATES_MAX]))

    def _is_older(self, step: int) -> bool:
        """Whether this newcomer's state is older than that of another holder, who is as far as the head: the
        one that gives the stage to it."""
        if self._has_worked or self.held.trainer.step >= step or self._renewals >= RENEWALS_MAX:
            return False
        return any(each.has_state and each.step.reaches(step) for each in self.held.reports.values())

    def _applied(self, step: int, samples: int) -> None:
        trainer = self.held.trainer
        self._has_worked |= samples > 0
        trainer.step, trainer.samples = step, trainer.samples + samples

    async def work(self, nursery: trio.Nursery, carried: Snapshot | None = None) -> None:
        """Hold the stage for heads, from the state that was `carried` here or others have. Raises
        StageFailed."""
        held, server = self.held, self.server

        async def between() -> None:
            held.trainer.is_waiting = server.head is None
            held.report()
            await held.average(nursery, is_still=self.is_still())
            await held.hand_on()
            await held.keep(nursery, is_training=True)

        async def settle() -> None:
            held.note_end()
            while held.rounds.ending_for >= 0 and held.rounds.lacks_mean(len(held.training)):
                await between()
                await trio.sleep(LOOK_SECONDS)

        await held.begin(carried)
        held.has_state = True
        held.report()
        self.begun()
        server.between, server.settle = between, settle
        while not self._is_spare():
            if server.failure:
                raise StageFailed(server.failure)
            await self._renew()
            if server.head is None:
                known = list(self._door.admission.admitted)[-GREETED_MAX:]
                self._door.greet([*known, *server.companions])  # heads look for holders
                async with server.lock:
                    await between()
                self.alone()
            elif held.trainer.is_idle or self._ending.has_converged:  # no step of the head calls for a round
                async with server.lock:
                    await between()
            else:
                async with server.lock:  # the head may be waiting for whoever wants this state
                    await held.hand_on()
            await trio.sleep(LOOK_SECONDS)

    async def _renew(self) -> None:
        """Take over the state that a head asked for."""
        step, self._wanted_step = self._wanted_step, None
        if step is not None and self.server.head is None:
            self._renewals += 1
            async with self.server.lock:
                await self.held.renew(step)

    def _is_spare(self) -> bool:
        """Whether another node holds this stage, which is a further one here, and has gone on."""
        held = self.held
        waited = self._due.waited("a head", self.server.head is None)
        if not (self._is_further and self._has_worked and held.training) or waited < 0:
            return False
        beyond = held.trainer.step + 1
        is_past = any(each.has_state and each.step.reaches(beyond) for each in held.reports.values())
        return is_past or waited >= SPARE_SECONDS
