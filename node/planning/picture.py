"""The picture of a plan as SVG: stages as bars above the peers that hold them, links, and a step below."""

from collections.abc import Mapping
from html import escape
from typing import Any

from node.planning.screen import summary
from node.text import bytes_text, seconds_text

WIDTH, MARGIN = 960, 24
BAR_TOP, BAR_HEIGHT = 78, 64
PEER_TOP, PEER_HEIGHT, PEER_GAP = 178, 34, 6
LANE = 20
PEERS_DRAWN_MAX = 8
_STYLE = """
text{font:12px system-ui,sans-serif;fill:#1c2733}.quiet{fill:#5b6b7a;font-size:11px}.title{font-size:16px;
font-weight:600}.stage{fill:#cfe0f5;stroke:#6f94c4}.slow{fill:#f7d4c1;stroke:#cf7b4d}.peer{fill:#fff;
stroke:#9fb0c0}.memory{fill:#dfe8d8}.link{stroke:#6f94c4;stroke-width:2;fill:none}.wait{stroke:#cf7b4d;
stroke-width:3}.forward{fill:#6f94c4}.backward{fill:#94b77c}.both{fill:#a08cc0}.lane{fill:#f2f5f8}
@media(prefers-color-scheme:dark){svg{background:#151b22}text{fill:#e4eaf0}.quiet{fill:#9aa9b8}
.stage{fill:#27405f}.slow{fill:#6b3d24}.peer{fill:#1f2831}.memory{fill:#2e3d27}.lane{fill:#1d252d}}
"""


def plan_svg(document: Mapping[str, Any]) -> str:
    """Draw a `peerloom/plan/1` document."""
    stages = document["stages"]
    rows = max(min(len(stage["peers"]), PEERS_DRAWN_MAX) for stage in stages)
    lanes_top = PEER_TOP + rows * (PEER_HEIGHT + PEER_GAP) + 44
    lanes = document["utilisation"][: 3 * PEERS_DRAWN_MAX]
    left_out = document["left_out"][:PEERS_DRAWN_MAX]
    height = lanes_top + LANE * len(lanes) + 30 + 18 * len(left_out) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><style>{_STYLE}</style>',
        _text(MARGIN, 30, document["model"], "title"),
        _text(MARGIN, 52, summary(document), "quiet"),
        *_stages(document),
        *_timeline(document, lanes, lanes_top),
    ]
    top = lanes_top + LANE * len(lanes) + 34
    for number, row in enumerate(left_out):
        parts.append(_text(MARGIN, top + 18 * number, f"{row['peer']}: {row['reason']}", "quiet"))
    return "".join([*parts, "</svg>\n"])


def _stages(document: Mapping[str, Any]) -> list[str]:
    """Return the bars of the stages side by side, with widths according to their layers but never too narrow
    to read."""
    stages = document["stages"]
    gap = 84 if len(stages) <= 6 else 24
    counts = [stage["last_layer"] - stage["first_layer"] + 1 for stage in stages]
    room = WIDTH - 2 * MARGIN - gap * (len(stages) - 1)
    least = min(104.0, room / len(stages))
    spare = max(0.0, room - least * len(stages))
    parts: list[str] = []
    x = float(MARGIN)
    for number, (stage, count) in enumerate(zip(stages, counts, strict=True)):
        width = least + spare * count / sum(counts)
        parts += _stage(stage, x, width, document["slowest"])
        if number + 1 < len(stages):
            parts += _link(stage, x + width, gap, document["slowest"])
        x += width + gap
    return parts


def _stage(stage: Mapping[str, Any], x: float, width: float, slowest: Mapping[str, Any]) -> list[str]:
    is_slow = stage["stage"] == slowest["stage"] and slowest["waits_for"] == "compute"
    first, last = stage["first_layer"], stage["last_layer"]
    layers = f"layers {first}-{last}" if last > first else f"layer {first}"
    parts = [
        _box("slow" if is_slow else "stage", x, BAR_TOP, width, BAR_HEIGHT),
        _text(x + 8, BAR_TOP + 20, f"stage {stage['stage']}"),
        _text(x + 8, BAR_TOP + 37, layers, "quiet"),
        _text(x + 8, BAR_TOP + 54, seconds_text(stage["seconds"]), "quiet"),
    ]
    names = stage["peers"]
    for row, name in enumerate(names[:PEERS_DRAWN_MAX]):
        top = PEER_TOP + row * (PEER_HEIGHT + PEER_GAP)
        share = min(1.0, stage["memory_bytes"] / max(1, stage["memory_offered_bytes"]))
        told = (
            name
            if row < PEERS_DRAWN_MAX - 1 or len(names) == PEERS_DRAWN_MAX
            else f"and {len(names) - row} more"
        )
        parts += [
            _box("peer", x, top, width, PEER_HEIGHT),
            _box("memory", x + 1, top + 1, max(0.0, (width - 2) * share), PEER_HEIGHT - 2),
            _text(x + 8, top + 15, told[: int(width / 7)]),
            _text(x + 8, top + 28, f"{stage['memory_bytes'] / 1e9:.1f} GB", "quiet"),
        ]
    return parts


def _link(stage: Mapping[str, Any], x: float, gap: float, slowest: Mapping[str, Any]) -> list[str]:
    waits = stage["stage"] == slowest["stage"] and slowest["waits_for"] == "link"
    middle = BAR_TOP + BAR_HEIGHT / 2
    line = (
        f'<path class="link{" wait" if waits else ""}" '
        f'd="M{x + 3:.1f} {middle:.1f}h{gap - 8:.1f}m-5 -4l5 4l-5 4"/>'
    )
    if gap < 60:
        return [line]
    return [
        line,
        _text(x + gap / 2, middle - 8, bytes_text(stage["sent_bytes"]), "quiet", anchor="middle"),
        _text(x + gap / 2, middle + 18, seconds_text(stage["sent_seconds"]), "quiet", anchor="middle"),
    ]


def _timeline(document: Mapping[str, Any], lanes: list[Mapping[str, Any]], top: float) -> list[str]:
    bars = document["timeline"]
    end = max((bar["end_seconds"] for bar in bars), default=0.0) or 1.0
    left, right = MARGIN + 92, WIDTH - MARGIN - 44
    scale = (right - left) / end
    parts = [_text(MARGIN, top - 10, f"a step of {seconds_text(document['step_seconds'])}", "quiet")]
    # The last stage runs its backward pass right after the forward pass.
    last_stage = len(document["stages"])
    for direction, x in (("forward", right - 186), ("backward", right - 118), ("both", right - 42)):
        parts += [_box(direction, x, top - 19, 10, 10), _text(x + 15, top - 10, direction, "quiet")]
    for number, lane in enumerate(lanes):
        y = top + LANE * number
        parts += [
            _text(MARGIN, y + 12, lane["peer"][:13]),
            _box("lane", left, y, right - left, LANE - 4),
            _text(right + 8, y + 12, f"{lane['share'] * 100:.0f} %", "quiet"),
        ]
        for bar in bars:
            if bar["peer"] == lane["peer"]:
                width = max(0.6, (bar["end_seconds"] - bar["start_seconds"]) * scale - 0.6)
                kind = "both" if bar["stage"] == last_stage else bar["direction"]
                parts.append(_box(kind, left + bar["start_seconds"] * scale, y, width, LANE - 4))
    return parts


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'


def _text(x: float, y: float, told: str, kind: str = "", anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(told)}</text>'
