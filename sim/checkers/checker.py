"""The base of all checkers: each names the events it handles, and its handlers. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from sim.observers import Broken, Observation, World

Handler = Callable[[Observation, World], None]


class Checker:
    """A `sim.observers.Watcher`. `name` is shown when the invariant breaks."""

    name = ""

    def __init__(self) -> None:
        self.handlers: Mapping[type[Any], Handler] = {}
        """Do nothing; checkers that look at intervals override it."""

    def see(self, observed: Observation, world: World) -> None:
        handler = self.handlers.get(type(observed.event))
        if handler is not None:
            handler(observed, world)

    def sample(self, world: World) -> None:
        """Do nothing; checkers that can judge only at the end override it."""

    def end(self, world: World) -> None:
        """Nothing, unless something is known only then."""

    def broken(self, what: str) -> Broken:
        """Return the error to raise."""
        return Broken(self.name, what)
