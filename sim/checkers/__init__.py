"""Invariants of a whole simulated world, one small class each. A checker watches every event and raises
`sim.observers.Broken` if its invariant does not hold. Checkers see all peers, which no single peer can."""

from sim.checkers.select import Checkers, checkers_for

__all__ = ["Checkers", "checkers_for"]
