"""The data of a checkpoint: a signed manifest that names a list of chunks for each stage. No I/O.

    Fact(author, Checkpoint, signature)          the checkpoint's blob; its BLAKE3 hash is its name
      StageState, one for each stage             which layers, how large, the hash of ...
        StatePart                                ... a blob: the hashes of the chunks of two arenas
          chunk                                  a blob: CHUNK_BYTES of `parameters` or `moments`

Chunks lie at fixed offsets in each arena, so unchanged parts of the next checkpoint (frozen layers, untouched
rows) have the same hashes, and cost neither disk nor network again.

Everything has one encoding: decoding refuses bytes that encoding would not produce. A checkpoint of an 8B
model in 8 stages with Adam is a manifest of 2 kB, 8 lists of 393 kB each, and 96 GB of chunks.
"""

from collections.abc import Iterator
from typing import Annotated, TypeVar

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PEER_ID_BYTES, SIGNATURE_BYTES, PeerId
from node.protocols.manifest import MANIFEST_BYTES_MAX, Manifest, Run, check_run
from node.storage.blobs import BLOB_BYTES_MAX, HASH_BYTES, split
from partition.plan.plan import HEIGHT_MAX, STAGES_MAX, STEPS_MAX, Hash
from partition.stage import SAMPLES_MAX, VECTOR_BYTES_MAX

T = TypeVar("T")

CHECKPOINT_VERSION = 1
CHUNK_BYTES = 1 << 20
"""Size of a chunk. It is part of the format, because different chunk borders give different hashes. Measured:
with a quarter of it, storing and fetching take 1.6 times as long. Four times as much is no faster, and costs
more when a single value has changed."""
PART_BYTES_MAX = 3 * (VECTOR_BYTES_MAX // CHUNK_BYTES) * HASH_BYTES + 256
"""Maximum size of a list of chunks: for 16 GiB of parameters with two moments each, 1.5 MiB."""
_STAGE_BYTES_MAX = 160
CHECKPOINT_BYTES_MAX = MANIFEST_BYTES_MAX + STAGES_MAX * _STAGE_BYTES_MAX + 1_024
"""Maximum size of a checkpoint's blob, with its signature and the run's manifest: 12 kB for 64 stages."""
CHECKPOINT_PURPOSE = "checkpoint"

assert PART_BYTES_MAX <= BLOB_BYTES_MAX, "a list of chunks must fit one blob"

ArenaBytes = Annotated[int, msgspec.Meta(ge=0, le=VECTOR_BYTES_MAX)]
MomentsBytes = Annotated[int, msgspec.Meta(ge=0, le=2 * VECTOR_BYTES_MAX)]
Layer = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
Number = Annotated[int, msgspec.Meta(ge=0, le=SAMPLES_MAX)]


class StatePart(msgspec.Struct, frozen=True, array_like=True):
    """The content of a stage's arenas: the concatenated hashes of their chunks, and the length of each arena.

    All chunks except the last one of an arena have `CHUNK_BYTES`. `digest` is the BLAKE3 hash of all the
    parameters, the same that `partition.stage.Applied` carries. Numbers are little-endian, as in the arenas.
    """

    parameters_bytes: ArenaBytes
    moments_bytes: MomentsBytes
    digest: Hash
    parameters: bytes
    moments: bytes

    def __post_init__(self) -> None:
        for size, hashes in ((self.parameters_bytes, self.parameters), (self.moments_bytes, self.moments)):
            if len(hashes) != HASH_BYTES * -(-size // CHUNK_BYTES):
                raise ValueError("the number of chunks does not match the part's size")

    @property
    def chunks(self) -> dict[bytes, int]:
        """Return every chunk once, with its length."""
        sizes = dict(chunk_sizes(self.parameters, self.parameters_bytes))
        return sizes | dict(chunk_sizes(self.moments, self.moments_bytes))


class StageState(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a checkpoint: layers from `first_layer` to before `last_layer`, and the blob of its
    StatePart."""

    first_layer: Layer
    last_layer: Layer
    part: Hash
    part_bytes: Annotated[int, msgspec.Meta(ge=1, le=PART_BYTES_MAX)]
    parameters_bytes: ArenaBytes
    moments_bytes: MomentsBytes
    digest: Hash

    @property
    def state_bytes(self) -> int:
        """The size of the stage's arenas."""
        return self.parameters_bytes + self.moments_bytes


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """A run's whole state after `step` committed steps and `samples` samples.

    `manifest` is the run as signed by its requester. `plan` and `height` describe the plan that was in force
    at that time.
    """

    version: Annotated[int, msgspec.Meta(ge=CHECKPOINT_VERSION, le=CHECKPOINT_VERSION)]
    run: Hash
    manifest: Fact
    graph: Hash
    plan: Hash
    height: Annotated[int, msgspec.Meta(ge=0, lt=HEIGHT_MAX)]
    step: Number
    samples: Number
    stages: Annotated[tuple[StageState, ...], msgspec.Meta(min_length=1, max_length=STAGES_MAX)]
    created_milliseconds: Number

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The layers of each stage, in the form that `partition.model.cut.cut_layers` takes."""
        return [(stage.first_layer, stage.last_layer) for stage in self.stages]

    @property
    def state_bytes(self) -> int:
        """The size of all stages' arenas."""
        return sum(stage.state_bytes for stage in self.stages)


def encode_part(part: StatePart) -> bytes:
    """Return a part's blob."""
    return encode(part)


def decode_part(data: bytes) -> StatePart:
    """Decode a part's blob. Raises RemoteProtocolError."""
    return _decode_canonical(data, StatePart, PART_BYTES_MAX, "a list of chunks")


def stage_state(part: StatePart, name: bytes, size: int, layers: tuple[int, int]) -> StageState:
    """Return a checkpoint's entry for a part, whose blob has this name and size."""
    return StageState(*layers, name, size, part.parameters_bytes, part.moments_bytes, part.digest)


def check_part(part: StatePart, stage: StageState) -> None:
    """Check that a part matches its checkpoint's entry in what the hash does not cover. Raises
    RemoteProtocolError."""
    said = (stage.parameters_bytes, stage.moments_bytes, stage.digest)
    if (part.parameters_bytes, part.moments_bytes, part.digest) != said:
        raise RemoteProtocolError("the list of chunks does not match its checkpoint")


def sign_checkpoint(signer: Signer, checkpoint: Checkpoint) -> bytes:
    """Return the blob of a checkpoint signed by this peer."""
    data = encode(signer.sign(CHECKPOINT_PURPOSE, encode(checkpoint)))
    check_checkpoint(signer, data)
    return data


def check_checkpoint(signer: Signer, data: bytes) -> tuple[PeerId, Run, Checkpoint]:
    """Return a checkpoint with its author and its run, after verifying both signatures. Raises
    RemoteProtocolError.

    This does not show whether the author was in the run.
    """
    fact, checkpoint = _decode_fact(data)
    author = signer.check(CHECKPOINT_PURPOSE, fact)
    run = check_run(signer, checkpoint.manifest)
    if run.id != checkpoint.run:
        raise RemoteProtocolError("the checkpoint and its manifest belong to different runs")
    if run.manifest.graph_hash != checkpoint.graph:
        raise RemoteProtocolError("the checkpoint's graph differs from its run's graph")
    # the manifest's own limit does not apply: a revision may let the run end later
    if checkpoint.step > STEPS_MAX:
        raise RemoteProtocolError("the checkpoint's step is beyond the last step that a run may have")
    return author, run, checkpoint


def read_checkpoint(data: bytes) -> tuple[PeerId, Manifest, Checkpoint]:
    """Decode a checkpoint from this node's own disk. Signatures are not checked here, because they were
    verified on arrival.

    Raises:
        RemoteProtocolError: the checkpoint has an unknown version, or is damaged.
    """
    fact, checkpoint = _decode_fact(data)
    manifest: Manifest = decode(checkpoint.manifest.body, Manifest, bytes_max=MANIFEST_BYTES_MAX)
    return PeerId(fact.author), manifest, checkpoint


def _decode_fact(data: bytes) -> tuple[Fact, Checkpoint]:
    fact: Fact = _decode_canonical(data, Fact, CHECKPOINT_BYTES_MAX, "a checkpoint")
    checkpoint: Checkpoint = _decode_canonical(fact.body, Checkpoint, CHECKPOINT_BYTES_MAX, "a checkpoint")
    for each in (fact, checkpoint.manifest):
        if len(each.author) != PEER_ID_BYTES or len(each.signature) != SIGNATURE_BYTES:
            raise RemoteProtocolError("the checkpoint has a malformed author or signature")
    position = 0
    for stage in checkpoint.stages:
        if stage.first_layer != position or stage.last_layer <= stage.first_layer:
            raise RemoteProtocolError("the stages of the checkpoint are not consecutive")
        position = stage.last_layer
    return fact, checkpoint


def _decode_canonical(data: bytes, kind: type[T], bytes_max: int, what: str) -> T:
    value: T = decode(data, kind, bytes_max=bytes_max)
    if encode(value) != data:
        raise RemoteProtocolError(f"{what} is not in its canonical encoding")
    return value


def chunk_sizes(hashes: bytes, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield each chunk of an arena of `size` bytes, with its length, in order."""
    for number, name in enumerate(split(hashes)):
        yield name, min(CHUNK_BYTES, size - number * CHUNK_BYTES)
