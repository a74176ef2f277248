"""A scenario's training run, requested as by a user: model, data, manifest, submission.

The model is captured like by the command `train`, once per process and before the world plays, since that
takes seconds. The data is real: scikit-learn's digits, a text file, or a folder of arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from node.cli.capture import capture_to
from node.content import datasets as datasets
from node.placement.leases import PlacementFailed
from node.protocols.manifest import Run, make_run
from node.protocols.run_file import PlanTable, RunFile, TrainTable, check_run_file
from node.runs.manifest_builder import make_manifest, window_of
from node.runtime import Node
from sim.scenario import TrainingScenario

MICROBATCH = 32
"""Number of samples in a micro-batch."""
AGAIN_SECONDS = 5.0
"""How long a user waits before a retry if no plan was decided, because no peer had a slot or one died."""
KNOWN_MODELS_MAX = 8


@dataclass(frozen=True)
class SubmittedModel:
    """A captured model in the form that `node.content.graphs` accepts: a graph, and initial values if it has
    any."""

    graph: bytes
    values: bytes | None

    def put(self, folder: Path) -> tuple[Path, Path | None]:
        """Write the graph and the initial values for a node to read."""
        graph = folder / "model.peerloom"
        graph.write_bytes(self.graph)
        if self.values is None:
            return graph, None
        values = graph.with_suffix(".safetensors")
        values.write_bytes(self.values)
        return graph, values


def run_file_of(training: TrainingScenario, seed: int) -> RunFile:
    """Return the run file that a user would write. Raises UsageError."""
    train = TrainTable(
        steps=training.steps,
        batch=training.microbatches * MICROBATCH,
        microbatch=MICROBATCH,
        optimizer="adam",
        learning_rate=training.learning_rate,
        seed=seed,
    )
    plan = PlanTable(
        stages=training.stages,
        replicas=training.replicas,
        trainers=training.trainers,
        checkpoint_every=training.checkpoint_every,
        on_lost_quorum=training.on_lost_quorum,
    )
    run_file = RunFile(model=training.model, data=training.data, train=train, plan=plan)
    check_run_file(run_file, "runs")
    return run_file


def capture(training: TrainingScenario) -> SubmittedModel:
    """Capture the model. Raises UsageError if no model has this name, or if it cannot be captured."""
    return _capture(training.model, training.data)


@lru_cache(maxsize=KNOWN_MODELS_MAX)
def _capture(model: str, data: str) -> SubmittedModel:
    run_file = run_file_of(TrainingScenario(model=model, data=data), 0)
    with TemporaryDirectory(prefix="peerloom-sim-") as folder:
        graph = Path(folder) / "captured.peerloom"
        capture_to(graph, run_file, Path("runs"), "runs")
        values = graph.with_suffix(".safetensors")
        return SubmittedModel(graph.read_bytes(), values.read_bytes() if values.is_file() else None)


async def submit(
    node: Node, training: TrainingScenario, captured: SubmittedModel, seed: int, made: Callable[[Run], None]
) -> None:
    """Make `node` request the run, and again while no plan is decided. `made` is called with each manifest.

    Raises:
        UsageError: the data is missing, or does not fit the model.
    """
    run_file = run_file_of(training, seed)
    with TemporaryDirectory(prefix="peerloom-sim-") as folder:
        graph_name, graph = await node.runs.models.learn(*captured.put(Path(folder)))
    dataset = datasets.load(run_file.source, Path(), window=window_of(run_file, graph, "runs"))
    if dataset.digest != datasets.DIGITS_NAME:
        await node.runs.data.keep(
            dataset.digest, datasets.path_of(run_file.source, Path()), window=dataset.window
        )
    while True:
        created = node.seams.clock.wall()
        manifest = make_manifest(run_file, graph, graph_name, dataset, name="runs", created=created)
        run = make_run(node.signer, manifest)
        made(run)
        try:
            await node.runs.submit(run)
        except PlacementFailed:
            await trio.sleep(AGAIN_SECONDS)
        else:
            return
