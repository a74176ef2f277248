"""Turns of a run's members at its evaluation in local mode. They follow from a hash, so the members need not
agree on them."""

from collections.abc import Collection, Iterable
from math import inf

from blake3 import blake3

from crypto.identity import PeerId

TURN_SECONDS = 60.0
"""Seconds between the turns of successive members while an evaluation is due. They are longer than most
evaluations take. An evaluation that is repeated costs only time."""
TURN_SLACK_SECONDS = 10.0
"""Maximum difference between members in how long they think that an evaluation has been due."""


class Turns:
    """The turns of one run, as one member sees them."""

    def __init__(self, me: PeerId, run: bytes) -> None:
        self.trainers: frozenset[PeerId] | None = None
        """The members with a state; None if any evaluator may have a turn."""
        self.passed = 0
        """Number of this member's results that were given up after the last step. After each, all other
        members have a turn before this member's next one."""
        self._me = me
        self._run = run
        self._due_at = inf

    def is_first(self, others: Iterable[PeerId]) -> bool:
        """Return whether this member is the first to evaluate. `others` are the other members with a
        state."""
        return self.place(self._me, others) == 0

    def is_mine(self, others: Collection[PeerId], waited_seconds: float) -> bool:
        """Return whether it is this member's turn, given how long an evaluation has been due.

        The member nearest to the hash of the run has the first turn, and each other member has its turn
        `TURN_SECONDS` after the one before. So a member that is alive but does not evaluate delays the end,
        but cannot prevent it. After the last step, a member whose result was given up has its next turn after
        all others.
        """
        turn = self.place(self._me, others) + self.passed * (len(others) + 1)
        return waited_seconds >= TURN_SECONDS * turn

    def may_be(self, now: float, peer: PeerId) -> bool:
        """Return whether it may be the turn of the member `peer`."""
        if self.trainers is None:
            return True
        place = self.place(peer, self.trainers)
        return place == 0 or now - self._due_at >= TURN_SECONDS * place - TURN_SLACK_SECONDS

    def set_due(self, now: float, waited_seconds: float) -> None:
        """Note how long an evaluation has been due here; negative if none is due."""
        self._due_at = inf if waited_seconds < 0 else now - waited_seconds

    def place(self, peer: PeerId, others: Iterable[PeerId]) -> int:
        """Return how many of the other members precede a member."""
        own = blake3(self._run + peer).digest()
        return sum(blake3(self._run + other).digest() < own for other in others)
