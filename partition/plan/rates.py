"""Measured speeds of a device for each class of operators, and the times of layers that follow from them. No
torch.

Work in a class takes `fixed + FLOPs / rate + bytes / bandwidth`, with separate constants for forward and
backward. The constants are in picoseconds, so that all arithmetic is in integers and a plan is the same to
the byte wherever it is made. They are fitted by `partition.calibrate`, which runs in the kind of process that
computes stages.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from partition.plan.cost import NANOSECONDS
from partition.plan.operations import KINDS, Amount, Kind, Operations
from partition.plan.problem import BUSY_MILLIWATTS, IDLE_MILLIWATTS

CALIBRATION_BYTES_MAX = 8 * 1024
KINDS_MAX = 64
MEGA = 1_000_000
MEBI_BITS = 20
FRAMES_OF_BOTH_PASSES = 4
"""Number of frames of a micro-batch at a stage: one in and one out, in each of both passes."""
REQUESTER_PERMILLE = 3_500
"""Node time of the requester for a micro-batch, relative to the calibrated time of a member, in permille: the
requester's node also feeds and commits. Under quotas it took 1.9 to 2.1 ms more than the other nodes, which
were calibrated at 0.8 ms (`benchmarks/quotas.py --planned`, three runs). The factor includes the requester's
node time for a step."""

Picoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Milliwatts = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Word = Annotated[str, msgspec.Meta(max_length=64)]


class OperatorPace(msgspec.Struct, frozen=True, array_like=True):
    """Picoseconds for one call, for a million FLOPs, and for a MiB touched."""

    call: Picoseconds
    megaflop: Picoseconds
    mebibyte: Picoseconds

    def picoseconds(self, amount: Amount) -> int:
        """Return the time of an amount of work."""
        return (
            self.call * amount.calls
            + self.megaflop * amount.flops // MEGA
            + (self.mebibyte * amount.touched_bytes >> MEBI_BITS)
        )


class KindPace(msgspec.Struct, frozen=True, array_like=True):
    """The pace of one class of operators."""

    kind: Word
    forward: OperatorPace
    backward: OperatorPace


class Calibration(msgspec.Struct, frozen=True, array_like=True):
    """The speed of one device of one peer, for one data type and number of threads.

    `hardware` and `torch` show whether a cached calibration still holds. `baseline_bytes` is the size of a
    stage's process before it holds a model. `frame` is the pace of a bundle on its way into or out of a stage
    (a call, and bytes). `step` is the pace of an optimizer step: a call for each parameter, and bytes. `node`
    is the node's own time for a micro-batch, during which its stage waits: a call for both passes, and the
    bytes of incoming and outgoing frames. `node_step` is the node's time for a step, in addition to that for
    its micro-batches. The paces hold for a processor that does nothing else; `share_permille` is the share of
    a processor that a stage gets here. `busy_milliwatts` is the machine's power while it computes,
    `idle_milliwatts` while it waits; both are 0 if no meter could be read.
    """

    hardware: Word
    torch: Word
    device: Word
    dtype: Word
    threads: Annotated[int, msgspec.Meta(ge=1, le=1_024)]
    kinds: Annotated[tuple[KindPace, ...], msgspec.Meta(max_length=KINDS_MAX)]
    baseline_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)]
    frame: OperatorPace
    step: OperatorPace
    share_permille: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1_000
    node: OperatorPace = OperatorPace(0, 0, 0)
    busy_milliwatts: Milliwatts = 0
    idle_milliwatts: Milliwatts = 0
    node_step: Picoseconds = 0

    def layer_nanoseconds(self, operations: Operations) -> tuple[int, int]:
        """Return the (forward, backward) time of one layer for one micro-batch."""
        paces = {row.kind: row for row in self.kinds}
        share = self.share_permille
        found = []
        for amounts, is_forward in ((operations.forward, True), (operations.backward, False)):
            total = 0
            for kind, amount in amounts:
                row = paces.get(kind) or paces.get("elementwise")
                if row is not None:
                    total += (row.forward if is_forward else row.backward).picoseconds(amount)
            found.append(total // share)
        return found[0], found[1]

    @property
    def node_nanoseconds(self) -> tuple[int, int]:
        """The time in addition to computing, for a stage's frames and for the node's own work: per
        micro-batch (both passes), and per MiB of its frames."""
        call = self.node.call + FRAMES_OF_BOTH_PASSES * self.frame.call
        return call // self.share_permille, (self.node.mebibyte + self.frame.mebibyte) // self.share_permille

    @property
    def draw_milliwatts(self) -> tuple[int, int]:
        """The machine's power while computing and while idle; an assumed value if no meter could be read."""
        if self.busy_milliwatts <= self.idle_milliwatts:
            return BUSY_MILLIWATTS, IDLE_MILLIWATTS
        return self.busy_milliwatts, self.idle_milliwatts

    @property
    def node_step_nanoseconds(self) -> int:
        """The time of the node's own work for a step, in addition to that for its micro-batches."""
        return self.node_step // self.share_permille

    @property
    def step_nanoseconds(self) -> tuple[int, int]:
        """The time of an optimizer step: per parameter tensor, and per MiB of parameters."""
        return self.step.call // self.share_permille, self.step.mebibyte // self.share_permille

    def model_nanoseconds(self, layers: Sequence[Operations]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return forward and backward times of every layer."""
        pairs = [self.layer_nanoseconds(layer) for layer in layers]
        return tuple(forward for forward, _ in pairs), tuple(backward for _, backward in pairs)

    def scaled(self, permille: int) -> "Calibration":
        """Return the calibration of the same device at this many thousandths of its speed."""

        def slower(pace: OperatorPace) -> OperatorPace:
            call, megaflop, mebibyte = (
                min(2**53, value * 1000 // max(1, permille))
                for value in (pace.call, pace.megaflop, pace.mebibyte)
            )
            return OperatorPace(call, megaflop, mebibyte)

        return msgspec.structs.replace(
            self,
            kinds=tuple(KindPace(row.kind, slower(row.forward), slower(row.backward)) for row in self.kinds),
            frame=slower(self.frame),
            step=slower(self.step),
            node=slower(self.node),
            node_step=min(2**53, self.node_step * 1000 // max(1, permille)),
        )

    def as_requester(self) -> "Calibration":
        """Return the calibration of the same device if its node also feeds and commits the run."""
        call = min(2**53, self.node.call * REQUESTER_PERMILLE // 1000)
        return msgspec.structs.replace(self, node=OperatorPace(call, self.node.megaflop, self.node.mebibyte))

    @property
    def flops_per_second(self) -> int:
        """The rate of large matrix products in the forward pass."""
        for row in self.kinds:
            if row.kind == "matmul":
                return MEGA * self.share_permille * NANOSECONDS // max(1, row.forward.megaflop)
        return 0


def assumed(flops_per_second: int) -> Calibration:
    """Return the calibration of a processor of which only the FLOP/s are known. Its other values are in
    proportion to a measured processor: one core of a server's processor with torch 2.13 (`REFERENCE`).
    """
    permille = max(1, flops_per_second * 1000 // REFERENCE.flops_per_second)
    return REFERENCE.scaled(permille)


def equivalent_rate(calibration: Calibration, layers: Sequence[Operations]) -> int:
    """Return the FLOP/s that a processor in proportion to `REFERENCE` needs to take as long for these layers.
    Plans use this number, because it means the same for every peer."""
    reference, own = (sum(map(sum, device.model_nanoseconds(layers))) for device in (REFERENCE, calibration))
    return max(1, REFERENCE.flops_per_second * reference // max(1, own))


def encode_calibration(calibration: Calibration) -> bytes:
    """Return the value of the DHT record."""
    return encode(calibration)


def decode_calibration(data: bytes) -> Calibration:
    """Decode and check a calibration. Raises RemoteProtocolError if it is invalid."""
    found: Calibration = decode(data, Calibration, bytes_max=CALIBRATION_BYTES_MAX)
    names = [row.kind for row in found.kinds]
    if len(set(names)) < len(names):
        raise RemoteProtocolError("a calibration has a class of operators twice")
    return found


def _pace(call_microseconds: float, gigaflops: float, gigabytes: float) -> OperatorPace:
    return OperatorPace(
        round(call_microseconds * 1e6),
        round(1e9 / gigaflops) if gigaflops else 0,
        round((1 << MEBI_BITS) * 1e3 / gigabytes) if gigabytes else 0,
    )


def _kind(kind: Kind, forward: tuple[float, float, float], backward: tuple[float, float, float]) -> KindPace:
    return KindPace(kind, _pace(*forward), _pace(*backward))


REFERENCE = Calibration(
    hardware="reference",
    torch="2.13.0",
    device="cpu",
    dtype="float32",
    threads=1,
    # Microseconds per call, GFLOP/s, GB/s.
    kinds=(
        _kind("matmul", (8, 60, 0), (12, 60, 0)),
        _kind("convolution", (20, 45, 0), (30, 40, 0)),
        _kind("depthwise", (20, 10, 0), (30, 5, 0)),
        _kind("attention", (25, 35, 0), (50, 60, 0)),
        _kind("attention_dropout", (60, 15, 0), (90, 20, 0)),
        _kind("normalization", (10, 0, 6), (20, 0, 4)),
        _kind("elementwise", (4, 0, 8), (6, 0, 6)),
        _kind("transcendental", (5, 0, 3), (8, 0, 3)),
        _kind("random", (10, 0, 1), (8, 0, 6)),
        _kind("reduction", (8, 0, 5), (10, 0, 5)),
        _kind("pooling", (10, 0, 2), (15, 0, 2)),
        _kind("gather", (10, 0, 4), (20, 0, 4)),
        _kind("view", (2, 0, 0), (3, 0, 0)),
        _kind("accumulate", (0, 0, 0), (5, 0, 6)),
    ),
    baseline_bytes=400 * 1024 * 1024,
    frame=_pace(30, 0, 2),
    step=_pace(20, 0, 4),
)
assert all(any(row.kind == kind for row in REFERENCE.kinds) for kind in KINDS)
