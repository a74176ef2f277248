"""The output of all commands: plain lines, coloured by rich on a terminal.

A command builds lines of text, and only this file decides how they look. Lines contain texts of other peers
(names, reasons), so unprintable characters are replaced: no peer can control our terminal. It imports only
the standard library; rich is loaded only if there is a terminal.
"""

import csv
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from node.errors import PeerloomError
from node.invocation import SPAN, SPAN_BEGINS, shown, shown_values
from node.text import bytes_text as bytes_text
from node.text import fold
from node.text import seconds_text as seconds_text
from node.text import table as table

_LABEL_WIDTH = 12
WIDTH = 80
"""The width for which tables are made, also assumed for a terminal of unknown width."""
WIDTH_MIN = 40
"""Minimum width for folding. In a narrower terminal, folding leaves no room for words after a label."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
PASTED = ("  do: ", "  look: ", "  On another machine:", "  On this machine:")
"""Beginnings of lines that contain something to type. The terminal wraps these lines itself, so that they can
be copied as one line."""
DATA_HASH_LENGTH = 64
"""Hex digits of a BLAKE3 hash."""

METRICS_FIRST = ("step", "loss", "validation_loss", "validation_accuracy", "loss_held_out", "accuracy")

_STYLES = {
    "good": r"\b(ok|alive|running|done|joined)\b",
    "bad": r"\b(error:|dead|lost|failed|refused|timeout|unknown|wrong key)",
    "doubt": r"\b(suspect|suspected|degraded|placing)\b",
    "dim": r"(\.\.\.[A-Za-z0-9]{6}\b)|^\s+(do|look):",
}
_COLOURS = {"good": "green", "bad": "red", "doubt": "yellow", "dim": "dim"}


def show(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Write lines to `stream` (stdout): plain if it is not a terminal or NO_COLOR is set, else coloured."""
    target = stream if stream is not None else sys.stdout
    given = list(lines)
    if target.isatty():
        width = max(WIDTH_MIN, shutil.get_terminal_size((WIDTH, 0)).columns)
        clean = [_printable(part) for line in given for part in folded(line, width)]
    else:
        clean = [_printable(shown(line)) for line in given]
    if not clean:
        return
    if not target.isatty() or os.environ.get("NO_COLOR"):
        target.write("".join(line + "\n" for line in clean))
    else:
        _show_coloured(clean, target)
    target.flush()


def folded(line: str, width: int) -> list[str]:
    """Return a line folded for a terminal of `width` columns. Commands stay whole, so that they can be
    pasted."""
    if line.startswith(PASTED):
        return [shown(line)]
    whole = SPAN.sub(lambda span: shown(span[0]).replace(" ", _NO_BREAK), line)
    return [part.replace(_NO_BREAK, " ") for part in fold(whole, width)]


def progress(text: str) -> None:
    """Show progress on a terminal's stderr, in one line that the next one overwrites."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K  {_printable(text)}\r")
        sys.stderr.flush()


def show_json(document: Mapping[str, Any]) -> None:
    """Print one document on stdout, as one line."""
    text = json.dumps(document)
    if SPAN_BEGINS in text:
        text = json.dumps(shown_values(document))
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_error(error: PeerloomError) -> None:
    """Show an error on stderr."""
    show(error_lines(error), sys.stderr)


def error_lines(error: PeerloomError) -> list[str]:
    """Return `error: what`, then an indented `do: remedy`: at most three lines."""
    lines = [f"error: {' '.join(error.what.split())}"]
    if error.do is not None:
        # A remedy in columns has a label of its own, as in "look: ... a second one: ...".
        lines.append("  " + (error.do if error.do.startswith("look: ") else f"do: {error.do}"))
    return lines


def _show_coloured(lines: Sequence[str], stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, soft_wrap=True)
    for line in lines:
        text = Text(line)
        for style, pattern in _STYLES.items():
            text.highlight_regex(pattern, _COLOURS[style])
        console.print(text)


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in line).rstrip()


def labelled(label: str, text: str) -> str:
    """Return an indented line under a heading, its label in a column: `listening   192.168.1.20:9747`."""
    return f"  {label:<{_LABEL_WIDTH}}{text}"


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the column names of rows of metrics, the usual ones first."""
    names = dict.fromkeys(name for row in rows for name in row)
    return sorted(names, key=lambda name: name not in METRICS_FIRST)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV (RFC 4180), with a header; missing values are empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns_of(rows) or ["step"], restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def short_id(peer: str) -> str:
    """Return the last six characters of a peer id, `...kVa9Qz`."""
    return "..." + peer[-6:]


def short_address(text: str) -> str:
    """Return a multiaddr as a person types it: `/ip4/10.0.0.5/tcp/9747` becomes `10.0.0.5:9747`."""
    parts = text.split("/")
    if len(parts) < 5 or parts[0]:
        return text
    return f"[{parts[2]}]:{parts[4]}" if parts[1] == "ip6" else f"{parts[2]}:{parts[4]}"


def minute_text(at: str) -> str:
    """Return an RFC 3339 time in local time: `2026-11-28 15:07`."""
    return f"{datetime.fromisoformat(at).astimezone():%Y-%m-%d %H:%M}"


def flops_text(flops: float) -> str:
    """Return an amount of computing with its unit."""
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops / 1e6:.3g} MFLOP" if flops else "-"


def data_text(data: str, reading: Mapping[str, Any] | None = None) -> str:
    """Return the name of a data set: its own name, the name of the file that was read, or a prefix of its
    hash."""
    if len(data) < DATA_HASH_LENGTH:
        return data
    return Path(reading["source"]).name if reading and reading["source"] else f"data {data[:8]}"


def compute_lines(capacity: Mapping[str, Any]) -> list[str]:
    """Return the lines of a machine's capacity: figures, corrected claims, and what is too small."""
    corrected = [labelled("", f"corrected: {what}") for what in capacity.get("corrected", ())]
    small = [labelled("", f"too small: {what}") for what in capacity.get("small", ())]
    return [labelled("compute", capacity_text(capacity)), *corrected, *small]


def capacity_text(capacity: Mapping[str, Any]) -> str:
    """`cpu, 2 cores, 21.3 of 24.0 GB free, 118 GFLOP/s fp32 measured` from a capacity document."""
    free = capacity["memory_free_bytes"] / 1e9
    total = capacity["memory_total_bytes"] / 1e9
    cores = f"{capacity['cores']} core{'' if capacity['cores'] == 1 else 's'}"
    parts = [capacity["device"], cores, f"{free:.1f} of {total:.1f} GB free"]
    if capacity["flops_per_second"]:
        parts.append(f"{capacity['flops_per_second'] / 1e9:.0f} GFLOP/s fp32 measured")
    if capacity["location"]:
        parts.append(f"in {capacity['location']}")
    return ", ".join(parts)
