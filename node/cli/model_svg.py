"""A captured model as a picture: a self-contained SVG, made from a `peerloom/model/1` document.

It shows the chain of layers from top to bottom. The wide bar is time (forward FLOPs), the thin bar is memory
(parameters). The text between two layers says what is sent if a plan cuts there. An arc on the right is a
tensor that is carried past layers that do not use it. An arc on the left is a weight that several layers
share. Bands are stages.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from node.cli.model_summary import count_text, short_name
from node.cli.render import bytes_text

ROW = 44
BAR = 14
THIN = 5
BAR_WIDTH = 360
LETTER = 7.3
"""Approximate width of a monospaced character at 12 pixels."""
TEXT_WIDTH = 180
"""Width of the text to the right of the bars: FLOPs and parameters of a layer."""
ARC_STEP = 14
ARCS_MAX = 8
"""Maximum number of lanes of arcs side by side. Further arcs share lanes, because more lanes would be
unreadable anyway."""
TOP = 76
MARGIN = 16

_STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2933; }
.title { font-size: 16px; font-weight: 600; }
.quiet { fill: #66727f; font-size: 11px; }
.time { fill: #3b7dd8; }
.memory { fill: #e0a030; }
.edge { stroke: #9aa5b1; stroke-width: 1.2; }
.skip { fill: none; stroke: #2f9e6e; stroke-width: 1.6; }
.tied { fill: none; stroke: #b0569a; stroke-width: 1.6; stroke-dasharray: 4 3; }
.band { fill: #f1f5fa; }
.other { fill: #f9f5ec; }
"""


def picture(document: Mapping[str, Any]) -> str:
    """Return the SVG. The same document always gives the same text."""
    layers = document["layers"]
    names = [short_name(layer["name"]) for layer in layers]
    tied = _sides([(tie["layers"][0], tie["layers"][-1]) for tie in document["tied"]])
    skips = _sides([(skip["first"], skip["last"]) for skip in document["skips"]])
    name_x = MARGIN + _arc_width(tied) + LETTER * max(map(len, names), default=0)
    bar_x = name_x + 12
    arc_x = bar_x + BAR_WIDTH + TEXT_WIDTH
    width = arc_x + _arc_width(skips) + MARGIN + 60 * bool(document["stages"])
    height = TOP + ROW * len(layers) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_number(width)} {height}" '
        f'width="{_number(width)}" height="{height}" role="img">',
        f"<title>{escape(document['name'] or 'model')}, layer by layer</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_number(width)}" height="{height}" fill="#ffffff"/>',
        *_heading(document, bar_x),
        *_bands(document["stages"], width),
        *_rows(layers, names, name_x, bar_x),
    ]
    for (first, last, lane), skip in zip(skips, document["skips"], strict=True):
        told = f"{bytes_text(skip['bytes'])} made in layer {first}, used in layer {last}"
        parts.append(_arc("skip", arc_x, 1, first, last, lane, told))
    left = MARGIN + _arc_width(tied)
    for (first, last, lane), tie in zip(tied, document["tied"], strict=True):
        parts.append(_arc("tied", left, -1, first, last, lane, " = ".join(tie["names"])))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _middle(layer: int) -> float:
    return TOP + ROW * layer + BAR / 2 + 6


def _heading(document: Mapping[str, Any], bar_x: float) -> list[str]:
    parameters = document["parameters"]
    sizes = ", ".join(f"{size['name']} {size['shown']}" for size in document["sizes"])
    facts = (
        f"{count_text(parameters['count'])} parameters, {bytes_text(parameters['bytes'])}; "
        f"{len(document['layers'])} layers; at {sizes}"
    )
    return [
        f'<text class="title" x="{MARGIN}" y="26">{escape(document["name"] or "model")}</text>',
        f'<text class="quiet" x="{MARGIN}" y="44">{escape(facts)}</text>',
        f'<rect class="time" x="{_number(bar_x)}" y="55" width="18" height="8"/>',
        f'<text class="quiet" x="{_number(bar_x + 24)}" y="63">forward FLOPs</text>',
        f'<rect class="memory" x="{_number(bar_x + 130)}" y="57" width="18" height="{THIN}"/>',
        f'<text class="quiet" x="{_number(bar_x + 154)}" y="63">parameters</text>',
        *(_arc_legend("skip", bar_x + 250, "carried past layers") if document["skips"] else ()),
        *(_arc_legend("tied", bar_x + 410, "shared weights") if document["tied"] else ()),
    ]


def _arc_legend(kind: str, x: float, told: str) -> list[str]:
    return [
        f'<path class="{kind}" d="M{_number(x)} 59h18"/>',
        f'<text class="quiet" x="{_number(x + 24)}" y="63">{told}</text>',
    ]


def _rows(
    layers: Sequence[Mapping[str, Any]], names: Sequence[str], name_x: float, bar_x: float
) -> list[str]:
    most_flops = max([1, *(layer["forward_flops"] for layer in layers)])
    most_bytes = max([1, *(layer["parameter_bytes"] for layer in layers)])
    parts = []
    for index, (layer, name) in enumerate(zip(layers, names, strict=True)):
        top = TOP + ROW * index + 6
        time = max(1.0, BAR_WIDTH * layer["forward_flops"] / most_flops)
        memory = BAR_WIDTH * layer["parameter_bytes"] / most_bytes
        facts = f"{count_text(layer['forward_flops'], 'FLOP')}, {bytes_text(layer['parameter_bytes'])}"
        facts_x = _number(bar_x + BAR_WIDTH + 10)
        parts += [
            f'<text x="{_number(name_x)}" y="{top + 12}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="time" x="{_number(bar_x)}" y="{top}" width="{_number(time)}" height="{BAR}"/>',
            f'<rect class="memory" x="{_number(bar_x)}" y="{top + BAR}" width="{_number(memory)}" '
            f'height="{THIN}"/>',
            f'<text class="quiet" x="{facts_x}" y="{top + 11}">{escape(facts)}</text>',
        ]
        if index < len(layers) - 1:
            parts += _edge(layer, bar_x, top + BAR + THIN)
    return parts


def _edge(layer: Mapping[str, Any], bar_x: float, top: float) -> list[str]:
    """Return the edge to the next layer, with the bytes sent."""
    count = layer["output_tensors"]
    told = bytes_text(layer["output_bytes"]) + (f" in {count} tensors" if count > 1 else "")
    x, end = bar_x + 4, top + ROW - BAR - THIN
    return [
        f'<path class="edge" fill="none" d="M{_number(x)} {top + 2}V{end - 2}m-3 -5l3 5l3 -5"/>',
        f'<text class="quiet" x="{_number(x + 12)}" y="{top + 16}">{escape(told)}</text>',
    ]


def _bands(stages: Sequence[Mapping[str, Any]], width: float) -> list[str]:
    parts = []
    for stage in stages:
        top = TOP + ROW * stage["first"]
        height = ROW * (stage["last"] - stage["first"] + 1)
        kind = "band" if stage["index"] % 2 == 0 else "other"
        parts += [
            f'<rect class="{kind}" x="4" y="{top}" width="{_number(width - 8)}" '
            f'height="{height - 2}" rx="5"/>',
            f'<text class="quiet" x="{_number(width - MARGIN)}" y="{top + 17}" text-anchor="end">'
            f"stage {stage['index'] + 1}</text>",
        ]
    return parts


def _sides(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return each span with a lane in which it touches no other span, as long as there are enough lanes.
    Short spans get the inner lanes."""
    taken: list[list[tuple[int, int]]] = []
    lanes: dict[int, int] = {}
    order = sorted(
        range(len(spans)), key=lambda place: (spans[place][1] - spans[place][0], spans[place], place)
    )
    for place in order:
        first, last = spans[place]
        free = (
            lane
            for lane, others in enumerate(taken)
            if all(last < other_first or first > other_last for other_first, other_last in others)
        )
        lane = next(free, min(len(taken), ARCS_MAX - 1))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((first, last))
        lanes[place] = lane
    return [(*spans[place], lanes[place]) for place in range(len(spans))]


def _arc_width(arcs: Sequence[tuple[int, int, int]]) -> float:
    return ARC_STEP * (1 + max(lane for _, _, lane in arcs)) + 8 if arcs else 0


def _arc(kind: str, x: float, side: int, first: int, last: int, lane: int, told: str) -> str:
    """Return an arc between two layers along a lane, with rounded corners. `side` is 1 for the right, -1 for
    the left."""
    reach, bend = side * ARC_STEP * (lane + 1), side * 6
    start, end = _middle(first), _middle(last)
    return (
        f'<path class="{kind}" d="M{_number(x)} {_number(start)}h{_number(reach - bend)}q{bend} 0 {bend} 6'
        f'V{_number(end - 6)}q0 6 {-bend} 6h{_number(bend - reach)}"><title>{escape(told)}</title></path>'
    )
