"""Tensors of units on the wire and in a batch: checking, joining and splitting them, and turning logits into
answers.

Long tensors must not be processed on the event loop; the caller decides where.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crypto.errors import RemoteProtocolError
from partition.codecs.base import ON_WIRE, Array
from partition.codecs.codec import TensorHeader, Typed, check_length
from partition.model.graph import DataType
from partition.serve.messages import Answer, UnitWork
from partition.serve.sampling import log_sum
from partition.serve.selection import best_logits


def tensor_headers(arrays: Sequence[Typed]) -> tuple[TensorHeader, ...]:
    """Return a message's headers for the tensors that follow it."""
    return tuple(
        TensorHeader(dtype, tuple(array.shape))  # type: ignore[arg-type]  # no boundary is complex
        for dtype, array in arrays
    )


def tensor_bytes(arrays: Sequence[Typed]) -> list[memoryview]:
    """Return the bytes of tensors that follow a message, without a copy if they are contiguous."""
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for _, array in arrays]


def read_tensors(headers: Sequence[TensorHeader], data: memoryview) -> tuple[Typed, ...]:
    """Return received tensors as views of `data`. Raises RemoteProtocolError if the lengths differ."""
    check_length(headers, "raw", len(data))
    found: list[Typed] = []
    begin = 0
    for header in headers:
        part = np.frombuffer(data[begin : begin + header.size_bytes], np.uint8)
        begin += header.size_bytes
        if header.dtype not in ON_WIRE or (header.dtype == "bool" and part.max(initial=0) > 1):
            raise RemoteProtocolError(f"a tensor of {header.dtype} that cannot be read")
        found.append((header.dtype, part.view(ON_WIRE[header.dtype]).reshape(header.shape)))
    return tuple(found)


def check_ids(work: UnitWork, arrays: Sequence[Typed], vocabulary: int) -> None:
    """Raise RemoteProtocolError if a unit for a first stage does not have the stated number of valid
    tokens."""
    if len(arrays) != 1 or arrays[0][0] != "int64" or arrays[0][1].shape != (work.tokens,):
        raise RemoteProtocolError("a unit without its token ids")
    ids = arrays[0][1]
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise RemoteProtocolError("ids that are no tokens of the model")


@dataclass(frozen=True)
class BoundaryForm:
    """The form of a tensor that crosses a boundary: its type, its shape, and the axis of the tokens, whose
    length varies."""

    dtype: DataType
    sides: tuple[int, ...]
    axis: int

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Return the tensor's shape for a number of tokens."""
        return tuple(tokens if axis == self.axis else side for axis, side in enumerate(self.sides))


def check_boundary(work: UnitWork, arrays: Sequence[Typed], form: Sequence[BoundaryForm]) -> None:
    """Raise RemoteProtocolError if a unit's tensors do not fit a boundary."""
    wanted = [(each.dtype, each.shape(work.tokens)) for each in form]
    if [(dtype, array.shape) for dtype, array in arrays] != wanted:
        raise RemoteProtocolError("a unit with different tensors than its boundary has")
    if any(array.dtype.kind == "f" and not np.isfinite(array).all() for _, array in arrays):
        raise RemoteProtocolError("a unit with numbers that are not finite")


def join(units: Sequence[Sequence[Typed]], form: Sequence[BoundaryForm]) -> list[Typed]:
    """Join the tensors of several units into one batch."""
    if len(units) == 1:
        return list(units[0])
    return [
        (each.dtype, np.concatenate([array for _, array in rows], axis=each.axis))
        for each, rows in zip(form, zip(*units, strict=True), strict=True)
    ]


def split(
    arrays: Sequence[Typed], form: Sequence[BoundaryForm], counts: Sequence[int]
) -> list[tuple[Typed, ...]]:
    """Split the tensors of a batch into those of each unit. Raises ValueError if the batch does not have
    these tensors."""
    if [array.shape for _, array in arrays] != [each.shape(sum(counts)) for each in form]:
        raise ValueError("a stage that answers other tensors than it was asked for")
    found, begin = [], 0
    for count in counts:
        taken = slice(begin, begin + count)
        begin += count
        found.append(
            tuple(
                (dtype, array[(slice(None),) * each.axis + (taken,)])
                for each, (dtype, array) in zip(form, arrays, strict=True)
            )
        )
    return found


def answer(work: UnitWork, logits: Array | None) -> tuple[Answer, tuple[Typed, ...]]:
    """Return the answer to a unit of the last stage. As requested, it has for each row the best logits, all
    logits, or the hidden state."""
    if logits is None or not work.wanted:
        return Answer(work.session, work.number), ()
    dtype = "float64" if logits.dtype == np.float64 else "float32"
    rows = logits.astype(dtype, copy=False)
    if work.is_hidden:
        return Answer(work.session, work.number), ((dtype, rows),)  # type: ignore[return-value]  # by how it was made
    sums = tuple(log_sum(row) for row in rows)
    if not work.best:
        return Answer(work.session, work.number, 0, sums), ((dtype, rows),)  # type: ignore[return-value]  # by how it was made
    best = [best_logits(row, work.best) for row in rows]
    ids, values = np.stack([ids for ids, _ in best]), np.stack([found for _, found in best])
    typed: tuple[Typed, ...] = (("int64", ids), ("float64" if dtype == "float64" else "float32", values))
    return Answer(work.session, work.number, work.best, sums), typed
