"""`python -m node train RUN.toml`: hand a run to the node on this machine, and watch it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.client import ask
from node.cli.place import AsJson, DataDir, find_data_dir
from node.cli.render import show, show_json
from node.cli.runs import fetch_weights
from node.cli.screen import EventScreen
from node.errors import RunFailed, UsageError


def train(
    context: typer.Context,
    run_file: Annotated[str, typer.Argument(metavar="RUN.toml", help="What to train on what, and how.")],
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Put the weights there at the end.")] = "",
    follow: Annotated[
        bool, typer.Option("--follow/--detach", help="Watch until it ends, or only hand it over.")
    ] = True,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Start a run of training in the swarm of this node."""
    if out and not follow:
        raise UsageError(
            "--out needs the end of the run, and --detach does not wait for it",
            "leave --detach away, or later: python -m node runs fetch RUN --out FILE",
        )
    from node.toml import read_text

    folder = find_data_dir(context, data_dir)
    path = Path(run_file).expanduser()
    arguments = {"text": read_text(path), "path": str(path.absolute()), "name": run_file, "follow": follow}
    screen = EventScreen()

    def on_event(event: Any) -> None:
        if as_json:
            show_json({"schema": "peerloom/event/1", **event})
        else:
            show(screen.lines(event), sys.stderr)

    try:
        result: dict[str, Any] = ask(folder, "train", arguments, on_event, seconds=None)
    except KeyboardInterrupt:
        show(["stopped watching; the run goes on: python -m node runs"], sys.stderr)
        raise
    _finish(folder, result, out, follow=follow, as_json=as_json)


def _finish(folder: Path, result: dict[str, Any], out: str, *, follow: bool, as_json: bool) -> None:
    run = result["run"]
    if result.get("status") == "failed":
        raise RunFailed(f"run {run[:8]} failed: {result.get('detail') or 'no reason given'}")
    document = {"schema": "peerloom/train/1", **result}
    if out:
        document["out"] = fetch_weights(folder, run, out)["out"]
    if as_json:
        show_json(document)
    elif follow:
        accuracy = result.get("accuracy")
        show([f"run {run[:8]} done" + (f", accuracy {accuracy:.3f}" if accuracy is not None else "")])
    else:
        show([f"run {run} handed over; look: python -m node runs"])
