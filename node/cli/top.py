"""`peerloom top`: the contents of the web page in a terminal, for machines without a browser.

It asks the node once a second, like `status` and `peers`. One pure function makes the lines.
"""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from node.cli.client import ask, request
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import (
    bytes_text,
    capacity_text,
    data_text,
    seconds_text,
    short_id,
    show,
    show_json,
    table,
)
from node.cli.run_lines import rate_text
from node.cli.screen import EventScreen
from node.errors import UsageError
from node.quantities import read_duration
from node.text import layers_text

RUNS_SHOWN_MAX = 4
EVENT_LINES_MAX = 8
EVENTS_SECONDS = 600.0
EVERY_SECONDS = 1.0
EVERY_SECONDS_MIN = 0.2
"""Minimum interval. Shorter intervals cost the node more, and a user would not see a difference."""
EVERY_SECONDS_MAX = 60.0
BARS = " .:-=+*#%@"
_OVER = ("done", "failed", "stopped")
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


def top(
    context: typer.Context,
    every: Annotated[
        str | None,
        typer.Option(metavar="1s", help="How often to refresh, 200ms to 1m; default: every second."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once, as without a terminal.")] = False,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Show the swarm, runs and newest events, refreshed until Ctrl-C."""
    if every is not None and (once or as_json):
        raise UsageError("top: --every has no effect if the screen is shown only once", "leave --every out")
    pause_seconds = EVERY_SECONDS
    if every is not None:
        from node.config import (
            read_setting,
        )  # imported here so that other commands start faster

        pause_seconds = read_setting("--every", every, _read_pause)
    folder = find_data_dir(context, data_dir)
    curves: dict[str, list[float]] = {}
    while True:
        status, peers = ask(folder, "status"), ask(folder, "peers")
        if as_json:
            show_json({"schema": "peerloom/top/1", "status": status, "peers": peers["peers"]})
            return
        for run in status["runs"]:
            if run["loss"] is not None:
                curves.setdefault(run["run"], []).append(run["loss"])
                del curves[run["run"]][:-200]
        since = {"since": time.time() - EVENTS_SECONDS, "follow": False}
        happened = [reply["event"] for reply in request(folder, "events", since) if "event" in reply]
        size = shutil.get_terminal_size()
        lines = top_lines(status, peers["peers"], happened, curves, size.columns, size.lines)
        if once or not sys.stdout.isatty():
            show(lines)
            return
        sys.stdout.write(_HOME_AND_CLEAR)
        show(lines)
        try:
            time.sleep(pause_seconds)
        except KeyboardInterrupt:
            return


def _read_pause(text: str) -> float:
    seconds = read_duration(text)
    if not EVERY_SECONDS_MIN <= seconds <= EVERY_SECONDS_MAX:
        raise ValueError("want 200ms to 1m")
    return seconds


def top_lines(
    status: Mapping[str, Any],
    peers: Sequence[Mapping[str, Any]],
    happened: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Sequence[float]],
    width: int,
    height: int,
) -> list[str]:
    """Return the screen, at most `width` by `height` characters: this node, runs, members, events."""
    counts = {
        name: sum(peer["status"] == name for peer in peers) for name in ("alive", "suspect", "dead", "left")
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nobody else"
    lines = [
        f"{status['name']}  {short_id(status['peer'])}   up {seconds_text(status['up_seconds'])}, "
        f"swarm {status['swarm']}: {told}"
    ]
    if status["capacity"] is not None:
        lines.append(f"  {capacity_text(status['capacity'])}")
    runs = sorted(status["runs"], key=lambda run: run["status"] in _OVER)[:RUNS_SHOWN_MAX]
    names = {status["peer"]: status["name"]} | {peer["peer"]: peer["name"] for peer in peers}
    for run in runs:
        lines += ["", *_run_lines(run, names, curves.get(run["run"], ()), width)]
    recent = _event_lines(happened)
    room = max(3, height - len(lines) - len(recent) - 5)
    lines += ["", *_member_lines(peers, room)]
    if recent:
        lines += ["", *recent]
    return [line[:width] for line in lines[: max(1, height - 1)]]


def _run_lines(
    run: Mapping[str, Any], names: Mapping[str, str], curve: Sequence[float], width: int
) -> list[str]:
    loss = "-" if run["loss"] is None else f"{run['loss']:.4f}"
    step, last = f"step {run['step']} of {run['steps']}", run["last_step"]
    rate = f"  {rate_text(last)}" if last and last["seconds"] else ""
    bubble = f"  bubble {last['bubble']:.0%}" if last else ""
    title = f"run {run['run'][:8]}  {run['model']} on {data_text(run['data'])}  {run['status']}"
    lines = [f"{title}  {step}  loss {loss}{rate}{bubble}"]
    if len(curve) > 1:
        lines.append(f"  loss {sparkline(curve, max(10, width - 10))}")
    stages = run["plan"]["stages"] if run["plan"] else []
    for number, stage in enumerate(stages):
        who = " ".join(
            (names.get(peer) or short_id(peer)) + " (standby)" * (peer in stage["standbys"])
            for peer in stage["replicas"]
        )
        used = last["utilisation"][number] if last and number < len(last["utilisation"]) else None
        busy = "" if used is None else f"  busy {used:4.0%} {'#' * round(20 * min(1.0, used))}"
        lines.append(f"  stage {number + 1}  {layers_text(*stage['layers'])}  {who}{busy}")
    return lines


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve as one line of characters that every terminal has, for at most the newest `width`
    values."""
    shown = [value for value in values if value == value][-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)


def _member_lines(peers: Sequence[Mapping[str, Any]], room: int) -> list[str]:
    order = {"suspect": 0, "dead": 1, "alive": 2, "left": 3}
    ranked = sorted(peers, key=lambda peer: (order.get(peer["status"], 4), peer["since_seconds"]))
    rows = [
        (
            peer["name"] or "-",
            short_id(peer["peer"]),
            peer["status"] + (f": {peer['reason']}" if peer["reason"] not in ("", peer["status"]) else ""),
            seconds_text(peer["since_seconds"]),
            bytes_text(peer["capacity"]["memory_free_bytes"]) if peer["capacity"] else "-",
        )
        for peer in ranked[:room]
    ]
    if not rows:
        return []
    more = [f"  and {len(ranked) - room} more"] if len(ranked) > room else []
    return [*table(("MEMBER", "PEER", "STATUS", "SINCE", "FREE"), rows), *more]


def _event_lines(happened: Sequence[Mapping[str, Any]]) -> list[str]:
    screen = EventScreen()
    lines = [line for event in happened if event["kind"] != "StepCommitted" for line in screen.lines(event)]
    return lines[-EVENT_LINES_MAX:]
