"""`peerloom peers`: the members this node knows, the lost ones with their reason."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from node.cli.client import ask
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import bytes_text, seconds_text, short_address, short_id, show, show_json, table
from node.text import way_text


def peers(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List the members this node knows, the lost ones too."""
    document = ask(find_data_dir(context, data_dir), "peers")
    if as_json:
        show_json(document)
    else:
        show(peers_lines(document))


def peers_lines(document: Mapping[str, Any]) -> list[str]:
    """The screen of a `peerloom/peers/1` document."""
    if not document["peers"]:
        return ["no other member yet; the screen of the node says what to type on another machine"]
    header = ("NAME", "PEER", "STATUS", "SINCE", "FOUND THROUGH", "ADDRESS", "COMPUTE")
    names = {member["peer"]: member["name"] for member in document["peers"]}
    return table(header, [_row(member, names) for member in document["peers"]])


def _row(member: Mapping[str, Any], names: Mapping[str, str]) -> tuple[str, ...]:
    status, reason, capacity = member["status"], member["reason"], member["capacity"]
    return (
        member["name"] or "-",
        short_id(member["peer"]),
        status + _sparing(status, member.get("standing")),
        seconds_text(member["since_seconds"]),
        member["found_through"] or "-",
        _address(member["addresses"]) + _path(member.get("path"), names),
        _brief(capacity) + _place(member.get("place")) if capacity is not None else "-",
    )


def _address(addresses: Sequence[str]) -> str:
    return short_address(addresses[0]) if addresses else "-"


def _place(place: Mapping[str, Any] | None) -> str:
    """Where a member says it is, and what round trips say instead."""
    if place is None or not (place["claimed"] or place["location"]):
        return ""
    if place["is_doubted"]:
        return f", in {place['location'] or 'no known place'} by its round trips, not {place['claimed']}"
    return f", in {place['location']}"


def _path(path: Mapping[str, Any] | None, names: Mapping[str, str]) -> str:
    """By which way it is spoken to, where it cannot simply be dialled, and how fast that was found to be."""
    if path is None or path["way"] == "direct":
        return ""
    relay = path["relay"] or ""
    return f", {way_text(path, names.get(relay) or short_id(relay))}"


def _why(status: str, reason: str, degraded: Mapping[str, Any] | None) -> str:
    """Return why a member is not simply alive; empty where its status says all."""
    if degraded is not None:
        return f"{degraded['condition']}: {degraded['reason']}"
    return reason if reason != status else ""


def _sparing(status: str, standing: Mapping[str, Any] | None) -> str:
    """Whether a member says that it sends less, for its link is metered or its battery low."""
    return ", sends less" if status == "alive" and standing is not None and standing["sends_less"] else ""


def _brief(capacity: Mapping[str, Any]) -> str:
    cores = counted(capacity["cores"], "core")
    speed = f", {capacity['flops_per_second'] / 1e9:.0f} GFLOP/s" if capacity["flops_per_second"] else ""
    return f"{capacity['device']}, {cores}, {bytes_text(capacity['memory_free_bytes'])} free{speed}"
