"""The head's side of a simulated column: holders are looked for, asked to work, and regrouped."""

from typing import Any

from crypto.identity import PeerId
from partition.plan.columns import Takers
from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.run.local.column import ColumnHolders
from partition.run.local.recruiting import Recruitment
from partition.run.local.regrouping import (
    MERGE_SECONDS,
    RENEW_LOOK_SECONDS,
    RESUMED_SECONDS,
    AskPromised,
    ColumnRegrouping,
    FindMoves,
)
from sim.worlds.local_context import Attachment
from sim.worlds.local_holder import HolderLife
from sim.worlds.local_life import LOOK_SECONDS, HeldPlace
from sim.worlds.tasks import Task, Wait, gather

ATTACH_SECONDS_MAX = 5.0
JOIN_SECONDS_MAX = 30.0
EXPORT_SECONDS_MAX = 300.0
LAYERS = 4
"""The layers of each stage, for the planner."""


class ColumnLife(HolderLife):
    """A member that may be the head of a column."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams: dict[int, Attachment] = {}
        self._attaching: set[Attachment] = set()
        self._recruitment = Recruitment(self.crew, self, self.run.training.stages)
        self._regrouping: ColumnRegrouping | None = None
        if self.begin.is_training and not self.stage and self.run.training.stages > 1:
            self.crew.holders_of = ColumnHolders(self.run.training.stages)

    def _recruit(self) -> Task:
        while True:
            candidates = self._recruitment.look(self.now)
            for stage, peer in candidates or ():
                self._recruitment.asking(self.now, peer)
                answer = yield from self._join(peer, stage, is_beside=False)
                if answer:
                    self._recruitment.agreed(self.now, stage, peer)
            if candidates is not None:
                self._recruitment.asked(self.now)
            yield self.sleep(LOOK_SECONDS)

    def _join(self, peer: PeerId, stage: int, *, is_beside: bool) -> Task:
        """Ask a node to take part; return whether it does."""
        if not self.admission.can_vouch:
            return False
        chain = self.admission.extended(peer, self.run.wall(self.me))
        return bool((yield self.ask(peer, ("join", chain, stage, is_beside), JOIN_SECONDS_MAX)))

    def _mend(self) -> Task:
        """Find holders for the stages that are missing; return whether none is."""
        column = self.crew.holders_of
        if column is None:
            return True
        if column.missing:
            live = self.live()
            known = [peer for peer in self.crew.holders if peer in live]
            for stage in column.missing:
                if stage in column.here:
                    self._work_here(self.crew.further[stage])
                    continue
                for peer in column.candidates(stage, known):
                    if (yield from self._attach(stage, peer)):
                        break
                else:
                    for head in column.heads_to_ask(self.crew.others):
                        yield from self._attach(stage, head)
            column.looked()
        elif self._regrouping is not None and self.finish.has_state:
            yield from self._hand_over(self._regrouping)
        self.own.counts.is_waiting = bool(column.missing)
        return not column.missing

    def _work_here(self, holding: HeldPlace) -> None:
        seat = holding.rules.seat
        if seat.is_vacant and holding.is_ready:
            holding.stage.counts.step = self.own.step
            seat.work_here(self.me)

    def _attach(self, stage: int, peer: PeerId) -> Task:
        """Have a peer hold a stage; return whether it does."""
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
        """Note that the stream to a holder is broken."""
        if self._streams.get(attachment.stage) is attachment:
            del self._streams[attachment.stage]
            if self.crew.holders_of is not None:
                self.crew.holders_of.lost(attachment.stage)

    def _let_go(self) -> None:
        """Let all holders go: each drops what it had of a step."""
        for attachment in list(self._streams.values()):
            attachment.end()
        for place in self.crew.further.values():
            place.rules.seat.rest()

    def _all(self, question: tuple[Any, ...], seconds: float) -> Task:
        """Ask all other stages; return whether all did what they were asked."""
        column = self.crew.holders_of
        if column is None:
            return True
        if column.missing:
            return False
        waits: list[Wait] = []
        asked: list[Attachment] = []
        for stage in range(1, self.run.training.stages):
            attachment = self._streams.get(stage)
            if attachment is not None:
                asked.append(attachment)
                waits.append(self.ask(attachment.holder, ("work", attachment, *question), seconds))
            elif not self._do(self.crew.further[stage], self.me, question):
                return False
        answers = yield gather(waits)
        for attachment, answer in zip(asked, answers, strict=True):
            if not answer:
                attachment.end()
        return all(answers)

    def _ask_all_to_settle(self) -> Task:
        """Have all stages be evaluated or exported; return whether all were."""
        yield self.sleep(0.2)
        waits = [
            self.ask(each.holder, ("settle", each), EXPORT_SECONDS_MAX) for each in self._streams.values()
        ]
        for holding in list(self.crew.further.values()):
            yield from self._settle(holding)
        streams = list(self._streams.values())
        answers = yield gather(waits)
        for attachment, answer in zip(streams, answers, strict=False):
            if not answer:
                attachment.end()
        column = self.crew.holders_of
        return all(answers) and not (column is not None and column.missing)

    def _prepare_regrouping(self) -> None:
        patience = None if self.begin.carried is None else MERGE_SECONDS
        self._regrouping = ColumnRegrouping(
            self.now,
            self.me,
            self._plan(),
            self.crew,
            self._recruitment,
            live=self.live,
            further=lambda: self.crew.taken,
            tell=lambda _text: None,
            patience_seconds=RESUMED_SECONDS if self.begin.is_resumed else patience,
        )
        self.tasks.start(self._regroup(self._regrouping))
        for stage, state in (self.begin.carried or {}).items():
            self.hold(stage, state)

    def _plan(self) -> Plan:
        count = self.run.training.stages
        rows = tuple(StagePlan(LAYERS * n, LAYERS * (n + 1), (self.me,), (1,)) for n in range(count))
        return Plan(self.run.name, NO_HASH, 0, (self.me,), (self.me,), 1, rows)

    def _regroup(self, rules: ColumnRegrouping) -> Task:
        while True:
            yield self.sleep(LOOK_SECONDS)
            deed = rules.look(self.now, lambda: dict.fromkeys(self.live(), 1))
            if isinstance(deed, AskPromised):
                if (yield from self._stand_in(deed.stages[0], deed.peer)):
                    rules.expect(self.now, deed.stages, deed.peer)
                    continue
                deed = rules.look(self.now, lambda: dict.fromkeys(self.live(), 1))
            if isinstance(deed, Takers):
                for stage, peer in deed.by_stage.items():
                    if not (yield from self._stand_in(stage, peer)):
                        rules.refused(self.now, stage, peer)
                        break
                    rules.taken(self.now, stage, peer)
                else:
                    rules.merged(deed)
            elif isinstance(deed, FindMoves):
                yield from self._move(rules, deed)

    def _stand_in(self, stage: int, peer: PeerId) -> Task:
        """Have a node hold a stage beside its own; return whether it does."""
        if peer == self.me:
            self.hold(stage)
            return True
        is_agreed = yield from self._join(peer, stage, is_beside=True)
        if is_agreed and self.crew.holders_of is not None:
            self.crew.holders_of.agreed(stage, peer)
        return is_agreed

    def _move(self, rules: ColumnRegrouping, deed: FindMoves) -> Task:
        """Give a stage of a node that holds several to another."""
        stage = next(n for n, peer in reversed(list(enumerate(deed.column))) if deed.column.count(peer) > 1)
        for peer in (*deed.free, *deed.spare):
            if peer in deed.spare or (yield from self._join(peer, stage, is_beside=False)):
                rules.expect(self.now, (stage,), peer)
                if self.crew.holders_of is not None and peer not in deed.spare:
                    self.crew.holders_of.agreed(stage, peer)
                return
            self._recruitment.asking(self.now, peer)
        if not (deed.free or deed.spare):
            rules.useless(deed)

    def _hand_over(self, rules: ColumnRegrouping) -> Task:
        begun = self.now
        arriving = rules.arriving(begun)
        if arriving is None:
            return
        stage, peer = arriving
        while not (yield from self._attach(stage, peer)):
            if not rules.awaits_arrival(self.now, begun):
                rules.not_arrived(peer)
                return
            yield self.sleep(RENEW_LOOK_SECONDS)
        rules.arrived()
        if stage in self.crew.further:
            self.crew.further[stage].is_released = True
