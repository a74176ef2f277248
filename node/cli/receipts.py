"""`peerloom receipts`: this node's work for others' runs, and others' work as measured here."""

from collections.abc import Mapping
from typing import Any

import typer

from node.cli.client import ask
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import flops_text, minute_text, short_id, show, show_json, table
from node.text import bytes_text, counted

WEIGHTS_SHOWN_MAX = 32
AMOUNTS = ("given_flops", "vouched_flops", "witnessed_flops", "averaged_flops")


def receipts(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List the signed receipts of contributions, and the share of this node that each peer has earned."""
    document = ask(find_data_dir(context, data_dir), "receipts")
    if as_json:
        show_json(document)
    else:
        show(receipts_lines(document))


def receipts_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the screen of a `peerloom/receipts/1` document."""
    rows = [_row("for others", row) for row in document["earned"]]
    rows += [_row("measured here", row) for row in document["issued"]]
    if not rows:
        return [
            "no receipt yet: receipts come from runs in which this node works for others, or others for it"
        ]
    first, *lines = table(("RECEIPT", "RUN", "PROVIDER", "WORK", "AT"), rows)
    below = " " * first.index("RUN")
    given = (*document["earned"], *document["issued"])
    lines = [line for row, each in zip(lines, given, strict=True) for line in (row, below + _whose(each))]
    lines = [first, *lines]
    weights = sorted(document["peers"], key=lambda row: -row["share_weight"])[:WEIGHTS_SHOWN_MAX]
    if weights:
        columns = ("PEER", "GAVE THIS NODE", "VOUCHED FOR", "WITNESSED", "AVERAGED", "SHARE HERE")
        lines += ["", *table(columns, [_weight(row) for row in weights])]
    return lines


def work_text(row: Mapping[str, Any]) -> str:
    """Return the work of one row of the document."""
    if row["kind"] == "compute":
        return flops_text(row["flops"])
    what = {"data": "of data", "checkpoint": "of checkpoints", "averaging": "averaged"}[row["kind"]]
    return f"{bytes_text(row['size_bytes'])} {what}"


def _row(kind: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        kind,
        row["run"][:8],
        short_id(row["provider"]),
        work_text(row),
        minute_text(row["at"]),
    )


def _whose(row: Mapping[str, Any]) -> str:
    count = counted(row["microbatches"], "micro-batch", "micro-batches") + ", "
    what = count if row["kind"] == "compute" else ""
    return f"{what}requested by {short_id(row['requester'])}, measured by {short_id(row['measurer'])}"


def _weight(row: Mapping[str, Any]) -> tuple[str, ...]:
    amounts = (flops_text(row[name]) for name in AMOUNTS)
    return (short_id(row["peer"]), *amounts, f"{row['share_weight']:.2f} x")
