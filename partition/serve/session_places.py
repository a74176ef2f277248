"""The places of a provider's sessions, both in use and resting.

The number of places is limited in all, for each door (the node that asks) and for each network
(`crypto.registers`). A resting session is kept as a base for other sessions of the same door until its place
is needed. Resting sessions are dropped before any session in use, the one unused for longest first.
"""

from collections.abc import Callable, Sequence
from math import inf

from crypto.identity import PeerId
from crypto.registers import Budget, Register
from partition.serve.bounds import SESSIONS_PER_DOOR_MAX
from partition.serve.served_session import ServedSession

SESSIONS_MAX = 64
"""Maximum number of sessions of all doors at one node."""
PATIENCE_SECONDS = 5.0
"""How long a door may send nothing for a session before its place goes to another door."""
PLACES = Budget(SESSIONS_MAX, SESSIONS_PER_DOOR_MAX, SESSIONS_MAX // 2, PATIENCE_SECONDS)
RESTS_PER_DOOR_MAX = 8
"""Maximum number of resting sessions of one door: half of its limit for all sessions."""


class SessionPlaces:
    """The places of one provider. `source_of` returns the network of a peer."""

    def __init__(self, source_of: Callable[[PeerId], bytes]) -> None:
        self._source_of = source_of
        self._register: Register[ServedSession] = Register(PLACES)
        self._resting: dict[bytes, ServedSession] = {}

    @property
    def resting(self) -> list[ServedSession]:
        """The resting sessions; the one unused for longest comes first."""
        return list(self._resting.values())

    def admit(
        self, now: float, session: ServedSession, base: ServedSession | None
    ) -> tuple[bool, list[ServedSession]]:
        """Give a session a place, that of its `base` if there is no other. Return whether it has a place, and
        the sessions that must end for it."""
        gone = self._spare(session.door, base)
        for each in gone:
            self.leave(each)
        resting = base if base is not None and base.id in self._resting else None
        if resting is not None:
            resting.silent_since = inf  # the register skips it
        evicted = self._register.admit(now, session, session.door, self._source_of(session.door))
        is_taken_over = evicted is None and resting is not None
        if is_taken_over and resting is not None:
            self._register.leave(resting)
            evicted = self._register.admit(now, session, session.door, self._source_of(session.door))
        if resting is not None:
            resting.silent_since = -inf
            del self._resting[resting.id]
        if is_taken_over and evicted is not None:
            session.replaces = resting
        elif is_taken_over and resting is not None:
            gone.append(resting)
        elif resting is not None:
            self._resting[resting.id] = resting  # it is now the most recently used
        return evicted is not None, [*gone, *(evicted or ())]

    def rest(self, session: ServedSession) -> list[ServedSession]:
        """Let a session rest; return the sessions of its door that must make room."""
        session.rests, session.silent_since = True, -inf
        self._resting[session.id] = session
        own = [each for each in self._resting.values() if each.door == session.door]
        return own[: max(0, len(own) - RESTS_PER_DOOR_MAX)]

    def credit(self, session: ServedSession) -> None:
        """Note that a session is in use."""
        self._register.credit(session)

    def leave(self, session: ServedSession) -> None:
        """Free the place of a session."""
        self._resting.pop(session.id, None)
        self._register.leave(session)

    def _spare(self, door: PeerId, base: ServedSession | None) -> list[ServedSession]:
        """Return the resting session whose place a new session of this door needs, if any."""
        resting: Sequence[ServedSession] = [each for each in self._resting.values() if each is not base]
        if self._register.count(door) >= SESSIONS_PER_DOOR_MAX:
            resting = [each for each in resting if each.door == door]
        elif len(self._register) < SESSIONS_MAX:
            return []
        return list(resting[:1])
