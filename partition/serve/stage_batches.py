"""The batches that the stages of a provider compute: one at a time per stage, from the doors (nodes that ask)
whose turn it is. A refused unit ends only its own session. After a failed batch its units are computed again
one by one; this is safe because a unit rolls its session back to the position where the unit begins. If a
stage has no free page left, resting sessions free theirs, and the batch is computed again.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from msgspec.structs import replace

from partition.codecs.codec import Typed
from partition.serve.computing import Event, ForgetSession
from partition.serve.messages import Answer, Carried, CloseCode, Sends, UnitWork
from partition.serve.served_session import SessionPart
from partition.serve.served_sessions import OTHERS, ServedSessions, StageKey
from partition.serve.stage_queue import StageQueue
from partition.serve.turns import StageTurns, wait_until


class StageBatches:
    """The batches of the `stages` of one provider. Orders to stages are appended to `events`. `spend` counts
    the tokens that are computed for a part; the number is negative if a unit must wait again."""

    def __init__(
        self,
        events: list[Event],
        stages: Mapping[StageKey, StageQueue],
        sessions: ServedSessions,
        turns: StageTurns,
        spend: Callable[[SessionPart, int], None],
    ) -> None:
        self._events = events
        self._stages = stages
        self._sessions = sessions
        self._turns = turns
        self._spend = spend
        self._count = 0

    def compute(self, now: float, stage: StageQueue) -> None:
        """Make an idle stage compute waiting units."""
        if stage.computing:
            return
        own = [
            each.parts[stage.number]
            for each in self._sessions.values()
            if each.service == stage.service and stage.number in each.parts
        ]
        stage.waits_until = wait_until(now, own, stage.call_seconds)
        if stage.waits_until > now:
            return
        stage.waits_until = -inf
        chosen = self._choose(now, stage, own)
        if not chosen:
            return
        for part in chosen:
            self._sessions.note_asked(part.door)
        self._count += 1
        self._events.append(stage.begin(now, self._count, chosen))

    def _choose(self, now: float, stage: StageQueue, own: Sequence[SessionPart]) -> list[SessionPart]:
        """Return the parts whose next units are computed together, those of the least served doors first."""
        if (alone := stage.next_alone(own)) is not None:
            return [alone]
        chosen = self._turns.choose(now, own)
        for part in chosen:
            self._spend(part, part.waiting[0].message.tokens)  # type: ignore[union-attr]  # only units wait
        for part in chosen:
            self._sessions.note_chosen(part.session)
        return chosen

    def _put_back(self, part: SessionPart, unit: Carried) -> None:
        """Queue a unit again after its batch was refused. Its tokens count only when it is chosen again."""
        part.waiting.appendleft(unit)
        assert isinstance(unit.message, UnitWork)
        self._turns.give_back(part, unit.message.tokens)
        self._spend(part, -unit.message.tokens)

    def computed(
        self,
        now: float,
        service: bytes,
        batch: int,
        answers: Sequence[tuple[Answer | None, tuple[Typed, ...]]],
    ) -> Sends:
        """Handle a computed batch: for each unit, the tensors for the next stage, or the last stage's answer,
        which the driver has made from the logits."""
        stage = self._finish(service, batch)
        if stage is None:
            return []
        stage.call_seconds = now - stage.began_at
        sends: Sends = []
        found = stage.end()
        for (part, unit), (answer, arrays) in zip(found, answers, strict=True):
            session = part.session
            if session.is_over:
                self._events.append(ForgetSession(service, part.stage, session.id))
                continue
            work = unit.message
            assert isinstance(work, UnitWork)
            self._sessions.note_computed(session)
            if session.rests:
                continue
            part.silent_since = inf if part.waiting else now
            is_busy = any(each.waiting or each.is_computing for each in session.parts.values())
            session.silent_since = inf if is_busy else now
            if answer is None:
                sends.append((part.after, Carried(replace(work, stage=part.stage + 1), arrays)))
            else:
                sends.append((session.door, Carried(answer, arrays)))
        self.compute(now, stage)
        return sends

    def failed(
        self, now: float, service: bytes, batch: int, code: CloseCode, reason: str, session: bytes = b""
    ) -> Sends:
        """Handle a refused batch; the stage continues. The `session` at which the batch failed ends, or the
        only session of the batch. If the cause is unknown, each unit is computed by itself."""
        stage = self._finish(service, batch)
        if stage is None:
            return []
        sends: Sends = []
        found = stage.end()
        # If no page is left, a resting session frees its pages, and the batch is computed again.
        number = stage.number
        resting = [e for e in self._sessions.resting if e.service == service and number in e.parts]
        is_again = code == "busy" and bool(resting)
        if is_again:
            sends += self._sessions.close(resting[0], "evicted", OTHERS)
        for part, unit in found:
            each = part.session
            if each.is_over:
                self._events.append(ForgetSession(service, number, each.id))
            elif each.rests:
                continue
            elif not is_again and (len(found) == 1 or each.id == session):
                sends += self._sessions.close(each, code, reason)
            elif is_again or session:
                self._put_back(part, unit)
            else:
                part.waiting.appendleft(unit)
                stage.alone.append(each.id)
        self.compute(now, stage)
        return sends

    def _finish(self, service: bytes, batch: int) -> StageQueue | None:
        """Return the stage that has computed a batch; None if it is no longer held."""
        found = (each for each in self._stages.values() if each.service == service and each.computing)
        return next((each for each in found if each.batch == batch), None)
