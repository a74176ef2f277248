"""A run's result: the whole model as one safetensors file, kept by every member and handed to anyone.

The trainer collects each stage's parameters once at the end; each member then fetches the file and
checks its BLAKE3 hash, so that any of them can hand it over when the others have gone.
"""

from collections.abc import Sequence
from functools import partial

import safetensors
import safetensors.numpy
from blake3 import blake3

from crypto.identity import PeerId
from node.errors import Unreachable
from node.runs.manifest import Run
from node.runs.requests import ExportStage, FetchWeights, fetch
from node.seams import Network, Seams, Storage
from partition.plan.plan import Plan, plan_hash

WEIGHTS_PURPOSE = "weights"
"""DHT records under (this, short run id): one for each peer that keeps the file; the value is its hash."""
EXPORT_SECONDS_MAX = 120.0
FETCH_SECONDS_MAX = 300.0


def weights_name(run: str) -> str:
    """Where a node keeps the weights of a run, in its storage."""
    return f"runs/{run}/model.safetensors"


async def collect(
    run: Run, plan: Plan, live: Sequence[PeerId], me: PeerId, own: bytes | None, seams: Seams
) -> bytes:
    """One safetensors file from the stages, each from its first live replica that answers.

    `own` is the export of the stage that this node hosts itself, if it does.

    Raises:
        Unreachable: no replica of a stage handed its parameters over.
    """
    parts = []
    for number, stage in enumerate(plan.stages):
        if own is not None and me in stage.replicas:
            parts.append(own)
        else:
            replicas = [PeerId(peer) for peer in stage.replicas if peer in live]
            parts.append(await _collect_stage(number, plan, replicas, seams.network))
    return await seams.executor.run(lambda: _join(run, parts))


async def _collect_stage(number: int, plan: Plan, replicas: Sequence[PeerId], network: Network) -> bytes:
    reasons = []
    for peer in replicas:
        try:
            return await fetch(network, peer, ExportStage(plan_hash(plan)), seconds=EXPORT_SECONDS_MAX)
        except Unreachable as error:
            reasons.append(error.detail)
    raise Unreachable("refused", f"stage {number + 1} handed over no parameters: {'; '.join(reasons)}")


def _join(run: Run, parts: Sequence[bytes]) -> bytes:
    tensors = {}
    for part in parts:
        try:
            tensors.update(safetensors.numpy.load(part))
        except (safetensors.SafetensorError, ValueError, TypeError) as error:
            raise Unreachable("refused", f"a stage sent parameters that cannot be read: {error}") from None
    metadata = {"format": "pt", "peerloom.run": run.id.hex(), "peerloom.model": run.manifest.model}
    return safetensors.numpy.save(tensors, metadata=metadata)


async def fetch_weights(seams: Seams, run: str, holders: Sequence[PeerId], digest: str) -> bytes:
    """The file from the first holder whose bytes have the hash `digest` (hex; empty: not known).

    Raises:
        Unreachable: nobody had it.
    """
    reasons = []
    for peer in holders:
        try:
            data = await fetch(seams.network, peer, FetchWeights(run), seconds=FETCH_SECONDS_MAX)
        except Unreachable as error:
            reasons.append(error.detail)
            continue
        if digest and await seams.executor.run(partial(_hash, data)) != digest:
            reasons.append("the bytes have another hash than the run's result")
            continue
        return data
    raise Unreachable("unknown", "; ".join(reasons) or "nobody is known to hold these weights")


def keep(storage: Storage, run: str, data: bytes) -> str:
    """Store a run's weights; their BLAKE3 hash in hex. Raises OSError where the disk is full."""
    storage.write(weights_name(run), data)
    return _hash(data)


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest()
