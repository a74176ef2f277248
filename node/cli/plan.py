"""`python -m node plan MODEL`: who would hold what, how fast that would be, and why, before anything runs."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.client import ask
from node.cli.options import GRAPH_SUFFIX, AsJson, DataDir, find_data_dir
from node.cli.outputs import output_path
from node.cli.render import show, show_json
from node.errors import RunFailed, UsageError
from node.suggest import did_you_mean

if TYPE_CHECKING:
    from node.planning.peers import Peers
    from partition.model.graph import Graph


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Built-in, FILE.peerloom, PATH.py:FUNCTION.")],
    peers: Annotated[
        str,
        typer.Option("--peers", metavar="FILE|live", help="Peers and links, or this node's swarm."),
    ] = "live",
    objective: Annotated[
        str, typer.Option("--objective", metavar="throughput|latency|energy", help="What is to be best.")
    ] = "throughput",
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Samples in a step.")] = 64,
    microbatch: Annotated[int, typer.Option("--microbatch", metavar="N", help="Samples at once.")] = 0,
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="adam|adamw|sgd|momentum")] = "adam",
    stages: Annotated[int, typer.Option("--stages", metavar="N", help="As many, not what is best.")] = 0,
    replicas: Annotated[int, typer.Option("--replicas", metavar="N", help="Of each stage.")] = 0,
    pipeline: Annotated[str, typer.Option("--pipeline", metavar="1f1b|gpipe")] = "1f1b",
    explain: Annotated[bool, typer.Option("--explain", help="Say why, and draw the step.")] = False,
    what_if: Annotated[
        str,
        typer.Option("--what-if", metavar="lose=A,add=8GB@50GFLOPS@100Mbit", help="With other peers."),
    ] = "",
    place: Annotated[str, typer.Option("--place", metavar="LOCATION", help="Only with peers there.")] = "",
    devices: Annotated[
        str, typer.Option("--devices", metavar="cuda,mps,cpu", help="On the first of these that are enough.")
    ] = "",
    svg: Annotated[str, typer.Option("--svg", metavar="FILE", help="Draw it into this file.")] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Show who would hold which layers of a model, how fast that would be, and why."""
    from node.cli.train import read_devices
    from node.planning.document import plan_document
    from node.planning.peers import in_place, live_peers, on_devices, read_peers
    from node.planning.peers import what_if as changed
    from node.planning.planner import plan_model
    from node.planning.request import wishes
    from partition.plan.problem import Infeasible

    wanted = wishes(batch, objective, microbatch, optimizer, stages, replicas, pipeline)
    if svg:
        output_path(svg, "--svg")
    if peers == "live":
        folder = find_data_dir(context, data_dir)
        offered = live_peers(ask(folder, "status"), ask(folder, "peers"), ask(folder, "measurements"))
    else:
        offered = read_peers(peers)
    offered = in_place(offered, place)
    order = read_devices(devices)
    graph = read_model(model)

    def planned(among: "Peers") -> dict[str, Any]:
        """The plan on the first devices that are enough for one."""
        for count in range(1, len(order)):
            with suppress(Infeasible):
                return plan_document(plan_model(graph, on_devices(among, order[:count]), wanted, name=model))
        return plan_document(plan_model(graph, on_devices(among, order), wanted, name=model))

    try:
        document = planned(offered)
        other = planned(changed(offered, what_if)) if what_if else None
    except Infeasible as infeasible:
        raise RunFailed(f"{model}: {infeasible}", infeasible.do or None) from None
    _tell(document, other, what_if=what_if, explain=explain, svg=svg, as_json=as_json)


def _tell(
    document: dict[str, Any],
    other: dict[str, Any] | None,
    *,
    what_if: str,
    explain: bool,
    svg: str,
    as_json: bool,
) -> None:
    from node.cli.plan_lines import plan_lines
    from node.cli.plan_svg import plan_svg

    shown = document if other is None else other
    if svg:
        try:
            Path(svg).expanduser().write_text(plan_svg(shown), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg {svg}: {error.strerror or error}") from None
        show([f"drawn into {svg}"], sys.stderr)
    if as_json:
        show_json({**shown, "what_if": what_if or None})
        return
    lines = plan_lines(shown, explain=explain)
    if other is not None:
        gain = other["samples_per_second"] / max(1e-12, document["samples_per_second"]) - 1
        lines.append(f"with {what_if}: {gain * 100:+.0f} % against the plan without")
    show(lines)


def read_model(model: str) -> "Graph":
    """The graph of a built-in model, of a captured file, or of what a person's own function makes.

    Raises:
        UsageError: no such model, or one that cannot be captured.
    """
    from node.cli.model_summary import read_graph
    from node.planning.request import MODELS

    if model.endswith(GRAPH_SUFFIX):
        return read_graph(Path(model).expanduser())[0]
    from partition.capture import CaptureRefused
    from partition.capture.model_spec import capture_built_in, capture_own

    try:
        if ".py:" in model:
            return capture_own(model).graph
        if model in MODELS:
            found = MODELS[model]
            options = dict(found.options)
            return capture_built_in(found.name, found.sample, found.classes, options=options).graph
    except (CaptureRefused, OSError) as error:
        raise UsageError(f"{model}: {error}") from None
    known = sorted(MODELS)
    if model.endswith(".toml"):
        raise UsageError(f"{model[:80]}: a run, not a model", "name the model that it trains: plan MODEL")
    raise UsageError(
        f"no model is called '{model[:80]}'{did_you_mean(model, known)}",
        f"{', '.join(known)}; a captured FILE.peerloom; or PATH.py:FUNCTION",
    )
