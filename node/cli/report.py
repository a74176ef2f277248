"""`peerloom report`: one file for a bug report, without secrets.

It contains versions, the status with its counters, members, the newest events and the end of `errors.log`. It
never contains keys, tokens, the environment or any other file. It does contain names and addresses of
members, and says so. The checks of `peerloom doctor` are not included.
"""

import json
import platform
import time
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.client import ask, request
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.outputs import output_path
from node.cli.render import bytes_text, show, show_json
from node.errors import NoNode

PACKAGES = ("peerloom", "trio", "torch", "numpy", "cryptography", "msgspec", "h11", "kademlia", "zstandard")
LOG_BYTES_MAX = 256 << 10
LOG_NAME = "errors.log"


def report(
    context: typer.Context,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="File to write it to.")
    ] = "peerloom-report.zip",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Write a file for a bug report: it has no keys, but names and addresses of members."""
    path, folder = output_path(out), find_data_dir(context, data_dir)
    parts = collect(folder)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    if as_json:
        document = {"schema": "peerloom/report/1", "out": str(path), "files": sorted(parts)}
        show_json({**document, "size_bytes": path.stat().st_size})
        return
    show(
        [
            f"written to {path}, {bytes_text(path.stat().st_size)}: {', '.join(sorted(parts))}",
            "It has no keys; it has names and addresses of members. Read it before you send it to anybody.",
        ]
    )


def collect(folder: Path) -> dict[str, str]:
    """Return the files of a report, by name. If the node does not answer, the report says so."""
    parts = {"versions.json": _json(_versions())}
    try:
        parts["status.json"] = _json(ask(folder, "status"))
        parts["peers.json"] = _json(ask(folder, "peers"))
        wanted = {"since": 0.0, "follow": False}
        events = [reply["event"] for reply in request(folder, "events", wanted) if "event" in reply]
        parts["events.jsonl"] = "".join(json.dumps(event) + "\n" for event in events)
    except NoNode as error:
        parts["node.txt"] = f"{error.what}\n"
    log = folder / LOG_NAME
    if log.is_file() and not log.is_symlink():
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES_MAX))
            parts[LOG_NAME] = file.read(LOG_BYTES_MAX).decode(errors="replace")
    return parts


def _versions() -> dict[str, Any]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {
        "schema": "peerloom/versions/1",
        "packages": found,
        "python": platform.python_version(),
        "system": platform.platform(),
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _json(document: object) -> str:
    return json.dumps(document, indent=1) + "\n"
