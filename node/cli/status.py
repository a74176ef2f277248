"""`python -m node status`: what the node on this machine is doing."""

from collections.abc import Mapping
from typing import Any

import typer

from node.cli.client import ask
from node.cli.place import AsJson, DataDir, find_data_dir
from node.cli.render import (
    capacity_text,
    labelled,
    seconds_text,
    short_address,
    short_id,
    show,
    show_json,
)
from node.cli.runs import run_text


def status(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Show this node: addresses, compute, members, runs."""
    document = ask(find_data_dir(context, data_dir), "status")
    if as_json:
        show_json(document)
    else:
        show(status_lines(document))


def status_lines(document: Mapping[str, Any]) -> list[str]:
    """The screen of a `peerloom/status/1` document."""
    up = seconds_text(document["up_seconds"])
    lines = [f"{document['name']}  {short_id(document['peer'])}   up {up}, swarm {document['swarm']}"]
    lines += [labelled("listening", short_address(address)) for address in document["addresses"]]
    if document["capacity"] is not None:
        lines.append(labelled("compute", capacity_text(document["capacity"])))
    alive, known = document["members_alive"], document["members_known"]
    lines.append(labelled("members", f"{alive} alive" + (f" of {known} known" if known > alive else "")))
    for join in document["joins"]:
        if join["outcome"] != "ok":
            lines.append(
                labelled("join", f"{join['outcome']}  {short_address(join['address'])}  {join['detail']}")
            )
    lines += [labelled("run", run_text(run)) for run in document["runs"]]
    refused = [f"{reason} {count}" for reason, count in document["counters"].items() if count]
    if refused:
        lines.append(labelled("refused", ", ".join(refused)))
    return lines
