"""The signed manifest of a run, made from the RUN.toml that a person writes (`node.protocols.run_file`).

All members hold it, and its hash is the run's id. It identifies the model by the hash of its graph, which
members fetch from each other (`node.content.graphs`), and the data by its hash.
"""

from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from partition.codecs.choice import Frames
from partition.model.graph import LAYERS_MAX, SYMBOLS_MAX
from partition.model.together import RANGES_MAX
from partition.plan.plan import STEPS_MAX, TRAINERS_MAX
from partition.run.local_settings import LocalSettings, OwnData
from partition.stage import IN_FLIGHT_MAX, METRICS_MAX, OptimizerSettings
from partition.steps.validation import ValidationSettings

LOSS = "loss"
"""The metric by which states are compared, unless a run names a different one."""
CORRECT, ACCURACY = "correct", "accuracy"
"""The metric that counts right answers, and its usual name. Divided by the number of samples it is the
accuracy."""
MANIFEST_PURPOSE = "run-manifest"
MANIFEST_VERSION = 2
"""The version that this node reads and writes. A manifest of version 1 had no version number."""
MANIFEST_BYTES_MAX = 900
"""Maximum size of a manifest, so that it fits a DHT record."""

Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}\Z")]
HexHash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]

LayerNumber = Annotated[int, msgspec.Meta(ge=0, le=LAYERS_MAX)]

Objective = Literal["throughput", "energy"]
"""The quantity that a run's plan optimizes. `peerloom plan` also has latency, which concerns answers."""
DeviceKind = Literal["cuda", "mps", "cpu"]
DEVICE_KINDS = 3
STANDBYS_MAX = 8
"""Maximum number of standbys. In every step, each costs its stage the bytes of a gradient in both
directions."""


class PlaceWish(msgspec.Struct, frozen=True, array_like=True):
    """Where a run's stages may be, and on which devices: see PlanTable."""

    location: Annotated[str, msgspec.Meta(max_length=64)] = ""
    near: Annotated[str, msgspec.Meta(max_length=64)] = ""
    max_rtt_milliseconds: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    devices: Annotated[tuple[DeviceKind, ...], msgspec.Meta(max_length=DEVICE_KINDS)] = ()
    gflops_min: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class Manifest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The definition of a run. `model` is its model's name on screens, `graph` (BLAKE3, hex) identifies the
    model.

    `data` is `digits`, or the BLAKE3 hash (hex) of the content of a folder or file. If data stays with its
    owners, it is the hash of `local.own_data`, which describes the data. `sizes` are the values of the
    graph's symbols except the batch, which is `microbatch`. `metrics` name the sums that the graph computes
    in addition to the loss. `window` is the number of bytes in a sample of text, 0 for other data.
    `validation` says when a run in exact mode is validated; None means never. `together` are half-open ranges
    of layers that no plan may split.
    """

    version: Annotated[int, msgspec.Meta(ge=MANIFEST_VERSION, le=MANIFEST_VERSION)] = MANIFEST_VERSION
    model: Word
    graph: HexHash
    data: Annotated[str, msgspec.Meta(pattern=r"^(digits|[0-9a-f]{64})\Z")]
    test_samples: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    steps: Annotated[int, msgspec.Meta(ge=1, le=STEPS_MAX)]
    microbatch: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=IN_FLIGHT_MAX)]
    sizes: Annotated[tuple[Size, ...], msgspec.Meta(max_length=SYMBOLS_MAX - 1)]
    metrics: Annotated[tuple[Word, ...], msgspec.Meta(max_length=METRICS_MAX)]
    optimizer: OptimizerSettings
    autocast: Literal["off", "bfloat16"]
    recompute: bool
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    frames: Frames
    stages: Annotated[int, msgspec.Meta(ge=0, le=64)]
    replicas: Annotated[int, msgspec.Meta(ge=0, le=64)]
    created_milliseconds: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    trainers: Annotated[int, msgspec.Meta(ge=1, le=TRAINERS_MAX)] = 1
    window: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    pipeline: Literal["1f1b", "gpipe"] = "1f1b"
    save_every: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    on_lost_quorum: Literal["wait", "fork", "requester"] = "wait"
    on_divergence: Literal["stop", "continue"] = "stop"
    local: LocalSettings | None = None
    validation_samples: Annotated[int, msgspec.Meta(ge=0, lt=2**40)] = 0
    validation: ValidationSettings | None = None
    place: PlaceWish | None = None
    together: Annotated[tuple[tuple[LayerNumber, LayerNumber], ...], msgspec.Meta(max_length=RANGES_MAX)] = ()
    replicas_min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    objective: Objective = "throughput"
    standbys: Annotated[int, msgspec.Meta(ge=0, le=STANDBYS_MAX)] = 0

    @property
    def graph_hash(self) -> bytes:
        """The graph's hash in the form that requests use."""
        return bytes.fromhex(self.graph)

    @property
    def sizes_max(self) -> tuple[int, ...]:
        """All symbols' values for a whole micro-batch, the batch first."""
        return (self.microbatch, *self.sizes)

    @property
    def evaluations(self) -> int:
        """The number of micro-batches of test samples."""
        return -(-self.test_samples // self.microbatch)

    @property
    def validations(self) -> int:
        """The number of micro-batches of validation samples. They are the held-out micro-batches with the
        lowest numbers."""
        return -(-self.validation_samples // self.microbatch) if self.validation else 0


_NOT_ARITHMETIC = frozenset(
    {
        "version",
        "model",
        "metrics",
        "recompute",
        "frames",
        "stages",
        "replicas",
        "created_milliseconds",
        "trainers",
        "pipeline",
        "save_every",
        "on_lost_quorum",
        "on_divergence",
        "local",
        "validation_samples",
        "validation",
        "place",
        "together",
        "replicas_min",
        "objective",
        "standbys",
    }
)
"""Fields of a Manifest that do not affect what a step computes, but only whether it is applied. `graph` is
the model; `model` is only a name."""


class Run(msgspec.Struct, frozen=True):
    """A checked manifest with its id, its requester, and the fact to pass on."""

    id: bytes
    requester: PeerId
    manifest: Manifest
    fact: Fact

    @property
    def tie_breaker(self) -> PeerId | None:
        """The member whose vote decides together with half of the voters, if the run has one."""
        return self.requester if self.manifest.on_lost_quorum == "requester" else None

    @property
    def random_key(self) -> bytes:
        """The key from which dropout masks are drawn: the hash of all fields that affect what is computed,
        but not when, by how many members, in which order, or how it is sent. So if the same run is requested
        twice, by anybody and with any plan, it draws the same masks."""
        names = (name for name in Manifest.__struct_fields__ if name not in _NOT_ARITHMETIC)
        return blake3(encode([getattr(self.manifest, name) for name in names])).digest()

    @property
    def text(self) -> str:
        """The run's id as screens and files show it: the first 16 hex digits."""
        return run_text(self.id)


def own_data_of(manifest: Manifest) -> OwnData | None:
    """Return the requirements for each member's own data; None if data travels between members."""
    return None if manifest.local is None else manifest.local.own_data


def own_data_hash(own: OwnData) -> str:
    """Return the hash that a manifest has for data that stays with its owners."""
    return blake3(encode(own)).hexdigest()


def run_text(run: bytes) -> str:
    """Return the short text form of a run id."""
    return run.hex()[:16]


def make_run(signer: Signer, manifest: Manifest) -> Run:
    """Sign a manifest; this peer becomes the run's requester."""
    return check_run(signer, signer.sign(MANIFEST_PURPOSE, encode(manifest)))


def check_run(signer: Signer, fact: Fact) -> Run:
    """Return a checked run whose signature and ranges are valid. Raises RemoteProtocolError."""
    if len(fact.body) > MANIFEST_BYTES_MAX:
        raise RemoteProtocolError(
            f"a manifest of {len(fact.body)} bytes; at most {MANIFEST_BYTES_MAX} fit a record"
        )
    _check_version(fact.body)
    manifest: Manifest = decode(fact.body, Manifest, bytes_max=MANIFEST_BYTES_MAX)
    validation = manifest.validation
    if validation is not None and (
        validation.watched > len(manifest.metrics) or not manifest.validation_samples
    ):
        raise RemoteProtocolError("a run whose validation uses a metric or samples that it does not have")
    if (own := own_data_of(manifest)) is not None and (
        manifest.data != own_data_hash(own) or manifest.stages > 1
    ):
        raise RemoteProtocolError("a run on its members' own data that names data, or cuts the model")
    requester = signer.check(MANIFEST_PURPOSE, fact)
    return Run(blake3(fact.body + fact.author).digest(), requester, manifest, fact)


class _Beginning(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a manifest of any version; the old ones without a version number begin with a name."""

    version: int | str


def _check_version(body: bytes) -> None:
    beginning: _Beginning = decode(body, _Beginning, bytes_max=MANIFEST_BYTES_MAX)
    version = 1 if isinstance(beginning.version, str) else beginning.version
    if version != MANIFEST_VERSION:
        raise RemoteProtocolError(
            f"a manifest of version {version}; this node speaks version "
            f"{MANIFEST_VERSION}: update the older node"
        )
