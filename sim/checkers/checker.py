"""The base class of all checkers: each has a handler for each type of event that it needs. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from sim.observers import Broken, Observation, World

Handler = Callable[[Observation, World], None]


class Checker:
    """A `sim.observers.Watcher`. `name` is shown when the invariant breaks."""

    name = ""

    def __init__(self) -> None:
        self.handlers: Mapping[type[Any], Handler] = {}
        """The handler for each type of event that the checker needs."""

    def see(self, observed: Observation, world: World) -> None:
        handler = self.handlers.get(type(observed.event))
        if handler is not None:
            handler(observed, world)

    def sample(self, world: World) -> None:
        """Do nothing; checkers that check at intervals override this."""

    def end(self, world: World) -> None:
        """Do nothing; checkers that can judge only at the end override this."""

    def broken(self, what: str) -> Broken:
        """Return the error to raise."""
        return Broken(self.name, what)
