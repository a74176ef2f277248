"""Chooses settings left as "auto" in RUN.toml, with the planner and the available peers, and gives reasons.

Pure: the same run file, graph, sizes and peers give the same choice on every machine.
"""

from msgspec.structs import replace

from node.errors import UsageError
from node.planning.peers import Peers
from node.planning.planner import plan_model
from node.planning.report import FRAME_BYTES_MAX, PlanWish
from node.protocols.run_file import RunFile
from node.protocols.run_keys import unused_keys
from partition.model.graph import Graph
from partition.model.together import kept_ranges
from partition.plan.problem import Constraints


def layers_together(run_file: RunFile, graph: Graph, name: str) -> tuple[tuple[int, int], ...]:
    """Return the ranges of layers that must be in the same stage. Raises UsageError if the file names a layer
    that the model does not have."""
    try:
        return kept_ranges(graph, run_file.plan.together, tied=run_file.plan.keep_tied)
    except ValueError as error:
        raise UsageError(f"{name}: plan.together: {error}") from None


def has_open(run_file: RunFile) -> bool:
    """Return whether any setting is left to be chosen."""
    train = run_file.train
    return "auto" in (train.microbatch, train.recompute, train.frames, train.mode)


def choose(
    run_file: RunFile, graph: Graph, sizes: tuple[int, ...], peers: Peers
) -> tuple[RunFile, tuple[str, ...]]:
    """Return the run file with every "auto" filled in, and the reasons.

    `sizes` are the values of the graph's symbols after the batch, as the data has them.

    Raises:
        Infeasible: no plan fits; the error names the need and a remedy.
        UsageError: the model does not accept the batch.
    """
    train, rules = run_file.train, run_file.plan
    wanted = PlanWish(
        batch=train.batch,
        objective=rules.objective,
        microbatch=train.microbatch if isinstance(train.microbatch, int) else 0,
        recompute=train.recompute if isinstance(train.recompute, bool) else None,
        pipeline=rules.pipeline,
        optimizer=train.optimizer,
        optimizer_moments=run_file.optimizer.moments,
        constraints=Constraints(
            stages=rules.stages,
            replicas=rules.replicas,
            replicas_min=rules.replicas_min,
            together=layers_together(run_file, graph, "RUN.toml"),
            frame_bytes_max=FRAME_BYTES_MAX,
        ),
        sizes=sizes,
        frames="auto" if train.frames == "auto" else "exact",
        mode="auto" if train.mode == "auto" else "exact",
        local_steps=train.local_steps,
    )
    report = plan_model(graph, peers, wanted)
    chosen = replace(
        train,
        microbatch=report.microbatch,
        recompute=report.problem.recompute,
        frames=report.frames if train.frames == "auto" else train.frames,
        mode=report.mode if train.mode == "auto" else train.mode,
    )
    found = replace(run_file, train=chosen)
    unused = [key for key, _ in unused_keys(found)] if train.mode == "auto" else []
    return found, (*report.reasons, *(f"{key} has no effect in mode {chosen.mode}" for key in unused))
