"""Requests to the planner, by a command or in a program: a model, peers, and settings as texts.

`plan` needs no node. A model that must be captured first is captured in a separate process, so that the
caller never imports torch.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, get_args

from crypto.errors import RemoteProtocolError
from node.errors import RunFailed, UsageError
from node.invocation import KEEPS_SPANS
from node.planning.peers import Peers, in_place, on_devices, read_peers
from node.planning.peers import what_if as changed
from node.planning.planner import plan_model
from node.planning.report import FRAME_BYTES_MAX, PlanReport, PlanWish
from node.protocols.run_file import GOAL_MAX
from node.suggest import did_you_mean
from partition.model.check import check_graph
from partition.model.graph import GRAPH_BYTES_MAX, Graph, decode_graph
from partition.model.together import kept_ranges
from partition.plan.problem import Constraints, Infeasible, Objective, Pipeline

GRAPH_SUFFIX = ".peerloom"
HUGGING_FACE_CONFIG = "config.json"
CAPTURE_SECONDS_MAX = 600.0
"""Time limit for capturing a large model on a busy machine, where importing torch alone takes many
seconds."""
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2})
"""The optimizers, and how many vectors each keeps in addition to the parameters."""


class BuiltIn(NamedTuple):
    """A built-in model: its `name`, the shape of a sample without the batch, its number of classes, and
    further options."""

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
    replicas_min: int = 1,
    goal: float = 0.0,
) -> PlanWish:
    """Return a request to the planner; for settings that are 0, the planner chooses. Raises UsageError."""
    _among("objective", objective, get_args(Objective))
    _among("pipeline", pipeline, get_args(Pipeline))
    _among("optimizer", optimizer, OPTIMIZERS)
    if objective == "latency" and (optimizer != "adam" or pipeline != "1f1b"):
        raise UsageError(
            "--optimizer and --pipeline have no effect with --objective latency, because no step is planned",
            "leave them out",
        )
    if goal and objective == "latency":
        raise UsageError(
            "--goal has no effect with --objective latency, because no step is planned",
            "leave one of them out",
        )
    if not 0 <= goal <= GOAL_MAX:
        raise UsageError(f"--goal: want samples a second from 0 to {GOAL_MAX:,.0f}")
    if replicas and replicas_min > 1:
        raise UsageError("--replicas and --replicas-min: give only one of them")
    if min(batch, replicas_min, microbatch + 1, stages + 1, replicas + 1) < 1:
        raise UsageError("--batch, --microbatch, --stages, --replicas, --replicas-min: want numbers from 1")
    return PlanWish(
        batch=batch,
        objective=objective,  # type: ignore[arg-type]  # looked at above
        microbatch=microbatch,
        pipeline=pipeline,  # type: ignore[arg-type]  # looked at above
        optimizer=optimizer,
        optimizer_moments=OPTIMIZERS[optimizer],
        goal=goal,
        constraints=Constraints(
            stages=stages, replicas=replicas, replicas_min=replicas_min, frame_bytes_max=FRAME_BYTES_MAX
        ),
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
    what_if: str | Sequence[str] = (),
    place: str = "",
    replicas_min: int = 1,
    together: Sequence[Sequence[str]] = (),
    keep_tied: bool = False,
    devices: Sequence[str] = (),
    goal: float = 0.0,
) -> PlanReport:
    """Return the best plan of a model over given peers, without a node; nothing is started.

    `model` is a graph, a captured FILE.peerloom, a built-in name, PATH.py:FUNCTION or a Hugging Face folder.
    `peers` is a TOML file of peers, or its parsed content. The planner chooses stages, replicas and the
    micro-batch if they are 0. `what_if` is a change to the peers such as `"lose=lab-3"`, or a list of
    changes. `place` restricts the plan to peers of one location. The layers of each group in `together`
    (modules, layers by name or number, ranges such as `3-5`) stay in one stage; with `keep_tied`, so do
    layers that share a weight. With `devices`, only peers that compute on one of these count (`cuda`, `mps`,
    `cpu`), and peers on a later device only if those on earlier ones are not enough. With a `goal`, in
    samples per second, the plan's document says whether it is predicted to be reached.

    Raises:
        RunFailed: no plan fits; its hint gives a remedy. UsageError: the request is malformed.
    """
    wanted = wishes(batch, objective, microbatch, optimizer, stages, replicas, pipeline, replicas_min, goal)
    found = peers if isinstance(peers, Peers) else read_peers(str(peers))
    name = model.name if isinstance(model, Graph) else str(model)
    graph = graph_of(model)
    wanted = with_together(wanted, graph, together, keep_tied=keep_tied)
    return plan_over(graph, in_place(found, place), wanted, what_if=what_if, devices=devices, name=name)


def with_together(
    wanted: PlanWish, graph: Graph, groups: Sequence[Sequence[str]], *, keep_tied: bool
) -> PlanWish:
    """Return the request with layers that must be in the same stage. Raises UsageError if the model has no
    such layers."""
    try:
        ranges = kept_ranges(graph, groups, tied=keep_tied)
    except ValueError as error:
        raise UsageError(f"--together: {error}") from None
    return replace(wanted, constraints=replace(wanted.constraints, together=ranges))


def plan_over(
    graph: Graph,
    peers: Peers,
    wanted: PlanWish,
    *,
    what_if: str | Sequence[str] = (),
    devices: Sequence[str] = (),
    name: str,
) -> PlanReport:
    """Return the best plan over these peers. With `what_if`, the plan is for the changed peers, and has the
    gain.

    Raises:
        RunFailed: no plan fits; its hint gives a remedy. UsageError: the request is malformed.
    """

    def planned(among: Peers) -> PlanReport:
        """Return the plan on the first devices that suffice."""
        for count in range(1, len(devices)):
            with suppress(Infeasible):
                return plan_model(graph, on_devices(among, devices[:count]), wanted, name=name)
        return plan_model(graph, on_devices(among, devices), wanted, name=name)

    changes = tuple(what_if.split(",") if isinstance(what_if, str) and what_if else what_if)
    try:
        if not changes:
            return planned(peers)
        report = planned(changed(peers, ",".join(changes)))
    except Infeasible as infeasible:
        raise RunFailed(f"{name}: {infeasible}", infeasible.do or None) from None
    try:
        without = planned(peers).predicted
    except Infeasible:
        without = None
    return replace(report, what_if=changes, without=without)


def graph_of(model: Graph | str | Path) -> Graph:
    """Return the graph of a model. Raises UsageError if it is not a model, or cannot be captured."""
    if isinstance(model, Graph):
        return model
    text = str(model)
    if text.endswith(GRAPH_SUFFIX):
        return _read(Path(text).expanduser())
    with tempfile.TemporaryDirectory(prefix="peerloom-plan-") as folder:
        file = Path(folder) / f"model{GRAPH_SUFFIX}"
        command = [sys.executable, "-P", "-m", "node", "model", "capture", "--out", str(file), *_words(text)]
        try:
            done = subprocess.run(  # noqa: S603 - our own command; the model is its user's own code
                command,
                capture_output=True,
                text=True,
                timeout=CAPTURE_SECONDS_MAX,
                stdin=subprocess.DEVNULL,
                env={**os.environ, KEEPS_SPANS: "1"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{text}: it could not be captured: {error}") from None
        if done.returncode:
            _, found, told = done.stderr.rpartition("error: ")
            what, _, do = told.strip().partition("\n")
            if not found or not what:
                raise UsageError(f"{text}: the process that captures the model ended unexpectedly")
            raise UsageError(f"{text}: {what}", do.strip().removeprefix("do: ") or None)
        return _read(file)


def _words(model: str) -> list[str]:
    """Return the arguments of the command `model capture` for a model. Raises UsageError if there is no such
    model."""
    built_in = MODELS.get(model)
    if built_in is not None:
        sample = ",".join(map(str, built_in.sample))
        words = [built_in.name, "--no-proof", "--sample", sample, "--classes", str(built_in.classes)]
        options = (f"{key}={value}" for key, value in built_in.options.items())
        return words + [word for option in options for word in ("--set", option)]
    if ".py:" in model:
        return [model]
    if (Path(model).expanduser() / HUGGING_FACE_CONFIG).is_file():
        return [model, "--set", "values=0"]  # a plan needs no weights
    if model.endswith(".toml"):
        trained = shlex.quote(_model_of_run(Path(model).expanduser()))
        raise UsageError(f"{model[:80]}: a run, not a model", f"`peerloom plan {trained}`")
    raise UsageError(f"no model has the name '{model[:80]}'{did_you_mean(model, sorted(MODELS))}", _ways())


def _model_of_run(file: Path) -> str:
    """Return the model that a run's file names, or a placeholder for it."""
    import tomllib

    try:
        named = tomllib.loads(file.read_text()).get("model")
    except (OSError, ValueError):
        named = None
    return named[:80] if isinstance(named, str) and named.isprintable() and "`" not in named else "MODEL"


def _read(file: Path) -> Graph:
    try:
        with file.open("rb") as source:
            graph = decode_graph(source.read(GRAPH_BYTES_MAX + 1))
        check_graph(graph)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}", "make it: `peerloom model capture`") from None
    except RemoteProtocolError as error:
        raise UsageError(f"{file} is not a captured model: {error}") from None
    return graph


def _ways() -> str:
    known = ", ".join(sorted(MODELS))
    return f"FILE{GRAPH_SUFFIX}, PATH.py:FUNCTION, a Hugging Face folder, or one of {known}"
