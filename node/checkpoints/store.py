"""The checkpoints in one data folder: which are stored, how much of each, and which may be removed.

    runs/<run>/checkpoints/<step>             the hash of the checkpoint's blob
    runs/<run>/best                           which step validated best, if the run keeps its best state
    pins/checkpoints/<run>/<step>/manifest    pins that blob
    pins/checkpoints/<run>/<step>/<stage>     pins a stage's list of chunks and the chunks themselves

A stage is pinned while its chunks are still arriving, and before the whole checkpoint has a name; only the
first file shows that there is a checkpoint. The newest `KEPT` checkpoints of a run stay, and the one that
validated best. A node may hold only some stages of a checkpoint.

All methods wait for the disk and none uses the network, so a command can use them without a running node.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, peer_text
from node.checkpoints.export import exporting
from node.content.graphs import graph_name
from node.content.safetensors import writing
from node.documents import rfc3339
from node.protocols.checkpoint import (
    Checkpoint,
    StageState,
    StatePart,
    check_part,
    decode_part,
    encode_part,
    read_checkpoint,
    stage_state,
)
from node.protocols.manifest import Manifest, run_text
from node.seams import Storage
from node.storage.blobs import HASH_BYTES, Blobs
from partition.model.check import check_graph
from partition.model.graph import Graph, decode_graph, graph_hash
from partition.plan.plan import Hash, StepNumber
from partition.steps.validation import Series

KEPT = 2
"""Number of checkpoints kept of each run: the newest, and the previous one in case the newest proves
damaged."""
SERIES_MAX = 8
"""Number of validations that a member remembers; returning to a checkpoint rarely takes back more."""
BEST_RECORD_MAX = 1_024
_PINS = "checkpoints"
_MANIFEST = "manifest"


class Best(msgspec.Struct, frozen=True, array_like=True):
    """The newest validations of a run, at most one per step, and the name and step of the best state that is
    complete as a checkpoint."""

    series: Annotated[tuple[Series, ...], msgspec.Meta(max_length=SERIES_MAX)] = ()
    checkpoint: Hash | None = None
    step: StepNumber = 0


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that is stored here, completely or in part: `stages_here` are the complete stages.

    `name` is the hash of its blob, `author` its signer.
    """

    name: bytes
    author: PeerId
    manifest: Manifest
    checkpoint: Checkpoint
    stages_here: tuple[int, ...]

    @property
    def run(self) -> str:
        """The run's short id."""
        return run_text(self.checkpoint.run)

    @property
    def is_whole(self) -> bool:
        """Whether it can be restored or exported from this disk alone."""
        return len(self.stages_here) == len(self.checkpoint.stages)


class CheckpointStore:
    """The checkpoints of one data folder. Runs are named by their short ids (`manifest.run_text`)."""

    def __init__(self, storage: Storage, blobs: Blobs) -> None:
        self.blobs = blobs
        self.graphs: frozenset[bytes] = frozenset()
        """The graphs that the stored checkpoints need, which must stay. Known after `recover`."""
        self._storage = storage
        self._graph_of: dict[tuple[str, int], bytes] = {}

    # Reading

    def steps(self, run: str) -> list[tuple[int, bytes]]:
        """Return the steps with a checkpoint, and the checkpoints' hashes, oldest first."""
        return [(step, name) for step, name in self._records(f"runs/{run}").get(run, ())]

    def all(self) -> list[StoredCheckpoint]:
        """Return all readable checkpoints of all runs, ordered by run and step."""
        return [
            kept
            for run, records in sorted(self._records("runs").items())
            for step, name in records
            if (kept := self._kept(run, step, name)) is not None
        ]

    def find(self, run: str, step: int | None = None) -> StoredCheckpoint | None:
        """Return the checkpoint of a step, or the newest; None if it is not here or cannot be read."""
        for each, name in reversed(self.steps(run)):
            kept = self._kept(run, each, name) if step in (None, each) else None
            if kept is not None:
                return kept
        return None

    def stage_pins(self, run: str, step: int) -> dict[int, tuple[bytes, ...]]:
        """Return, for each stage with a pinned part, the pinned hashes; the first is that of the list of
        chunks."""
        found: dict[int, tuple[bytes, ...]] = {}
        for label in self.blobs.labels(f"{_PINS}/{run}/{step}/"):
            stage, hashes = label.rpartition("/")[2], self.blobs.pinned(label)
            if stage.isdecimal() and hashes:
                found[int(stage)] = hashes
        return found

    def _records(self, under: str) -> dict[str, list[tuple[int, bytes]]]:
        records: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for file in self._storage.sizes(under):
            parts = file.split("/")
            if len(parts) != 4 or parts[2] != "checkpoints" or not parts[3].isdecimal():
                continue
            name = self._storage.read(file)
            if name is not None and len(name) == HASH_BYTES:
                records[parts[1]].append((int(parts[3]), name))
        return {run: sorted(each) for run, each in records.items()}

    def _kept(self, run: str, step: int, name: bytes) -> StoredCheckpoint | None:
        data = self.blobs.get(name)
        try:
            author, manifest, checkpoint = read_checkpoint(data or b"")
        except RemoteProtocolError:
            return None  # damaged, or of a different version
        here = [
            stage
            for stage, hashes in self.stage_pins(run, step).items()
            if stage < len(checkpoint.stages)
            and hashes[0] == checkpoint.stages[stage].part
            and not self.blobs.missing(hashes)
        ]
        return StoredCheckpoint(name, author, manifest, checkpoint, tuple(here))

    # Adding

    def expect_part(
        self, run: str, step: int, stage: int, state: StageState, data: bytes, *, is_guest: bool
    ) -> StatePart:
        """Pin a stage whose list of chunks is `data` and whose chunks arrive later; return the list.

        Raises:
            RemoteProtocolError: the list does not match the checkpoint.
            NoRoom, OSError.
        """
        part = decode_part(data)
        check_part(part, state)
        with self.blobs.hold():
            if self.blobs.put(data) != state.part:
                raise RemoteProtocolError(
                    "the list of chunks has a different hash from that in its checkpoint"
                )
            self._pin(run, step, stage, state, part, is_guest=is_guest)
        return part

    def _pin(
        self, run: str, step: int, stage: int, state: StageState, part: StatePart, *, is_guest: bool
    ) -> None:
        self.blobs.pin(
            _label(run, step, stage), {state.part: state.part_bytes} | part.chunks, is_guest=is_guest
        )

    def add_part(
        self, run: str, step: int, stage: int, part: StatePart, layers: tuple[int, int], *, is_guest: bool
    ) -> StageState:
        """Pin a stage whose chunks are all stored; return its entry for a checkpoint.

        Raises NoRoom, OSError. Call it within the same `Blobs.hold` as storing the chunks.
        """
        data = encode_part(part)
        state = stage_state(part, self.blobs.put(data), len(data), layers)
        self._pin(run, step, stage, state, part, is_guest=is_guest)
        return state

    def drop(self, run: str, step: int) -> None:
        """Release everything that is pinned for a step, and remove its checkpoint."""
        self._storage.delete(_file(run, step))
        self._graph_of.pop((run, step), None)
        for label in self.blobs.labels(f"{_PINS}/{run}/{step}/"):
            self.blobs.unpin(label)

    def drop_stage(self, run: str, step: int, stage: int) -> None:
        """Release one stage."""
        self.blobs.unpin(_label(run, step, stage))

    def add(self, data: bytes, *, is_guest: bool) -> bytes:
        """Add a verified checkpoint whose wanted stages are pinned here; return its hash.

        The run's oldest surplus checkpoints are removed. Raises NoRoom, OSError, RemoteProtocolError.
        """
        _, _, checkpoint = read_checkpoint(data)
        run, step = run_text(checkpoint.run), checkpoint.step
        with self.blobs.hold():
            name = self.blobs.put(data)
            self.blobs.pin(f"{_PINS}/{run}/{step}/{_MANIFEST}", {name: len(data)}, is_guest=is_guest)
            for hashes in self.stage_pins(run, step).values():
                self.blobs.sync(hashes)
            self._storage.write(_file(run, step), name)
        self._graph_of[run, step] = checkpoint.graph
        self.prune(run, step)
        return name

    # Removing

    def prune(self, run: str, asked_for: int | None = None) -> int:
        """Release the old checkpoints of a run. The newest, the one asked for and the best stay. Parts of
        older steps that never became a checkpoint are also released. Return how many bytes were freed.
        """
        steps = [step for step, _ in self.steps(run)]
        kept = {*steps[-KEPT:], asked_for, *self._best_steps(run)}
        held = {*steps, *_steps_of(self.blobs.labels(f"{_PINS}/{run}/"))}
        for step in held - kept:
            if steps and step < steps[-1]:
                self.drop(run, step)
        self.graphs = frozenset(self._graph_of.values())
        return self.blobs.sweep()

    def _best_steps(self, run: str) -> set[int]:
        """Return the steps whose state is the best so far, or was the best until then. The earlier best is
        included because the newer one may not be complete yet."""
        data = self._storage.read(best_name(run))
        try:
            best: Best = Best() if data is None else decode(data, Best, bytes_max=BEST_RECORD_MAX)
        except RemoteProtocolError:
            return set()
        return {best.step, *(series.best_step for series in best.series)}

    def recover(self) -> int:
        """Clean up after a start: release parts that never became a checkpoint and remove unpinned blobs, and
        pin again what a damaged pin held. Return the freed bytes."""
        records = {run: dict(each) for run, each in self._records("runs").items()}
        for label in self.blobs.labels(f"{_PINS}/"):
            run, step = label.split("/")[1:3]
            if not step.isdecimal() or int(step) not in records.get(run, {}):
                self.blobs.unpin(label)
        for run, steps in records.items():
            for number, name in steps.items():
                self._hold_again(run, number, name)
        self._graph_of = {(kept.run, kept.checkpoint.step): kept.checkpoint.graph for kept in self.all()}
        self.graphs = frozenset(self._graph_of.values())
        return self.blobs.sweep()

    def _hold_again(self, run: str, step: int, name: bytes) -> None:
        kept, data = self._kept(run, step, name), self.blobs.get(name)
        if kept is None or data is None:
            return
        label = f"{_PINS}/{run}/{step}/{_MANIFEST}"
        if self.blobs.pinned(label) is None:
            self.blobs.pin(label, {name: len(data)})
        held = self.stage_pins(run, step)
        for stage, state in enumerate(kept.checkpoint.stages):
            part = self.blobs.get(state.part) if stage not in held else None
            if part is not None:
                # For a stage that was never pinned here, any entry is accepted.
                with suppress(RemoteProtocolError):
                    self.expect_part(run, step, stage, state, part, is_guest=False)

    def check_held(self, checkpoint: Checkpoint) -> bool:
        """Return whether the pinned parts of a step (at least one stage) belong to this checkpoint."""
        held = self.stage_pins(run_text(checkpoint.run), checkpoint.step)
        for stage, (name, *_) in held.items():
            if stage >= len(checkpoint.stages) or checkpoint.stages[stage].part != name:
                return False
            try:
                check_part(decode_part(self.blobs.get(name) or b""), checkpoint.stages[stage])
            except RemoteProtocolError:
                return False
        return bool(held)

    # Exporting

    def graph(self, name: bytes) -> Graph | None:
        """Return a model's graph from this disk; None if it is missing or damaged."""
        data = self._storage.read(graph_name(name))
        if data is None or graph_hash(data) != name:
            return None
        graph = decode_graph(data)
        check_graph(graph)
        return graph

    def exporting(self, kept: StoredCheckpoint, graph: Graph, path: Path) -> Iterator[int | None]:
        """Write a checkpoint's model to a safetensors file. Yields None between steps, and its length at the
        end.

        Raises:
            BlobsMissing, RemoteProtocolError (see `node.checkpoints.export`), OSError.
        """
        pieces = exporting(kept.checkpoint, kept.manifest, graph, self.blobs.get)
        yield from writing(path, pieces)


def document(kept: StoredCheckpoint, copies: int | None) -> dict[str, Any]:
    """Return one checkpoint as `checkpoint list --json` shows it; `copies` is the number of peers that claim
    to hold it."""
    checkpoint = kept.checkpoint
    return {
        "run": kept.run,
        "model": kept.manifest.model,
        "step": checkpoint.step,
        "steps": kept.manifest.steps,
        "samples": checkpoint.samples,
        "size_bytes": checkpoint.state_bytes,
        "stages": len(checkpoint.stages),
        "stages_here": [stage + 1 for stage in kept.stages_here],
        "copies": copies,
        "created": rfc3339(checkpoint.created_milliseconds / 1000),
        "author": peer_text(kept.author),
        "checkpoint": kept.name.hex(),
    }


def best_name(run: str) -> str:
    """Return the storage name of a node's record of a run's validations."""
    return f"runs/{run}/best"


def _label(run: str, step: int, stage: int) -> str:
    return f"{_PINS}/{run}/{step}/{stage}"


def _file(run: str, step: int) -> str:
    return f"runs/{run}/checkpoints/{step}"


def _steps_of(labels: list[str]) -> set[int]:
    return {int(step) for label in labels if (step := label.split("/")[2]).isdecimal()}
