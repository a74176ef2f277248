"""`peerloom events`: past and future events of the node on this machine."""

import time
from typing import Annotated, Any

import typer

from node.cli.client import request
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import show, show_json
from node.cli.screen import EventScreen
from node.suggest import did_you_mean


def events(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", help="Also show events as they happen.")] = False,
    since: Annotated[
        str, typer.Option("--since", metavar="10m", help="Only events since this long ago.")
    ] = "",
    kind: Annotated[list[str] | None, typer.Option(metavar="KIND", help="Only these kinds.")] = None,
    text: Annotated[
        str, typer.Option("--find", metavar="TEXT", help="Only events that contain this text.")
    ] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Show the events that the node still remembers, the newest 10,000."""
    from node.config import read_setting
    from node.quantities import read_duration

    begin = time.time() - read_setting("--since", since, read_duration) if since else 0.0
    arguments = {"since": begin, "follow": follow, "kinds": _kinds(kind or []), "text": text}
    screen = EventScreen()
    for reply in request(find_data_dir(context, data_dir), "events", arguments):
        if "event" in reply:
            _show(screen, reply["event"], as_json=as_json)


def _kinds(given: list[str]) -> list[str]:
    """Return the names of the given kinds, which may be typed in any case. Raises UsageError."""
    from node.errors import UsageError
    from node.event_kinds import EVENT_KINDS

    known = {name.lower(): name for name in EVENT_KINDS}
    for name in given:
        if name.lower() not in known:
            hint = did_you_mean(name, sorted(known.values()))
            raise UsageError(f"--kind {name}: there is no such kind of event{hint}")
    return [known[name.lower()] for name in given]


def _show(screen: EventScreen, event: Any, *, as_json: bool) -> None:
    if as_json:
        show_json({"schema": "peerloom/event/1", **event})
    else:
        show(screen.lines(event))
