"""Turns of a run's members at its evaluation in local mode, by a hash, so that they need not agree."""

from collections.abc import Collection, Iterable
from math import inf

from blake3 import blake3

from crypto.identity import PeerId

TURN_SECONDS = 60.0
"""How long an evaluation is due before the next member's turn. Longer than most take; a repeated one only
costs its time."""
TURN_SLACK_SECONDS = 10.0
"""Allowed difference between members in how long an evaluation has been due."""


class Turns:
    """One run's turns, as one member sees them."""

    def __init__(self, me: PeerId, run: bytes) -> None:
        self.trainers: frozenset[PeerId] | None = None
        """The members with a state; None: any evaluator may have its turn."""
        self.passed = 0
        """This member's results that were given up at the end of the steps: others have their turn before its
        next."""
        self._me = me
        self._run = run
        self._due_at = inf

    def is_first(self, others: Iterable[PeerId]) -> bool:
        """Return whether this member is the first to evaluate; `others` are the other members with a
        state."""
        return self.place(self._me, others) == 0

    def is_mine(self, others: Collection[PeerId], waited_seconds: float) -> bool:
        """Return whether it is this member's turn, given how long an evaluation has been due.

        The nearest to the hash of the run has the first turn, each other one `TURN_SECONDS` later: a member
        that lives and does not evaluate delays the end, and cannot prevent it. At the end of the steps a
        member whose result was given up has its next turn after all others.
        """
        turn = self.place(self._me, others) + self.passed * (len(others) + 1)
        return waited_seconds >= TURN_SECONDS * turn

    def may_be(self, now: float, peer: PeerId) -> bool:
        """Return whether it may be another member's turn."""
        if self.trainers is None:
            return True
        place = self.place(peer, self.trainers)
        return place == 0 or now - self._due_at >= TURN_SECONDS * place - TURN_SLACK_SECONDS

    def set_due(self, now: float, waited_seconds: float) -> None:
        """Note how long an evaluation has been due here; negative if none is."""
        self._due_at = inf if waited_seconds < 0 else now - waited_seconds

    def place(self, peer: PeerId, others: Iterable[PeerId]) -> int:
        """Return how many of the others precede a member."""
        own = blake3(self._run + peer).digest()
        return sum(blake3(self._run + other).digest() < own for other in others)
