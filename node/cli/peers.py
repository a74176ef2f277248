"""`peerloom peers`: the members that this node knows, and lost members with the reason."""

from collections.abc import Mapping
from typing import Any

import typer

from node.cli.client import ask
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import bytes_text, seconds_text, short_address, short_id, show, show_json, table
from node.text import counted, way_text


def peers(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List the members that this node knows, including lost ones."""
    document = ask(find_data_dir(context, data_dir), "peers")
    if as_json:
        show_json(document)
    else:
        show(peers_lines(document))


def peers_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the screen of a `peerloom/peers/1` document."""
    if not document["peers"]:
        return ["no other member yet; the node's screen shows what to type on another machine"]
    header = ("NAME", "PEER", "STATUS", "SINCE", "ADDRESS")
    first, *rows = table(header, [_row(member) for member in document["peers"]])
    below = " " * (first.index("PEER"))
    names = {member["peer"]: member["name"] for member in document["peers"]}
    return [first] + [
        line
        for row, member in zip(rows, document["peers"], strict=True)
        for line in (row, *(below + told for told in _more(member, names)))
    ]


def _row(member: Mapping[str, Any]) -> tuple[str, ...]:
    status = member["status"]
    return (
        member["name"] or "-",
        short_id(member["peer"]),
        status + _sparing(status, member.get("standing")),
        seconds_text(member["since_seconds"]),
        short_address(member["addresses"][0]) if member["addresses"] else "-",
    )


def _more(member: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Return the lines below a member's row: why it is not simply alive, how it is reached, its offer, and
    how it was found."""
    way = _way(member.get("path"), names)
    why = _why(member["status"], member["reason"], member.get("degraded"))
    capacity, found = member["capacity"], member["found_through"]
    offers = _brief(capacity) + _place(member.get("place")) if capacity is not None else ""
    through = f"found through {found}" if found not in ("", "itself") else ""
    return list(filter(None, (why, way, "; ".join(filter(None, (offers, through))))))


def _place(place: Mapping[str, Any] | None) -> str:
    """Return a member's stated location, and the location that round trips suggest instead."""
    if place is None or not (place["claimed"] or place["location"]):
        return ""
    if place["is_doubted"]:
        return f", in {place['location'] or 'an unknown location'} by its round trips, not {place['claimed']}"
    return f", in {place['location']}"


def _way(path: Mapping[str, Any] | None, names: Mapping[str, str]) -> str:
    """Return how a member is reached that cannot simply be dialled, and the measured speed."""
    if path is None or path["way"] == "direct":
        return ""
    relay = path["relay"] or ""
    return f"spoken to {way_text(path, names.get(relay) or short_id(relay))}"


def _why(status: str, reason: str, degraded: Mapping[str, Any] | None) -> str:
    """Return why a member is not simply alive; empty if its status says everything."""
    if degraded is not None:
        return f"{degraded['condition']}: {degraded['reason']}"
    return reason if reason != status else ""


def _sparing(status: str, standing: Mapping[str, Any] | None) -> str:
    """Return a note if a member sends less because its link is metered or its battery is low."""
    return ", sends less" if status == "alive" and standing is not None and standing["sends_less"] else ""


def _brief(capacity: Mapping[str, Any]) -> str:
    cores = counted(capacity["cores"], "core")
    speed = f", {capacity['flops_per_second'] / 1e9:.0f} GFLOP/s" if capacity["flops_per_second"] else ""
    return f"{capacity['device']}, {cores}, {bytes_text(capacity['memory_free_bytes'])} free{speed}"
