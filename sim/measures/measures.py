"""All measures of one experiment as one watcher: it writes rows during the experiment and a summary at the
end."""

from collections.abc import Callable
from typing import Any

from sim.measures.answers import AnswerFigures
from sim.measures.detection import Detection
from sim.measures.records import Records
from sim.measures.rows import Row
from sim.measures.swarm import Swarm
from sim.measures.traffic import Traffic
from sim.measures.training import Training
from sim.measures.views import Views
from sim.observers import Observation, World
from sim.scenario import Scenario

POINTS_MAX = 1_000
"""Maximum number of moments at which population and views are recorded: as many as a picture can show."""
SETTLING_SECONDS = 30.0
"""A swarm counts as settled this long after the first start of its last peer."""
WINDOWS_MAX = 60
WINDOW_SECONDS_MIN = 10.0
"""Minimum length of a window, so that each count (of traffic, lookups, steps) has several events in it."""

Handler = Callable[[Observation], None]


class Measures:
    """A `sim.observers.Watcher` that only measures."""

    def __init__(self, scenario: Scenario) -> None:
        self.rows: list[Row] = []
        self._scenario = scenario
        self._point_seconds = max(scenario.sample_seconds, scenario.seconds / POINTS_MAX)
        self._window_seconds = max(WINDOW_SECONDS_MIN, scenario.seconds / WINDOWS_MAX)
        self._next_point = 0.0
        self._next_window = self._window_seconds
        self._parts: _Parts | None = None
        self._now = 0.0

    def see(self, observed: Observation, world: World) -> None:
        parts = self._parts or self._begin(world)
        for handler in parts.handlers.get(type(observed.event), ()):
            handler(observed)

    def sample(self, world: World) -> None:
        parts = self._parts or self._begin(world)
        now = self._now = world.now
        if now >= self._next_point:
            self._next_point = now + self._point_seconds - self._scenario.sample_seconds / 2
            parts.swarm.sample(now, self.rows)
            parts.views.sample(now, world, self.rows)
            if parts.scoped:
                parts.detection.recount(now)
        if now >= self._next_window:
            self._next_window += self._window_seconds
            self._end_window(parts, world)

    def end(self, world: World) -> None:
        """Add the rows of the final window."""
        parts = self._parts or self._begin(world)
        self._now = world.now
        self._end_window(parts, world)

    @property
    def population(self) -> int:
        """The number of peers that are up at this moment."""
        return self._parts.swarm.count if self._parts is not None else 0

    def summary(self, world: World) -> dict[str, Any]:
        """Return the final figures as JSON values."""
        parts = self._parts or self._begin(world)
        return {
            "population": parts.swarm.summary(world.now),
            "membership": {**parts.views.summary(), **parts.detection.summary()},
            "dht": parts.records.summary(),
            "traffic": parts.traffic.summary(world.now, world),
            "runs": parts.training.summary(),
            "services": parts.answers.summary(),
        }

    def _end_window(self, parts: "_Parts", world: World) -> None:
        parts.records.sample(self._now, self.rows)
        parts.traffic.sample(self._now, world, self.rows)
        parts.training.sample(self._now, self.rows)

    def _begin(self, world: World) -> "_Parts":
        self._parts = _Parts(world, self.rows, self._scenario)
        return self._parts


class _Parts:
    """The measures, created once the peers are known."""

    def __init__(self, world: World, rows: list[Row], scenario: Scenario) -> None:
        self.scoped = scenario.membership.scope != "all"
        settled = min(scenario.start.spread_seconds + SETTLING_SECONDS, scenario.seconds / 2)
        self.swarm = Swarm(world)
        self.detection = Detection(self.swarm, world, rows)
        self.views = Views(self.swarm, self.detection, scoped=self.scoped, settled_seconds=settled)
        self.detection.follow(self.views)
        self.records = Records()
        self.traffic = Traffic(self.swarm)
        self.training = Training(rows)
        self.answers = AnswerFigures(rows)
        self.handlers: dict[type, list[Handler]] = {}
        # The order matters: the population comes first, and a verdict is timed before the views forget its
        # subject.
        for part in (self.swarm, self.detection, self.views, self.records, self.training, self.answers):
            for kind, handler in part.handlers.items():
                self.handlers.setdefault(kind, []).append(handler)
