"""A stage's state from a checkpoint that was cut into different stages: parameters by row, with their
moments.

A parameter has one offset in `parameters` and, unless it is frozen, the same offset in each of the
optimizer's vectors in `moments`. Both cuts determine these offsets, so the state is a list of copies between
arenas.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from crypto.errors import RemoteProtocolError
from node.checkpoints.chunks import TURN_CHUNKS, ArenaReader, Read
from node.protocols.checkpoint import CHUNK_BYTES, Checkpoint, StatePart, chunk_sizes
from node.protocols.manifest import Manifest
from partition.model.cut import cut_layers
from partition.model.graph import Graph, StageGraph
from partition.stage import StageSpecification, vector_bytes
from partition.stage_layout import gradient_bytes, parameter_layout

Arena = Literal["parameters", "moments"]


@dataclass(frozen=True)
class Copy:
    """`length` bytes of an arena, copied from `source` in the arena of the checkpoint's `stage` to `target`
    in this stage's."""

    stage: int
    arena: Arena
    source: int
    target: int
    length: int


@dataclass(frozen=True)
class _Layout:
    """The locations of a stage's rows, each (offset, length, whether it is trained), in bytes, and the
    arenas' sizes."""

    rows: Mapping[int, tuple[int, int, bool]]
    parameters_bytes: int
    vector_bytes: int
    vectors: int


def copies_between(
    checkpoint: Checkpoint, manifest: Manifest, graph: Graph, ranges: Sequence[tuple[int, int]], number: int
) -> tuple[Copy, ...]:
    """Return the copies that produce the state of stage `number` of the cut into `ranges`, in the order of
    its arenas.

    Raises:
        RemoteProtocolError: a cut does not fit the model, or the checkpoint does not have its sizes.
    """
    held = _layouts(checkpoint.run, checkpoint.graph, manifest, graph, checkpoint.ranges)
    for layout, state in zip(held, checkpoint.stages, strict=True):
        sizes = layout.parameters_bytes, layout.vectors * layout.vector_bytes
        if sizes != (state.parameters_bytes, state.moments_bytes):
            raise RemoteProtocolError("a stage's state is larger or smaller than its parameters")
    mine = _layouts(checkpoint.run, checkpoint.graph, manifest, graph, ranges)[number]
    copies: list[Copy] = []
    for row, (target, length, _) in sorted(mine.rows.items(), key=lambda item: item[1]):
        _add(copies, Copy(*_find(held, row, length), target, length))
    for vector in range(mine.vectors):
        for row, (target, length, is_trained) in sorted(mine.rows.items(), key=lambda item: item[1]):
            if is_trained:
                stage, _, source = _find(held, row, length)
                begin = vector * held[stage].vector_bytes, vector * mine.vector_bytes
                _add(copies, Copy(stage, "moments", begin[0] + source, begin[1] + target, length))
    return tuple(copies)


def _find(held: Sequence[_Layout], row: int, length: int) -> tuple[int, Arena, int]:
    """Return the location of a row; a tied row's location is that in the first stage."""
    for stage, layout in enumerate(held):
        if row in layout.rows and layout.rows[row][1] == length:
            return stage, "parameters", layout.rows[row][0]
    raise RemoteProtocolError(f"the checkpoint lacks parameter {row} of its model")


def _add(copies: list[Copy], copy: Copy) -> None:
    """Add a copy, or extend the previous copy if both are contiguous."""
    if copies and copy.length:
        last = copies[-1]
        ends = last.source + last.length, last.target + last.length
        if (last.stage, last.arena, *ends) == (copy.stage, copy.arena, copy.source, copy.target):
            copies[-1] = replace(last, length=last.length + copy.length)
            return
    if copy.length:
        copies.append(copy)


def _layouts(
    run: bytes, name: bytes, manifest: Manifest, graph: Graph, ranges: Sequence[tuple[int, int]]
) -> list[_Layout]:
    try:
        return [_layout(run, manifest, each) for each in cut_layers(graph, name, ranges)]
    except ValueError as error:
        raise RemoteProtocolError(f"the cut does not fit its model: {error}") from None


def _layout(run: bytes, manifest: Manifest, graph: StageGraph) -> _Layout:
    specification = StageSpecification(run, graph, manifest.sizes_max, optimizer=manifest.optimizer)
    rows = {
        slot.row: (slot.begin_bytes, slot.parameter.stored_bytes, slot.parameter.kind != "frozen")
        for slot in parameter_layout(specification)
    }
    vectors = specification.optimizer.moments
    return _Layout(rows, vector_bytes(specification), gradient_bytes(specification), vectors)


def chunks_of(parts: Mapping[int, StatePart], copies: Sequence[Copy]) -> dict[bytes, int]:
    """Return the chunks that contain copied bytes, with their lengths."""
    wanted: dict[bytes, int] = {}
    tables = {
        (stage, arena): list(chunk_sizes(hashes, size))
        for stage, part in parts.items()
        for arena, hashes, size in (
            ("parameters", part.parameters, part.parameters_bytes),
            ("moments", part.moments, part.moments_bytes),
        )
    }
    for copy in copies:
        last = (copy.source + copy.length - 1) // CHUNK_BYTES
        wanted.update(tables[copy.stage, copy.arena][copy.source // CHUNK_BYTES : last + 1])
    return wanted


def recutting(
    parts: Mapping[int, StatePart],
    copies: Sequence[Copy],
    read: Read,
    arenas: tuple[memoryview, memoryview],
) -> Iterator[bool | None]:
    """Copy everything into the arenas, in parts. Yields None between parts, and True at the end.

    Raises:
        RemoteProtocolError: the copies do not exactly fill an arena.
        BlobsMissing: a chunk is not here.
    """
    targets = {"parameters": arenas[0].cast("B"), "moments": arenas[1].cast("B")}
    filled = {name: sum(copy.length for copy in copies if copy.arena == name) for name in targets}
    if any(filled[name] != target.nbytes for name, target in targets.items()):
        raise RemoteProtocolError("the checkpoint fills more or less than the stage's arenas")
    done = 0
    for copy in copies:
        part = parts[copy.stage]
        is_value = copy.arena == "parameters"
        hashes = part.parameters if is_value else part.moments
        size = part.parameters_bytes if is_value else part.moments_bytes
        at = copy.target
        for piece in ArenaReader(hashes, size, read).read(copy.source, copy.length):
            targets[copy.arena][at : at + len(piece)] = piece
            at += len(piece)
            done += 1
            if not done % TURN_CHUNKS:
                yield None
    yield True
