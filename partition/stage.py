"""The Stage API: what a stage is told, what it is asked, and what it answers. Structs only, no torch.

A stage is a half-open range of a model's layers, held by one replica. Its numbers lie in four flat
arenas that the node and the stage's process share:

    parameters   the trainable values
    gradients    sums over the micro-batches of one step, not means
    totals       what the replicas' sums add up to; the node writes them, `Apply` takes them
    moments      the optimizer's state: nothing, one vector (momentum) or two (Adam)

The first three have one layout (`parameter_layout`), elements in the order of torch's state dict,
without gaps; `moments` repeats it. `partition.execute` computes; `node.runs.host` keeps it in a process.
"""

from math import isfinite, prod
from typing import Annotated, Literal

import msgspec

from partition.codec import ITEM_BYTES, Codec, Digest, Payload
from partition.model import Model, Shape, build

ARENAS = ("parameters", "gradients", "totals", "moments")
"""In the order in which their file descriptors are handed to the stage's process."""

VECTOR_BYTES_MAX = 1 << 32
"""One arena: 4 GiB, a billion float32 parameters in one stage. A node may well refuse far less."""
SAMPLES_MAX = 65_536
"""Samples in a micro-batch. A real one has tens."""
MICROBATCH_BYTES_MAX = 1 << 30
"""What goes into or out of a stage for one micro-batch. A real one has a few MB."""
THREADS_MAX = 1_024
IN_FLIGHT_MAX = 64
"""Micro-batches forwarded but not yet backward: a pipeline holds about as many as it has stages."""
MICROBATCHES_MAX = 1 << 20
"""Micro-batches a stage remembers within one step, to refuse a second one with the same number."""
RUN_BYTES_MAX = 64
MODEL_NAME_MAX = 40
REASON_LENGTH_MAX = 400
_OVERHEAD_BYTES = 1 << 20
"""On top of tensors: field names, safetensors' header, and what zstd adds to incompressible data."""

_NUMBER_MAX = 2**53
"""Steps and micro-batches: what every language can count exactly."""

Number = Annotated[int, msgspec.Meta(ge=0, le=_NUMBER_MAX)]
Side = Annotated[int, msgspec.Meta(ge=1)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


class OptimizerSettings(msgspec.Struct, frozen=True):
    """torch.optim's SGD or Adam, with torch's names for the numbers.

    `momentum` counts for sgd only, `betas` and `epsilon` for adam only.
    """

    kind: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.learning_rate, self.momentum, *self.betas, self.epsilon, self.weight_decay)
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("an optimizer's numbers are finite and not negative")
        if max(self.momentum, *self.betas) >= 1:
            raise ValueError("momentum and betas are below 1")

    @property
    def moments(self) -> int:
        """How many vectors of the parameters' size its state takes."""
        if self.kind == "adam":
            return 2
        return 1 if self.momentum else 0


class StageSpecification(msgspec.Struct, frozen=True):
    """All that makes a stage what it is: two replicas with equal specifications compute the same.

    `first_layer` to `last_layer` is half open. `seed` gives the first parameters, each by its name, and
    `run` the dropout masks, so neither depends on the cut. `samples_max` bounds a micro-batch. `codec` is
    what the stage's answers are packed with. `threads` and `device` are the replica's own affair.

    Raises:
        ValueError: an unknown model, a range that is not in it, a vector or a micro-batch that is too large.
    """

    run: Annotated[bytes, msgspec.Meta(min_length=1, max_length=RUN_BYTES_MAX)]
    model: Annotated[str, msgspec.Meta(max_length=MODEL_NAME_MAX)]
    sample_shape: Annotated[tuple[Side, ...], msgspec.Meta(max_length=7)]  # the batch makes it eight
    classes: Annotated[int, msgspec.Meta(ge=1)]
    first_layer: Annotated[int, msgspec.Meta(ge=0)]
    last_layer: Annotated[int, msgspec.Meta(ge=1)]
    dtype: Literal["float32", "float64"] = "float32"
    seed: Number = 0
    optimizer: OptimizerSettings = OptimizerSettings()
    threads: Annotated[int, msgspec.Meta(ge=1, le=THREADS_MAX)] = 1
    device: Annotated[str, msgspec.Meta(pattern=r"^[a-z]{1,16}(:[0-9]{1,3})?\Z")] = "cpu"
    samples_max: Annotated[int, msgspec.Meta(ge=1, le=SAMPLES_MAX)] = 1_024
    codec: Codec = "raw"

    def __post_init__(self) -> None:
        layers = len(self.built.layers)
        if not 0 <= self.first_layer < self.last_layer <= layers:
            raise ValueError(
                f"{self.model} has layers 0 to {layers}, not {self.first_layer} to {self.last_layer}"
            )
        if vector_bytes(self) > VECTOR_BYTES_MAX:
            raise ValueError(f"a stage of {vector_bytes(self)} bytes, at most {VECTOR_BYTES_MAX} allowed")
        sample_bytes = self.item_bytes * max(prod(self.input_shape), prod(self.output_shape))
        if self.samples_max * sample_bytes > MICROBATCH_BYTES_MAX:
            raise ValueError(
                f"{self.samples_max} samples of {sample_bytes} bytes exceed {MICROBATCH_BYTES_MAX} bytes"
            )

    @property
    def built(self) -> Model:
        """The whole model, as data."""
        return build(self.model, self.sample_shape, self.classes)

    @property
    def is_first(self) -> bool:
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        return self.last_layer == len(self.built.layers)

    @property
    def input_shape(self) -> Shape:
        """Of one sample, as the stage takes it."""
        return self.built.shapes[self.first_layer]

    @property
    def output_shape(self) -> Shape:
        """Of one sample, as the stage gives it."""
        return self.built.shapes[self.last_layer]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


class Slot(msgspec.Struct, frozen=True):
    """Where one parameter lies in an arena: `offset` and `size` count elements."""

    name: str
    shape: Shape
    offset: int
    size: int
    fan_in: int


def parameter_layout(specification: StageSpecification) -> tuple[Slot, ...]:
    """The stage's parameters in their order in an arena, without gaps."""
    slots: list[Slot] = []
    offset = 0
    for parameter in specification.built.parameters(specification.first_layer, specification.last_layer):
        slots.append(Slot(parameter.name, parameter.shape, offset, parameter.size, parameter.fan_in))
        offset += parameter.size
    return tuple(slots)


def vector_bytes(specification: StageSpecification) -> int:
    """Bytes of `parameters`, and of `gradients` and `totals`; 0 for a stage without parameters."""
    return sum(slot.size for slot in parameter_layout(specification)) * specification.item_bytes


def arena_bytes(specification: StageSpecification) -> dict[str, int]:
    """Bytes of every arena, by name, in the order of ARENAS."""
    vector = vector_bytes(specification)
    return {name: vector * (specification.optimizer.moments if name == "moments" else 1) for name in ARENAS}


def message_bytes_max(specification: StageSpecification) -> int:
    """The longest request or answer of a correct stage: the parameters, or one micro-batch both ways."""
    elements = prod(specification.input_shape) + prod(specification.output_shape)
    boundary = specification.samples_max * elements * specification.item_bytes
    labels = specification.samples_max * ITEM_BYTES["int64"]
    tensors = max(vector_bytes(specification), boundary + labels)
    return tensors + tensors // 128 + _OVERHEAD_BYTES


class Forward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute one micro-batch. `input` is (samples, *input_shape); `labels` (samples,) int64.

    The last stage needs labels; when `train`, it goes back at once. Any other stage keeps what its
    `Backward` will need. With `train` false nothing is kept and nothing is random.
    """

    step: Number
    microbatch: Number
    train: bool
    input: Payload
    labels: Payload | None = None


class Forwarded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer: `output` from all but the last stage, `gradient` of the input from the last one.

    `loss` is the cross entropy *summed* over the samples, `correct` how many the logits name rightly;
    both are 0 except at the last stage.
    """

    output: Payload | None
    gradient: Payload | None
    loss: float
    samples: int
    correct: int


class Backward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The gradient of the loss by what `Forward` gave out, of the same shape."""

    step: Number
    microbatch: Number
    gradient: Payload


class BackwardDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`gradient` is for the stage before; None from the first stage."""

    gradient: Payload | None


class Discard(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget the micro-batches of this step and zero the gradient sums."""


class Apply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One optimizer step by `totals` / `samples`; then zero sums and totals, forget the micro-batches.

    `step` is the number of the committed step, counted from 0; Adam's bias correction follows it, so a
    replica that comes later steps as the others do.
    """

    step: Number
    samples: Annotated[int, msgspec.Meta(ge=1, le=_NUMBER_MAX)]


class Applied(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`digest` is blake3 of the parameter arena: equal on all replicas of a stage."""

    digest: Digest


class Export(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the stage's parameters."""


class Exported(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`data` is a safetensors file of the stage's parameters, named as in torch's state dict."""

    data: bytes


class Import(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take the parameters from a safetensors file that holds exactly this stage's.

    Forgets the micro-batches and zeroes the sums, which belong to the parameters replaced. The
    optimizer's moments stay as they are.
    """

    data: bytes


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Discard` and `Import`."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a request that no correct peer makes. The stage is as it was before."""

    reason: Reason


Request = Forward | Backward | Discard | Apply | Export | Import
Reply = Forwarded | BackwardDone | Done | Applied | Exported | Refused
