"""A run's result: the whole model as one safetensors file, kept by every member and sent to anyone who asks.

The trainer collects each stage's parameters once at the end. Each member then fetches the file and checks its
BLAKE3 hash, so that any of them can deliver it when the others are gone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import safetensors
import trio
from blake3 import blake3

from crypto.identity import PeerId
from node.content.safetensors import file_bytes, file_metadata, file_pieces, state_dict
from node.errors import Unreachable
from node.protocols.calls import fetch, fetch_into
from node.protocols.manifest import Run
from node.protocols.runs import BLOB_BYTES_MAX, ExportStage, FetchWeights
from node.seams import Draft, Network, Seams, Storage
from partition.model.graph import ITEM_BYTES, Graph
from partition.model.safetensors_layout import SAFETENSORS_TYPES
from partition.model.sizes import shape_of
from partition.plan.plan import Plan, plan_hash

WEIGHTS_PURPOSE = "weights"
"""Purpose of DHT records. For each run, by its short id, each peer that keeps the file has one record, whose
value is the file's hash."""
EXPORT_OVERHEAD_BYTES = 1 << 16
EXPORT_ROW_BYTES = 512
"""Room for a row of the header in addition to the name in it: type, shape and offsets."""
FETCH_SECONDS_MAX = 300.0
HASHED_BYTES = 4 << 20
"""Number of bytes of a file read at once."""


def weights_name(run: str) -> str:
    """Return the storage name of a run's weights."""
    return f"runs/{run}/model.safetensors"


def export_bytes_max(graph: Graph) -> int:
    """Return the maximum size of one stage's export, which is the size of the whole model."""
    names = [row.names[0] for row in graph.parameters] + [
        row.names[0] for row in graph.constants if row.names
    ]
    size = sum(prod(shape_of(row.type, ())) * ITEM_BYTES[row.type.dtype] for row in graph.parameters)
    size += sum(len(constant.data) for constant in graph.constants)
    return size + EXPORT_ROW_BYTES * len(names) + sum(map(len, names)) + EXPORT_OVERHEAD_BYTES


async def fetch_stage(plan: Plan, peer: PeerId, network: Network, *, seconds: float, bytes_max: int) -> bytes:
    """Return the export of the stage that a peer holds under this plan. Raises Unreachable."""
    request, most = ExportStage(plan_hash(plan)), min(bytes_max, BLOB_BYTES_MAX)
    return await fetch(network, peer, request, seconds=seconds, bytes_max=most)


def join_stages(run: Run, graph: Graph, parts: Sequence[bytes]) -> bytes:
    """Return one safetensors file of the whole model from the exports of its stages.

    It has the model's whole state dict: parameters and statistics under all their names, named constants, and
    the number of micro-batches that each batch norm has seen.

    Raises:
        Unreachable: an export cannot be read, or a parameter is missing.
    """
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for part in parts:
        try:
            tensors = safetensors.deserialize(part)  # type: ignore[no-untyped-call]  # the package has no stub
        except (safetensors.SafetensorError, ValueError, TypeError) as error:
            raise Unreachable("refused", f"a stage sent parameters that cannot be read: {error}") from None
        for name, tensor in tensors:
            # A tied parameter is taken from the first stage that has it.
            found.setdefault(name, (tensor["dtype"], list(tensor["shape"]), bytes(tensor["data"])))
    for row in graph.parameters:
        # Stages send it under the first of its names.
        tensor = found.get(row.names[0])
        if tensor is None or tensor[:2] != (SAFETENSORS_TYPES[row.type.dtype], list(shape_of(row.type, ()))):
            raise Unreachable("refused", f"no stage delivered {row.names[0]} with the model's type and shape")
    entries = state_dict(graph, run.manifest.steps * run.manifest.microbatches)
    metadata = file_metadata(run.id, run.manifest.model)
    return b"".join(file_pieces(entries, metadata, lambda row: [found[graph.parameters[row].names[0]][2]]))


def result_bytes(run: Run, graph: Graph) -> int:
    """Return the size of a run's result, computed from its model."""
    entries = state_dict(graph, run.manifest.steps * run.manifest.microbatches)
    return file_bytes(entries, file_metadata(run.id, run.manifest.model))


async def fetch_weights(
    seams: Seams,
    run: str,
    holders: Sequence[PeerId],
    digest: str,
    draft: Callable[[], Draft],
    bytes_max: int = BLOB_BYTES_MAX,
) -> int:
    """Write the file from the first holder whose bytes have the hash `digest` (hex; empty: unknown) to a
    `draft`, and commit it; return its length. It is hashed while it arrives, and is never completely in
    memory.

    Raises:
        Unreachable: no holder had it; "busy": all holders were busy.
        OSError: the disk is full.
    """
    reasons, codes = [], set[str]()
    for peer in holders:
        file = _Hashed(await seams.executor.run(draft))
        take = partial(_take, file, seams)
        request = FetchWeights(run)
        try:
            await fetch_into(
                take, seams.network, peer, request, seconds=FETCH_SECONDS_MAX, bytes_max=bytes_max
            )
            if digest in ("", file.digest.hexdigest()):
                await seams.executor.run(file.draft.commit)
                return file.size
            reasons.append("the bytes have a different hash from the run's result")
            codes.add("refused")
        except Unreachable as error:
            reasons.append(error.detail)
            codes.add(error.reason)
        finally:
            with trio.CancelScope(shield=True):
                await seams.executor.run(file.draft.discard)
    code = "busy" if codes == {"busy"} else "unknown"
    raise Unreachable(code, "; ".join(reasons) or "no peer is known to hold these weights")


class _Hashed:
    """A draft, and the hash of the bytes written to it."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.digest = blake3()
        self.size = 0

    def write(self, data: bytes) -> None:
        self.draft.write(data)
        self.digest.update(data)
        self.size += len(data)


async def _take(file: _Hashed, seams: Seams, chunk: bytes) -> None:
    await seams.executor.run(partial(file.write, chunk))


def has_result(storage: Storage, run: str) -> bool:
    """Return whether this node has a run's weights."""
    return storage.read_part(weights_name(run), 0, 1) is not None


def keep(storage: Storage, run: str, data: bytes) -> str:
    """Store a run's weights; return their BLAKE3 hash in hex.

    An existing file stays, and its hash is returned. Raises OSError if the disk is full.
    """
    if has_result(storage, run):
        return digest_of(storage, run)
    storage.write(weights_name(run), data)
    return _hash(data)


def digest_of(storage: Storage, run: str) -> str:
    """Return the BLAKE3 hash (hex) of this node's copy of a run's weights."""
    digest, offset = blake3(), 0
    while data := storage.read_part(weights_name(run), offset, HASHED_BYTES):
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest()
