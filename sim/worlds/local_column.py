"""The head's part in a simulated column: it finds holders, sends them work, and regroups."""

from typing import Any

from crypto.identity import PeerId
from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.run.local.column import ColumnHolders, WorkHere
from partition.run.local.courses import AskToHold, AttachTo, ColumnBroken
from partition.run.local.head_course import HeadCourse
from partition.run.local.recruiting import Recruitment
from partition.run.local.regrouping import (
    MERGE_SECONDS,
    RESUMED_SECONDS,
    ColumnRegrouping,
    DropFurther,
    FindMoves,
)
from partition.run.local.start_barrier import StartBarrier
from sim.worlds.local_context import Attachment
from sim.worlds.local_holder import HolderLife
from sim.worlds.local_life import HeldPlace
from sim.worlds.tasks import Task, Wait, gather

ATTACH_SECONDS_MAX = 5.0
JOIN_SECONDS_MAX = 30.0
EXPORT_SECONDS_MAX = 300.0
LAYERS = 4
"""Number of layers of each stage, for the planner."""


class ColumnLife(HolderLife):
    """A member that may be the head of a column."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams: dict[int, Attachment] = {}
        self._attaching: set[Attachment] = set()
        self._recruitment = Recruitment(self.crew, self, self.run.training.stages)
        self.barrier = StartBarrier(self.run.name, self.begin.inviter)
        self.life_as_head = HeadCourse(
            self.own, self.crew, self.finish, self.barrier, stages=self.run.training.stages, live=self.live
        )
        if self.begin.is_training and not self.stage and self.run.training.stages > 1:
            self.crew.holders_of = ColumnHolders(self.run.training.stages)
            self.own.taken_over = self._let_go  # holders learn of the new step when they are attached

    def _join(self, peer: PeerId, stage: int, *, is_beside: bool) -> Task:
        """Ask a node to take part; return whether it agrees, None if no answer came."""
        if not self.admission.can_vouch:
            return False
        chain = self.admission.extended(peer, self.run.wall(self.me))
        return (yield self.ask(peer, ("join", chain, stage, is_beside), JOIN_SECONDS_MAX))

    def _work_here(self, holding: HeldPlace) -> None:
        seat = holding.rules.seat
        if seat.is_vacant and holding.is_ready:
            holding.stage.counts.step = self.own.step
            seat.work_here(self.me)

    def do_in_column(self, deed: object) -> Task:
        """Carry out a command of the column's course about the holders of the other stages."""
        match deed:
            case WorkHere(stage=stage):
                self._work_here(self.crew.further[stage])
            case AttachTo(stage=stage, peer=peer):
                return (yield from self._attach(stage, peer))
            case AskToHold(stage=stage, peer=peer, is_beside=is_beside):
                if peer != self.me:
                    return (yield from self._join(peer, stage, is_beside=is_beside))
                self.hold(stage)
                return True
            case FindMoves(column=column, free=free, spare=spare):
                several = [n for n, peer in enumerate(column) if column.count(peer) > 1]
                return [((several[-1],), peer) for peer in (*free, *spare)]
            case DropFurther(stage=stage):
                if stage in self.crew.further:
                    self.crew.further[stage].rules.is_released = True
        return None

    def _attach(self, stage: int, peer: PeerId) -> Task:
        """Make a peer hold a stage; return whether it does."""
        column = self.crew.holders_of
        assert column is not None, "a head has a column"
        column.asking()
        attachment = Attachment(self.me, peer, stage, self.run.detached)
        self._attaching.add(attachment)
        step, keeps = self.own.step, column.wants_copies(stage)
        question = ("attach", attachment, step, self.admission.chain, keeps, column.peers)
        answer = yield self.ask(peer, question, ATTACH_SECONDS_MAX)
        self._attaching.discard(attachment)
        is_attached = answer is not None and answer[0] == "attached" and attachment.is_open
        if answer is None or (answer[0] == "attached" and not is_attached):
            attachment.end()
            column.failed(stage, peer)
            return False
        if not is_attached:
            column.refused(stage, peer, answer[1], is_older=answer[2])
            return False
        before = self._streams.get(stage)
        column.took(stage, peer, answer[1])
        self._streams[stage] = attachment
        if before is not None:
            before.end()
        return True

    def detached(self, attachment: Attachment) -> None:
        """Handle a broken stream to a holder."""
        if self._streams.get(attachment.stage) is attachment:
            del self._streams[attachment.stage]
            if self.crew.holders_of is not None:
                self.crew.holders_of.lost(attachment.stage)

    def _let_go(self) -> None:
        """Release all holders; each drops its open step."""
        for attachment in list(self._streams.values()):
            attachment.end()
        for place in self.crew.further.values():
            place.rules.seat.rest()

    def _all(self, question: tuple[Any, ...], seconds: float) -> Task:
        """Send a request to the holders of all other stages. Raises ColumnBroken."""
        column = self.crew.holders_of
        if column is None:
            return
        is_done = not column.missing
        waits: list[Wait] = []
        asked: list[Attachment] = []
        for stage in range(1, self.run.training.stages) if is_done else ():
            attachment = self._streams.get(stage)
            if attachment is not None:
                asked.append(attachment)
                waits.append(self.ask(attachment.holder, ("work", attachment, *question), seconds))
            else:
                is_done = is_done and (yield from self._work(self.crew.further[stage], self.me, question))
        answers = (yield gather(waits)) if is_done else []
        for attachment, answer in zip(asked, answers, strict=False):
            if not answer:
                attachment.end()
        if not (is_done and all(answers)):
            raise ColumnBroken("a stage is missing")

    def _ask_all_to_settle(self) -> Task:
        """Prepare all stages for an evaluation or export. Raises ColumnBroken."""
        yield self.sleep(0.2)
        waits = [
            self.ask(each.holder, ("settle", each), EXPORT_SECONDS_MAX) for each in self._streams.values()
        ]
        for holding in list(self.crew.further.values()):
            yield from self.follow(holding.rules.settle(), holding.stage.do)
        streams = list(self._streams.values())
        answers = yield gather(waits)
        for attachment, answer in zip(streams, answers, strict=False):
            if not answer:
                attachment.end()
        column = self.crew.holders_of
        if not all(answers) or (column is not None and column.missing):
            raise ColumnBroken("a stage is missing")

    def _prepare_regrouping(self) -> None:
        patience = None if self.begin.carried is None else MERGE_SECONDS
        self.life_as_head.regrouping = regrouping = ColumnRegrouping(
            lambda: self.now,
            self.me,
            self._plan(),
            self.crew,
            self._recruitment,
            live=self.live,
            rates=lambda: dict.fromkeys(self.live(), 1),
            tell=lambda _text: None,
            patience_seconds=RESUMED_SECONDS if self.begin.is_resumed else patience,
        )
        self.tasks.start(self.follow(regrouping.regroup(), self.do_in_column))
        for stage, state in (self.begin.carried or {}).items():
            self.hold(stage, state)

    def _plan(self) -> Plan:
        count = self.run.training.stages
        rows = tuple(StagePlan(LAYERS * n, LAYERS * (n + 1), (self.me,), (1,)) for n in range(count))
        return Plan(self.run.name, NO_HASH, 0, (self.me,), (self.me,), 1, rows)
