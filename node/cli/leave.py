"""`peerloom leave`: the node on this machine says goodbye to its swarm, and ends."""

import contextlib
import sys
import time
from typing import Any

import typer

from node.cli.client import GoneAway, ask, is_running
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import short_id, show, show_json
from node.errors import PeerloomError

ENDING_SECONDS_MAX = 15.0
"""Time limit. A node forces its own end earlier (`node.process.END_SECONDS_MAX`)."""
_LOOK_SECONDS = 0.05


def leave(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Let the node say goodbye and end; return when it has ended."""
    folder = find_data_dir(context, data_dir)
    document = ask(folder, "status")
    until = time.monotonic() + ENDING_SECONDS_MAX
    show(["leaving..."], sys.stderr)
    answer: dict[str, Any] = {"runs": []}
    with contextlib.suppress(GoneAway):  # the node may end before its answer arrives
        answer = ask(folder, "leave", seconds=ENDING_SECONDS_MAX)
    while is_running(folder):
        if time.monotonic() > until:
            raise PeerloomError(
                f"the node has not ended in {ENDING_SECONDS_MAX:.0f} s",
                "look at its screen, or press Ctrl-C twice there",
            )
        time.sleep(_LOOK_SECONDS)
    if as_json:
        show_json(
            {"schema": "peerloom/leave/1", "peer": document["peer"], "name": document["name"], **answer}
        )
        return
    show([f"{document['name']}  {short_id(document['peer'])}  left", *map(_run_line, answer["runs"])])


def _run_line(row: dict[str, Any]) -> str:
    if row["handed_over"]:
        return f"  run {row['run'][:8]}  handed over"
    return f"  run {row['run'][:8]}  not handed over in time: its others go on as after a crash"
