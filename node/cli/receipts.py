"""`peerloom receipts`: what this node computed for others' runs and others for those it committed."""

from collections.abc import Mapping
from typing import Any

import typer

from node.cli.client import ask
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import flops_text, short_id, show, show_json, table

WEIGHTS_SHOWN_MAX = 32


def receipts(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List signed receipts of contribution, and the share that peers have here by them."""
    document = ask(find_data_dir(context, data_dir), "receipts")
    if as_json:
        show_json(document)
    else:
        show(receipts_lines(document))


def receipts_lines(document: Mapping[str, Any]) -> list[str]:
    """The screen of a `peerloom/receipts/1` document."""
    rows = [_row("for others", row) for row in document["earned"]]
    rows += [_row("measured here", row) for row in document["issued"]]
    if not rows:
        return ["no receipt yet: they come of runs in which this node computes for others, or others for it"]
    header = ("RECEIPT", "RUN", "PROVIDER", "COMPUTED", "MICRO-BATCHES", "REQUESTER", "MEASURED BY", "AT")
    lines = table(header, rows)
    weights = sorted(document["peers"], key=lambda row: -row["share_weight"])[:WEIGHTS_SHOWN_MAX]
    if weights:
        columns = ("PEER", "GAVE THIS NODE", "VOUCHED FOR", "WITNESSED", "SHARE HERE")
        lines += ["", *table(columns, [_weight(row) for row in weights])]
    return lines


def _row(kind: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        kind,
        row["run"][:8],
        short_id(row["provider"]),
        flops_text(row["flops"]),
        str(row["microbatches"]),
        short_id(row["requester"]),
        short_id(row["measurer"]),
        row["at"],
    )


def _weight(row: Mapping[str, Any]) -> tuple[str, ...]:
    amounts = (flops_text(row[name]) for name in ("given_flops", "vouched_flops", "witnessed_flops"))
    return (short_id(row["peer"]), *amounts, f"{row['share_weight']:.2f} x")
