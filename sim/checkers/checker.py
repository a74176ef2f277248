"""The base of all checkers: each names the events it handles, and its handlers. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from sim.observers import Broken, Observed, World

Handler = Callable[[Observed, World], None]


class Checker:
    """A `sim.observers.Watcher`. `name` is the name of a broken invariant."""

    name = ""

    def __init__(self) -> None:
        self.handlers: Mapping[type[Any], Handler] = {}
        """By exactly the type of the event."""

    def see(self, observed: Observed, world: World) -> None:
        handler = self.handlers.get(type(observed.event))
        if handler is not None:
            handler(observed, world)

    def sample(self, world: World) -> None:
        """Nothing, unless a checker looks now and then."""

    def end(self, world: World) -> None:
        """Nothing, unless something is known only then."""

    def broken(self, what: str) -> Broken:
        """To raise."""
        return Broken(self.name, what)
