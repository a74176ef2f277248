"""The sessions of all doors (nodes that ask) that one provider serves, from getting a place to their end.

A session that ends frees its place and its turn, and each stage here that has data of it forgets it. When the
last session of a door ends, everything known about the door is forgotten.
"""

from collections import Counter
from collections.abc import Callable, Collection

from crypto.identity import PeerId
from partition.serve.computing import Event, ForgetSession
from partition.serve.messages import CloseCode, OpenSession, Sends, SessionClosed
from partition.serve.served_session import ServedSession
from partition.serve.session_places import SessionPlaces
from partition.serve.turns import StageTurns

OTHERS = "others wanted the place"
StageKey = tuple[bytes, int]
"""A service, and the number of one of its stages."""


class ServedSessions:
    """The sessions of one provider, which holds the stages `held`. Orders to stages are appended to `events`.
    `heard_at` is the time when each door that has a session was last heard."""

    def __init__(
        self,
        events: list[Event],
        held: Collection[StageKey],
        turns: StageTurns,
        source_of: Callable[[PeerId], bytes],
    ) -> None:
        self.heard_at: dict[PeerId, float] = {}
        self._events = events
        self._held = held
        self._turns = turns
        self._places = SessionPlaces(source_of)
        self._sessions: dict[bytes, ServedSession] = {}
        self._idle_forks = Counter[PeerId]()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: bytes) -> bool:
        return session in self._sessions

    def __getitem__(self, session: bytes) -> ServedSession:
        return self._sessions[session]

    def get(self, session: bytes) -> ServedSession | None:
        """Return a session; None if it is not here."""
        return self._sessions.get(session)

    def values(self) -> Collection[ServedSession]:
        """Return all sessions. Those of recently served doors come last."""
        return self._sessions.values()

    @property
    def resting(self) -> list[ServedSession]:
        """The resting sessions; the one unused for longest comes first."""
        return self._places.resting

    def idle_forks(self, door: PeerId) -> int:
        """Return how many sessions in a row a door has begun from another session and ended without a
        unit."""
        return self._idle_forks[door]

    def admit(
        self, now: float, session: ServedSession, base: ServedSession | None
    ) -> tuple[bool, list[ServedSession]]:
        """Give a session a place, if there is one. Return whether it has a place, and the sessions that must
        end for it."""
        return self._places.admit(now, session, base)

    def enter(self, now: float, session: ServedSession) -> None:
        """Begin to serve a session that has a place."""
        self._sessions[session.id] = session
        self.heard_at[session.door] = now
        self._turns.enter(session)

    def note_computed(self, session: ServedSession) -> None:
        """Note that a unit of a session was answered."""
        self._places.credit(session)

    def note_chosen(self, session: ServedSession) -> None:
        """Note that a unit of a session is being computed. Next time, other sessions of the same door come
        first."""
        self._sessions[session.id] = self._sessions.pop(session.id)

    def note_asked(self, door: PeerId) -> None:
        """Note that a door asks for units, so it does not only open sessions."""
        self._idle_forks.pop(door, None)

    def close(self, session: ServedSession, code: CloseCode, reason: str) -> Sends:
        """End a session; return the messages to send, which tell its door why."""
        sends = self.forget(session)
        return [*sends, (session.door, SessionClosed(session.id, code, reason))]

    def close_replaced(self, session: ServedSession) -> Sends:
        """End the session that gave its place to this one."""
        replaced, session.replaces = session.replaces, None
        return [] if replaced is None or replaced.is_over else self.close(replaced, "evicted", OTHERS)

    def forget(self, session: ServedSession) -> Sends:
        """End a session whose door knows this already; return the messages to other doors."""
        if session.is_over:
            return []
        session.is_over = True
        self._idle_forks[session.door] += session.shared > 0 and not session.has_asked
        self._sessions.pop(session.id, None)
        self._places.leave(session)
        for part in session.parts.values():
            part.waiting.clear()
            is_here = (session.service, part.stage) in self._held
            if part.is_kept and not part.is_computing and is_here:
                self._events.append(ForgetSession(session.service, part.stage, session.id))
        left = [each for each in self._sessions.values() if each.door == session.door]
        self._turns.leave(session, left)
        if not left:
            self.heard_at.pop(session.door, None)
            self._idle_forks.pop(session.door, None)
        return self.close_replaced(session)

    def rest(self, session: ServedSession) -> Sends:
        """Keep a session, so that others can begin from it. If its door has too many, the one unused for
        longest is closed."""
        for part in session.parts.values():
            part.waiting.clear()
        gone = self._places.rest(session)
        sends = self.close_replaced(session)
        return sends + [send for each in gone for send in self.close(each, "evicted", "others rest")]

    def base_of(self, door: PeerId, message: OpenSession) -> ServedSession | None:
        """Return the session of the same door from which a new session begins; None if it is not here."""
        found = None if message.base is None else self._sessions.get(message.base.session)
        if found is None or message.base is None or found.kept(message.stage) < message.base.tokens:
            return None
        return found if (found.door, found.service) == (door, message.service) else None
