"""`peerloom runs`: the runs this node knows, each in detail, and their requester's commands."""

import json
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from node.cli.client import ask, peer_names, request
from node.cli.event_text import name_and_id, with_names
from node.cli.goals import goal_lines, goal_text, pace_text
from node.cli.model_folders import fetch_folder, is_folder_path
from node.cli.options import AsJson, CommandGroup, DataDir, find_data_dir
from node.cli.outputs import output_path
from node.cli.receipts import work_text
from node.cli.render import (
    bytes_text,
    columns_of,
    csv_text,
    data_text,
    short_id,
    show,
    show_json,
    table,
)
from node.cli.screen import EventScreen
from node.cli.trace import chrome_trace, send_otlp
from node.errors import PeerloomError, UsageError
from node.quantities import read_duration
from node.text import counted, cover_text, layers_text

TRACE_SECONDS_MAX = 30.0
AUDIT_SECONDS_MAX = 600.0
"""Time limit for an audit. A checkpoint may have to be fetched, and each stage needs a process of its own."""
STOP_SECONDS_MAX = 30.0
"""Time limit for stopping. A stage's process may take seconds to end, and the node waits 5 s for members."""
SHOW_SECONDS_MAX = 15.0
"""Time limit for showing a run. If this node does not take part in it, its members are asked."""
POLL_SECONDS = 2.0
"""How often members are asked while a user watches a run."""
_OVER = ("done", "failed", "stopped")

app = typer.Typer(cls=CommandGroup, no_args_is_help=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def runs(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List, follow and steer the runs that this node knows."""
    before = context.obj or {}
    context.obj = {**before, "data_dir": data_dir or before.get("data_dir"), "as_json": as_json}
    if context.invoked_subcommand is None:
        list_runs(context, "", as_json)


@app.command("list")
def list_runs(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List the runs that this node knows."""
    folder = find_data_dir(context, data_dir)
    document = {"schema": "peerloom/runs/1", "runs": ask(folder, "status")["runs"]}
    if as_json or context.obj["as_json"]:
        show_json(document)
    else:
        show(runs_lines(document, peer_names(folder) if document["runs"] else {}))


@app.command()
def fetch(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or its beginning.")],
    out: Annotated[
        str,
        typer.Option("--out", metavar="FILE|FOLDER/", help="File for the weights, or folder for the model."),
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="FOLDER", help="The Hugging Face folder that was trained.")
    ] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Fetch a run's weights (safetensors) from any peer that keeps them, or write a whole model folder."""
    document = fetch_weights(find_data_dir(context, data_dir), run, out, model)
    if as_json or context.obj["as_json"]:
        show_json(document)


@app.command()
def audit(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or its beginning.")],
    step: Annotated[int, typer.Option("--step", min=-1, help="-1: the step of the newest checkpoint.")] = -1,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Recompute signed frames of a committed step, and report which are right."""
    arguments = {"run": run, "step": step}
    document = ask(find_data_dir(context, data_dir), "runs.audit", arguments, seconds=AUDIT_SECONDS_MAX)
    if as_json or context.obj["as_json"]:
        show_json(document)
        return
    rows = [
        (short_id(row["peer"]), str(row["stage"] + 1), str(row["microbatch"]), row["verdict"], row["detail"])
        for row in document["frames"]
    ]
    show([f"step {document['step']} of run {document['run'][:8]}"])
    show(table(("PEER", "STAGE", "MICRO-BATCH", "FRAME IS", "BECAUSE"), rows))


@app.command()
def trace(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or its beginning.")],
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="A Chrome trace, for Perfetto.")] = "",
    otlp: Annotated[str, typer.Option("--otlp", metavar="URL", help="An OTLP collector's /v1/traces.")] = "",
    steps: Annotated[int, typer.Option("--steps", min=1, max=1_024, help="Number of newest steps.")] = 4,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Collect what each machine of a run computed when, for its newest steps."""
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


Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or its beginning.")]


@app.command()
def stop(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Stop a run that this node requested, for all its members."""
    folder = find_data_dir(context, data_dir)
    try:
        result = ask(folder, "runs.stop", {"run": run}, seconds=STOP_SECONDS_MAX)
    except PeerloomError as error:
        what, do = error.written
        error.written = (with_names(what, peer_names(folder)), do)
        raise
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom/stop/1", **result})
        return
    show([f"run {result['run'][:8]} stopped; {_told(result)}"])


@app.command()
def drop(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Leave another node's run immediately and for good; its other members go on without this node."""
    result = ask(find_data_dir(context, data_dir), "runs.drop", {"run": run}, seconds=STOP_SECONDS_MAX)
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom/drop/1", **result})
    else:
        show([f"run {result['run'][:8]} dropped: this node is free, and takes no part in it again"])


Peer = Annotated[str, typer.Argument(metavar="PEER", help="The peer's id, or a member's name.")]


@app.command()
def invite(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of an averaging run of this node's own.")
    ],
    peer: Peer,
    valid: Annotated[str, typer.Option("--valid", metavar="7d", help="How long it is valid.")] = "7d",
    admit: Annotated[str, typer.Option("--admit", help="invited or vouched, as in the scripts.")] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Print an invitation for one peer to an averaging run (invitation= in the peer's script)."""
    from node.config import read_setting  # imported here so that other commands start faster

    hours = read_setting("--valid", valid, read_duration) / 3600
    arguments = {"run": run, "peer": peer, "hours": hours, "admit": admit}
    result = ask(find_data_dir(context, data_dir), "runs.invite", arguments)
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom/invitation/1", **result})
    else:
        show([result["invitation"]])


@app.command()
def revoke(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The id of a run in local mode, or an averaging run's name.")
    ],
    peer: Peer,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Revoke a peer's admission to a run of this node: it is excluded from the next round on."""
    result = ask(find_data_dir(context, data_dir), "runs.revoke", {"run": run, "peer": peer})
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom/revocation/1", **result})
    else:
        told = f"{counted(result['told'], 'member was', 'members were')} told"
        show([f"{short_id(result['peer'])} may take no part in {run} any more; {told}"])


@app.command("show")
def show_run(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Show a run's state: as this node knows it, or otherwise as its members report it."""
    document = ask(find_data_dir(context, data_dir), "runs.show", {"run": run}, seconds=SHOW_SECONDS_MAX)
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom/run/1", **document})
    else:
        show(run_lines(document))


@app.command()
def log(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Show the events of a run that this node still remembers."""
    _events(find_data_dir(context, data_dir), run, as_json=as_json or context.obj["as_json"], follow=False)


@app.command()
def watch(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Follow a run to its end. Ctrl-C stops watching, but not the run."""
    _events(find_data_dir(context, data_dir), run, as_json=as_json or context.obj["as_json"], follow=True)


def _events(data_dir: Path, run: str, *, as_json: bool, follow: bool) -> None:
    document = ask(data_dir, "runs.show", {"run": run}, seconds=SHOW_SECONDS_MAX)
    if follow and not document["is_followed"]:
        document = _poll(data_dir, document, as_json=as_json)
    is_going = document["status"] not in _OVER
    arguments = {"since": 0.0, "text": document["run"], "follow": follow and is_going}
    screen = EventScreen(names=peer_names(data_dir))
    for reply in request(data_dir, "events", arguments):
        event = reply.get("event")
        if event is None or event.get("run") != document["run"]:
            continue
        if as_json:
            show_json({"schema": "peerloom/event/1", **event})
        else:
            show(screen.lines(event))
        if event["kind"] == "RunEnded":
            return
    show([run_text(document)], sys.stderr)


def _poll(data_dir: Path, document: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Show the members' reports while a run goes on without this node, which receives none of its events.
    Return the run's state at its end, or once this node takes part."""
    shown = None
    if not as_json and document["status"] not in _OVER:
        show(["this node takes no part in the run, so its members are asked"], sys.stderr)
    while document["status"] not in _OVER and not document["is_followed"]:
        now = document["status"], document["step"]
        if now != shown and as_json:
            show_json({"schema": "peerloom/run/1", **document})
        elif now != shown:
            show([run_text(document)])
        shown = now
        time.sleep(POLL_SECONDS)
        document = ask(data_dir, "runs.show", {"run": document["run"]}, seconds=SHOW_SECONDS_MAX)
    return document


@app.command()
def metrics(
    context: typer.Context,
    run: Run,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV, with a header.")] = False,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Show the measurements of a run, one row per step."""
    if as_csv and (as_json or context.obj["as_json"]):
        raise UsageError("runs metrics: --csv and --json are different forms", "leave out one of them")
    document = ask(find_data_dir(context, data_dir), "runs.metrics", {"run": run})
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom/metrics/1", **document})
    elif as_csv:
        sys.stdout.write(csv_text(document["rows"]))
    else:
        columns = columns_of(document["rows"])
        rows = [tuple(_number_text(row.get(name)) for name in columns) for row in document["rows"]]
        show(table(tuple(name.upper() for name in columns), rows))


def _number_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else ("-" if value is None else str(value))


@app.command()
def pause(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Pause a run of this node after the current step, on all members, with a checkpoint."""
    _revise(context, data_dir, {"run": run, "is_paused": True}, as_json=as_json)


@app.command()
def resume(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Resume a paused run."""
    _revise(context, data_dir, {"run": run, "is_paused": False}, as_json=as_json)


@app.command()
def revise(
    context: typer.Context,
    run: Run,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="Learning rate from the next step on.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Step at which the run ends.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", help="0 (last) to 9 (first) among your own runs; usually 5.")
    ] = None,
    goal: Annotated[
        float | None, typer.Option("--goal", help="Alert you below this many samples/s; 0: never.")
    ] = None,
    goal_seconds: Annotated[
        int | None, typer.Option("--goal-seconds", help="How long the run must be slower before an alert.")
    ] = None,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Change a run of this node while it runs, for all its members."""
    changes: dict[str, Any] = {"learning_rate": learning_rate, "steps": steps, "priority": priority}
    changes |= {"samples_per_second": goal, "goal_seconds": goal_seconds}
    _revise(context, data_dir, {"run": run, **changes}, as_json=as_json)


def _revise(context: typer.Context, data_dir: str, arguments: dict[str, Any], *, as_json: bool) -> None:
    folder = find_data_dir(context, data_dir)
    result = ask(folder, "runs.revise", arguments, seconds=STOP_SECONDS_MAX)
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom/revision/1", **result})
        return
    rate = "" if result["learning_rate"] is None else f", learning rate {result['learning_rate']:g}"
    word = "paused" if result["is_paused"] else "goes on"
    goal = f", {goal_text(result['goal'])}" if result.get("goal") else ""
    said = f"{word}: {counted(result['steps'], 'step')}, priority {result['priority']}{rate}{goal}"
    show([f"run {result['run'][:8]} {said}; {_told(result)}"])


def _told(result: Mapping[str, Any]) -> str:
    left = f"; {result['left']} members do not know it yet" if result["left"] else ""
    return counted(result["told"], "other member knows", "other members know") + left


def fetch_weights(data_dir: Path, run: str, out: str, model: str = "") -> dict[str, Any]:
    """Let the node write the weights of `run` to a file, or the whole model to a folder."""
    if is_folder_path(out):
        return fetch_folder(data_dir, run, out, model)
    if model:
        raise UsageError(f"--model {model}: has no effect on a file of weights", f"--out {out}/")
    arguments = {"run": run, "out": str(output_path(out))}
    result: dict[str, Any] = ask(data_dir, "runs.fetch", arguments, seconds=None)
    size = f", {bytes_text(result['size_bytes'])}" if "size_bytes" in result else ""
    show([f"weights in {out}{size}"], sys.stderr)
    return {"schema": "peerloom/fetch/1", **arguments} | result


def runs_lines(document: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Return the screen of a `peerloom/runs/1` document; `names` are names of peers."""
    if not document["runs"]:
        return ["no run yet; start one: `peerloom train RUN.toml`"]
    header = ("RUN", "MODEL", "STATUS", "STEP", "LOSS", "ACCURACY", "RESULT")
    first, *rows = table(header, [_row(run) for run in document["runs"]])
    below = " " * first.index("MODEL")
    return [first] + [
        line
        for row, run in zip(rows, document["runs"], strict=True)
        for line in (row, *(below + told for told in _more(run, names)))
    ]


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        run["run"][:8],
        run["model"],
        run["status"] + (", split" if run.get("other_results") else ""),
        step_text(run),
        f"{run['loss']:.4f}" if run["loss"] is not None else "-",
        f"{run['accuracy']:.3f}" if run["accuracy"] is not None else "-",
        run["result"] or "-",
    )


def _more(run: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Return the lines below a run's row: its data, its requester, and the reason for its status."""
    whose = f"on {data_text(run['data'])}, asked for by {name_and_id(names, run['requester'])}"
    wanted = [goal_text(run["goal"]) + pace_text(run)] if run.get("goal") else []
    return [whose, *wanted, *([run["detail"]] if run["detail"] else [])]


def _since_text(run: Mapping[str, Any]) -> str:
    """Return since when a running run has its state; empty for a finished run."""
    if run.get("detail") or not run.get("reason_since"):
        return ""
    at = datetime.fromisoformat(run["reason_since"]).astimezone()
    return f" (since {at:%H:%M:%S})"


def reading_lines(document: Mapping[str, Any] | None) -> list[str]:
    """Return the reading of a run's data, as `data show` prints it; empty if it is not known here."""
    if document is None:
        return []
    import msgspec

    from node.content.reading import SourceReading

    return msgspec.convert(document, SourceReading).lines()


def run_lines(run: Mapping[str, Any]) -> list[str]:
    """Return the screen of a `peerloom/run/1` document: one run."""
    names = {row["peer"]: row["name"] for row in run.get("waits_for", ())} | run.get("names", {})
    called = partial(name_and_id, names)
    lines = [run_text(run), f"  asked for by  {called(run['requester'])}"]
    if run.get("detail") or run.get("reason"):
        said = with_names(run.get("detail") or run["reason"], names)
        lines.append(f"  why           {said}{_since_text(run)}")
    if run.get("accuracy") is not None:
        lines.append(f"  accuracy      {run['accuracy']:.3f}")
    if run.get("validations"):
        last = run["validations"][-1]
        best = f"best after step {last['best_step']}"
        lines.append(f"  validation    loss {last['loss']:.4f} after step {last['step']}, {best}")
    lines += [f"  {line}" for line in reading_lines(run.get("reading"))]
    if run.get("last_round"):
        last = run["last_round"]
        whose = ", ".join(map(called, last["peers"]))
        said = f"nothing averaged: {last['error']}" if last["error"] else f"averaged with {whose}"
        if not last["error"] and last.get("aggregate", "mean") != "mean":
            said += f"; {last['aggregate']}, which survives {last['liars_max']} liars"
        lines.append(f"  last round    {last['round']}, at step {last['step']}: {said}")
    if run.get("revised"):
        revised = run["revised"]
        rate = "" if revised["learning_rate"] is None else f", learning rate {revised['learning_rate']:g}"
        lines.append(
            f"  changed to    {counted(revised['steps'], 'step')}, priority {revised['priority']}{rate}"
        )
    lines += goal_lines(run)
    plan = run.get("plan")
    for number, stage in enumerate(plan["stages"] if plan else (), 1):
        layers = layers_text(*stage["layers"])
        who = [
            called(peer) + (" (standby)" if peer in stage["standbys"] else "") for peer in stage["replicas"]
        ]
        lines.append(f"  stage {number:<7} {layers} on {', '.join(who)}")
    if covered := run.get("covered"):
        lines.append(f"  covered       {with_names(cover_text(covered), names)}")
    for row in run.get("receipts", ()):
        is_computed = row["kind"] == "compute"
        work = work_text(row) + (
            f" in {counted(row['microbatches'], 'micro-batch', 'micro-batches')}" if is_computed else ""
        )
        name = "computed" if is_computed else "sent"
        lines.append(f"  {name:<13} {called(row['provider'])}: {work}, measured by {called(row['measurer'])}")
    for row in run.get("other_results", ()):
        lines.append(f"  differs       {called(row['peer'])} has {_other_text(row['weights'])}")
    if run.get("result"):
        lines.append(f"  result        {run['result']}: `peerloom runs fetch {run['run']} --out FILE`")
    return lines


def _other_text(weights: str) -> str:
    return f"another result, {weights[:12]}" if weights else "no result: the run failed there"


def run_text(run: Mapping[str, Any]) -> str:
    """Return a run in one line, for other screens."""
    loss = f"  loss {run['loss']:.4f}" if run["loss"] is not None else ""
    place = step_text(run)
    place = "steps not followed here" if place == "-" else f"step {place}"
    data = data_text(run["data"], run.get("reading"))
    return f"{run['run']}  {run['model']} on {data}  {run['status']}  {place}{loss}"


def step_text(run: Mapping[str, Any]) -> str:
    """Return a run's progress, `12 of 200`; `-` if it is done, but this node has left it before."""
    if run["status"] == "done" and not run["step"]:
        return "-"
    return f"{run['step']} of {run['steps']}"
