"""The provider, which serves the units of all doors (nodes that ask): it decides which doors are served, and
what a stage computes next.

A sans-IO core. It does not look into tensors: its driver checks arrays, joins those of a batch and splits
what the stage answers.

The number of sessions is limited in all, for each door and for each network (`crypto.registers`). A session
whose door is idle may be evicted for another session, and its door is told. Waiting units are computed
together: one unit of each session, and as many tokens as fit into a batch. Doors take turns according to the
tokens computed for them and to their weights (`partition.serve.turns`). If several doors want the stage, a
call has only a few sessions of each. So a door with a long prompt, or with many sessions, does not hold up
another door's next token.

The node's owner limits what a door may use (`PeerBounds`): sessions, tokens per minute, and a share of the
memory for keys and values. The door is told which limit it has reached.

A node may hold several stages of a service. A session that several of them serve is one session, with a part
in each: it occupies one place, and if one part ends, all parts end.
"""

from collections.abc import Callable, Sequence
from math import inf

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
from partition.serve.served_sessions import OTHERS as OTHERS
from partition.serve.served_sessions import ServedSessions
from partition.serve.served_sessions import StageKey as StageKey
from partition.serve.stage_batches import StageBatches
from partition.serve.stage_queue import StageQueue
from partition.serve.timeouts import ALIVE_SECONDS, DOOR_SILENCE_SECONDS_MAX, STALL_SECONDS
from partition.serve.turns import StageTurns

IDLE_FORKS_MAX = 32
"""Maximum number of sessions that one door may begin from another session and end without a unit, in a row.
Each costs the stage two calls, for which other doors wait."""
REST_ALIVE_SECONDS = 3.0
"""How often a node reports that it is running if a session only rests: well within the silence that a door
may have, and often enough that no stream is closed for being idle."""
WAITING_UNITS_MAX = 16
"""Maximum number of waiting units of one session. A correct door has fewer in flight."""


class SessionProvider:
    """One node's provider, over all its stages. `events` is drained in place. `source_of` returns the network
    of a peer, `refuses` why a door is not served (empty if it is), `weight_of` the weight of its share
    relative to an unknown peer's, and `bounds_of` its limits."""

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
        self._turns = StageTurns(weight_of)
        self._sessions = ServedSessions(self.events, self._stages, self._turns, source_of)
        self._spent = TokensSpent()
        self._batches = StageBatches(self.events, self._stages, self._sessions, self._turns, self._spend)
        self._now = -inf
        self._alive_at = inf
        self._rest_alive_at = -inf

    # What this node has

    @property
    def services(self) -> tuple[bytes, ...]:
        """The services with an answering stage here."""
        return tuple(dict.fromkeys(service for service, _ in self._stages))

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return len(self._sessions)

    def sessions_of(self, service: bytes) -> int:
        """Return how many sessions of a service are in use."""
        return sum(each.service == service and not each.rests for each in self._sessions.values())

    def tokens_of(self, service: bytes, stage: int) -> int:
        """Return how many tokens the sessions of a service have in a stage here."""
        return sum(each.kept(stage) for each in self._sessions.values() if each.service == service)

    def hold(self, service: bytes, number: int, count: int, context: int, room: int = 0) -> None:
        """Serve this stage, one of `count`, from now on. A session has at most `context` tokens. There is
        room for the keys and values of `room` tokens of all sessions; 0 if the stage keeps none."""
        self._stages[service, number] = StageQueue(service, number, count, context, room)

    def release(self, service: bytes, number: int, code: CloseCode, reason: str) -> Sends:
        """Stop serving a stage, and tell its doors why."""
        self._stages.pop((service, number), None)
        gone = [e for e in self._sessions.values() if e.service == service and number in e.parts]
        return [send for each in gone for send in self._sessions.close(each, code, reason)]

    def knows_session(self, session: bytes) -> bool:
        """Return whether a session is open here."""
        return session in self._sessions

    def stage_of(self, work: UnitWork) -> StageKey | None:
        """Return the service and the stage that a unit is for; None if that stage does not serve its session
        here."""
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
        """Close a session after an invalid unit. A message of an unrelated peer closes nothing."""
        found = self._sessions.get(session)
        if found is None or all(part.before != sender for part in found.parts.values()):
            return []
        return self._sessions.close(found, "failed", reason)

    # What others say

    @property
    def deadline(self) -> float:
        """The time of the next `wake`."""
        waits = (each.waits_until for each in self._stages.values() if each.waits_until > -inf)
        return min(self._alive_at, min(waits, default=inf))

    def wake(self, now: float) -> Sends:
        """Report that this node is running, and end the sessions of silent doors."""
        self._note(now)
        for stage in self._stages.values():
            if -inf < stage.waits_until <= now:
                self._batches.compute(now, stage)
        if now < self._alive_at:
            return []
        doors = {each.door for each in self._sessions.values()}
        for door in doors:
            if now - self._sessions.heard_at[door] >= DOOR_SILENCE_SECONDS_MAX:
                self.lost(door)
        doors = {each.door for each in self._sessions.values()}
        busy = {each.door for each in self._sessions.values() if not each.rests}
        told = busy
        if now >= self._rest_alive_at:
            self._rest_alive_at, told = now + REST_ALIVE_SECONDS, doors
        self._alive_at = inf if not doors else now + (ALIVE_SECONDS if busy else REST_ALIVE_SECONDS)
        return [(door, Alive()) for door in sorted(told)]

    def receive(self, now: float, sender: PeerId, message: Message | Carried) -> Sends:
        """Handle a message of a door, or of the previous stage. Raises RemoteProtocolError."""
        self._note(now)
        if sender in self._sessions.heard_at:
            self._sessions.heard_at[sender] = now
        match message:
            case OpenSession():
                return self._open(now, sender, message)
            case Carried(message=UnitWork()):
                return self._take(sender, message)
            case LeaveSession() | RestSession():
                session = self._sessions.get(message.session)
                if session is not None and session.door != sender:
                    raise RemoteProtocolError("a session was ended by a peer that is not its door")
                if session is None:
                    return []
                if isinstance(message, RestSession):
                    return self._sessions.rest(session)
                return self._sessions.forget(session)
            case _:
                return []

    def lost(self, peer: PeerId) -> None:
        """Note that the stream from this peer is broken: its sessions end."""
        for session in [each for each in self._sessions.values() if each.door == peer]:
            self._sessions.forget(session)

    def _open(self, now: float, door: PeerId, message: OpenSession) -> Sends:
        def refuse(code: CloseCode, reason: str) -> Sends:
            return [(door, SessionClosed(message.session, code, reason))]

        known = self._sessions.get(message.session)
        if known is not None and not known.takes_part(door, message):
            raise RemoteProtocolError("a session was opened twice")
        if (refused := self._refusal(door, message, known)) is not None:
            return refuse(*refused)
        if message.base is not None and self._sessions.idle_forks(door) >= IDLE_FORKS_MAX:
            return refuse("busy", "too many sessions began from another session and asked nothing")
        self._stages[message.service, message.stage].check_ends(door, message)
        if known is not None:
            self._add_part(known, message)
            return [(door, SessionOpened(known.id, message.stage))]
        base = self._sessions.base_of(door, message)
        session = ServedSession(message.session, message.service, door, now, message.share)
        is_admitted, gone = self._sessions.admit(now, session, base)
        sends = [send for each in gone for send in self._sessions.close(each, "evicted", OTHERS)]
        if not is_admitted:
            return sends + refuse("busy", "too many sessions")
        self._sessions.enter(now, session)
        self._add_part(session, message)
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
        """Return why a session is not served; None if it may be. `known` is the session if another stage here
        already serves it."""
        if (message.service, message.stage) not in self._stages:
            return "unknown", "this stage is not here"
        if reason := self._refuses(message.service, door):
            return "refused", reason
        if message.base is not None and self._sessions.base_of(door, message) is None:
            return "position", "the base session is not here"
        reason = self._has_enough(door) if known is None else ""
        return ("busy", reason) if reason else None

    def _has_enough(self, door: PeerId) -> str:
        """Return why a door gets no further session; empty if it may get one."""
        bounds = self._bounds_of(door)
        used = sum(each.door == door and not each.rests for each in self._sessions.values())
        # At the maximum, the register chooses the session that makes room.
        if used >= bounds.sessions < SESSIONS_PER_DOOR_MAX:
            return f"this peer has {counted(used, 'session')} here, as many as the owner allows"
        return self._spent.refusal(self._now, door, bounds.tokens_per_minute)

    def _find_room(self, session: ServedSession, stage: StageQueue, tokens: int) -> tuple[Sends, str]:
        """Return why a session may not have `tokens` tokens in a stage; empty if it may. If necessary,
        resting sessions of its door are closed to make room."""
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
        for each in [e for e in self._sessions.resting if e in own]:
            if stage.room and tokens_together(own, session, number, tokens) > most:
                own.remove(each)
                sends += self._sessions.close(each, "evicted", OTHERS)
        if stage.room and tokens_together(own, session, number, tokens) > most:
            return sends, f"its owner allows each peer keys and values of {most:,} tokens here"
        return sends, ""

    def _take(self, sender: PeerId, carried: Carried) -> Sends:
        work = carried.message
        assert isinstance(work, UnitWork)
        session = self._sessions.get(work.session)
        if session is None:
            return []  # the session has ended here, and its door knows, or learns it from the silence
        part = session.part(work.stage)
        if part is None or part.before != sender:
            raise RemoteProtocolError("a unit was sent by a peer that is not before this stage")
        if session.rests:
            return []
        if work.number <= part.newest or work.wanted > work.tokens:
            raise RemoteProtocolError("a unit is out of order, or asks for more rows than it has")
        part.newest = work.number
        stage = self._stages[session.service, part.stage]
        if work.position > part.kept:
            return self._sessions.close(session, "position", f"{part.kept} tokens are kept")
        if work.position + work.tokens > stage.context:
            return self._sessions.close(session, "length", f"the model takes {stage.context} tokens")
        is_full = len(part.waiting) >= WAITING_UNITS_MAX
        if is_full or not has_room_to_wait(self._sessions.values(), session.door, carried.size_bytes):
            return self._sessions.close(session, "busy", "too many units wait to be computed")
        sends = self._sessions.close_replaced(session)
        freed, reason = self._find_room(session, stage, work.position + work.tokens)
        sends += freed
        if reason:
            return sends + self._sessions.close(session, "busy", reason)
        part.kept = work.position + work.tokens
        part.waiting.append(carried)
        if part.silent_since < inf:
            part.pause_seconds = self._now - part.silent_since
        part.silent_since = inf
        session.silent_since = inf
        self._batches.compute(self._now, stage)
        return sends

    def computed(
        self,
        now: float,
        service: bytes,
        batch: int,
        answers: Sequence[tuple[Answer | None, tuple[Typed, ...]]],
    ) -> Sends:
        """Handle the results of a batch: for each unit, the tensors for the next stage, or the last stage's
        answer, which the driver has made from the logits."""
        self._note(now)
        return self._batches.computed(now, service, batch, answers)

    def failed(
        self, now: float, service: bytes, batch: int, code: CloseCode, reason: str, session: bytes = b""
    ) -> Sends:
        """Handle a failed batch. The `session` that caused the failure ends, or the only session of the
        batch. If the cause is unknown, each unit is computed by itself."""
        self._note(now)
        return self._batches.failed(now, service, batch, code, reason, session)

    def _spend(self, part: SessionPart, tokens: int) -> None:
        if part.stage == min(part.session.parts):  # a token counts once, even if several stages are here
            rate = self._bounds_of(part.door).tokens_per_minute
            self._spent.spend(self._now, part.door, tokens, rate)

    def _note(self, now: float) -> None:
        """Note the time. If this node itself stood still, the silence of others does not count."""
        self._now = now
        heard_at = self._sessions.heard_at
        if heard_at and now - self._alive_at > STALL_SECONDS - ALIVE_SECONDS:
            self._sessions.heard_at = {peer: max(at, now - ALIVE_SECONDS) for peer, at in heard_at.items()}
