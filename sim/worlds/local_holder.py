"""The holder's part in a simulated column: stages that work for heads, which are the member's own one and
additional ones."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from partition.run.admission import Present
from partition.run.local.courses import CallHeads, StageLost
from partition.run.local.holder import AverageStage, OpenToHeads, RenewState
from sim.worlds.local_context import Attachment, CountedState
from sim.worlds.local_life import HeldPlace, LocalLife
from sim.worlds.local_stage import LocalStage
from sim.worlds.tasks import Task

GREETED_MAX = 32
HELD_MAX = 8


class HolderLife(LocalLife):
    """A member that can hold stages for heads."""

    holding: HeldPlace | None = None
    """The member's own stage, if it works for heads."""

    def take_back(self, number: int) -> None:
        """Stop lending a copy of a stage."""

    @property
    def _holdings(self) -> list[HeldPlace]:
        own = [] if self.holding is None else [self.holding]
        return own + list(self.crew.further.values())

    def _work(self, holding: HeldPlace, head: PeerId, question: tuple[Any, ...]) -> Task:
        """Carry out one request of a head; return whether it succeeded."""
        kind, execution, step = question
        if holding.rules.seat.head != head:
            return False
        if kind == "apply":
            self.run.truth.apply(execution, head, self.me, holding.stage.number)
            holding.rules.applied(step + 1, 1)
            yield from self.follow(holding.rules.between(), holding.stage.do)
        return True

    def _hold(self, holding: HeldPlace) -> Task:
        """Hold a stage for heads until it is no longer needed."""
        stage, rules = holding.stage, holding.rules

        def do(deed: object) -> Task:
            match deed:
                case OpenToHeads():
                    holding.is_ready = True
                case RenewState(step=step):
                    _, found = yield from stage.fetch(step, self.run.training.steps)
                    if found is not None and rules.seat.head is None:
                        stage.take(found)
                case CallHeads(companions=companions):
                    self.greet([*list(self.admission.admitted)[-GREETED_MAX:], *companions])
                case AverageStage():
                    yield from self.follow(rules.between(), stage.do)
                case _:
                    return (yield from stage.do(deed))
            return None

        yield from self.follow(rules.work(), do)

    # Additional stages

    def hold(self, number: int, carried: CountedState | None = None) -> None:
        """Open an additional stage."""
        if number not in self.crew.taken and number != self.stage:
            self.crew.taken.add(number)
            self.take_back(number)
            self.tasks.start(self._hold_further(number, carried))

    def _hold_further(self, number: int, carried: CountedState | None) -> Task:
        yield self.sleep(self.run.training.open_seconds * self.rng.uniform(0.5, 1.5))
        stage = LocalStage(self, number)
        stage.enter()
        holding = self.crew.further[number] = HeldPlace(stage, is_further=True)
        if self.crew.holders_of is not None:
            self.crew.holders_of.here[number] = holding.rules.seat
        yield self.sleep(1.0)
        stage.carried = carried or self.disk.copies.get(number)
        with suppress(StageLost):
            yield from self._hold(holding)
        self.crew.further.pop(number, None)
        self.crew.taken.discard(number)
        if self.crew.holders_of is not None:
            self.crew.holders_of.here.pop(number, None)
        holding.rules.seat.close()
        stage.leave()

    # Answers

    def _stands_in(self, asker: PeerId, stage: int) -> bool:
        if not (self.stage and stage and self.finish.has_state) or self.crew.head not in (None, asker):
            return False
        if len({self.stage, stage, *self.crew.taken}) > HELD_MAX:
            return False
        self.hold(stage)
        return True

    def _attached(
        self,
        attachment: Attachment,
        step: int,
        chain: tuple[Fact, ...],
        *,
        keeps_copies: bool,
        column: Sequence[PeerId],
    ) -> tuple[Any, ...] | None:
        head = attachment.head
        if self.holding is None:
            mates = [peer for peer in self.crew.holders if peer != head]
            return "refusal", mates if self.admission.admits(head) else [], False
        if self.admission.admits(head):
            self.finish.heads.seen(self.now)
        holding = next((each for each in self._holdings if each.stage.number == attachment.stage), None)
        if holding is None or not attachment.is_open:
            return "refusal", [], False
        try:
            self._admit(lambda _: self.admission.receive(head, Present(self.run.name, chain)))
        except RemoteProtocolError:
            return None
        reason, is_older = holding.rules.refusal(step)
        if reason:
            return "refusal", [], is_older
        seat = holding.rules.seat
        if not seat.take(self.now, attachment.seated, keeps_copies=keeps_copies, column=column):
            return "refusal", [], False
        self.run.attachments.add(attachment)
        self.run.truth.seat(self.me, attachment.stage, head)
        attachment.seated.silence.begin(self.now)
        holding.rules.applied(step, 0)
        return "attached", holding.stage.training

    def _serving(self, attachment: Attachment) -> HeldPlace | None:
        if not attachment.is_open:
            return None
        return next((each for each in self._holdings if each.stage.number == attachment.stage), None)

    def _do_work(
        self, attachment: Attachment, request: tuple[Any, ...], answer: Callable[[Any], None]
    ) -> None:
        holding = self._serving(attachment)
        if holding is None:
            answer(False)
            return
        attachment.seated.silence.end(self.now)
        seconds = self.run.training.step_seconds * self.run.slowness(self.me)
        self.tasks.start(self._worked(holding, attachment, request, seconds, answer))

    def _worked(
        self,
        holding: HeldPlace,
        attachment: Attachment,
        request: tuple[Any, ...],
        seconds: float,
        answer: Callable[[Any], None],
    ) -> Task:
        yield self.sleep(seconds if request[0] == "pass" else 0.01)
        is_done = self._serving(attachment) is holding
        is_done = is_done and (yield from self._work(holding, attachment.head, request))
        if is_done and request[0] == "apply":
            holding.rules.seat.stepped(attachment.seated)
        attachment.seated.silence.begin(self.now)
        answer(is_done)

    def _settled(self, holding: HeldPlace, attachment: Attachment, answer: Callable[[Any], None]) -> Task:
        attachment.seated.silence.end(self.now)
        yield from self.follow(holding.rules.settle(), holding.stage.do)
        attachment.seated.silence.begin(self.now)
        answer(self._serving(attachment) is holding)

    def holder_detached(self, attachment: Attachment) -> None:
        """Handle a broken stream of a head."""
        for holding in self._holdings:
            if holding.stage.number == attachment.stage:
                holding.rules.seat.leave(attachment.seated)
