"""Invariants of a whole simulated world, one small class each; they watch every event, and one that does not
hold raises `sim.watch.Broken`. They see what no peer can: everybody at once."""

from sim.checkers.chosen import Checkers, checkers_for

__all__ = ["Checkers", "checkers_for"]
