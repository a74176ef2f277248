"""Numbers and tables as plain text, shared by screens and pictures; needs no terminal."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

CLOCK_REMEDY = "timedatectl set-ntp true"
"""The command that sets a clock on Linux."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns as wide as their widest cell, two spaces apart."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
_INDENT_SHARE_MAX = 0.55
"""Share of the width up to which folded text is indented. Deeper text would form a narrow column at the right
edge."""
_INDENT = 2
"""Spaces before folded text that does not follow a label."""


def fold(line: str, width: int) -> list[str]:
    """Return a line as lines of at most `width` columns, broken at spaces.

    The rest continues below the text after the line's last label, such as `  listening   `. A word wider
    than the available width, such as a link, stays whole.
    """
    if len(line) <= width:
        return [line]
    begins = [0, *(gap.end() for gap in _GAP.finditer(line))]
    leading = len(line) - len(line.lstrip())
    indent = max((column for column in begins if column <= width * _INDENT_SHARE_MAX), default=0)
    indent = indent or (leading + _INDENT)
    lines, rest = list[str](), line
    while len(rest) > width:
        cut = rest.rfind(" ", indent + 1, width + 1)
        if cut < 0 and (cut := rest.find(" ", width)) < 0:
            break
        lines.append(rest[:cut].rstrip())
        rest = " " * indent + rest[cut:].lstrip()
    return [*lines, rest]


def admit_text(admit: str, *, is_private: bool) -> str:
    """Return a text about who may take part in an averaging run."""
    match admit, is_private:
        case "invited", _:
            return "only peers that its owner invited take part"
        case "vouched", _:
            return "only peers that its owner, or a participant, invited take part"
        case _, True:
            return "anybody who has the swarm's key and knows the run's name takes part"
        case _:
            return "anybody who knows the run's name takes part"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 peer`, `2 peers`, `0 peers`; `plural` is needed if it is not the noun with an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def bytes_text(count: float) -> str:
    """Return a text such as `21.3 GB`, in powers of ten."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return counted(round(count), "byte") if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def seconds_text(seconds: float) -> str:
    """Return a text such as `0 s`, `1.2 ms`, `3.4 s`, `5 min 10 s`, `2 h 3 min`, `4 days`; integer seconds
    stay whole."""
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 59.95:
        return f"{seconds} s" if isinstance(seconds, int) else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"


def layers_text(first: int, end: int) -> str:
    """Return `layer 3` or `layers 0-2` for the layers from `first` up to, not including, `end`."""
    return f"layers {first}-{end - 1}" if end - 1 > first else f"layer {first}"


def clock_text(seconds: float, peers: int) -> str:
    """Return a text such as `this machine's clock is 2 h 0 min ahead of the median of 5 peers`."""
    way = "ahead of" if seconds > 0 else "behind"
    whose = f"the median of {peers} peers" if peers > 1 else "its only peer's: one of both is wrong"
    return f"this machine's clock is {seconds_text(round(abs(seconds)))} {way} {whose}"


def open_ports_text(ports: Sequence[int]) -> str:
    """Return advice for a node that nobody can reach: `let TCP and UDP port 9747 through ..., or start with
    --announce HOST:PORT`."""
    told = " and ".join(map(str, ports)) or "of this node"
    return f"let TCP and UDP port {told} through firewall and router, or start with --announce HOST:PORT"


def cover_text(covered: Mapping[str, Any]) -> str:
    """Return a text about how well stages are covered, from a `cover_document`."""
    chances = ", ".join(f"stage {number} {chance:.0%}" for number, chance in enumerate(covered["stages"], 1))
    rest = "; ".join(text for text in (covered["unreliable"], covered["reason"]) if text)
    return f"{chances} safe if a holder dies" + (f" ({rest})" if rest else "")


def way_text(path: Mapping[str, Any], relay: str) -> str:
    """Return a text about how a peer is reached if it cannot simply be dialled, with the measured rate.
    `path` is that of a peer in a `peerloom/peers/1` document; `relay` is the relay's name."""
    rate = path.get("bytes_per_second")
    cost = f" at {8 * rate / 1e6:.3g} Mbit/s" if rate else ""
    return ("by a punched path" if path["way"] == "punched" else f"through {relay}") + cost
