"""A world of cores (protocol state machines without I/O) with training runs. Tests decide how it is
disturbed."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from crypto.identity import PeerId
from sim.checkers import checkers_for
from sim.events import PlanAdopted, RunEnded, SamplesCounted, StepCommitted
from sim.observers import Observation, Watch, World
from sim.scenario import MembershipScenario, RecordsScenario, Scenario, SwarmStart, TrainingScenario
from sim.worlds.cores import CoresWorld
from sim.worlds.factories import Cores

END_SECONDS = 1.0
"""Seconds after the first member reports the end of a run, within which all others must report it too."""
BEGINS = 10.0
"""Time at which runs start: by then all peers know each other."""


def scenario(
    *runs: TrainingScenario, nodes: int = 7, seconds: float = 120.0, preset: Any = "lan", **changes: Any
) -> Scenario:
    """Settings under which peers find each other quickly, and only runs are simulated."""
    return Scenario(
        name="runs",
        about="",
        nodes=nodes,
        seconds=seconds,
        start=SwarmStart(spread_seconds=2.0),
        membership=MembershipScenario(preset=preset),
        records=RecordsScenario(enabled=False),
        runs=runs,
        **changes,
    )


def training(**changes: Any) -> TrainingScenario:
    """Return a run of seven members."""
    fields: dict[str, Any] = {"members": 7, "steps": 10, "at_seconds": BEGINS, "checkpoint_every": 3}
    return TrainingScenario(**(fields | changes))


class _Over(Exception):
    """Raised when all runs have ended."""


@dataclass
class Story:
    """A watcher that keeps the published events, and calls the test's actions in reaction to them."""

    seen: list[Observation] = field(default_factory=list)
    watchers: list[Callable[[Observation], None]] = field(default_factory=list)

    def see(self, observed: Observation, world: World) -> None:
        self.seen.append(observed)
        for watcher in list(self.watchers):
            watcher(observed)

    def sample(self, world: World) -> None: ...
    def end(self, world: World) -> None: ...

    def of(self, kind: type, since: float = 0.0) -> list[Observation]:
        return [row for row in self.seen if isinstance(row.event, kind) and row.time >= since]

    @property
    def steps(self) -> list[int]:
        """Return the steps that committers reported, in order of their reports."""
        return [row.event.step for row in self.of(StepCommitted)]

    @property
    def outcomes(self) -> dict[PeerId, str]:
        return {row.peer: row.event.outcome for row in self.of(RunEnded) if row.peer is not None}


class Troubled:
    """A world and its script. Peers have numbers: peer 0 is the requester, which feeds and commits."""

    def __init__(self, played: Scenario, seed: int = 1, cores: Cores | None = None) -> None:
        self.story = Story()
        self._ended: set[bytes] = set()
        self.watch = Watch([self.story, *checkers_for(played)])
        self.world = CoresWorld(played, seed, self._publish, cores=cores or Cores())

    def _publish(self, observed: Observation) -> None:
        self.watch.publish(observed, self.world)
        if isinstance(observed.event, RunEnded):
            self._ended.add(observed.event.run)
            if len(self._ended) == len(self.world.scenario.runs):
                self.at(observed.time + END_SECONDS, self._stop)

    def _stop(self) -> None:
        raise _Over

    def play(self) -> "Troubled":
        """Play the whole scenario, or until its runs have ended."""
        with suppress(_Over):
            self.world.play(lambda: None)
        return self

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self.world.at(time, action, *arguments)

    def crash(self, *numbers: int, seconds: float = 0.0) -> None:
        """Stop the peer now, and restart it after `seconds`; do not restart it if `seconds` is 0."""
        for number in numbers:
            if self.world.runs(number):
                self.world.stop(number, "crash")
                if seconds:
                    self.at(self.world.now + seconds, self.world.start, number)

    def split(self, minority: Sequence[int]) -> None:
        self.world.split(dict.fromkeys(minority, 1))

    def heal(self) -> None:
        self.world.split({})

    def when(self, holds: Callable[[Observation], bool], action: Callable[[], None]) -> None:
        """Call the action immediately after the first event that meets the condition."""

        def look(observed: Observation) -> None:
            if holds(observed):
                self.story.watchers.remove(look)
                self.at(self.world.now, action)

        self.story.watchers.append(look)

    def number(self, peer: PeerId | None) -> int:
        return self.world.peers.index(peer) if peer is not None else -1

    def describe(self) -> str:
        rows = [
            f"{row.time:.2f} {self.world.name(row.peer) if row.peer else '-'} {_short(row.event)}"
            for row in self.story.seen
            if not isinstance(row.event, SamplesCounted)
        ]
        return "\n".join(rows)


def _short(event: Any) -> str:
    if isinstance(event, PlanAdopted):
        return f"PlanAdopted {event.height} {event.plan.hex()[:6]}"
    if isinstance(event, StepCommitted):
        return f"StepCommitted {event.step} plan {event.height}"
    return str(event)[:100]
