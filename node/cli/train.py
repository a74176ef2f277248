"""`peerloom train RUN.toml`: capture a model, submit the run to this machine's node, and watch it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.client import ask, peer_names
from node.cli.model_folders import check_folder, is_folder_path
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.outputs import output_path
from node.cli.render import progress, show, show_json
from node.cli.runs import fetch_weights
from node.cli.screen import EventScreen
from node.errors import PeerloomError, RunFailed, UsageError
from node.invocation import command_span

if TYPE_CHECKING:
    from node.protocols.run_file import RunFile

DEVICE_WORDS = "cuda", "mps", "cpu"
COMMON = "common"


def train(
    context: typer.Context,
    run_file: Annotated[str, typer.Argument(metavar="RUN.toml", help="The file that describes the run.")],
    out: Annotated[
        str, typer.Option("--out", metavar="FILE|FOLDER/", help="Write the result there at the end.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow/--detach", help="Watch until it ends, or only submit it.")
    ] = True,
    wait: Annotated[
        str, typer.Option("--wait", metavar="10m", help="How long to wait for peers that the run needs.")
    ] = "",
    devices: Annotated[
        str,
        typer.Option("--devices", metavar="cuda,mps,cpu", help="The first kind that suffices; or common."),
    ] = "",
    prepare: Annotated[str, typer.Option("--prepare", metavar="PATH", hidden=True)] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Start a training run in the swarm of this node."""
    if out and not follow:
        raise UsageError(
            "--out needs the end of the run, but --detach does not wait for it",
            "leave out --detach, or fetch the result later: `peerloom runs fetch RUN --out FILE`",
        )
    if out:
        check_folder(out) if is_folder_path(out) else output_path(
            out
        )  # checked before the training instead of after it
    if prepare:
        _hold_prepared(Path(run_file), Path(prepare))
        return
    waits = _seconds(wait)
    folder = find_data_dir(context, data_dir)
    path = Path(run_file).expanduser()
    order = [COMMON] if devices == COMMON else read_devices(devices)
    wanted = _read_run(path, run_file, order)
    # Ask the node first, because capturing takes seconds and is useless without a node.
    screen = EventScreen(names=peer_names(folder))
    begun: list[str] = []

    def on_event(event: Any) -> None:
        if event["kind"] == "RunAccepted":
            begun.append(event["run"])
        if as_json:
            show_json({"schema": "peerloom/event/1", **event})
        else:
            show(screen.lines(event), sys.stderr)

    with handed_over(wanted, path, run_file, shows=True) as arguments:
        try:
            result: dict[str, Any] = ask(
                folder, "train", arguments | {"follow": follow, "wait_seconds": waits}, on_event, seconds=None
            )
        except KeyboardInterrupt:
            show(unwatched(begun[0] if begun else "", out), sys.stderr)
            raise
    _finish(folder, result, out, follow=follow, as_json=as_json)


def keys_as_flags() -> dict[str, str]:
    """Return the keys of RUN.toml written as flags, and the table of each, for hints about mistyped flags."""
    from node.protocols.data_table import DataTable
    from node.protocols.run_file import PlanTable, RunFile, SplitsTable, TrainTable

    tables = (
        ("of RUN.toml", RunFile),
        ("in [splits] of RUN.toml", SplitsTable),
        ("in [data] of RUN.toml", DataTable),
        ("in [plan] of RUN.toml", PlanTable),
    )
    found: dict[str, str] = {}
    for where, table in (*tables, ("in [train] of RUN.toml", TrainTable)):
        found |= {"--" + name.replace("_", "-"): where for name in table.__struct_fields__}
    return found


def unwatched(run: str, out: str) -> list[str]:
    """Return the lines for a user who stops watching; `run` is empty if no node has accepted it yet."""
    if not run:
        return ["stopped watching before the run began; whether it does: `peerloom runs`"]
    look = command_span("runs", "watch", run[:8])
    if not out:
        return [f"stopped watching; the run goes on: {look}"]
    fetch = command_span("runs", "fetch", run[:8], "--out", out)
    return [f"stopped watching; the run goes on: {look}", f"  its result, once it is done: {fetch}"]


def _hold_prepared(file: Path, path: Path) -> None:
    """Capture and convert what a checked run in `file` names, as if the file were at `path`. Print the
    location of the results, and keep them until this process's input ends. Used by a node's page and a
    program's `me.train`."""
    import msgspec

    from node.protocols.run_file import RunFile

    run_file = msgspec.json.decode(file.read_bytes(), type=RunFile)
    with handed_over(run_file, path, "train()") as arguments:
        show_json(dict(arguments))
        sys.stdin.read()


def read_devices(text: str) -> list[str]:
    """Return kinds of devices in the user's order. Raises UsageError."""
    found = [part for part in text.replace(",", " ").split() if part]
    if len(set(found)) < len(found) or not set(found) <= {*DEVICE_WORDS}:
        raise UsageError(f"--devices {text}: want some of {', '.join(DEVICE_WORDS)}, each once")
    return found


def _read_run(path: Path, name: str, devices: list[str]) -> "RunFile":
    """Read a run's file. `devices` replace the file's own. Raises UsageError."""
    # Imported here (and below) so that other commands start faster.
    from msgspec.structs import replace

    from node.api.task_defaults import read_run
    from node.toml import read_text

    found, default = read_run(read_text(path), path.parent, name)
    if default:
        show([default], sys.stderr)
    return replace(found, plan=replace(found.plan, devices=tuple(devices))) if devices else found


def _seconds(wait: str) -> float:
    from node.config import read_setting
    from node.quantities import read_duration

    return float(read_setting("--wait", wait, read_duration)) if wait else 0.0


@contextmanager
def handed_over(
    run_file: "RunFile", path: Path, name: str, *, shows: bool = False
) -> Iterator[dict[str, object]]:
    """Yield the request for a checked run whose file is at `path`; errors call the file `name`. With `shows`,
    report on stderr how the data was read.

    Raises:
        UsageError: the model cannot be captured, or the data cannot be read.
    """
    import msgspec
    from msgspec.structs import replace

    from node.cli.capture import captured, loading, prepare_data, reading_as_is
    from node.cli.temporary import command_folder
    from node.content.datasets import DIGITS_NAME
    from node.content.sources import called, data_names

    source, checked = run_file.source, msgspec.to_builtins(run_file)
    with command_folder() as folder:
        found: dict[str, object] = {}
        reading = prepare_data(run_file, path.parent, folder, name, progress)
        if reading is not None:
            run_file = replace(run_file, data=str(folder))
            found = {"data": str(folder)}
        load = loading(run_file, path.parent)
        if shows and source != DIGITS_NAME:  # the digits need no reading
            stated = reading if reading is not None else reading_as_is(run_file, path.parent, load)
            show(stated.lines(), sys.stderr)
        names = data_names(str(folder), source) if found else {}
        with called(names), captured(run_file, path, name, load) as files:
            yield {"run": checked, "path": str(path.absolute()), "name": name, **found, **files}


def _finish(folder: Path, result: dict[str, Any], out: str, *, follow: bool, as_json: bool) -> None:
    run = result["run"]
    if (status := result.get("status")) in ("failed", "stopped"):
        raise RunFailed(f"run {run[:8]} {status}: {result.get('detail') or 'no reason given'}")
    document = {"schema": "peerloom/train/1", **result}
    if out:
        try:
            document["out"] = fetch_weights(folder, run, out)["out"]
        except PeerloomError as error:
            raise _not_written(error, run) from None
    if as_json:
        show_json(document)
    elif follow:
        show([f"run {run[:8]} done{_result_text(result)}"])
    else:
        show([f"run {run} handed over; look: `peerloom runs`"])


def _not_written(error: PeerloomError, run: str) -> PeerloomError:
    """Return the error for a finished run whose result could not be written to the file. It says how to get
    the result."""
    found = PeerloomError(
        f"run {run[:8]} is done and its weights are kept, but not written: {error.what}",
        f"`peerloom runs fetch {run} --out FILE`",
    )
    found.exit_code = error.exit_code
    return found


def _result_text(result: dict[str, Any]) -> str:
    if result.get("accuracy") is not None:
        return f", accuracy {result['accuracy']:.3f}"
    loss = result.get("loss_held_out")
    return f", loss {loss:.4f} on unseen samples" if loss is not None else ""
