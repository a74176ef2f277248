"""The runs of a world of whole nodes: requested at their times, reported, and checked for their accuracy.

Not here: the conversion of node events (`sim.worlds.run_events`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from crypto.identity import PeerId
from partition.stage import StageSpecification
from sim.observers import Broken
from sim.worlds.life import WorldEnvironment
from sim.worlds.node_life import NodeLife
from sim.worlds.run_events import RunWords
from sim.worlds.submit import capture, submit


class NodesWorld(WorldEnvironment, Protocol):
    """A world of whole nodes as seen by its runs."""

    @property
    def peers(self) -> Sequence[PeerId]: ...

    @property
    def lives(self) -> Mapping[PeerId, NodeLife]: ...


class StackRuns:
    """The runs of a world's scenario, and the known facts of each (`words`)."""

    def __init__(self, world: NodesWorld) -> None:
        self.words = RunWords()
        self._world = world

    def plan(self) -> None:
        """Capture the models, and schedule the submission of each run. Raises UsageError if a run's model or
        data does not exist."""
        captured = [capture(training) for training in self._world.scenario.runs]
        for number, training in enumerate(self._world.scenario.runs):
            self._world.at(training.at_seconds, self._submit, number, captured[number])

    def _submit(self, number: int, captured: Any) -> None:
        """Submit a run at a permanent peer; runs take these peers in turn."""
        training = self._world.scenario.runs[number]
        asks = number % max(1, self._world.scenario.churn.permanent)
        life = self._world.lives.get(self._world.peers[asks])
        if life is None:
            self._world.at(self._world.now + 1.0, self._submit, number, captured)
            return
        made = partial(self.words.made, training)
        life.node.runs.start_task(
            submit, life.node, training, captured, self._world.seed + number, made, of=None
        )

    def pass_seconds(self, run: bytes) -> float:
        """Return the duration of a pass in the run with this random key; 0 if unknown."""
        for trained in self.words.runs.values():
            if trained.run.random_key == run:
                return trained.training.pass_seconds
        return 0.0

    def applied(
        self, life: NodeLife, specification: StageSpecification, step: int, microbatches: tuple[int, ...]
    ) -> None:
        """Publish that a stage of this peer applied a step."""
        said = self.words.of_stage(life, specification, step, microbatches)
        if said is not None and self._world.lives.get(life.peer) is life:
            self._world.tell(life, said)

    def check(self) -> None:
        """Raise Broken if a run missed its required accuracy."""
        for training in self._world.scenario.runs:
            mine = [trained for trained in self.words.runs.values() if trained.training is training]
            if training.accuracy and not any((run.accuracy or 0.0) >= training.accuracy for run in mine):
                found = "; ".join(run.standing for run in mine) or "the run was never submitted"
                raise Broken("accuracy", f"want {training.accuracy:g}: {found}")
