"""One experiment: plays a scenario in a world, watches it, and returns the outcome as a `Result`.

    result = sim.run("churn", seed=7)
    assert result.broken is None
    result.write("out")

The same scenario, seed and code give the same digest of all events. Not here: the worlds (`sim.worlds`),
measures (`sim.measures`), invariants (`sim.checkers`), the command line (`sim.cli`).
"""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from node.cli.signals import Stopped
from node.invocation import simulator
from sim.checkers import checkers_for
from sim.measures.measures import Measures
from sim.measures.rows import Row
from sim.observers import Broken, Observation, Watch, Watcher, World
from sim.progress import ExperimentProgress
from sim.report.documents import event_line
from sim.report.events_file import EVENTS_MAX, EventsFile, names_of
from sim.report.files import EVENTS_NAME, SUMMARY_NAME, write_files
from sim.scenario import Scenario, load
from sim.worlds.factories import Cores

__all__ = ["ExperimentProgress", "InvariantViolation", "Result", "Stopped", "run"]

SCHEMA = "peerloom.sim.summary/1"


@dataclass(frozen=True)
class InvariantViolation:
    """An invariant that did not hold. `repeat` is the command (or the call) that reproduces the violation.
    `recent` are the last events before it, `lines` the same events as readable text."""

    invariant: str
    what: str
    at_seconds: float
    seed: int
    repeat: str
    recent: tuple[Observation, ...] = field(repr=False)
    lines: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        head = f"{self.invariant} does not hold at {self.at_seconds:.3f} s, seed {self.seed}: {self.what}"
        return "\n".join((head, *self.lines, f"again: {self.repeat}"))


@dataclass(frozen=True)
class Result:
    """The result of an experiment. `events` is the number of events of each kind, `metrics` are rows in long
    form, `summary` is the content of summary.json. `stopped`: the experiment was ended early from outside."""

    scenario: Scenario
    seed: int
    digest: str
    broken: InvariantViolation | None
    stopped: bool
    virtual_seconds: float
    wall_seconds: float
    events: int
    metrics: tuple[Row, ...] = field(repr=False)
    summary: Mapping[str, Any] = field(repr=False)

    def values(self, metric: str, label: str = "") -> list[tuple[float, float]]:
        """Return the (time, value) pairs of one metric."""
        return [
            (row.time_seconds, row.value)
            for row in self.metrics
            if row.metric == metric and row.label == label
        ]

    def write(self, folder: str | Path, *, plots: bool = True) -> list[str]:
        """Write summary.json, metrics.csv, scenario.toml and the pictures; return the names of the pictures.

        Events are written only if `run` was given the folder, because they are too many to keep in memory.
        Without matplotlib there are no pictures.
        """
        target = Path(folder)
        write_files(target, self.scenario, self.metrics, self.summary)
        if not plots:
            return []
        try:
            from sim.report.plots import draw_all

            return draw_all(target, self)
        except ImportError:
            return []


class _Playable(World, Protocol):
    def play(self, on_sample: Callable[[], None]) -> None: ...


def run(
    scenario: Scenario | str | Path,
    *,
    seed: int = 1,
    swim: Any = None,
    kademlia: Any = None,
    replica: Any = None,
    committer: Any = None,
    agreement: Any = None,
    checkers: Sequence[Watcher] | None = None,
    watchers: Sequence[Watcher] = (),
    folder: str | Path | None = None,
    events_max: int = EVENTS_MAX,
    progress: Callable[[ExperimentProgress], None] | None = None,
    repeat: str = "",
) -> Result:
    """Play a scenario, given as a value, the name of a built-in one, or the path of a TOML file.

    `swim`, `kademlia`, `replica`, `committer`, `agreement` are constructors that replace the product's own
    (`sim.worlds.factories`). `checkers` replaces those of the scenario; `watchers` are added. With `folder`,
    events are written there as they happen, and the other files at the end. `progress` is called with every
    sample; it may raise `Stopped` to end the experiment. `repeat` is the command shown if an invariant
    breaks, for callers that know a better one than the default.

    Raises:
        UsageError: there is no such scenario, or the file is wrong.
        Exception: any exception of a core, with a note that says when it was raised.
    """
    given = {"swim": swim, "kademlia": kademlia, "replica": replica}
    given |= {"committer": committer, "agreement": agreement}
    own = {name: make for name, make in given.items() if make is not None}
    value = scenario if isinstance(scenario, Scenario) else load(str(scenario))
    target = Path(folder) if folder is not None else None
    if target is not None:
        target.mkdir(parents=True, exist_ok=True)
        (target / SUMMARY_NAME).unlink(missing_ok=True)
    play = _Play(
        value,
        seed,
        cores=replace(Cores(), **own),
        checkers=checkers_for(value) if checkers is None else checkers,
        watchers=watchers,
        repeat=repeat or _repeat(scenario, seed, target, own),
        events_path=target / EVENTS_NAME if target is not None else None,
        events_max=events_max,
    )
    result = play.result(progress)
    if target is not None:
        result.write(target, plots=False)
    return result


class _Play:
    """One world with its watchers, and how the experiment ended."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        *,
        cores: Cores,
        checkers: Sequence[Watcher],
        watchers: Sequence[Watcher],
        repeat: str,
        events_path: Path | None,
        events_max: int,
    ) -> None:
        self._scenario = scenario
        self._seed = seed
        self._repeat = repeat
        self._measures = Measures(scenario)
        self._file: EventsFile | None = None
        if events_path is not None:
            self._file = EventsFile(events_path, scenario=scenario.name, seed=seed, events_max=events_max)
        # Checkers come last, so that an event that breaks an invariant has already been measured and written.
        files = (self._file,) if self._file is not None else ()
        self._watch = Watch((self._measures, *files, *watchers, *checkers))
        self._world = _world(scenario, seed, self._publish, cores)

    def _publish(self, observed: Observation) -> None:
        self._watch.publish(observed, self._world)

    def result(self, progress: Callable[[ExperimentProgress], None] | None) -> Result:
        began = time.perf_counter()
        broken: Broken | None = None
        stopped = False

        def on_sample() -> None:
            self._watch.sample(self._world)
            if progress is not None:
                progress(self._progress(time.perf_counter() - began))

        try:
            self._world.play(on_sample)
            self._watch.end(self._world)
        except BaseException as error:
            inner = _inner(error)
            broken = inner if isinstance(inner, Broken) else None
            stopped = isinstance(inner, Stopped)
            if broken is None and not stopped:
                inner.add_note(f"at {self._world.now:.6f} virtual seconds; to repeat: {self._repeat}")
                raise
        finally:
            if self._file is not None:
                self._file.close()
        self._measures.end(self._world)
        return self._told(broken, stopped, time.perf_counter() - began)

    def _progress(self, wall_seconds: float) -> ExperimentProgress:
        return ExperimentProgress(
            virtual_seconds=self._world.now,
            scenario_seconds=self._scenario.seconds,
            wall_seconds=wall_seconds,
            population=self._measures.population,
            events=self._watch.count,
        )

    def _told(self, broken: Broken | None, stopped: bool, wall_seconds: float) -> Result:
        breakage = self._breakage(broken) if broken is not None else None
        digest = self._watch.digest()
        scenario, virtual_seconds = self._scenario, self._world.now
        summary = {
            "schema": SCHEMA,
            "scenario": scenario.name,
            "fidelity": scenario.fidelity,
            "nodes": scenario.nodes,
            "seed": self._seed,
            "complete": not stopped,
            "broken": _breakage_document(breakage),
            "digest": digest,
            "events": self._watch.count,
            "events_left_out": dict(sorted(self._file.left_out.items())) if self._file is not None else {},
            "virtual_seconds": round(virtual_seconds, 6),
            "wall_seconds": round(wall_seconds, 3),
            "times_real_time": round(virtual_seconds / wall_seconds, 3) if wall_seconds > 0 else None,
            **self._measures.summary(self._world),
        }
        return Result(
            scenario=scenario,
            seed=self._seed,
            digest=digest,
            broken=breakage,
            stopped=stopped,
            virtual_seconds=virtual_seconds,
            wall_seconds=wall_seconds,
            events=self._watch.count,
            metrics=tuple(self._measures.rows),
            summary=summary,
        )

    def _breakage(self, broken: Broken) -> InvariantViolation:
        names = names_of(self._world)
        recent = tuple(self._watch.recent)
        lines = tuple(event_line(observed, names) for observed in recent)
        return InvariantViolation(
            broken.invariant, broken.what, self._world.now, self._seed, self._repeat, recent, lines
        )


def _world(scenario: Scenario, seed: int, publish: Callable[[Observation], None], cores: Cores) -> _Playable:
    # Whole nodes need trio and more imports; bare cores start faster without them.
    if scenario.fidelity == "stack":
        from sim.worlds.stack import StackWorld

        return StackWorld(scenario, seed, publish, cores=cores)
    from sim.worlds.cores import CoresWorld

    return CoresWorld(scenario, seed, publish, cores=cores)


def _inner(error: BaseException) -> BaseException:
    """Return the exception inside trio's exception groups; a broken invariant takes precedence."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [_inner(each) for each in error.exceptions]
    for kind in (Broken, Stopped):
        found = next((leaf for leaf in leaves if isinstance(leaf, kind)), None)
        if found is not None:
            return found
    return leaves[0] if len(leaves) == 1 else error


def _repeat(scenario: Scenario | str | Path, seed: int, folder: Path | None, own: Mapping[str, Any]) -> str:
    """Return the command that repeats the experiment, or a Python call if the program supplied its own
    cores."""
    place = str(scenario)
    if isinstance(scenario, Scenario):
        from sim.report.files import SCENARIO_NAME

        place = str(folder / SCENARIO_NAME) if folder is not None else ""
    if place and not own:
        return f"{simulator()} {shlex.quote(place)} --seed {seed}"
    cores = "".join(f", {name}={getattr(make, '__name__', make)}" for name, make in own.items())
    return f"sim.run({repr(place) if place else 'scenario'}, seed={seed}{cores})"


def _breakage_document(broken: InvariantViolation | None) -> dict[str, Any] | None:
    if broken is None:
        return None
    return {
        "invariant": broken.invariant,
        "what": broken.what,
        "at_seconds": round(broken.at_seconds, 6),
        "repeat": broken.repeat,
        "recent": list(broken.lines),
    }
