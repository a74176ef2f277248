"""A run as it is asked for: the RUN.toml a person writes, and the signed manifest made of it.

The manifest is what all members hold; its hash is the run's id. By-name models and data are the
skeleton's; a graph hash and data shards by hash take their places in the same struct.
"""

from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from node.errors import UsageError
from partition.stage import IN_FLIGHT_MAX, OptimizerSettings

MANIFEST_PURPOSE = "run-manifest"
MANIFEST_BYTES_MAX = 900
"""So that it fits a DHT record."""


Sizes = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=65_536)], ...], msgspec.Meta(max_length=4)]


class TrainTable(msgspec.Struct, frozen=True):
    """`[train]` of RUN.toml. `batch` and `microbatch` count samples."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 200
    batch: Annotated[int, msgspec.Meta(ge=1, le=1_048_576)] = 128
    microbatch: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 16
    optimizer: Literal["sgd", "adam"] = "adam"
    learning_rate: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.002
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    dtype: Literal["float32", "float64"] = "float32"
    compress: bool = True


class PlanTable(msgspec.Struct, frozen=True):
    """`[plan]` of RUN.toml; 0 lets the planner choose."""

    stages: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    replicas: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0


class RunFile(msgspec.Struct, frozen=True):
    """RUN.toml: every key has a default but the model. `data` is `digits` or a folder."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
    data: Annotated[str, msgspec.Meta(min_length=1, max_length=4_096)] = "digits"
    train: TrainTable = TrainTable()
    plan: PlanTable = PlanTable()


def check_run_file(run: RunFile, where: str) -> None:
    """What no single key's range can say. Raises UsageError."""
    train = run.train
    if train.batch % train.microbatch:
        raise UsageError(
            f"{where}: train.batch {train.batch} is not a multiple of train.microbatch {train.microbatch}"
        )
    if train.batch // train.microbatch > IN_FLIGHT_MAX:
        raise UsageError(
            f"{where}: train.batch {train.batch} is {train.batch // train.microbatch} micro-batches of "
            f"{train.microbatch}; at most {IN_FLIGHT_MAX}",
            f"a train.microbatch of at least {-(-train.batch // IN_FLIGHT_MAX)}",
        )


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """What a run is. `data` is `digits`, or the BLAKE3 hash (hex) of a folder's arrays."""

    model: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,39}\Z")]
    data: Annotated[str, msgspec.Meta(pattern=r"^(digits|[0-9a-f]{64})\Z")]
    sample_shape: Sizes
    classes: Annotated[int, msgspec.Meta(ge=2, le=65_536)]
    test_samples: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    steps: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
    microbatch: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=IN_FLIGHT_MAX)]
    optimizer: OptimizerSettings
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    dtype: Literal["float32", "float64"]
    codec: Literal["raw", "zstd"]
    stages: Annotated[int, msgspec.Meta(ge=0, le=64)]
    replicas: Annotated[int, msgspec.Meta(ge=0, le=64)]
    created_milliseconds: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]

    @property
    def evaluations(self) -> int:
        """Micro-batches of held-out samples."""
        return -(-self.test_samples // self.microbatch)


class Run(msgspec.Struct, frozen=True):
    """A checked manifest: its id, who asks, and the fact to hand on."""

    id: bytes
    requester: PeerId
    manifest: Manifest
    fact: Fact

    @property
    def random_key(self) -> bytes:
        """What dropout masks are drawn from: the manifest without the moment it was made, so that the
        same run asked for twice, by whomever, draws the same ones."""
        return blake3(encode(msgspec.structs.replace(self.manifest, created_milliseconds=0))).digest()

    @property
    def text(self) -> str:
        """The run's id as screens and files show it: the first 16 hex digits."""
        return run_text(self.id)


def run_text(run: bytes) -> str:
    """The short text form of a run id."""
    return run.hex()[:16]


def make_run(signer: Signer, manifest: Manifest) -> Run:
    """Sign a manifest as its requester."""
    return check_run(signer, signer.sign(MANIFEST_PURPOSE, encode(manifest)))


def check_run(signer: Signer, fact: Fact) -> Run:
    """A manifest whose signature and ranges hold; else RemoteProtocolError."""
    if len(fact.body) > MANIFEST_BYTES_MAX:
        raise RemoteProtocolError("a manifest that is too long")
    manifest: Manifest = decode(fact.body, Manifest, bytes_max=MANIFEST_BYTES_MAX)
    requester = signer.check(MANIFEST_PURPOSE, fact)
    return Run(blake3(fact.body + fact.author).digest(), requester, manifest, fact)
