"""A stage of this node that works for the head of a column, and is averaged with other nodes' copies of the
same stage.

Not here: its rules (`partition.run.local.holder`).
"""

from collections.abc import Callable

from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.local.courses import follow
from node.local.held_stage import AveragedStage, Deed
from node.local.stage_server import StageServer
from partition.run.ending import Ending
from partition.run.local.column_messages import MATES_MAX, Attach, Attached, ColumnRefusal
from partition.run.local.courses import CallHeads
from partition.run.local.holder import AverageStage, OpenToHeads, RenewState, StageHolder
from partition.run.local.member_ending import MemberEnding
from partition.run.local.member_stage import HandOn

GREETED_MAX = 32
"""Maximum number of members to which a stage without a head announces itself."""


class ColumnHolder:
    """One held stage. `work` runs it until it fails or, for a further stage, until it is released."""

    def __init__(
        self,
        held: AveragedStage,
        number: int,
        door: TicketGate,
        ending: Ending,
        finish: MemberEnding,
        *,
        payload_bytes_max: int,
        is_further: bool = False,
    ) -> None:
        self.held = held
        self.begun: Callable[[], None] = lambda: None
        """Called once the stage is ready to work."""
        self.number = number
        self.rules = StageHolder(held, number, ending, finish, is_further=is_further)
        self._door = door
        self.server = StageServer(
            held.trainer.stage,
            self.rules.seat,
            accept=self._accept,
            apply=self.rules.applied,
            now=held.now,
            payload_bytes_max=payload_bytes_max,
        )

    def _accept(self, peer: PeerId, attach: Attach) -> Attached | ColumnRefusal:
        """Answer a head that wants this stage. Raises RemoteProtocolError if the peer is not a member."""
        self._door.check(peer, attach.chain)
        reason, is_older = self.rules.refusal(attach.step)
        if reason:
            return ColumnRefusal(reason, is_older=is_older)
        return Attached(self._door.admission.chain, tuple(self.held.training[:MATES_MAX]))

    async def work(self) -> None:
        """Hold the stage for heads. Raises StageFailed."""
        await follow(self.rules.work(), self._do)

    async def _do(self, deed: OpenToHeads | RenewState | CallHeads | AverageStage | Deed) -> object:
        held, server = self.held, self.server
        match deed:
            case OpenToHeads():
                self.begun()
                server.between, server.settle = self._between, self._settle
            case RenewState(step=step):
                async with server.lock:
                    await held.renew(step)
            case CallHeads(companions=companions):
                known = list(self._door.admission.admitted)[-GREETED_MAX:]
                self._door.greet([*known, *companions])  # so that heads that look for holders find this one
            case AverageStage():
                async with server.lock:
                    await self._between()
            case HandOn():
                async with server.lock:
                    await held.do(deed)
            case _:
                return await held.do(deed)
        return None

    async def _between(self) -> None:
        await follow(self.rules.between(), self.held.do)

    async def _settle(self) -> None:
        await follow(self.rules.settle(), self.held.do)
