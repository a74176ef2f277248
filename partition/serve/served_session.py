"""A session as a provider keeps it, and for how many tokens several have keys and values together."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from crypto.identity import PeerId
from partition.serve.messages import Carried


@dataclass(eq=False)
class ServedSession:
    """What a provider keeps of one session of a door."""

    id: bytes
    service: bytes
    door: PeerId
    before: PeerId
    after: PeerId
    silent_since: float
    share: int = 0
    waiting: deque[Carried] = field(default_factory=deque)
    is_computing: bool = False
    is_over: bool = False
    is_kept: bool = False
    """Whether the stage has anything of it."""
    rests: bool = False
    kept: int = 0
    """Tokens that the stage keeps once all that waits is computed."""
    base: bytes = b""
    shared: int = 0
    """The first tokens, whose pages it shares with the session `base` and others that began from that."""
    pause_seconds: float = inf
    """From its last answer to the unit that came then."""
    newest: int = -1
    """The number of the newest unit."""

    @property
    def may_compute(self) -> bool:
        return bool(self.waiting) and not self.is_computing


def tokens_together(sessions: Sequence[ServedSession], session: ServedSession, tokens: int) -> int:
    """Return for how many tokens these sessions have keys and values, once `session` has `tokens`: those that
    several share count once."""
    found = sum(max(0, (tokens if each is session else each.kept) - each.shared) for each in sessions)
    there, shared = {each.id for each in sessions}, dict[bytes, int]()
    for each in sessions:
        if each.shared and each.base not in there:
            shared[each.base] = max(shared.get(each.base, 0), each.shared)
    return found + sum(shared.values())
