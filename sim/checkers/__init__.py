"""Invariants of a whole simulated world, one small class each; they watch every event, and one that does not
hold raises `sim.observers.Broken`. They see what no peer can: everybody at once."""

from sim.checkers.select import Checkers, checkers_for

__all__ = ["Checkers", "checkers_for"]
