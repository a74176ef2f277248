"""`python -m node leave`: the node on this machine says goodbye to its swarm and ends."""

import contextlib
import sys
import time

import typer

from node.cli.client import GoneAway, ask, is_running
from node.cli.place import AsJson, DataDir, find_data_dir
from node.cli.render import short_id, show, show_json
from node.errors import PeerloomError

ENDING_SECONDS_MAX = 15.0
"""A goodbye takes a second; stages may need a few more to end."""
_LOOK_SECONDS = 0.05


def leave(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Let the node say goodbye and end; returns when it has."""
    folder = find_data_dir(context, data_dir)
    document = ask(folder, "status")
    with contextlib.suppress(GoneAway):  # it may end faster than its answer travels
        ask(folder, "leave")
    show(["leaving..."], sys.stderr)
    until = time.monotonic() + ENDING_SECONDS_MAX
    while is_running(folder):
        if time.monotonic() > until:
            raise PeerloomError(
                "the node said goodbye but still runs", "look at its screen; Ctrl-C twice there"
            )
        time.sleep(_LOOK_SECONDS)
    if as_json:
        show_json({"schema": "peerloom/leave/1", "peer": document["peer"], "name": document["name"]})
    else:
        show([f"{document['name']}  {short_id(document['peer'])}  left"])
