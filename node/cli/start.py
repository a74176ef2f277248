"""`peerloom` without a command: start a node and show its events."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.cli.render import show, show_json
from node.cli.screen import EventScreen
from node.containment import note_lost_line, write_log
from node.eventlog import EventLog
from node.invocation import program_from_anywhere, shown_values


def start(flags: Mapping[str, Any], *, require_join: str | None, record: str | None, as_json: bool) -> int:
    """Run a node until it is stopped; return the exit code.

    Raises PeerloomError. `record` is the file for its recording. `flags` are the settings of `node.config` by
    name, as typed.
    """
    from node import config
    from node.quantities import read_duration

    settings = config.resolve(flags, os.environ)
    seconds = None
    if require_join is not None:
        seconds = config.read_setting("--require-join", require_join, read_duration)

    write_log(settings.data_dir)

    # Imported after the settings are checked, so that the error for a mistyped flag need not wait for torch.
    from node import state_documents
    from node.process import main

    screen = EventScreen(seeds=len(settings.join.seeds), environ=os.environ)

    log = None
    if settings.log.format != "off":
        log = EventLog(settings.data_dir, settings.log.format, settings.log.levels, note_lost_line)

    def report(event: Any) -> None:
        document = state_documents.event_document(event)
        if log is not None:
            log.write(shown_values(document, program_from_anywhere))
        if as_json:
            show_json({"schema": "peerloom/event/1", **document})
        else:
            show(screen.lines(state_documents.screen_document(event)))

    into = None if record is None else Path(record).expanduser()
    return main(settings, require_join_seconds=seconds, report=report, record=into)
