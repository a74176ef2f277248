"""`python -m node` without a command: start a node and show what happens to it."""

import os
from collections.abc import Mapping
from typing import Any

from node.cli.render import show, show_json
from node.cli.screen import EventScreen
from node.containment import write_log


def start(flags: Mapping[str, Any], *, require_join: str | None, as_json: bool) -> int:
    """Run a node until it is told to stop; the exit code. Raises PeerloomError.

    `flags` are the rules of `node.config` by name, as typed.
    """
    from node import config

    settings = config.resolve(flags, os.environ)
    seconds = None
    if require_join is not None:
        seconds = config.read_setting("--require-join", require_join, config.read_duration)

    write_log(settings.data_dir)

    from node import process, state  # after the settings: a mistyped flag need not wait for torch

    screen = EventScreen(seeds=len(settings.join.seeds), environ=os.environ)

    def report(event: Any) -> None:
        document = state.event_document(event)
        if as_json:
            show_json({"schema": "peerloom/event/1", **document})
        else:
            show(screen.lines(document))

    return process.main(settings, require_join_seconds=seconds, report=report)
