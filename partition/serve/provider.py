"""What a provider does with the units of all doors: whom it serves, and what its stage computes next.

A sans-IO core. It looks into no tensor: its driver checks arrays, joins those of a batch and splits what the
stage answers.

Sessions are bounded in all, for each door and for each network (`crypto.registers`): a session whose door
moves nothing makes room for another, and its door is told. What waits is computed together, one unit of a
session at a time, as many tokens as a batch takes. Doors take turns by the tokens that were computed for
them, for what each gave itself (`partition.serve.turns`), and where several want the stage, a call has a few
sessions of each: so a door with a long prompt does not hold up another's next token, nor does one with many.

The node's owner bounds what a door may have (`PeerBounds`): sessions, tokens a minute, and a part of the
memory for keys and values. It is told which bound it has met.

A session that its door lets rest keeps its tokens for others of the same door to begin from, as long as
nobody needs its place or its pages: the least used goes first.

A unit that the stage refuses ends its session alone: where a batch fails, its units are computed again one by
one, which changes nothing, for a unit rolls its session back to where it begins.

A node may hold several stages of a service. A session that several of them serve is one session, with a part
in each: it has one place, and where one part ends all do.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from crypto.registers import Budget, Register
from partition.codecs.codec import Typed
from partition.serve.bounds import MINUTES_MAX, NO_BOUNDS, PeerBounds, TokensSpent, counted
from partition.serve.bounds import SESSIONS_PER_DOOR_MAX as SESSIONS_PER_DOOR_MAX
from partition.serve.computing import BatchUnit as BatchUnit
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
    Work,
)
from partition.serve.served_session import ServedSession, SessionPart, tokens_together
from partition.serve.timeouts import ALIVE_SECONDS, DOOR_SILENCE_SECONDS_MAX, STALL_SECONDS
from partition.serve.turns import BATCH_ROWS_MAX as BATCH_ROWS_MAX
from partition.serve.turns import BATCH_TOKENS_MAX as BATCH_TOKENS_MAX
from partition.serve.turns import StageTurns, wait_until

SESSIONS_MAX = 64
"""All doors together have so many at one node."""
PATIENCE_SECONDS = 5.0
"""How long a door may send nothing for a session that another door wants the place of."""
PLACES = Budget(SESSIONS_MAX, SESSIONS_PER_DOOR_MAX, SESSIONS_MAX // 2, PATIENCE_SECONDS)
RESTS_PER_DOOR_MAX = 8
"""Sessions of one door that rest: half of what it may have."""
IDLE_FORKS_MAX = 32
"""Sessions that one door began from another and ended without a unit, since its last: each is two calls of
the stage, for which others wait."""
REST_ALIVE_SECONDS = 3.0
"""How often a node says that it runs where a session only rests: well within what counts as a door's silence,
and often enough that no stream is closed for being idle."""
OTHERS = "others wanted the place"
WAITING_UNITS_MAX = 16
"""Units of one session that wait: a door has fewer in flight."""
WAITING_BYTES_MAX = 256 << 20
"""Tensors of all units that wait. A door that finds no room here tries elsewhere."""
WAITING_BYTES_PER_DOOR_MAX = 64 << 20

StageKey = tuple[bytes, int]
"""A service, and the number of its stage."""


@dataclass(eq=False)
class _Stage:
    service: bytes
    number: int
    count: int
    context: int
    room: int = 0
    batch: int = 0
    computing: tuple[SessionPart, ...] = ()
    units: tuple[Carried, ...] = ()
    alone: deque[bytes] = field(default_factory=deque)
    """Sessions whose next unit is computed by itself, since a batch with it failed."""
    began_at: float = 0.0
    call_seconds: float = 0.0
    """When the last call began, and how long the last took that was answered."""
    waits_until: float = -inf
    """Until when it waits for a unit that is on its way."""


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
        self._source_of = source_of
        self._refuses = refuses
        self._bounds_of = bounds_of
        self._stages: dict[StageKey, _Stage] = {}
        self._batches = 0
        self._sessions: dict[bytes, ServedSession] = {}
        self._resting: dict[bytes, ServedSession] = {}
        """Those that rest, the least used first."""
        self._places: Register[ServedSession] = Register(PLACES)
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
        self._stages[service, number] = _Stage(service, number, count, context, room)

    def release(self, service: bytes, number: int, code: CloseCode, reason: str) -> Sends:
        """Serve a stage no more; its doors are told why."""
        self._stages.pop((service, number), None)
        gone = [e for e in self._sessions.values() if e.service == service and number in e.parts]
        return [send for each in gone for send in self._close(each, code, reason)]

    def knows_session(self, session: bytes) -> bool:
        """Return whether a session is open here."""
        return session in self._sessions

    def stage_of(self, work: Work) -> StageKey | None:
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
        """What came as a unit of this session cannot be one; a stranger's ends nothing."""
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
            case Carried(message=Work()):
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
        if known is not None and not self._is_further_part(door, known, message):
            raise RemoteProtocolError("a session that is open already")
        if (refused := self._refusal(door, message, known)) is not None:
            return refuse(*refused)
        if message.base is not None and self._idle_forks[door] >= IDLE_FORKS_MAX:
            return refuse("busy", "too many sessions that began from another, and asked nothing")
        self._check_ends(door, message)
        if known is not None:
            self._add_part(known, message)
            return [(door, SessionOpened(known.id, message.stage))]
        base = self._base_of(door, message)
        session = ServedSession(message.session, message.service, door, now, message.share)
        sends = self._make_place(door, base)
        # One that rests makes room for what begins from it, where nothing else does.
        self._hide(base)
        evicted = self._places.admit(now, session, door, self._source_of(door))
        is_taken_over = evicted is None and base is not None and base.id in self._resting
        if is_taken_over and base is not None:
            self._places.leave(base)
            evicted = self._places.admit(now, session, door, self._source_of(door))
        self._hide(base, is_over=True)
        if evicted is None:
            if is_taken_over and base is not None:
                sends += self._close(base, "evicted", OTHERS)
            return sends + refuse("busy", "too many sessions")
        sends += [send for each in evicted for send in self._close(each, "evicted", OTHERS)]
        self._sessions[session.id] = session
        self._add_part(session, message)
        if base is not None:
            rested = self._resting.pop(base.id, None)
            if is_taken_over:
                session.replaces = base
            elif rested is not None:
                self._resting[base.id] = rested
        self._heard_at[door] = now
        self._turns.enter(session)
        self._alive_at = min(self._alive_at, now + ALIVE_SECONDS)
        return [*sends, (door, SessionOpened(session.id, message.stage))]

    def _is_further_part(self, door: PeerId, known: ServedSession, message: OpenSession) -> bool:
        """Return whether another stage here is to serve a session that is open, and has asked nothing yet."""
        base = message.base
        begins = (known.base, known.shared) == ((base.session, base.tokens) if base is not None else (b"", 0))
        is_same = (known.door, known.service) == (door, message.service) and begins
        return is_same and message.stage not in known.parts and not known.rests and not known.has_asked

    def _check_ends(self, door: PeerId, message: OpenSession) -> None:
        stage = self._stages[message.service, message.stage]
        is_first, is_last = stage.number == 0, stage.number == stage.count - 1
        if (is_first and message.before != door) or (is_last and message.after != door):
            raise RemoteProtocolError("a session whose first or last stage does not speak to its door")

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

    def _find_room(self, session: ServedSession, stage: _Stage, tokens: int) -> tuple[Sends, str]:
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
        for each in [e for e in self._resting.values() if e in own]:
            if stage.room and tokens_together(own, session, number, tokens) > most:
                own.remove(each)
                sends += self._close(each, "evicted", OTHERS)
        if stage.room and tokens_together(own, session, number, tokens) > most:
            return sends, f"its owner allows each peer keys and values of {most:,} tokens here"
        return sends, ""

    @staticmethod
    def _hide(base: ServedSession | None, *, is_over: bool = False) -> None:
        """Have the register pass over a session that rests while another is admitted that begins from it."""
        if base is not None and base.rests:
            base.silent_since = -inf if is_over else inf

    def _make_place(self, door: PeerId, base: ServedSession | None) -> Sends:
        """Have a session that rests make room for a new one, before any that is in use would have to."""
        resting = [each for each in self._resting.values() if each is not base]
        if self._places.count(door) >= SESSIONS_PER_DOOR_MAX:
            resting = [each for each in resting if each.door == door]
        elif len(self._places) < SESSIONS_MAX:
            return []
        return [send for each in resting[:1] for send in self._close(each, "evicted", OTHERS)]

    def _rest(self, session: ServedSession) -> Sends:
        """Keep a session for others to begin from; the least used of its door makes room."""
        session.rests, session.silent_since = True, -inf
        for part in session.parts.values():
            part.waiting.clear()
        self._resting[session.id] = session
        own = [each for each in self._resting.values() if each.door == session.door]
        gone = own[: max(0, len(own) - RESTS_PER_DOOR_MAX)]
        sends = self._close_replaced(session)
        return sends + [send for each in gone for send in self._close(each, "evicted", "others rest")]

    def _take(self, sender: PeerId, carried: Carried) -> Sends:
        work = carried.message
        assert isinstance(work, Work)
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
        if len(part.waiting) >= WAITING_UNITS_MAX or not self._has_room(session, carried.size_bytes):
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

    def _has_room(self, session: ServedSession, size_bytes: int) -> bool:
        waits = {True: 0, False: 0}
        for each in self._sessions.values():
            units = [unit for part in each.parts.values() for unit in part.waiting]
            waits[each.door == session.door] += sum(unit.size_bytes for unit in units)
        own = waits[True] + size_bytes
        return own <= WAITING_BYTES_PER_DOOR_MAX and own + waits[False] <= WAITING_BYTES_MAX

    # What the stage computes

    def _compute(self, stage: _Stage) -> None:
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
        units = []
        for part in chosen:
            part.is_computing = part.is_kept = True
            self._idle_forks.pop(part.door, None)
            units.append(part.waiting.popleft())
        self._batches += 1
        stage.batch, stage.began_at = self._batches, self._now
        stage.computing, stage.units = tuple(chosen), tuple(units)
        rows = tuple(
            BatchUnit(part.session.id, unit.message, unit.arrays)
            for part, unit in zip(chosen, units, strict=True)
            if isinstance(unit.message, Work)
        )
        self.events.append(ComputeBatch(stage.service, stage.number, stage.batch, rows))

    def _choose(self, stage: _Stage, own: Sequence[SessionPart]) -> list[SessionPart]:
        """Return the sessions whose next units are computed together, of the least served doors first."""
        while stage.alone:
            name = stage.alone.popleft()
            found = next((part for part in own if part.session.id == name and part.may_compute), None)
            if found is not None:
                return [found]
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
        assert isinstance(unit.message, Work)
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
        found, stage.computing, stage.units = zip(stage.computing, stage.units, strict=True), (), ()
        for (part, unit), (answer, arrays) in zip(found, answers, strict=True):
            session = part.session
            if session.is_over:
                self.events.append(ForgetSession(service, part.stage, session.id))
                continue
            work = unit.message
            assert isinstance(work, Work)
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
        found, stage.computing, stage.units = list(zip(stage.computing, stage.units, strict=True)), (), ()
        # Where there is no page left, those that rest give theirs, and all is computed again.
        number = stage.number
        resting = [e for e in self._resting.values() if e.service == service and number in e.parts]
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

    def _finish(self, service: bytes, batch: int) -> _Stage | None:
        """Return the stage that has computed a batch; None: it is held no more."""
        for stage in self._stages.values():
            if (stage.service, stage.batch) == (service, batch) and stage.computing:
                for part in stage.computing:
                    part.is_computing = False
                return stage
        return None

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
        self._resting.pop(session.id, None)
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
