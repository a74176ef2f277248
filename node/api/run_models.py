"""A run's weights as files that can be served: the weights of its result, or of its newest checkpoint.

The graph is the run's own, and its chunks are fetched by their hashes from members of the run. If the run
trained a Hugging Face folder, the kept files of that folder define how to tokenize text.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.checkpoints.replication import CheckpointReplicator
from node.checkpoints.service import Checkpoints
from node.checkpoints.store import StoredCheckpoint
from node.commands import Commands, LocalNode, find_run
from node.content.kept_folders import write_kept_folder
from node.content.stored_values import with_values
from node.errors import PeerloomError, RunFailed, Unreachable, UsageError
from node.serving.sources import GRAPH_SUFFIX, VALUES_SUFFIX, ServedFiles
from partition.model.graph import Graph, encode_graph
from partition.run.states import OVER


class RunsNode(LocalNode, Protocol):
    """The part of `node.runtime.Node` that is used here."""

    checkpoints: Checkpoints
    copies: CheckpointReplicator


@asynccontextmanager
async def run_files(node: RunsNode, name: str) -> AsyncIterator[ServedFiles]:
    """Yield the files of a run's newest weights, which exist while a node takes them. Raises UsageError if
    there is no such run, and RunFailed if nobody delivers its weights."""
    here = await node.checkpoints.call(node.checkpoints.store.all)
    run = find_run(sorted({*node.state.runs, *(kept.run for kept in here)}), name)
    kept, holders = await _newest(node, run)
    executor = node.seams.executor
    with TemporaryDirectory() as folder:
        state = Path(folder) / "state.safetensors"
        graph_file = Path(folder) / f"{kept.manifest.model.rpartition('/')[2] or 'run'}{GRAPH_SUFFIX}"
        try:
            requester = PeerId(kept.checkpoint.manifest.author)
            graph = await node.runs.models.get(kept.checkpoint.graph, [requester, *holders])
            step = await _write_state(node, run, kept, graph, state, holders)
            values = Path(folder) / f"values{VALUES_SUFFIX}"
            found = await executor.run(partial(with_values, graph, state, values), apart=True)
            await executor.run(partial(graph_file.write_bytes, encode_graph(found)))
        except (Unreachable, RemoteProtocolError) as error:
            raise RunFailed(f"run {run[:8]} cannot be served: {error}", "see: `peerloom runs`") from None
        except OSError as error:
            raise RunFailed(f"no room for the weights of run {run[:8]}: {error.strerror or error}") from None
        text = await executor.run(partial(_kept_text, node, run, Path(folder) / "text"))
        called = f"{graph_file.stem.removesuffix(GRAPH_SUFFIX)}-{run[:8]}"
        yield ServedFiles(graph_file, values, called, text, kept.checkpoint.run, step)


async def _newest(node: RunsNode, run: str) -> tuple[StoredCheckpoint, list[PeerId]]:
    """Return the newest checkpoint of a run, from this node or from the checkpoint's keepers, and the
    keepers."""
    own = await node.checkpoints.call(partial(node.checkpoints.store.find, run))
    offers = {peer: offer for peer, offer in (await node.copies.holders(run)).items() if peer != node.peer}
    holders = list(offers)
    newer = max((offer.step for offer in offers.values()), default=-1)
    if own is not None and own.checkpoint.step >= newer:
        return own, holders
    try:
        return await node.copies.fetch(run, None, holders), holders
    except Unreachable as error:
        if own is not None:
            return own, holders
        raise RunFailed(
            f"no checkpoint of run {run[:8]} is available: {error.detail}",
            "fetch its result instead: `peerloom runs fetch RUN --out FILE`",
        ) from None
    except OSError as error:
        raise RunFailed(f"the checkpoint could not be stored: {error.strerror or error}") from None


async def _write_state(
    node: RunsNode, run: str, kept: StoredCheckpoint, graph: Graph, state: Path, holders: list[PeerId]
) -> int:
    """Write a run's newest state dict to a file; return its step. Raises Unreachable, OSError,
    RemoteProtocolError."""
    view = node.state.runs.get(run)
    if view is None or view.status in OVER:
        try:
            await Commands(node).fetch(run, str(state))
            return kept.manifest.steps
        except PeerloomError:
            pass  # the run failed, or nobody keeps its result, so use its newest checkpoint
    await node.checkpoints.export(kept, graph, state, holders)
    return kept.checkpoint.step


def _kept_text(node: RunsNode, run: str, into: Path) -> str:
    """Write the kept files of the folder that a run trained. Return where they are, or "" if none are
    kept."""
    into.mkdir()
    try:
        write_kept_folder(node.seams.storage, run, into)
    except UsageError:
        return ""
    return str(into)
