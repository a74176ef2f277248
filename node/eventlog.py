"""The log of a node: every event as one line in a file of the data folder, text or JSON by choice, rotated.

Areas have levels: `swarm=warning,runs=info`. An event has the area of its part of the node, and a level.
What is logged is what events hold, values for screens: no key, no token, no content of a message. Errors with
their tracebacks are in `errors.log` (`node.containment`).
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
"""Files of this size beside the newest."""
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
    """The part of the node that an event of this kind is about."""
    if kind.startswith(_NODE):
        return "node"
    return next((area for start, area in _AREAS.items() if kind.startswith(start)), "runs")


def level_of(event: Mapping[str, Any]) -> int:
    """Return what an event means: a run that failed is an error, a loss a warning."""
    if event["kind"] == "RunEnded" and event["outcome"] == "failed":
        return ERROR
    return WARNING if event["kind"] in _WARNINGS else INFO


def read_levels(text: str) -> dict[str, int]:
    """`warning` for all areas, or `swarm=warning,runs=info`. Raises ValueError."""
    levels = dict.fromkeys(AREAS, INFO)
    for part in filter(None, text.split(",")):
        area, sign, level = part.strip().rpartition("=")
        if level not in LEVELS or (sign and area not in AREAS):
            raise ValueError(f"want {'|'.join(LEVELS)}, or areas such as swarm=warning ({', '.join(AREAS)})")
        levels |= dict.fromkeys([area] if sign else AREAS, LEVELS[level])
    return levels


class EventLog:
    """Writes event documents to `events.log` in a folder. A disk that fails loses lines, not the node."""

    def __init__(
        self,
        folder: Path,
        style: Format,
        levels: Mapping[str, int],
        failed: Callable[[BaseException], None] = lambda _error: None,
        *,
        bytes_max: int = LOG_BYTES_MAX,
    ) -> None:
        """`failed` is told of each line that could not be written. A file has at most `bytes_max`."""
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
        """Write no more."""
        self._file.close()


class LogFile(RotatingFileHandler):
    """A log of at most so many bytes, with older ones of that size beside it: for this user only, and no link
    that somebody has planted. A line that cannot be written is lost; `failed` is told why."""

    def __init__(
        self, path: Path, bytes_max: int, kept: int, failed: Callable[[BaseException], None]
    ) -> None:
        super().__init__(path, maxBytes=bytes_max, backupCount=kept, encoding="utf-8", delay=True)
        self._failed = failed

    def handleError(self, record: LogRecord) -> None:  # noqa: ARG002, N802 - the name and shape of logging's
        """Go on without the line. By itself logging prints a traceback for each."""
        error = sys.exc_info()[1]
        stream, self.stream = self.stream, None  # logging opens it again
        if stream is not None:
            with suppress(OSError):  # what is left in its buffer
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
