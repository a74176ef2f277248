"""Exports a checkpoint with its run's graph to a safetensors file with the model's own state-dict names.

The model is cut into the checkpoint's stages, which gives each parameter's location in an arena; its bytes
are read from the chunks on demand.
"""

from collections.abc import Iterator
from functools import lru_cache

from crypto.errors import RemoteProtocolError
from node.checkpoints.chunks import ArenaReader, Read
from node.content.blobs import BlobsMissing
from node.content.safetensors import file_metadata, file_pieces, state_dict
from node.protocols.checkpoint import Checkpoint, check_part, decode_part
from node.protocols.manifest import Manifest
from partition.model.cut import cut_layers
from partition.model.graph import Graph
from partition.stage import StageSpecification
from partition.stage_layout import parameter_layout

CHUNKS_IN_MEMORY_MAX = 16
"""Number of chunks cached in memory. A chunk may contain many small tensors, which are written in a different
order."""


def exporting(
    checkpoint: Checkpoint, manifest: Manifest, graph: Graph, read: Read
) -> Iterator[bytes | memoryview]:
    """Yield the pieces of the file.

    Raises:
        BlobsMissing: a blob of the checkpoint is not here. RemoteProtocolError: it does not fit its graph.
    """
    places = _places(checkpoint, manifest, graph, lru_cache(CHUNKS_IN_MEMORY_MAX)(read))

    def parameter(row: int) -> Iterator[memoryview]:
        arena, start, length = places[row]
        return arena.read(start, length)

    entries = state_dict(graph, checkpoint.step * manifest.microbatches)
    return file_pieces(entries, file_metadata(checkpoint.run, manifest.model), parameter)


def _places(
    checkpoint: Checkpoint, manifest: Manifest, graph: Graph, read: Read
) -> dict[int, tuple[ArenaReader, int, int]]:
    """Return the location of each row of the parameter table: an arena, the first byte and the length."""
    try:
        graphs = cut_layers(graph, checkpoint.graph, checkpoint.ranges)
    except ValueError as error:
        raise RemoteProtocolError(f"the checkpoint does not fit its model: {error}") from None
    places: dict[int, tuple[ArenaReader, int, int]] = {}
    for stage, stage_graph in zip(checkpoint.stages, graphs, strict=True):
        data = read(stage.part)
        if data is None:
            raise BlobsMissing((stage.part,), "it is not on this disk, or was damaged")
        part = decode_part(data)
        check_part(part, stage)
        try:
            layout = StageSpecification(checkpoint.run, stage_graph, manifest.sizes_max)
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from None
        arena = ArenaReader(part.parameters, part.parameters_bytes, read)
        slots = parameter_layout(layout)
        if sum(slot.parameter.stored_bytes for slot in slots) != part.parameters_bytes:
            raise RemoteProtocolError("a stage's state is larger or smaller than its parameters")
        for slot in slots:
            # A tied parameter is taken from the first stage that has it.
            places.setdefault(slot.row, (arena, slot.begin_bytes, slot.parameter.stored_bytes))
    return places
