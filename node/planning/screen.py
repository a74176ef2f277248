"""The screen of a plan: a table of stages, the peers left out, the prediction, and the best change."""

from collections.abc import Mapping
from typing import Any

from node.text import bytes_text, seconds_text, table

BAR_WIDTH = 5
WIDTH = 80
"""Width of the screen in columns. Names that do not fit in their row go into rows below it."""
PEERS_WIDTH_MIN = 8
PEERS_SHOWN_MAX = 4


def plan_lines(document: Mapping[str, Any], *, explain: bool = False) -> list[str]:
    """Return the screen of a `peerloom/plan/1` document. `<` marks the bottleneck."""
    stages = document["stages"]
    longest = max((stage["seconds"] for stage in stages), default=0.0) or 1.0
    rows = [_stage_row(stage, longest, document["slowest"]) for stage in stages]
    header = ("STAGE", "LAYERS", "PEERS", "TIME/MICROBATCH", "MEMORY", "SENDS")
    beside = table(header, [(*row[:2], "", *row[3:]) for row in rows])
    room = max(PEERS_WIDTH_MIN, WIDTH - max(map(len, beside)) + len("PEERS"))
    rows = [part for row in rows for part in _spread(row, room)]
    left_out = len(rows) + 1
    rows += [("-", "-", row["peer"], "", "", "") for row in document["left_out"]]
    lines = table(header, rows)
    # A reason extends over the empty columns to its right.
    column = lines[0].index("TIME/")
    for number, row in enumerate(document["left_out"], left_out):
        lines[number] = f"{lines[number].ljust(column)}no stage: {row['reason']}"
    lines.append(summary(document))
    if (goal := document["goal"]) is not None:
        wanted = f"goal of {goal['samples_per_second']:g} samples/s"
        reached = (
            f"met, {goal['share']:.2g} times" if goal["is_met"] else f"missed, {goal['share']:.2g} of it"
        )
        lines.append(f"{wanted}: {reached}")
    if (change := document["help"]) is not None:
        lines.append(f"what would help most: {change['change']}: {change['gain'] * 100:+.0f} %")
    if (changes := document["what_if"]) is not None:
        gain = document["what_if_gain"]
        told = (
            "nothing fits without the changes"
            if gain is None
            else f"{gain * 100:+.0f} % compared with the plan without"
        )
        lines.append(f"with {changes}: {told}")
    if explain:
        lines += ["", "why", *(f"  {reason}" for reason in document["reasons"])]
        lines += _timeline(document)
    return lines


def _spread(row: tuple[str, ...], room: int) -> list[tuple[str, ...]]:
    """Return a row whose peers fill a column of width `room`; the remaining peers go into rows below it."""
    lines: list[str] = []
    for name in row[2].split(", "):
        if lines and len(lines[-1]) + len(name) + 2 <= room:
            lines[-1] += f", {name}"
        else:
            lines.append(name)
    first, *more = lines
    return [(*row[:2], first, *row[3:]), *(("", "", names, "", "", "") for names in more)]


def _stage_row(stage: Mapping[str, Any], longest: float, slowest: Mapping[str, Any]) -> tuple[str, ...]:
    first, last = stage["first_layer"], stage["last_layer"]
    is_slowest = stage["stage"] == slowest["stage"]
    bar = "#" * round(BAR_WIDTH * stage["seconds"] / longest)
    computes = " <" if is_slowest and slowest["waits_for"] == "compute" else ""
    sends = " <" if is_slowest and slowest["waits_for"] == "link" else ""
    names = stage["peers"]
    shown = ", ".join(names[:PEERS_SHOWN_MAX])
    if len(names) > PEERS_SHOWN_MAX:
        shown += f" and {len(names) - PEERS_SHOWN_MAX} more"
    return (
        str(stage["stage"]),
        f"{first}-{last}" if last > first else str(first),
        shown,
        f"{seconds_text(stage['seconds'])} {bar}{computes}",
        f"{stage['memory_bytes'] / 1e9:.1f}/{stage['memory_offered_bytes'] / 1e9:.1f} GB",
        f"{bytes_text(stage['sent_bytes'])} in {seconds_text(stage['sent_seconds'])}{sends}"
        if stage["sent_bytes"]
        else "-",
    )


def summary(document: Mapping[str, Any]) -> str:
    """Return a text such as `18.4k tokens/s predicted, bubble 11 %, slowest: stage 2 (compute); lab-1 alone:
    9.6k tokens/s`."""
    factor = 1.0
    unit = "samples/s"
    if document["tokens_per_second"] is not None and document["samples_per_second"]:
        factor = document["tokens_per_second"] / document["samples_per_second"]
        unit = "tokens/s"
    slowest = document["slowest"]
    if document["objective"] == "latency":
        head = f"{seconds_text(document['pass_seconds'])} a pass predicted"
    else:
        head = f"{_rate(document['samples_per_second'] * factor)} {unit} predicted"
    if document["objective"] == "energy":
        head += f", {document['joules_per_sample']:.2g} J a sample"
    text = f"{head}, bubble {document['bubble'] * 100:.0f} %, slowest: stage {slowest['stage']} "
    text += f"({'compute' if slowest['waits_for'] == 'compute' else 'link'})"
    if (alone := document["alone"]) is not None:
        text += f"; {alone['peer']} alone: {_rate(alone['samples_per_second'] * factor)} {unit}"
    return text


def _rate(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _timeline(document: Mapping[str, Any], width: int = WIDTH - 21) -> list[str]:
    """Return a step with one line per peer: forward as the micro-batch's last digit, backward as a letter."""
    bars = document["timeline"]
    end = max((bar["end_seconds"] for bar in bars), default=0.0)
    if not end:
        return []
    step = seconds_text(document["step_seconds"])
    lines = ["", f"a step of {step}, forward (in the last stage both) 0-9, backward a-j"]
    for row in document["utilisation"]:
        cells = ["."] * width
        for bar in bars:
            if bar["peer"] == row["peer"]:
                first = int(bar["start_seconds"] / end * width)
                last = max(first + 1, int(bar["end_seconds"] / end * width))
                digit = bar["microbatch"] % 10
                mark = "abcdefghij"[digit] if bar["direction"] == "backward" else str(digit)
                cells[first:last] = mark * (min(last, width) - first)
        lines.append(f"  {row['peer'][:12]:<12} {''.join(cells)} {row['share'] * 100:3.0f} %")
    return lines
