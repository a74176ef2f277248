"""A picture of predictions as SVG, made without a drawing library: a confusion matrix, samples with predicted
and true labels, or predicted values against true values."""

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

CLASSES_SHOWN_MAX = 64
SAMPLES_SHOWN_MAX = 32
POINTS_MAX = 2_000
_CELL, _TILE, _LEFT = 28, 72, 90
_STYLE = "font-family='sans-serif' font-size='11'"


def picture(
    *,
    confusion: Array | None,
    inputs: Sequence[Any],
    predicted: Array,
    truth: Array | None,
    words: list[str],
) -> str:
    """Return the picture, with its parts one below the other. `inputs` are the model's, each (N, ...). Evenly
    spread samples are drawn, because data is often sorted by class."""
    parts = []
    if confusion is not None and len(confusion) <= CLASSES_SHOWN_MAX:
        parts.append(_matrix(confusion, words))
    rows = np.unique(np.linspace(0, len(predicted) - 1, min(SAMPLES_SHOWN_MAX, len(predicted)), dtype=int))
    x = np.stack([inputs[0][row] for row in rows]) if len(inputs) == 1 and predicted.ndim == 1 else None
    if x is not None and (images := _images(x)) is not None:
        parts.append(_samples(images, predicted[rows], None if truth is None else truth[rows], words))
    if confusion is None and truth is not None and predicted.size == truth.size:
        parts.append(_scatter(predicted.reshape(-1), truth.reshape(-1)))
    if not parts:
        parts = [("<text x='10' y='20'>nothing to draw: see the file of predictions</text>", 400, 40)]
    top, drawn = 0, []
    for body, _, height in parts:
        drawn.append(f"<g transform='translate(0 {top})'>{body}</g>")
        top += height
    width = max(part[1] for part in parts)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{top}' {_STYLE}>"
    return f"{head}<rect width='100%' height='100%' fill='white'/>{''.join(drawn)}</svg>\n"


def _name(number: int, words: list[str]) -> str:
    return escape(words[number][:12] if 0 <= number < len(words) else str(number))


def _matrix(confusion: Array, words: list[str]) -> tuple[str, int, int]:
    count = len(confusion)
    shares = confusion / np.maximum(1, confusion.sum(1, keepdims=True))
    body = [f"<text x='{_LEFT}' y='16'>confusion matrix: row truth, column prediction</text>"]
    for row in range(count):
        y = 44 + row * _CELL
        body.append(f"<text x='{_LEFT - 6}' y='{y + 18}' text-anchor='end'>{_name(row, words)}</text>")
        middle = _LEFT + row * _CELL + _CELL // 2
        body.append(f"<text x='{middle}' y='38' text-anchor='middle'>{_name(row, words)[:4]}</text>")
        for column in range(count):
            share = float(shares[row, column])
            tone = round(255 * (1 - share))
            fill = f"rgb({tone},{tone},255)" if row == column else f"rgb(255,{tone},{tone})"
            x = _LEFT + column * _CELL
            body.append(
                f"<rect x='{x}' y='{y}' width='{_CELL}' height='{_CELL}' fill='{fill}' stroke='#ddd'>"
                f"<title>{_name(row, words)} taken for {_name(column, words)}</title></rect>"
            )
            if confusion[row, column]:
                ink = "white" if share > 0.6 else "black"
                body.append(
                    f"<text x='{x + _CELL // 2}' y='{y + 18}' text-anchor='middle' fill='{ink}'>"
                    f"{confusion[row, column]}</text>"
                )
    side = count * _CELL
    return "".join(body), _LEFT + side + 20, 44 + side + 20


def _images(x: Array) -> Array | None:
    """Return samples as bytes (N, H, W, 3) if they can be shown as images."""
    if x.ndim == 4 and x.shape[1] in (1, 3) and min(x.shape[2:]) >= 4:
        pixels = x.transpose(0, 2, 3, 1).astype(np.float64)
    elif x.ndim == 3 and min(x.shape[1:]) >= 4:
        pixels = x[..., None].astype(np.float64)
    else:
        return None
    low, high = pixels.min(), pixels.max()
    scaled = (pixels - low) / max(1e-12, high - low) * 255
    return np.broadcast_to(scaled, (*scaled.shape[:3], 3)).astype(np.uint8)


def _samples(images: Array, predicted: Array, truth: Array | None, words: list[str]) -> tuple[str, int, int]:
    body = ["<text x='10' y='16'>samples: prediction, and the true label where it differs</text>"]
    for place, image in enumerate(images):
        x, y = 10 + place % 8 * (_TILE + 8), 26 + place // 8 * (_TILE + 24)
        data = base64.b64encode(png(image)).decode()
        body.append(
            f"<image x='{x}' y='{y}' width='{_TILE}' height='{_TILE}' href='data:image/png;base64,{data}'"
            " style='image-rendering:pixelated'/>"
        )
        said = _name(int(predicted[place]), words)
        is_right = truth is None or int(truth[place]) == int(predicted[place])
        text = said if is_right or truth is None else f"{said}, is {_name(int(truth[place]), words)}"
        colour = "black" if is_right else "#c00"
        body.append(f"<text x='{x}' y='{y + _TILE + 14}' fill='{colour}'>{text}</text>")
    rows = -(-len(images) // 8)
    return "".join(body), 20 + 8 * (_TILE + 8), 30 + rows * (_TILE + 24)


def _scatter(predicted: Array, truth: Array) -> tuple[str, int, int]:
    step = max(1, len(truth) // POINTS_MAX)
    found, wanted = predicted[::step].astype(np.float64), truth[::step].astype(np.float64)
    low, high = min(found.min(), wanted.min()), max(found.max(), wanted.max())
    scale = 320 / max(1e-12, high - low)
    body = [
        "<text x='40' y='16'>predicted (up) against true</text>",
        "<line x1='40' y1='350' x2='360' y2='30' stroke='#bbb'/>",
    ]
    for up, along in zip(found, wanted, strict=True):
        x, y = 40 + (along - low) * scale, 350 - (up - low) * scale
        body.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='#06c' fill-opacity='0.5'/>")
    body.append(f"<text x='40' y='366'>{low:.4g}</text><text x='330' y='366'>{high:.4g}</text>")
    return "".join(body), 400, 380


def png(pixels: Array) -> bytes:
    """Return bytes (H, W, 3) as a PNG."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(pixels))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
