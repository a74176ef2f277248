"""The log of a node: every event as one line in a rotated file of the data folder, as text or JSON.

Areas have levels: `swarm=warning,runs=info`. Each event belongs to one area and has a level. Events hold
values for screens, so the log has no keys, tokens or message contents. Errors with their tracebacks are in
`errors.log` (`node.containment`).
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import TextIOWrapper
from logging import ERROR, INFO, WARNING, Formatter, LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

LOG_NAME = "events.log"
LOG_BYTES_MAX = 8 << 20
LOGS_KEPT = 3
"""Number of older files that are kept."""
Format = Literal["off", "text", "json"]
AREAS = ("node", "swarm", "runs", "alerts")
LEVELS: Mapping[str, int] = {"info": INFO, "warning": WARNING, "error": ERROR, "off": ERROR + 10}
_AREAS = {
    "Member": "swarm",
    "Join": "swarm",
    "Identity": "swarm",
    "Reachability": "swarm",
    "PendingConnection": "swarm",
    "Alert": "alerts",
}
_NODE = ("Node", "Capacity", "Fences", "Page")
_WARNINGS = frozenset(
    {"IdentityShared", "MemberLost", "MemberSuspected", "ReplicaDropped", "StrangerRefused", "AlertRaised"}
)


def area_of(kind: str) -> str:
    """Return the part of the node that an event of this kind is about."""
    if kind.startswith(_NODE):
        return "node"
    return next((area for start, area in _AREAS.items() if kind.startswith(start)), "runs")


def level_of(event: Mapping[str, Any]) -> int:
    """Return the severity of an event: a failed run is an error; a loss, a suspicion or an alert is a
    warning."""
    if event["kind"] == "RunEnded" and event["outcome"] == "failed":
        return ERROR
    return WARNING if event["kind"] in _WARNINGS else INFO


def read_levels(text: str) -> dict[str, int]:
    """Parse `warning` for all areas, or `swarm=warning,runs=info`. Raises ValueError."""
    levels = dict.fromkeys(AREAS, INFO)
    for part in filter(None, text.split(",")):
        area, sign, level = part.strip().rpartition("=")
        if level not in LEVELS or (sign and area not in AREAS):
            raise ValueError(f"want {'|'.join(LEVELS)}, or areas such as swarm=warning ({', '.join(AREAS)})")
        levels |= dict.fromkeys([area] if sign else AREAS, LEVELS[level])
    return levels


class EventLog:
    """Writes event documents to `events.log` in a folder. If the disk fails, lines are lost but the node goes
    on."""

    def __init__(
        self,
        folder: Path,
        style: Format,
        levels: Mapping[str, int],
        failed: Callable[[BaseException], None] = lambda _error: None,
        *,
        bytes_max: int = LOG_BYTES_MAX,
    ) -> None:
        """`failed` is called for each line that could not be written. A file has at most `bytes_max`
        bytes."""
        self._levels = levels
        self._line: Callable[[Mapping[str, Any]], str] = _json if style == "json" else _text
        self._file = LogFile(folder / LOG_NAME, bytes_max, LOGS_KEPT, failed)
        self._file.setFormatter(Formatter("%(message)s"))

    def write(self, event: Mapping[str, Any]) -> None:
        """Write one event, if its area is logged at its level."""
        level = level_of(event)
        if level >= self._levels[area_of(event["kind"])]:
            line = self._line(event)
            self._file.handle(LogRecord("peerloom", level, "", 0, line, (), None))

    def close(self) -> None:
        self._file.close()


class LogFile(RotatingFileHandler):
    """A log file of limited size, with older files of the same size. Only this user can read it, and it is
    never opened through a symbolic link that somebody planted. A line that cannot be written is lost, and
    `failed` gets the error."""

    def __init__(
        self, path: Path, bytes_max: int, kept: int, failed: Callable[[BaseException], None]
    ) -> None:
        super().__init__(path, maxBytes=bytes_max, backupCount=kept, encoding="utf-8", delay=True)
        self._failed = failed

    def handleError(self, record: LogRecord) -> None:  # noqa: ARG002, N802 - the name and shape of logging's
        """Report a line that cannot be written to `failed`. By default logging would print a traceback for
        each."""
        error = sys.exc_info()[1]
        stream, self.stream = self.stream, None  # logging reopens it
        if stream is not None:
            with suppress(OSError):  # flushing its buffer may fail again
                stream.close()
        if error is not None:
            self._failed(error)

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return TextIOWrapper(open(os.open(self.baseFilename, flags, 0o600), "wb"), encoding="utf-8")


def _name_of(level: int) -> str:
    return next(name for name, number in LEVELS.items() if number == level)


def _json(event: Mapping[str, Any]) -> str:
    about = {"area": area_of(event["kind"]), "level": _name_of(level_of(event))}
    return json.dumps({"schema": "peerloom/event/1", **about, **event})


def _text(event: Mapping[str, Any]) -> str:
    hidden = ("kind", "at", "at_seconds")
    fields = " ".join(f"{name}={json.dumps(value)}" for name, value in event.items() if name not in hidden)
    return (
        f"{event['at']} {_name_of(level_of(event)):<7} {area_of(event['kind']):<6} {event['kind']} {fields}"
    )
