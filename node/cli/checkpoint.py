"""`peerloom checkpoint`: a run's checkpoints on this machine: list, save, export, fetch.

Without a running node, `list` and `export` use only its data folder. With one, they also find and fetch other
peers' checkpoints.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.client import ask, is_running
from node.cli.options import VALUES_SUFFIX, AsJson, CommandGroup, DataDir, find_data_dir
from node.cli.outputs import output_path
from node.cli.render import bytes_text, minute_text, show, show_json, table
from node.errors import RunFailed, UsageError
from node.paths import short_path

if TYPE_CHECKING:
    from node.checkpoints.store import CheckpointStore

LIST_SECONDS_MAX = 60.0
"""Time limit while the node asks other nodes for copies."""
_WIDTH = 8

app = typer.Typer(cls=CommandGroup, no_args_is_help=False, rich_markup_mode=None)

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or its beginning.")]
Step = Annotated[
    int | None, typer.Option("--step", metavar="N", help="The step of the checkpoint; default: the newest.")
]


@app.callback(invoke_without_command=True)
def checkpoint(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List the checkpoints on this machine, or save, export or fetch one."""
    before = context.obj or {}
    context.obj = {**before, "data_dir": data_dir or before.get("data_dir"), "as_json": as_json}
    if context.invoked_subcommand is None:
        list_checkpoints(context, "", as_json)


@app.command("list")
def list_checkpoints(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List the checkpoints on this machine."""
    folder = find_data_dir(context, data_dir)
    if is_running(folder):
        found = ask(folder, "checkpoint.list", seconds=LIST_SECONDS_MAX)["checkpoints"]
    else:
        from node.checkpoints.store import document

        found = [document(kept, None) for kept in _store(folder).all()]
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom.checkpoints/1", "checkpoints": found})
    else:
        show(checkpoint_lines(found))


@app.command()
def save(context: typer.Context, run: Run, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Let an active run make a checkpoint after its next step."""
    result = ask(find_data_dir(context, data_dir), "checkpoint.save", {"run": run}, seconds=None)
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom.checkpoint-save/1"} | result)
    else:
        show([f"run {result['run'][:_WIDTH]}: checkpoint after step {result['step']}"])


@app.command()
def export(
    context: typer.Context,
    run: Run,
    out: Annotated[str, typer.Option("--out", metavar=f"FILE{VALUES_SUFFIX}", help="File for the model.")],
    step: Step = None,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's model to a safetensors file, under the model's own names."""
    path = output_path(out)
    folder = find_data_dir(context, data_dir)
    if is_running(folder):
        arguments = {"run": run, "step": step, "out": str(path)}
        result: dict[str, Any] = ask(folder, "checkpoint.export", arguments, seconds=None)
    else:
        result = _export_offline(folder, run, step, path)
    where = f"step {result['step']} of run {result['run'][:_WIDTH]}"
    show([f"{where} in {out}, {bytes_text(result['size_bytes'])}"], sys.stderr)
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom.checkpoint-export/1"} | result)


@app.command()
def fetch(
    context: typer.Context,
    run: Run,
    source: Annotated[
        list[str] | None, typer.Option("--from", metavar="PEER", help="Fetch only from these members.")
    ] = None,
    step: Step = None,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Fetch a run's checkpoint to this machine from the peers that keep it."""
    arguments = {"run": run, "step": step, "from": source or []}
    found = ask(find_data_dir(context, data_dir), "checkpoint.fetch", arguments, seconds=None)
    if as_json or context.obj["as_json"]:
        show_json({"schema": "peerloom.checkpoint-fetch/1"} | found)
    else:
        size = bytes_text(found["size_bytes"])
        show([f"step {found['step']} of run {found['run'][:_WIDTH]} is here, {size}"])


def checkpoint_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the screen of a list of checkpoint documents."""
    if not found:
        return ["no checkpoint here; fetch one: `peerloom checkpoint fetch RUN`"]
    return table(("RUN", "MODEL", "STEP", "SIZE", "HERE", "COPIES", "MADE"), [_row(each) for each in found])


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    here = len(found["stages_here"])
    return (
        found["run"][:_WIDTH],
        found["model"],
        f"{found['step']} of {found['steps']}",
        bytes_text(found["size_bytes"]),
        "all" if here == found["stages"] else f"{here} of {found['stages']}",
        str(found["copies"]) if found["copies"] is not None else "-",
        minute_text(found["created"]),
    )


def _store(folder: Path) -> "CheckpointStore":
    """Return the store of a data folder that no node holds. Raises UsageError."""
    from node.checkpoints.store import CheckpointStore
    from node.storage.blobs import Blobs
    from node.storage.folder import FolderStorage

    if not folder.is_dir():
        raise UsageError(
            f"data folder {short_path(folder)}: no such folder", "give another one: --data-dir DIR"
        )
    storage = FolderStorage(folder)
    return CheckpointStore(storage, Blobs(storage))


def _export_offline(folder: Path, run: str, step: int | None, path: Path) -> dict[str, Any]:
    from crypto.errors import RemoteProtocolError
    from node.checkpoint_commands import checkpoint_not_found
    from node.commands import find_run
    from node.errors import Unreachable

    store = _store(folder)
    name = find_run(dict.fromkeys(kept.run for kept in store.all()), run)
    kept = store.find(name, step)
    if kept is None:
        raise checkpoint_not_found(name, step)
    start = "start the node, which fetches it (`peerloom`), then repeat this"
    if not kept.is_whole:
        stages = ", ".join(str(stage + 1) for stage in kept.stages_here) or "none"
        count = len(kept.checkpoint.stages)
        raise RunFailed(f"of this checkpoint's {count} stages only some are here: {stages}", start)
    try:
        graph = store.graph(kept.checkpoint.graph)
        if graph is None:
            raise RunFailed(f"the graph of the model {kept.manifest.model} is not here", start)
        *_, size = store.exporting(kept, graph, path)
    except (Unreachable, RemoteProtocolError) as error:
        raise RunFailed(f"the checkpoint of run {name[:_WIDTH]} cannot be exported: {error}", start) from None
    except OSError as error:
        raise UsageError(f"--out {path}: {(error.strerror or str(error)).lower()}") from None
    return {"run": name, "step": kept.checkpoint.step, "out": str(path), "size_bytes": size}
