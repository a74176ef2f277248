"""`python -m node runs`: the runs this node knows; `runs fetch` brings a run's weights here, `runs stop` ends
a run of its own for all, `runs drop` leaves another's."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.client import ask
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.outputs import output_path
from node.cli.render import bytes_text, data_text, short_id, show, show_json, table
from node.cli.trace import chrome_trace, send_otlp

TRACE_SECONDS_MAX = 30.0
STOP_SECONDS_MAX = 30.0
"""A stage's process takes some seconds to end, on a busy machine; members are waited for five."""

app = typer.Typer(no_args_is_help=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def runs(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List the runs this node knows, or fetch the weights of one."""
    before = context.obj or {}
    context.obj = {**before, "data_dir": data_dir or before.get("data_dir"), "as_json": as_json}
    if context.invoked_subcommand is None:
        list_runs(context, "", as_json)


@app.command("list")
def list_runs(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List the runs this node knows."""
    status = ask(find_data_dir(context, data_dir), "status")
    document = {"schema": "peerloom/runs/1", "runs": status["runs"]}
    if as_json or context.obj["as_json"]:
        show_json(document)
    else:
        show(runs_lines(document))


@app.command()
def fetch(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or how it begins.")],
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Where to put the weights.")],
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Fetch a run's weights (safetensors) from any peer that keeps them."""
    document = fetch_weights(find_data_dir(context, data_dir), run, out)
    if as_json or context.obj["as_json"]:
        show_json(document)


@app.command()
def trace(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or how it begins.")],
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="A Chrome trace, for Perfetto.")] = "",
    otlp: Annotated[str, typer.Option("--otlp", metavar="URL", help="An OTLP collector's /v1/traces.")] = "",
    steps: Annotated[int, typer.Option("--steps", min=1, max=1_024, help="How many, the newest.")] = 4,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Collect what all machines of a run computed when, in its newest steps."""
    path = output_path(out) if out else None
    arguments = {"run": run, "steps": steps}
    document = ask(find_data_dir(context, data_dir), "runs.trace", arguments, seconds=TRACE_SECONDS_MAX)
    if path is not None:
        path.write_text(json.dumps(chrome_trace(document)))
    if otlp:
        send_otlp(otlp, document)
    if as_json or context.obj["as_json"]:
        show_json(document)
        return
    rows = [
        (
            peer["name"] or short_id(peer["peer"]),
            str(len(peer["spans"])),
            f"{peer['offset_seconds'] * 1e3:+.3f} ms" if "offset_seconds" in peer else "-",
            f"{peer['round_trip_seconds'] * 1e3:.3f} ms" if "offset_seconds" in peer else peer["error"],
        )
        for peer in document["peers"]
    ]
    show(table(("PEER", "SPANS", "CLOCK AHEAD", "ROUND TRIP"), rows))
    if path is not None:
        show([f"written to {path}; open it in https://ui.perfetto.dev or chrome://tracing"])


Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or how it begins.")]


@app.command()
def stop(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Stop a run that this node asked for, for all its members."""
    result = ask(find_data_dir(context, data_dir), "runs.stop", {"run": run}, seconds=STOP_SECONDS_MAX)
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom/stop/1", **result})
        return
    left = f"; {result['left']} have still to hear of it" if result["left"] else ""
    show([f"run {result['run'][:8]} stopped; {result['told']} other members know{left}"])


@app.command()
def drop(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Leave a run of another node, at once and for good; its others go on without this one."""
    result = ask(find_data_dir(context, data_dir), "runs.drop", {"run": run}, seconds=STOP_SECONDS_MAX)
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom/drop/1", **result})
    else:
        show([f"run {result['run'][:8]} dropped: this node is free, and takes no part in it again"])


def fetch_weights(data_dir: Path, run: str, out: str) -> dict[str, Any]:
    """Have the node put the weights of `run` into the file `out`; says so on stderr."""
    path = str(output_path(out))
    result: dict[str, Any] = ask(data_dir, "runs.fetch", {"run": run, "out": path}, seconds=None)
    size = f", {bytes_text(result['size_bytes'])}" if "size_bytes" in result else ""
    show([f"weights in {out}{size}"], sys.stderr)
    return {"schema": "peerloom/fetch/1", "run": run, "out": path} | result


def runs_lines(document: Mapping[str, Any]) -> list[str]:
    """The screen of a `peerloom/runs/1` document."""
    if not document["runs"]:
        return ["no run yet; start one: python -m node train RUN.toml"]
    header = ("RUN", "MODEL", "DATA", "STATUS", "STEP", "LOSS", "ACCURACY", "RESULT", "REQUESTER")
    return table(header, [_row(run) for run in document["runs"]])


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        run["run"],
        run["model"],
        data_text(run["data"]),
        run["status"] + (f": {run['detail']}" if run["detail"] else ""),
        f"{run['step']} of {run['steps']}",
        f"{run['loss']:.4f}" if run["loss"] is not None else "-",
        f"{run['accuracy']:.3f}" if run["accuracy"] is not None else "-",
        run["result"] or "-",
        short_id(run["requester"]),
    )


def run_text(run: Mapping[str, Any]) -> str:
    """A run in one line, for other screens."""
    loss = f"  loss {run['loss']:.4f}" if run["loss"] is not None else ""
    place = f"step {run['step']} of {run['steps']}"
    return f"{run['run']}  {run['model']} on {data_text(run['data'])}  {run['status']}  {place}{loss}"
