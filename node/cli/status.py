"""`peerloom status`: what the node on this machine is doing."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from node.cli.client import ask
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import (
    compute_lines,
    flops_text,
    labelled,
    seconds_text,
    short_address,
    short_id,
    show,
    show_json,
)
from node.cli.runs import run_text
from node.counter_names import TRAFFIC
from node.text import bytes_text, clock_text, counted, open_ports_text

TRAFFIC_SHOWN = ("datagrams_sent", "datagrams_received", "streams_opened", "streams_served")
"""The counters on this screen; `--json` and `/metrics` have all."""
BROKEN = (
    "broken",
    "cut_short",
    "ended_early",
    "failed",
    "faulty",
    "found_closed",
    "given_up",
    "not_sent",
    "stale",
    "stalled",
    "timed_out",
    "vanished",
)
"""Words in the names of counters that count losses by a network or a peer. All other such counters count
refusals."""
_CIRCUIT = "/p2p-circuit"
"""The value of `crypto.contact.CIRCUIT`. Importing it would slow down this command."""
RUNS_SHOWN_MAX = 16
"""Maximum number of runs on this screen, the newest ones. `runs` lists all known runs, including those from
before a restart."""


def status(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Show this node: addresses, compute, members, runs."""
    document = ask(find_data_dir(context, data_dir), "status")
    if as_json:
        show_json(document)
    else:
        show(status_lines(document))


def status_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the screen of a `peerloom/status/1` document."""
    up = seconds_text(document["up_seconds"])
    private = ", private" if document.get("is_private") else ""
    lines = [
        f"{document['name']}  {short_id(document['peer'])}   up {up}, swarm {document['swarm']}{private}"
    ]
    own = [short_address(address) for address in document["addresses"] if _CIRCUIT not in address]
    lines += [labelled("listening", address) for address in own]
    lines += reach_lines(document, own)
    if (clock := document.get("clock")) is not None and clock["seconds"]:
        lines.append(labelled("clock", clock_text(clock["seconds"], clock["peers"]) + "; theirs is used"))
    if (datagrams := document.get("datagrams")) is not None and datagrams["blocked"]:
        lines.append(labelled("datagrams", datagrams_text(datagrams)))
    if document["capacity"] is not None:
        lines += compute_lines(document["capacity"])
    lines += offer_lines(document.get("offer"))
    lines += follow_lines(document.get("follow"))
    lines += spare_lines(document.get("spare_process"))
    if (place := document.get("place")) is not None and place["is_doubted"]:
        doubt = f"{place['claimed']} is doubted: by its round trips it is in {place['location']}"
        lines.append(labelled("location", doubt))
    if document.get("fences") is not None:
        lines += fence_lines(document["fences"])
    alive, known = document["members_alive"], document["members_known"]
    others = counted(alive, "other") + " alive"
    lines.append(labelled("members", others + (f" of {known} known" if known > alive else "")))
    if document.get("dht") is not None:
        lines.append(labelled("dht", table_text(document["dht"])))
    if (given := document.get("contribution")) and (given["earned_receipts"] or given["issued_receipts"]):
        lines.append(labelled("contributed", contribution_text(given)))
    for join in document["joins"]:
        # A remembered peer that is away does not matter while other peers are alive.
        is_stale = join.get("found_by") == "memory" and alive
        if join["outcome"] != "ok" and not is_stale:
            lines.append(
                labelled("join", f"{join['outcome']}  {short_address(join['address'])}  {join['detail']}")
            )
    lines += [labelled("run", run_text(run)) for run in document["runs"][-RUNS_SHOWN_MAX:]]
    counters = {reason: count for reason, count in document["counters"].items() if count}
    lines += _counted("traffic", {name: counters[name] for name in TRAFFIC_SHOWN if name in counters})
    failures = [name for name in counters if name not in TRAFFIC]
    broken = [name for name in failures if any(word in name for word in BROKEN)]
    lines += _counted("broken", {name: counters[name] for name in broken})
    lines += _counted("refused", {name: counters[name] for name in failures if name not in broken})
    return lines


def offer_lines(document: Mapping[str, Any] | None) -> list[str]:
    """Return the lines for `offer` in a status document: whether the node serves no others, or sends less."""
    if document is None:
        return []
    lines = [] if document["may_serve"] else [labelled("serves", f"nobody else: {document['reason']}")]
    if document.get("sends_less"):
        lines.append(labelled("sends", f"less: {document['sends_less']}"))
    return lines


def follow_lines(document: Mapping[str, Any] | None) -> list[str]:
    """Return the lines for `follow` in a status document: the followed key and its settings."""
    if document is None:
        return []
    name = document["name"] or short_id(document["key"])
    if document["version"] is None:
        return [labelled("follows", f"{name}, of which no settings were found yet")]
    lines = [labelled("follows", f"{name}, version {document['version']} since {document['since'][:16]}Z")]
    lines += [labelled("", setting) for setting in document["settings"]]
    return lines + [labelled("", f"skipped: {skipped}") for skipped in document["skipped"]]


def spare_lines(document: Mapping[str, Any] | None) -> list[str]:
    """Return the lines for `spare_process` in a status document, if a process waits for a stage."""
    if document is None or not document["memory_bytes"]:
        return []
    cost = f"{bytes_text(document['memory_bytes'])} of memory (spare_process = false: none)"
    return [labelled("spare", f"one process is loaded for the next stage and takes {cost}")]


def fence_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the lines for `fences` in a status document: the restrictions of a stage's process on this
    machine."""
    if not document["unfenced"]:
        return [labelled("fences", "a stage is held to its files, memory and processor, and has no network")]
    allowed = document["allow_unfenced"]
    taken = "takes stages of others all the same" if allowed else "takes no stages but of its own runs"
    return [labelled("fences", f"incomplete: {taken}")] + [
        labelled("", f"missing: {what}") for what in document["unfenced"]
    ]


def reach_lines(document: Mapping[str, Any], own: Sequence[str]) -> list[str]:
    """Return the lines that say whether others can reach the `own` addresses."""
    found = document.get("reachability")
    if found is None:
        return []
    lines = [labelled("reachable", reachable_text(found))]
    if found["reachable"] is False and not found.get("relays"):
        ports = {int(address.rpartition(":")[2]) for address in own}
        lines.append(labelled("", open_ports_text(sorted(ports))))
    texts = filter(None, (found.get("mapping"), found.get("nat")))
    return [*lines, *(labelled("router", text) for text in texts)]


def reachable_text(document: Mapping[str, Any]) -> str:
    """Return the text for `reachability` in a status document."""
    if document["reachable"] is None and not document.get("relays"):
        return f"not known yet ({document['asked']} of {counted(document['of'], 'other')} have tried)"
    if document["reachable"]:
        return "yes"
    if document.get("relays"):
        relays = " and ".join(map(short_id, document["relays"]))
        return f"through {relays}, which carry what others say to it: no other node gets through directly"
    return "no: no other node gets through to this one. It takes no stages of others, and trains alone"


def datagrams_text(document: Mapping[str, Any]) -> str:
    """Return the text for `datagrams` in a status document."""
    blocked, of = len(document["blocked"]), document["of"]
    peers = counted(of, "peer")
    return f"do not get through to {blocked} of {peers}: streams are used; let UDP of the port through"


def table_text(document: Mapping[str, Any]) -> str:
    """Return the text for `dht` in a status document."""
    contacts, nodes = counted(document["contacts"], "contact"), counted(document["nodes_estimated"], "node")
    text = f"{contacts} of about {nodes}, "
    text += f"{counted(document['records'], 'record')} held, {document['own_records']} own"
    if document["records_short"]:
        text += f"; {counted(document['records_short'], 'store')} kept by too few"
    return text


def contribution_text(document: Mapping[str, Any]) -> str:
    """Return the text for `contribution` in a status document: this node's work for others, and their work
    for it."""
    text = "nothing for others yet"
    if document["earned_receipts"]:
        text = f"{flops_text(document['earned_flops'])} for others"
        text += f" and {bytes_text(document['earned_bytes'])}" if document["earned_bytes"] else ""
        text += f", by {counted(document['earned_receipts'], 'receipt')}"
    if document["issued_receipts"]:
        text += f"; measured of others: {flops_text(document['issued_flops'])}"
        text += f" and {bytes_text(document['issued_bytes'])}" if document["issued_bytes"] else ""
    return text


def _counted(label: str, counters: Mapping[str, int]) -> list[str]:
    text = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counters.items())
    return [labelled(label, text)] if text else []
