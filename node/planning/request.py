"""What a person asks of the planner, by command or in a program: a model, peers, and wishes in words.

`plan` needs no node. A model that must be captured first is captured by a process of its own, so that whoever
asks never imports torch here.
"""

import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, get_args

from crypto.errors import RemoteProtocolError
from node.errors import RunFailed, UsageError
from node.planning.peers import Peers, read_peers
from node.planning.peers import what_if as changed
from node.planning.planner import FRAME_BYTES_MAX, PlanReport, Wanted, plan_model
from node.suggest import did_you_mean
from partition.model.check import check_graph
from partition.model.graph import GRAPH_BYTES_MAX, Graph, decode_graph
from partition.plan.problem import Constraints, Infeasible, Objective, Pipeline

GRAPH_SUFFIX = ".peerloom"
CAPTURE_SECONDS_MAX = 600.0
"""A large model on a busy machine; torch alone takes many seconds there."""
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2})
"""And how many vectors each keeps beside the parameters."""


class BuiltIn(NamedTuple):
    """A built-in model of this `name`, a sample of it without the batch, its classes, further options."""

    name: str
    sample: tuple[int, ...]
    classes: int
    options: Mapping[str, int]


MODELS: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "simple-cnn": BuiltIn("simple-cnn", (3, 32, 32), 10, {}),
        "resnet18": BuiltIn("resnet18", (3, 224, 224), 1000, {}),
        "gpt": BuiltIn("gpt", (256,), 256, {}),
        "gpt2": BuiltIn("gpt", (1024,), 50_257, {"layers": 12, "heads": 12, "width": 768}),
        "gpt2-medium": BuiltIn("gpt", (1024,), 50_257, {"layers": 24, "heads": 16, "width": 1024}),
        "gpt2-large": BuiltIn("gpt", (1024,), 50_257, {"layers": 36, "heads": 20, "width": 1280}),
        "gpt2-xl": BuiltIn("gpt", (1024,), 50_257, {"layers": 48, "heads": 25, "width": 1600}),
    }
)


def wishes(
    batch: int = 64,
    objective: str = "throughput",
    microbatch: int = 0,
    optimizer: str = "adam",
    stages: int = 0,
    replicas: int = 0,
    pipeline: str = "1f1b",
) -> Wanted:
    """Return what is asked of the planner; 0 lets it choose. Raises UsageError."""
    _among("objective", objective, get_args(Objective))
    _among("pipeline", pipeline, get_args(Pipeline))
    _among("optimizer", optimizer, OPTIMIZERS)
    if min(batch, microbatch + 1, stages + 1, replicas + 1) < 1:
        raise UsageError("--batch, --microbatch, --stages, --replicas: want numbers from 1")
    return Wanted(
        batch=batch,
        objective=objective,  # type: ignore[arg-type]  # looked at above
        microbatch=microbatch,
        pipeline=pipeline,  # type: ignore[arg-type]  # looked at above
        optimizer=optimizer,
        optimizer_moments=OPTIMIZERS[optimizer],
        constraints=Constraints(stages=stages, replicas=replicas, frame_bytes_max=FRAME_BYTES_MAX),
    )


def _among(option: str, value: str, known: Collection[str]) -> None:
    names = sorted(known)
    if value not in names:
        raise UsageError(f"--{option} {value[:40]}{did_you_mean(value, names)}", ", ".join(names))


def plan(
    model: Graph | str | Path,
    peers: Peers | str | Path,
    batch: int = 64,
    objective: str = "throughput",
    microbatch: int = 0,
    optimizer: str = "adam",
    stages: int = 0,
    replicas: int = 0,
    pipeline: str = "1f1b",
    what_if: str = "",
) -> PlanReport:
    """Return the best plan of a model over given peers, without a node; nothing is started.

    `model` is a graph, a captured FILE.peerloom, a built-in name or PATH.py:FUNCTION; `peers` are a TOML file
    of peers, or what was read of one. The planner chooses stages, replicas and samples of a micro-batch where
    they are 0; `what_if` changes the peers, as `--what-if`.

    Raises:
        RunFailed: nothing fits; its hint says what to do. UsageError: what was asked makes no sense.
    """
    wanted = wishes(batch, objective, microbatch, optimizer, stages, replicas, pipeline)
    found = peers if isinstance(peers, Peers) else read_peers(str(peers))
    found = changed(found, what_if) if what_if else found
    name = model.name if isinstance(model, Graph) else str(model)
    try:
        return plan_model(graph_of(model), found, wanted, name=name)
    except Infeasible as infeasible:
        raise RunFailed(f"{name}: {infeasible}", infeasible.do or None) from None


def graph_of(model: Graph | str | Path) -> Graph:
    """Return the graph of what was given as a model. Raises UsageError: it is none, or none can be made."""
    if isinstance(model, Graph):
        return model
    text = str(model)
    if text.endswith(GRAPH_SUFFIX):
        return _read(Path(text).expanduser())
    if text not in MODELS and ".py:" not in text:
        raise UsageError(f"no model '{text[:60]}'{did_you_mean(text, sorted(MODELS))}", _ways())
    with tempfile.TemporaryDirectory(prefix="peerloom-plan-") as folder:
        file = Path(folder) / f"model{GRAPH_SUFFIX}"
        command = [sys.executable, "-m", "node", "model", "capture", "--no-proof", "--out", str(file)]
        built_in = MODELS.get(text)
        if built_in is None:
            command.append(text)
        else:
            sample = ",".join(map(str, built_in.sample))
            command += [built_in.name, "--sample", sample, "--classes", str(built_in.classes)]
            for key, value in built_in.options.items():
                command += ["--set", f"{key}={value}"]
        try:
            done = subprocess.run(  # noqa: S603 - our own command; the model is its user's own code
                command, capture_output=True, text=True, timeout=CAPTURE_SECONDS_MAX, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{text}: it could not be captured: {error}") from None
        if done.returncode:
            told = done.stderr.strip() or "the process that captures it ended"
            raise UsageError(f"{text}: {told[-300:]}")
        return _read(file)


def _read(file: Path) -> Graph:
    try:
        with file.open("rb") as source:
            graph = decode_graph(source.read(GRAPH_BYTES_MAX + 1))
        check_graph(graph)
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror or error}", "make it: python -m node model capture"
        ) from None
    except RemoteProtocolError as error:
        raise UsageError(f"{file} is no captured model: {error}") from None
    return graph


def _ways() -> str:
    return f"FILE{GRAPH_SUFFIX}, PATH.py:FUNCTION, or one of {', '.join(sorted(MODELS))}"
