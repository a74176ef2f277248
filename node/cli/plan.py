"""`peerloom plan MODEL`: predict which peers would hold which stages and how fast the run would be, with
reasons, before anything runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.client import ask
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.outputs import output_path
from node.cli.render import show, show_json
from node.errors import UsageError

if TYPE_CHECKING:  # the command line loads this file for every command
    from node.planning.peers import Peers
    from node.planning.report import PlanReport

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Built-in, FILE.peerloom, PATH.py:FUNCTION, Hugging Face folder."),
]


def plan(
    context: typer.Context,
    model: Model,
    peers: Annotated[
        str,
        typer.Option("--peers", metavar="FILE|live", help="File of peers and links, or this node's swarm."),
    ] = "live",
    objective: Annotated[
        str, typer.Option("--objective", metavar="throughput|latency|energy", help="The goal of the plan.")
    ] = "throughput",
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Samples in a step.")] = 64,
    microbatch: Annotated[int, typer.Option("--microbatch", metavar="N", help="Samples in a frame.")] = 0,
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="adam|adamw|sgd|momentum")] = "adam",
    stages: Annotated[int, typer.Option("--stages", metavar="N", help="Exactly this many.")] = 0,
    replicas: Annotated[int, typer.Option("--replicas", metavar="N", help="Of each stage, exactly.")] = 0,
    pipeline: Annotated[str, typer.Option("--pipeline", metavar="1f1b|gpipe")] = "1f1b",
    explain: Annotated[bool, typer.Option("--explain", help="Give reasons, and draw the step.")] = False,
    what_if: Annotated[
        str,
        typer.Option("--what-if", metavar="lose=A,add=8GB@50GFLOPS@100Mbit", help="With other peers."),
    ] = "",
    place: Annotated[str, typer.Option("--place", metavar="LOCATION", help="Only with peers there.")] = "",
    devices: Annotated[
        str, typer.Option("--devices", metavar="cuda,mps,cpu", help="Use the first kind that suffices.")
    ] = "",
    replicas_min: Annotated[
        int, typer.Option("--replicas-min", metavar="N", help="Minimum number of replicas of each stage.")
    ] = 1,
    goal: Annotated[
        float, typer.Option("--goal", metavar="N", help="Samples/s: report whether the plan reaches them.")
    ] = 0.0,
    together: Annotated[
        list[str] | None,
        typer.Option("--together", metavar="A,B", help="Layers or modules that stay in one stage."),
    ] = None,
    keep_tied: Annotated[
        bool, typer.Option("--keep-tied", help="Keep layers that share a weight in one stage.")
    ] = False,
    svg: Annotated[str, typer.Option("--svg", metavar="FILE", help="Draw the plan into this file.")] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Show which peers would hold which layers of a model, how fast that would be, and why."""
    from node.cli.train import read_devices
    from node.planning.peers import in_place
    from node.planning.request import graph_of, plan_over, wishes, with_together

    wanted = wishes(batch, objective, microbatch, optimizer, stages, replicas, pipeline, replicas_min, goal)
    if svg:
        output_path(svg, "--svg")
    offered = _offered(peers, context, data_dir)
    graph = graph_of(model)
    groups = [group.split(",") for group in together or ()]
    wanted = with_together(wanted, graph, groups, keep_tied=keep_tied)
    report = plan_over(
        graph, in_place(offered, place), wanted, what_if=what_if, devices=read_devices(devices), name=model
    )
    _show_plan(report, svg, explain=explain, as_json=as_json)


def _offered(peers: str, context: typer.Context, data_dir: str) -> "Peers":
    """Return the peers to plan with: those of a file, or of the node's swarm. Raises UsageError."""
    from node.planning.peers import live_peers, read_peers

    if peers != "live":
        return read_peers(peers)
    folder = find_data_dir(context, data_dir)
    return live_peers(ask(folder, "status"), ask(folder, "peers"), ask(folder, "measurements"))


def _show_plan(report: "PlanReport", svg: str, *, explain: bool, as_json: bool) -> None:
    """Show a plan, and draw it into a file if one is given. Raises UsageError."""
    from node.planning.report import plan_document
    from node.planning.screen import plan_lines

    if svg:
        try:
            Path(svg).expanduser().write_text(report.to_svg(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg {svg}: {error.strerror or error}") from None
        show([f"drawn into {svg}"], sys.stderr)
    if as_json:
        show_json(plan_document(report))
    else:
        show(plan_lines(plan_document(report), explain=explain))
