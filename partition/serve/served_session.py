"""A session as a provider keeps it, and the number of tokens for which several sessions together have keys
and values."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from crypto.identity import PeerId
from partition.serve.messages import Carried, OpenSession

WAITING_BYTES_MAX = 256 << 20
"""Maximum size of the tensors of all waiting units. A door (the node that asks) that is refused tries another
provider."""
WAITING_BYTES_PER_DOOR_MAX = 64 << 20


@dataclass(eq=False)
class ServedSession:
    """One session of a door, as a provider keeps it. It occupies one place, however many stages here serve
    it."""

    id: bytes
    service: bytes
    door: PeerId
    silent_since: float
    share: int = 0
    parts: dict[int, "SessionPart"] = field(default_factory=dict)
    """The parts of the session, by the number of the stage that serves each."""
    is_over: bool = False
    rests: bool = False
    base: bytes = b""
    shared: int = 0
    """The number of initial tokens whose pages this session shares with the session `base`, and with others
    that began from it."""
    replaces: "ServedSession | None" = None
    """The session that gave its place to this one. It is kept until the first unit comes, because further
    parts begin from it too."""

    @property
    def has_asked(self) -> bool:
        """Whether a unit of this session has come."""
        return any(part.newest >= 0 for part in self.parts.values())

    def takes_part(self, door: PeerId, message: OpenSession) -> bool:
        """Return whether the message opens a further part of this session at another stage here, before the
        session has asked anything."""
        base = message.base
        begins = (self.base, self.shared) == ((base.session, base.tokens) if base is not None else (b"", 0))
        is_same = (self.door, self.service) == (door, message.service) and begins
        return is_same and message.stage not in self.parts and not self.rests and not self.has_asked

    def part(self, stage: int | None) -> "SessionPart | None":
        """Return a stage's part of the session; if `stage` is None, the only part here."""
        if stage is not None:
            return self.parts.get(stage)
        return next(iter(self.parts.values())) if len(self.parts) == 1 else None

    def kept(self, stage: int) -> int:
        """Return how many tokens a stage keeps of this session; 0 if the stage does not serve it."""
        return self.parts[stage].kept if stage in self.parts else 0


@dataclass(eq=False)
class SessionPart:
    """The part of a session that one stage serves."""

    session: ServedSession
    stage: int
    before: PeerId
    after: PeerId
    waiting: deque[Carried] = field(default_factory=deque)
    is_computing: bool = False
    is_kept: bool = False
    """Whether the stage holds any data of the session."""
    kept: int = 0
    """The number of tokens that the stage keeps once all waiting units are computed."""
    silent_since: float = -inf
    """The time since when the part has been waiting for its next unit; inf while it has one."""
    pause_seconds: float = inf
    """Seconds between its latest answer and the next unit."""
    newest: int = -1
    """The number of the newest unit."""

    @property
    def door(self) -> PeerId:
        return self.session.door

    @property
    def share(self) -> int:
        return self.session.share

    @property
    def rests(self) -> bool:
        return self.session.rests

    @property
    def may_compute(self) -> bool:
        return bool(self.waiting) and not self.is_computing


def tokens_together(
    sessions: Sequence[ServedSession], session: ServedSession, stage: int, tokens: int
) -> int:
    """Return the number of tokens for which these sessions have keys and values in a stage, once `session`
    has `tokens`. Tokens that several sessions share count once."""
    found = sum(max(0, (tokens if each is session else each.kept(stage)) - each.shared) for each in sessions)
    there, shared = {each.id for each in sessions}, dict[bytes, int]()
    for each in sessions:
        if each.shared and each.base not in there:
            shared[each.base] = max(shared.get(each.base, 0), each.shared)
    return found + sum(shared.values())


def has_room_to_wait(sessions: Iterable[ServedSession], door: PeerId, size_bytes: int) -> bool:
    """Return whether there is room for the tensors of one more waiting unit of a door."""
    waits = {True: 0, False: 0}
    for each in sessions:
        units = [unit for part in each.parts.values() for unit in part.waiting]
        waits[each.door == door] += sum(unit.size_bytes for unit in units)
    own = waits[True] + size_bytes
    return own <= WAITING_BYTES_PER_DOOR_MAX and own + waits[False] <= WAITING_BYTES_MAX
