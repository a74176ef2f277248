"""Trace files: arrivals and departures as CSV with three columns (peer, time in seconds, up or down).

    peer,time,state
    lab-1,0,up
    lab-2,12.5,up
    lab-1,3600,down

The first line may name the columns; empty lines and lines that begin with # are skipped. The lines of each
peer must be in the order of time; lines of different peers may be mixed. Peers are numbered in the order of
their first lines. If a peer's first line says `down`, the peer was up from the start. Not here: how a
simulation uses a trace (`sim.churn.schedule`).
"""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from node.errors import UsageError

TRACE_LINES_MAX = 5_000_000
"""Maximum number of lines: a year of 1,000 peers that change 13 times a day. Each takes some 100 bytes of
memory."""
_HEADER = ("peer", "time")
_STATES = {"up": True, "down": False}


@dataclass(frozen=True)
class TraceFile:
    """A parsed trace. `names` has the peers by number. For each number there are (time, whether up) rows in
    order of time; each row is a change."""

    names: tuple[str, ...]
    changes: tuple[tuple[tuple[float, bool], ...], ...]


def load_trace(path: Path) -> TraceFile:
    """Read a trace file. Raises UsageError, which names the faulty line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return read_trace(file, name=str(path))
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text; is it the right file?") from None


def read_trace(lines: Iterable[str], *, name: str) -> TraceFile:
    """Parse the lines of a trace; `name` is for errors. Raises UsageError."""
    found: dict[str, list[tuple[float, bool]]] = {}
    rows = csv.reader(lines, strict=True)
    try:
        for row in rows:
            if rows.line_num > TRACE_LINES_MAX:
                raise UsageError(f"{name}: more than {TRACE_LINES_MAX} lines")
            cells = [cell.strip() for cell in row]
            if not any(cells) or cells[0].startswith("#") or (not found and tuple(cells[:2]) == _HEADER):
                continue
            _take(found, cells, f"{name}:{rows.line_num}")
    except csv.Error as error:
        raise UsageError(f"{name}:{rows.line_num}: not CSV: {error}") from None
    if not found:
        raise UsageError(f"{name}: it has no line of a peer; expected peer,time,up or down")
    return TraceFile(tuple(found), tuple(tuple(changes) for changes in found.values()))


def _take(found: dict[str, list[tuple[float, bool]]], cells: list[str], where: str) -> None:
    if len(cells) != 3 or not cells[0]:
        raise UsageError(f"{where}: expected three columns: peer, time in seconds, up or down")
    peer, time_text, state = cells
    try:
        time = float(time_text)
    except ValueError:
        time = math.nan
    if not 0 <= time < math.inf:
        raise UsageError(f"{where}: time '{time_text[:20]}': expected seconds since the start, 0 or more")
    if state not in _STATES:
        raise UsageError(f"{where}: '{state[:20]}' is neither up nor down")
    up = _STATES[state]
    changes = found.setdefault(peer, [])
    if changes and time <= changes[-1][0]:
        raise UsageError(
            f"{where}: {peer[:40]} at {time_text} s comes after its line for {changes[-1][0]:g} s"
        )
    if changes and up == changes[-1][1]:
        raise UsageError(f"{where}: {peer[:40]} is {state} already since {changes[-1][0]:g} s")
    changes.append((time, up))
