"""The cost of a stage: time, memory and bytes on the wire, in integers.

Nanoseconds and bytes are integers, so that the same inputs give the same plan on every machine. The basic
model of time is FLOPs over a measured rate. A fitted model per operator class can replace it behind
`stage_nanoseconds`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NANOSECONDS = 1_000_000_000
BACKWARD_FLOPS_RATIO = 2
"""Cost of a backward pass relative to a forward pass: it has one product for the input's gradient and one for
the weights' gradient. Recomputation adds another forward pass."""
GRADIENT_ARENAS = 2
"""Number of vectors as large as the parameters that a stage keeps for gradients: sums and totals."""
MOMENTS = 2
"""Number of vectors as large as the parameters that the optimizer keeps: two for Adam, none for plain SGD."""
STAGE_BASELINE_BYTES = 400 * 1024 * 1024
"""Memory of a stage process without a model: the interpreter and torch, measured at 230-350 MiB."""

KEPT_FRAMES_BYTES_MAX = 512 << 20
"""Maximum size of the sent frames that a stage keeps in memory until the step is applied; further frames are
kept on disk."""


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer: parameter bytes; and per micro-batch, forward FLOPs, bytes kept for the backward
    pass, and output bytes.

    `working_bytes` is the memory of its largest operator while it runs, forward or backward; `parameters` is
    the number of tensors that its optimizer steps.
    """

    parameter_bytes: int
    forward_flops: int
    saved_bytes: int
    output_bytes: int
    working_bytes: int = 0
    parameters: int = 0


@dataclass(frozen=True)
class PeerResources:
    """The resources that one peer offers: floating-point operations per second, and memory in bytes."""

    flops_per_second: int
    memory_bytes: int


def stage_memory_bytes(
    layers: Sequence[LayerCost],
    microbatches_in_flight: int,
    *,
    recompute: bool = False,
    moments: int = MOMENTS,
    input_bytes: int = 0,
    microbatches: int = 0,
) -> int:
    """Return the peak memory of a stage that trains `layers`. `microbatches_in_flight` is the maximum number
    of micro-batches between their forward and backward passes.

    With recomputation, a stage keeps only the input of each of these micro-batches, and everything of a
    single one. `moments` is the number of the optimizer's vectors. The frames of a step's `microbatches`, in
    both directions, are kept until the step is applied.
    """
    parameters = sum(layer.parameter_bytes for layer in layers)
    saved = sum(layer.saved_bytes + layer.output_bytes for layer in layers)
    if recompute:
        saved += input_bytes * microbatches_in_flight
    else:
        saved *= microbatches_in_flight
    sent = layers[-1].output_bytes if layers else 0
    kept = min(microbatches * (sent + input_bytes), KEPT_FRAMES_BYTES_MAX)
    working = max((layer.working_bytes for layer in layers), default=0)
    return STAGE_BASELINE_BYTES + (1 + GRADIENT_ARENAS + moments) * parameters + saved + kept + working


def stage_nanoseconds(layers: Sequence[LayerCost], flops_per_second: int, *, recompute: bool = False) -> int:
    """Return the forward and backward time of one micro-batch, on a group of replicas that together compute
    `flops_per_second`."""
    return compute_nanoseconds(
        sum(layer.forward_flops for layer in layers), flops_per_second, recompute=recompute
    )


def compute_nanoseconds(forward_flops: int, flops_per_second: int, *, recompute: bool = False) -> int:
    """Return the same time, for layers with a total of `forward_flops`."""
    passes = 1 + BACKWARD_FLOPS_RATIO + recompute
    return passes * forward_flops * NANOSECONDS // max(1, flops_per_second)


def transfer_nanoseconds(layer: LayerCost, bytes_per_second: int) -> int:
    """Return the time to send one micro-batch's output of `layer` over a link."""
    return layer.output_bytes * NANOSECONDS // max(1, bytes_per_second)
