"""Turns of a run's members at evaluating it in local mode: by a hash, so that they need not agree."""

from collections.abc import Collection, Iterable
from math import inf

from blake3 import blake3

from crypto.identity import PeerId

TURN_SECONDS = 60.0
"""The time after which a due evaluation is the next member's turn. Longer than most take: one made twice
costs only its time."""
TURN_SLACK_SECONDS = 10.0
"""How far members may differ in the time since which an evaluation has been due."""


class Turns:
    """One run's turns, as one member sees them."""

    def __init__(self, me: PeerId, run: bytes) -> None:
        self.trainers: frozenset[PeerId] | None = None
        """The members that have a state; None: any evaluator is believed that it is its turn."""
        self.passed = 0
        """Own results that were given up at the end of the steps: others have their turn before the next."""
        self._me = me
        self._run = run
        self._due_at = inf

    def is_first(self, others: Iterable[PeerId]) -> bool:
        """Return whether this member is the first to evaluate, `others` being those that have a state."""
        return self.place(self._me, others) == 0

    def is_mine(self, others: Collection[PeerId], waited_seconds: float) -> bool:
        """Return whether this member evaluates, given how long an evaluation has been due.

        The nearest to the hash of the run does at once, each of the others `TURN_SECONDS` after the one
        before: a member that is there and does not evaluate delays the end, and cannot prevent it. At the end
        of the steps a member whose result was given up has its next turn after all others.
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
        """Note for how long an evaluation has been due here; below 0: none is."""
        self._due_at = inf if waited_seconds < 0 else now - waited_seconds

    def place(self, peer: PeerId, others: Iterable[PeerId]) -> int:
        """Return how many of the others come before a member."""
        own = blake3(self._run + peer).digest()
        return sum(blake3(self._run + other).digest() < own for other in others)
