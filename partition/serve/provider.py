"""Serves the units of all doors: decides who is served, and what a stage computes next.

A sans-IO core. It looks into no tensor: its driver checks arrays, joins those of a batch and splits what the
stage answers.

Sessions are bounded in all, for each door and for each network (`crypto.registers`): a session whose door
moves nothing makes room for another, and its door is told. What waits is computed together, one unit of a
session at a time, as many tokens as a batch takes. Doors take turns by the tokens that were computed for
them, for what each gave itself (`partition.serve.turns`), and where several want the stage, a call has a few
sessions of each: so a door with a long prompt does not hold up another's next token, nor does one with many.

The node's owner bounds what a door may have (`PeerBounds`): sessions, tokens a minute, and a part of the
memory for keys and values. It is told which bound it has met.

A unit that the stage refuses ends its session alone: where a batch fails, its units are computed again one by
one, which changes nothing, for a unit rolls its session back to where it begins.

A node may hold several stages of a service. A session that several of them serve is one session, with a part
in each: it has one place, and where one part ends all do.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf

from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.codecs.codec import Typed
from partition.serve.bounds import MINUTES_MAX, NO_BOUNDS, PeerBounds, TokensSpent, counted
from partition.serve.bounds import SESSIONS_PER_DOOR_MAX as SESSIONS_PER_DOOR_MAX
from partition.serve.computing import ComputeBatch as ComputeBatch
from partition.serve.computing import Event as Event
from partition.serve.computing import ForgetSession as ForgetSession
from partition.serve.computing import ForkSession as ForkSession
from partition.serve.messages import (
    Alive,
    Answer,
    Carried,
    CloseCode,
    LeaveSession,
    Message,
    OpenSession,
    RestSession,
    Sends,
    SessionClosed,
    SessionOpened,
    UnitWork,
)
from partition.serve.served_session import ServedSession, SessionPart, has_room_to_wait, tokens_together
from partition.serve.session_places import SessionPlaces
from partition.serve.stage_queue import StageQueue
from partition.serve.timeouts import ALIVE_SECONDS, DOOR_SILENCE_SECONDS_MAX, STALL_SECONDS
from partition.serve.turns import StageTurns, wait_until

IDLE_FORKS_MAX = 32
"""Sessions that one door began from another and ended without a unit, since its last: each is two calls of
the stage, for which others wait."""
REST_ALIVE_SECONDS = 3.0
"""How often a node says that it runs where a session only rests: well within what counts as a door's silence,
and often enough that no stream is closed for being idle."""
OTHERS = "others wanted the place"
WAITING_UNITS_MAX = 16
"""Units of one session that wait: a door has fewer in flight."""
StageKey = tuple[bytes, int]
"""A service, and the number of its stage."""


class SessionProvider:
    """One node's, over all its stages. `source_of` tells the network of a peer, `refuses` why a door is not
    served, empty where it is, `weight_of` how large its share is beside a stranger's, `bounds_of` what it
    may have.

    Long because places, turns and what waits are one state of many messages.
    """

    def __init__(
        self,
        *,
        source_of: Callable[[PeerId], bytes] = lambda peer: peer,
        refuses: Callable[[bytes, PeerId], str] = lambda _service, _door: "",
        weight_of: Callable[[PeerId], float] = lambda _door: 1.0,
        bounds_of: Callable[[PeerId], PeerBounds] = lambda _door: NO_BOUNDS,
    ) -> None:
        self.events: list[Event] = []
        self._refuses = refuses
        self._bounds_of = bounds_of
        self._stages: dict[StageKey, StageQueue] = {}
        self._batches = 0
        self._sessions: dict[bytes, ServedSession] = {}
        self._places = SessionPlaces(source_of)
        self._turns = StageTurns(weight_of)
        self._idle_forks = Counter[PeerId]()
        self._spent = TokensSpent()
        self._now = -inf
        self._heard_at: dict[PeerId, float] = {}
        self._alive_at = inf
        self._rest_alive_at = -inf

    # What this node has

    @property
    def services(self) -> tuple[bytes, ...]:
        """The services of which a stage answers here."""
        return tuple(dict.fromkeys(service for service, _ in self._stages))

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)

    def sessions_of(self, service: bytes) -> int:
        """Return how many of a service are in use."""
        return sum(each.service == service and not each.rests for each in self._sessions.values())

    def tokens_of(self, service: bytes, stage: int) -> int:
        """Return how many tokens the sessions of a service have in a stage here."""
        return sum(each.kept(stage) for each in self._sessions.values() if each.service == service)

    def hold(self, service: bytes, number: int, count: int, context: int, room: int = 0) -> None:
        """Serve this stage, of `count`, from now on: sessions of at most `context` tokens. Keys and values
        have room for `room` tokens of all sessions; 0: it keeps none."""
        self._stages[service, number] = StageQueue(service, number, count, context, room)

    def release(self, service: bytes, number: int, code: CloseCode, reason: str) -> Sends:
        """Serve a stage no more; its doors are told why."""
        self._stages.pop((service, number), None)
        gone = [e for e in self._sessions.values() if e.service == service and number in e.parts]
        return [send for each in gone for send in self._close(each, code, reason)]

    def knows_session(self, session: bytes) -> bool:
        """Return whether a session is open here."""
        return session in self._sessions

    def stage_of(self, work: UnitWork) -> StageKey | None:
        """Return the service and the number of the stage that a unit is for; None: its session is not served
        here by that stage."""
        found = self._sessions.get(work.session)
        part = None if found is None else found.part(work.stage)
        return None if found is None or part is None else (found.service, part.stage)

    def knows(self, peer: PeerId) -> bool:
        """Return whether a peer has a session here, or sends units of one."""
        return any(
            peer == each.door or any(peer == part.before for part in each.parts.values())
            for each in self._sessions.values()
        )

    def reject(self, sender: PeerId, session: bytes, reason: str) -> Sends:
        """Close a session of which something came that can be no unit; a stranger's ends nothing."""
        found = self._sessions.get(session)
        if found is None or all(part.before != sender for part in found.parts.values()):
            return []
        return self._close(found, "failed", reason)

    # What others say

    @property
    def deadline(self) -> float:
        """When `wake` wants to be called."""
        waits = (each.waits_until for each in self._stages.values() if each.waits_until > -inf)
        return min(self._alive_at, min(waits, default=inf))

    def wake(self, now: float) -> Sends:
        """Say that this node runs, and let go of the sessions of doors that are silent."""
        self._note(now)
        for stage in self._stages.values():
            if -inf < stage.waits_until <= now:
                self._compute(stage)
        if now < self._alive_at:
            return []
        doors = {each.door for each in self._sessions.values()}
        for door in doors:
            if now - self._heard_at[door] >= DOOR_SILENCE_SECONDS_MAX:
                self.lost(door)
        doors = {each.door for each in self._sessions.values()}
        busy = {each.door for each in self._sessions.values() if not each.rests}
        told = busy
        if now >= self._rest_alive_at:
            self._rest_alive_at, told = now + REST_ALIVE_SECONDS, doors
        self._alive_at = inf if not doors else now + (ALIVE_SECONDS if busy else REST_ALIVE_SECONDS)
        return [(door, Alive()) for door in sorted(told)]

    def receive(self, now: float, sender: PeerId, message: Message | Carried) -> Sends:
        """Take what a door, or the stage before, says. Raises RemoteProtocolError."""
        self._note(now)
        if sender in self._heard_at:
            self._heard_at[sender] = now
        match message:
            case OpenSession():
                return self._open(now, sender, message)
            case Carried(message=UnitWork()):
                return self._take(sender, message)
            case LeaveSession() | RestSession():
                session = self._sessions.get(message.session)
                if session is not None and session.door != sender:
                    raise RemoteProtocolError("an end to another's session")
                if session is None:
                    return []
                if isinstance(message, RestSession):
                    return self._rest(session)
                return self._forget(session)
            case _:
                return []

    def lost(self, peer: PeerId) -> None:
        """The stream from this peer is broken: its sessions are over."""
        for session in [each for each in self._sessions.values() if each.door == peer]:
            self._forget(session)

    def _open(self, now: float, door: PeerId, message: OpenSession) -> Sends:
        def refuse(code: CloseCode, reason: str) -> Sends:
            return [(door, SessionClosed(message.session, code, reason))]

        known = self._sessions.get(message.session)
        if known is not None and not known.takes_part(door, message):
            raise RemoteProtocolError("a session that is open already")
        if (refused := self._refusal(door, message, known)) is not None:
            return refuse(*refused)
        if message.base is not None and self._idle_forks[door] >= IDLE_FORKS_MAX:
            return refuse("busy", "too many sessions that began from another, and asked nothing")
        self._stages[message.service, message.stage].check_ends(door, message)
        if known is not None:
            self._add_part(known, message)
            return [(door, SessionOpened(known.id, message.stage))]
        base = self._base_of(door, message)
        session = ServedSession(message.session, message.service, door, now, message.share)
        is_admitted, gone = self._places.admit(now, session, base)
        sends = [send for each in gone for send in self._close(each, "evicted", OTHERS)]
        if not is_admitted:
            return sends + refuse("busy", "too many sessions")
        self._sessions[session.id] = session
        self._add_part(session, message)
        self._heard_at[door] = now
        self._turns.enter(session)
        self._alive_at = min(self._alive_at, now + ALIVE_SECONDS)
        return [*sends, (door, SessionOpened(session.id, message.stage))]

    def _add_part(self, session: ServedSession, message: OpenSession) -> None:
        part = SessionPart(session, message.stage, PeerId(message.before), PeerId(message.after))
        part.silent_since = self._now
        session.parts[part.stage] = part
        if message.base is not None:
            base, part.kept, part.is_kept = message.base, message.base.tokens, True
            session.base, session.shared = base.session, base.tokens
            self.events.append(
                ForkSession(session.service, part.stage, session.id, base.session, base.tokens)
            )

    def _refusal(
        self, door: PeerId, message: OpenSession, known: ServedSession | None
    ) -> tuple[CloseCode, str] | None:
        """Return why a session is not served, None where it may be; `known` where another stage here does."""
        if (message.service, message.stage) not in self._stages:
            return "unknown", "this stage is not here"
        if reason := self._refuses(message.service, door):
            return "refused", reason
        if message.base is not None and self._base_of(door, message) is None:
            return "position", "the session that this one begins from is not here"
        reason = self._has_enough(door) if known is None else ""
        return ("busy", reason) if reason else None

    def _base_of(self, door: PeerId, message: OpenSession) -> ServedSession | None:
        """Return the session of the same door that a new one begins from; None where it is not here."""
        found = None if message.base is None else self._sessions.get(message.base.session)
        if found is None or message.base is None or found.kept(message.stage) < message.base.tokens:
            return None
        return found if (found.door, found.service) == (door, message.service) else None

    def _has_enough(self, door: PeerId) -> str:
        """Return why a door gets no further session, empty where it does."""
        bounds = self._bounds_of(door)
        used = sum(each.door == door and not each.rests for each in self._sessions.values())
        if used >= bounds.sessions < SESSIONS_PER_DOOR_MAX:  # else the register says who makes room
            return f"{counted(used, 'session')} of this peer here already, as many as its owner allows"
        return self._spent.refusal(self._now, door, bounds.tokens_per_minute)

    def _find_room(self, session: ServedSession, stage: StageQueue, tokens: int) -> tuple[Sends, str]:
        """Return why a session may not have `tokens` in all in a stage, empty where it may; sessions of its
        door that rest make room for it."""
        bounds, number = self._bounds_of(session.door), stage.number
        if reason := self._spent.refusal(self._now, session.door, bounds.tokens_per_minute, MINUTES_MAX):
            return [], reason
        most = int(stage.room * bounds.cache_part)
        own = [
            each
            for each in self._sessions.values()
            if (each.door, each.service) == (session.door, session.service) and number in each.parts
        ]
        sends: Sends = []
        for each in [e for e in self._places.resting if e in own]:
            if stage.room and tokens_together(own, session, number, tokens) > most:
                own.remove(each)
                sends += self._close(each, "evicted", OTHERS)
        if stage.room and tokens_together(own, session, number, tokens) > most:
            return sends, f"its owner allows each peer keys and values of {most:,} tokens here"
        return sends, ""

    def _rest(self, session: ServedSession) -> Sends:
        """Keep a session for others to begin from; the least used of its door makes room."""
        for part in session.parts.values():
            part.waiting.clear()
        gone = self._places.rest(session)
        sends = self._close_replaced(session)
        return sends + [send for each in gone for send in self._close(each, "evicted", "others rest")]

    def _take(self, sender: PeerId, carried: Carried) -> Sends:
        work = carried.message
        assert isinstance(work, UnitWork)
        session = self._sessions.get(work.session)
        if session is None:
            return []  # it ended here; its door knows, or learns it by its own silence
        part = session.part(work.stage)
        if part is None or part.before != sender:
            raise RemoteProtocolError("a unit of another's session")
        if session.rests:
            return []
        if work.number <= part.newest or work.wanted > work.tokens:
            raise RemoteProtocolError("a unit out of order, or that wants more rows than it has")
        part.newest = work.number
        stage = self._stages[session.service, part.stage]
        if work.position > part.kept:
            return self._close(session, "position", f"{part.kept} tokens are kept")
        if work.position + work.tokens > stage.context:
            return self._close(session, "length", f"the model takes {stage.context} tokens")
        is_full = len(part.waiting) >= WAITING_UNITS_MAX
        if is_full or not has_room_to_wait(self._sessions.values(), session.door, carried.size_bytes):
            return self._close(session, "busy", "too much waits to be computed")
        sends = self._close_replaced(session)
        freed, reason = self._find_room(session, stage, work.position + work.tokens)
        sends += freed
        if reason:
            return sends + self._close(session, "busy", reason)
        part.kept = work.position + work.tokens
        part.waiting.append(carried)
        if part.silent_since < inf:
            part.pause_seconds = self._now - part.silent_since
        part.silent_since = inf
        session.silent_since = inf
        self._compute(stage)
        return sends

    # What the stage computes

    def _compute(self, stage: StageQueue) -> None:
        """Have a stage compute what waits, if it is idle."""
        if stage.computing:
            return
        own = [
            each.parts[stage.number]
            for each in self._sessions.values()
            if each.service == stage.service and stage.number in each.parts
        ]
        stage.waits_until = wait_until(self._now, own, stage.call_seconds)
        if stage.waits_until > self._now:
            return
        stage.waits_until = -inf
        chosen = self._choose(stage, own)
        if not chosen:
            return
        for part in chosen:
            self._idle_forks.pop(part.door, None)
        self._batches += 1
        self.events.append(stage.begin(self._now, self._batches, chosen))

    def _choose(self, stage: StageQueue, own: Sequence[SessionPart]) -> list[SessionPart]:
        """Return the sessions whose next units are computed together, of the least served doors first."""
        if (alone := stage.next_alone(own)) is not None:
            return [alone]
        chosen = self._turns.choose(self._now, own)
        for part in chosen:
            self._spend(part, part.waiting[0].message.tokens)  # type: ignore[union-attr]  # only units wait
        for part in chosen:  # the next time others of the same door come first
            self._sessions[part.session.id] = self._sessions.pop(part.session.id)
        return chosen

    def _spend(self, part: SessionPart, tokens: int) -> None:
        if part.stage == min(part.session.parts):  # a token counts once, however many stages are here
            rate = self._bounds_of(part.door).tokens_per_minute
            self._spent.spend(self._now, part.door, tokens, rate)

    def _put_back(self, part: SessionPart, unit: Carried) -> None:
        """Have a unit wait again that was refused with another, and counts once it is chosen anew."""
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
        """The stage has computed a batch: for each unit what goes on to the next stage, or the answer of the
        last one, which the driver has made of the logits."""
        self._note(now)
        stage = self._finish(service, batch)
        if stage is None:
            return []
        stage.call_seconds = now - stage.began_at
        sends: Sends = []
        found = stage.end()
        for (part, unit), (answer, arrays) in zip(found, answers, strict=True):
            session = part.session
            if session.is_over:
                self.events.append(ForgetSession(service, part.stage, session.id))
                continue
            work = unit.message
            assert isinstance(work, UnitWork)
            self._places.credit(session)
            if session.rests:
                continue
            part.silent_since = inf if part.waiting else now
            is_busy = any(each.waiting or each.is_computing for each in session.parts.values())
            session.silent_since = inf if is_busy else now
            if answer is None:
                sends.append((part.after, Carried(replace(work, stage=part.stage + 1), arrays)))
            else:
                sends.append((session.door, Carried(answer, arrays)))
        self._compute(stage)
        return sends

    def failed(
        self, now: float, service: bytes, batch: int, code: CloseCode, reason: str, session: bytes = b""
    ) -> Sends:
        """The stage has refused a batch, and goes on. The `session` at which it failed ends, or the one whose
        unit was alone; where that is not known, each is computed by itself."""
        self._note(now)
        stage = self._finish(service, batch)
        if stage is None:
            return []
        sends: Sends = []
        found = stage.end()
        # Where there is no page left, those that rest give theirs, and all is computed again.
        number = stage.number
        resting = [e for e in self._places.resting if e.service == service and number in e.parts]
        is_again = code == "busy" and bool(resting)
        if is_again:
            sends += self._close(resting[0], "evicted", OTHERS)
        for part, unit in found:
            each = part.session
            if each.is_over:
                self.events.append(ForgetSession(service, number, each.id))
            elif each.rests:
                continue
            elif not is_again and (len(found) == 1 or each.id == session):
                sends += self._close(each, code, reason)
            elif is_again or session:
                self._put_back(part, unit)
            else:
                part.waiting.appendleft(unit)
                stage.alone.append(each.id)
        self._compute(stage)
        return sends

    def _finish(self, service: bytes, batch: int) -> StageQueue | None:
        """Return the stage that has computed a batch; None: it is held no more."""
        found = (each for each in self._stages.values() if each.service == service and each.computing)
        return next((each for each in found if each.batch == batch), None)

    # The end of sessions

    def _close(self, session: ServedSession, code: CloseCode, reason: str) -> Sends:
        sends = self._forget(session)
        return [*sends, (session.door, SessionClosed(session.id, code, reason))]

    def _close_replaced(self, session: ServedSession) -> Sends:
        """Let go of the session that gave this one its place."""
        replaced, session.replaces = session.replaces, None
        return [] if replaced is None or replaced.is_over else self._close(replaced, "evicted", OTHERS)

    def _forget(self, session: ServedSession) -> Sends:
        if session.is_over:
            return []
        session.is_over = True
        self._idle_forks[session.door] += session.shared > 0 and not session.has_asked
        self._sessions.pop(session.id, None)
        self._places.leave(session)
        for part in session.parts.values():
            part.waiting.clear()
            is_here = (session.service, part.stage) in self._stages
            if part.is_kept and not part.is_computing and is_here:
                self.events.append(ForgetSession(session.service, part.stage, session.id))
        left = [each for each in self._sessions.values() if each.door == session.door]
        self._turns.leave(session, left)
        if not left:
            self._heard_at.pop(session.door, None)
            self._idle_forks.pop(session.door, None)
        return self._close_replaced(session)

    def _note(self, now: float) -> None:
        """Where this node itself was asleep, nobody was silent."""
        self._now = now
        if self._heard_at and now - self._alive_at > STALL_SECONDS - ALIVE_SECONDS:
            self._heard_at = {peer: max(at, now - ALIVE_SECONDS) for peer, at in self._heard_at.items()}
