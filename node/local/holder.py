"""A stage of this node that works for the head of a column, and is averaged with the others that are held.

Not here: the rules for it (`partition.run.local.holder`).
"""

from collections.abc import Callable

import trio

from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.averaging.snapshot import Snapshot
from node.errors import StageFailed
from node.local.held_stage import AveragedStage
from node.local.stage_server import StageServer
from partition.run.ending import Ending
from partition.run.local.column_messages import MATES_MAX, Attach, Attached, ColumnRefusal
from partition.run.local.holder import StageHolder

LOOK_SECONDS = 0.5
"""How often a holder looks what is to be done, while no head calls for it."""
GREETED_MAX = 32
"""Members that a stage without a head tells that it is there."""


class ColumnHolder:
    """One held stage. `work` runs it until it fails, or a further one is not needed any more."""

    def __init__(
        self,
        held: AveragedStage,
        number: int,
        door: TicketGate,
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
        self._rules = StageHolder(held, number, steps, is_further=is_further)
        self._door = door
        self._ending = ending
        self.server = StageServer(
            held.trainer.stage,
            self._rules.seat,
            accept=self._accept,
            apply=self._applied,
            now=held.now,
            payload_bytes_max=payload_bytes_max,
        )

    def _accept(self, peer: PeerId, attach: Attach) -> Attached | ColumnRefusal:
        """Answer a head that wants this stage. Raises RemoteProtocolError: it is no member."""
        self._door.check(peer, attach.chain)
        reason, is_older = self._rules.refusal(attach.step)
        if reason:
            return ColumnRefusal(reason, is_older=is_older)
        return Attached(self._door.admission.chain, tuple(self.held.training[:MATES_MAX]))

    def _applied(self, step: int, samples: int) -> None:
        trainer = self.held.trainer
        self._rules.applied(samples)
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
            while held.rounds.ending_for >= 0 and held.lacks_mean():
                await between()
                await trio.sleep(LOOK_SECONDS)

        await held.begin(carried)
        held.has_state = True
        held.report()
        self.begun()
        server.between, server.settle = between, settle
        while not self._rules.is_spare(held.now()):
            if server.seat.failure:
                raise StageFailed(server.seat.failure)
            await self._renew()
            has_converged, is_idle = self._ending.series.has_converged, held.trainer.is_idle
            deed = self._rules.next_deed(is_idle=is_idle, has_converged=has_converged)
            if deed == "call":
                known = list(self._door.admission.admitted)[-GREETED_MAX:]
                self._door.greet([*known, *server.seat.companions])  # heads look for holders
            async with server.lock:
                await (held.hand_on() if deed == "hand on" else between())
            if deed == "call":
                self.alone()
            await trio.sleep(LOOK_SECONDS)

    async def _renew(self) -> None:
        """Take over the state that a head asked for."""
        step = self._rules.take_renewal()
        if step is not None:
            async with self.server.lock:
                await self.held.renew(step)
