"""The Stage API: the specification of a stage, its requests and its replies. Structs only, no torch.

A stage is a `StageGraph`, held by one replica. Its numbers lie in four flat arenas that the node and the
stage's process share:

    parameters   values: trainable parameters, batch statistics, then what is frozen
    gradients    sums over the micro-batches of one step, not means; and the step's share of the statistics
    totals       the total of the replicas' sums; the node writes them, `Apply` takes them
    moments      the optimizer's state: nothing, one vector (momentum) or two (Adam)

All have one layout (`partition.stage_layout`), without gaps; `gradients` and `totals` end before the frozen
parameters, and `moments` repeats them. A stage that trains has one type, float32 or float64. In one that does
not, parameters lie as they are stored, the widest types first, so that each value is aligned to its own.
`partition.execute` computes; `node.stages.host` keeps it in a process.
"""

from math import isfinite, prod
from typing import Annotated, Literal

import msgspec

from partition.codecs.codec import Codec, Digest, Payload, Rounding
from partition.model.graph import FLOATING, ITEM_BYTES, TRAIN, TRAINED, StageGraph
from partition.model.head import answered_kind, head_input
from partition.model.sizes import check_sizes, evaluate, shape_of
from partition.stage_serving import BITS_BYTES as BITS_BYTES
from partition.stage_serving import NUMBER_MAX as NUMBER_MAX
from partition.stage_serving import SESSION_BYTES_MAX as SESSION_BYTES_MAX
from partition.stage_serving import UNITS_MAX as UNITS_MAX
from partition.stage_serving import BitsFound as BitsFound
from partition.stage_serving import CopySession as CopySession
from partition.stage_serving import EndSession as EndSession
from partition.stage_serving import FindBits as FindBits
from partition.stage_serving import Number as Number
from partition.stage_serving import ReadValues as ReadValues
from partition.stage_serving import Serve as Serve
from partition.stage_serving import Served as Served
from partition.stage_serving import Unit as Unit
from partition.stage_serving import ValuesRead as ValuesRead

ARENAS = ("parameters", "gradients", "totals", "moments")
"""In the order in which their file descriptors are handed to the stage's process."""

VECTOR_BYTES_MAX = 1 << 34
"""One arena: 16 GiB, four billion float32 parameters in one stage. A node may well refuse far less."""
MICROBATCH_BYTES_MAX = 1 << 30
"""The most bytes into or out of a stage for one micro-batch. A real one has a few MB."""
THREADS_MAX = 1_024
IN_FLIGHT_MAX = 64
"""Micro-batches forwarded but not yet backward: a pipeline holds about as many as it has stages."""
MICROBATCHES_MAX = 1 << 20
"""Micro-batches a stage remembers within one step, to refuse a second one with the same number."""
SESSIONS_MAX = 64
"""Sessions with states of their own (KV caches) in one stage."""
GROUPS_MAX = 16
METRICS_MAX = 16
RUN_BYTES_MAX = 64
SERVED_SESSIONS_MAX = 4_096
"""Sessions with keys and values in one stage; its memory ends most services long before."""
REASON_LENGTH_MAX = 400
FENCES_MAX = 16

SAMPLES_MAX = NUMBER_MAX
"""Steps and micro-batches: the largest number that every language counts exactly."""
Sign = Literal[1, -1]
"""The sign of a micro-batch in the sums: 1 adds it, -1 takes one out that they hold."""
PayloadPart = Literal["input", "labels", "gradient"]
"""The payloads that a stage gets for one micro-batch."""
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


class Schedule(msgspec.Struct, frozen=True, array_like=True):
    """The learning rate's factor as a function of the committed step, counted from 0.

    It rises linearly over `warmup_steps`, then stays (`constant`) or falls to `floor` at `total_steps`
    (`linear`, or `cosine` as in SGDR).
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Number = 0
    total_steps: Number = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.floor) and 0 <= self.floor <= 1):
            raise ValueError("a schedule's floor is between 0 and 1")
        if self.kind != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError("a schedule that falls has more total_steps than warmup_steps")


class GroupSettings(msgspec.Struct, frozen=True, array_like=True):
    """The settings of one parameter group: a factor on the learning rate, and the weight decay."""

    rate_factor: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not all(isfinite(number) and number >= 0 for number in (self.rate_factor, self.weight_decay)):
            raise ValueError("a group's numbers are finite and not negative")


class OptimizerSettings(msgspec.Struct, frozen=True, array_like=True):
    """torch.optim's SGD, Adam or AdamW, with torch's names for the numbers.

    `momentum` applies to sgd only, `betas` and `epsilon` to adam and adamw only. `groups` are indexed by
    `Parameter.group`; without them every parameter has `weight_decay`. `clip_norm` bounds the norm of the
    *mean* gradient over all stages, 0 for none.
    """

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    groups: Annotated[tuple[GroupSettings, ...], msgspec.Meta(max_length=GROUPS_MAX)] = ()
    schedule: Schedule = Schedule()
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        numbers = (
            self.learning_rate,
            self.momentum,
            *self.betas,
            self.epsilon,
            self.weight_decay,
            self.clip_norm,
        )
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("an optimizer's numbers are finite and not negative")
        if max(self.momentum, *self.betas) >= 1:
            raise ValueError("momentum and betas are below 1")

    @property
    def moments(self) -> int:
        """The number of vectors of the gradients' size in its state."""
        if self.kind != "sgd":
            return 2
        return 1 if self.momentum else 0


class StageSpecification(msgspec.Struct, frozen=True):
    """The full specification of a stage: two replicas with equal specifications compute the same.

    `seed` gives the first values of parameters that have a recipe, each by its name, and `run` the random
    operators', so neither depends on the cut. `sizes_max` bounds the graph's symbols; `microbatches` make a
    step. `autocast` computes in bfloat16 as `torch.autocast` does; `recompute` keeps only a micro-batch's
    input and computes it again for the backward pass. `cache_bytes` are for keys and values of all served
    sessions together. `memory_bytes_max` and `flops_max` (for one micro-batch, forward and backward; 0 for no
    bound) are the provider's offer. `threads`, `device` and `allow_unfenced`, whether to run where the system
    cannot fence it in, are the replica's own choice.

    Raises:
        ValueError: vectors, a micro-batch or a type that no stage can have.
    """

    run: Annotated[bytes, msgspec.Meta(min_length=1, max_length=RUN_BYTES_MAX)]
    graph: StageGraph
    sizes_max: tuple[int, ...]
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=MICROBATCHES_MAX)] = 1
    seed: Number = 0
    optimizer: OptimizerSettings = OptimizerSettings()
    autocast: Literal["off", "bfloat16"] = "off"
    recompute: bool = False
    threads: Annotated[int, msgspec.Meta(ge=1, le=THREADS_MAX)] = 1
    device: Annotated[str, msgspec.Meta(pattern=r"^[a-z]{1,16}(:[0-9]{1,3})?\Z")] = "cpu"
    memory_bytes_max: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] = 1 << 40
    flops_max: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    allow_unfenced: bool = False
    cache_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0

    def __post_init__(self) -> None:
        check_sizes(self.graph.symbols, self.sizes_max)
        dtypes = {row.type.dtype for row in self.graph.parameters}
        trains = any(entry.loss is not None or entry.name == TRAIN for entry in self.graph.entries)
        is_frozen = not trains and all(row.kind == "frozen" for row in self.graph.parameters)
        if not (is_frozen and dtypes <= set(FLOATING)) and (len(dtypes) > 1 or not dtypes <= set(TRAINED)):
            found = ", ".join(sorted(dtypes))
            raise ValueError(
                f"the parameters of a stage that trains are all float32 or all float64, not {found}"
            )
        vector, boundary = vector_bytes(self), boundary_bytes(self)
        if vector > VECTOR_BYTES_MAX:
            raise ValueError(f"a stage of {vector} bytes, at most {VECTOR_BYTES_MAX} allowed")
        if boundary > MICROBATCH_BYTES_MAX:
            raise ValueError(f"a micro-batch of {boundary} bytes, at most {MICROBATCH_BYTES_MAX} allowed")

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """The type of the arenas of a stage that trains; in others each `Slot` has the type of its value."""
        rows = self.graph.parameters
        return "float64" if rows and rows[0].type.dtype == "float64" else "float32"

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def vector_bytes(specification: StageSpecification) -> int:
    """Return the bytes of `parameters`; 0 for a stage without any."""
    return sum(row.stored_bytes for row in specification.graph.parameters)


def boundary_bytes(specification: StageSpecification) -> int:
    """Return the most bytes into or out of the stage for one micro-batch, over its entry points."""
    graph = specification.graph
    values = evaluate(graph.expressions, specification.sizes_max)
    largest = 0
    for entry in graph.entries:
        types = dict(entry.types)
        for ids in ((*entry.inputs, *entry.labels), entry.outputs):
            kinds = [graph.types[types[number]] for number in ids]
            taken = sum(prod(shape_of(kind, values)) * ITEM_BYTES[kind.dtype] for kind in kinds)
            largest = max(largest, taken)
    if graph.is_last and (head := head_input(graph)) is not None:
        kind = answered_kind(head[1])
        largest = max(largest, prod(shape_of(kind, values)) * ITEM_BYTES[kind.dtype])
    return largest


class Admitted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process is ready; with the results of its dry run at the largest sizes, for one micro-batch.

    `flops` forward and backward; `saved_bytes` kept between them; `peak_bytes` at most at once, without the
    arenas; `seconds` the admission took. `fences` are the limits of the process and their means, `unfenced`
    those that this system could not enforce, and why.
    """

    flops: Number
    saved_bytes: Number
    peak_bytes: Number
    seconds: float
    fences: Annotated[tuple[Reason, ...], msgspec.Meta(max_length=FENCES_MAX)] = ()
    unfenced: Annotated[tuple[Reason, ...], msgspec.Meta(max_length=FENCES_MAX)] = ()


class Forward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute one micro-batch of the entry point `train`: `input` is the stage's inputs in their order.

    The last stage needs labels; when `train`, it goes back at once. Any other stage keeps the data that its
    `Backward` will need. With `train` false nothing is kept and nothing is random. `codec` packs the answer:
    it is chosen for the answer's link.

    With the sign -1 it computes one again that the sums hold, to take it out of them: the same draws, the
    gradients and the share of the statistics negated. Then it counts as never given.
    """

    step: Number
    microbatch: Number
    train: bool
    input: Payload
    labels: Payload | None = None
    codec: Codec = "raw"
    sign: Sign = 1


class Forwarded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer: `output` from all but the last stage, `gradient` of the inputs from the last one.

    `samples` is the batch, or what the graph counts instead (tokens). `loss` and `metrics` are *sums* over
    them, in the graph's order; 0 and () except at the last stage. A micro-batch that is taken out has neither
    output nor gradient: the neighbours have had theirs. `busy_nanoseconds` is the time of the stage's
    process, with decoding and encoding, without waiting. `rounding` is the codec's rounding of the answer's
    tensors.
    """

    output: Payload | None
    gradient: Payload | None
    loss: float
    samples: int
    metrics: Annotated[tuple[float, ...], msgspec.Meta(max_length=METRICS_MAX)] = ()
    busy_nanoseconds: Number = 0
    rounding: Rounding = Rounding()


class Backward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The gradients of the loss by the outputs that have one, in their order; else as in `Forward`."""

    step: Number
    microbatch: Number
    gradient: Payload
    codec: Codec = "raw"
    sign: Sign = 1


class BackwardDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`gradient` is for the stage before; None from the first stage, and where one is taken out.

    `busy_nanoseconds` and `rounding` as in `Forwarded`.
    """

    gradient: Payload | None
    busy_nanoseconds: Number = 0
    rounding: Rounding = Rounding()


class Forget(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget a micro-batch that was forwarded and has not gone back: it counts as never given.

    One that was being taken out stays in the sums.
    """

    step: Number
    microbatch: Number


class Discard(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget the micro-batches of this step and zero the gradient sums."""


class Norm(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the squared norm of `totals` over the parameters this stage reports on.

    The first stage that holds a tied parameter reports on it, so that the sum over stages is the model's.
    """


class Normed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer: the squared norm of the sums, not of the mean. Infinite where anything in `totals` is not
    finite."""

    squared_norm: float


class Apply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One optimizer step by `totals` / `samples`; then zero sums and totals, forget the micro-batches.

    `step` is the number of the committed step, counted from 0; schedules and Adam's bias correction follow
    it, so a replica that joins later steps as the others do. `squared_norm` is that of the totals of *all*
    stages, needed where the settings clip. `is_skipped` drops the sums and totals of a step that diverged:
    parameters, statistics and moments stay as they are, and the step still counts. `rate` multiplies the
    learning rate.
    """

    step: Number
    samples: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    squared_norm: float | None = None
    is_skipped: bool = False
    rate: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0


class Applied(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`digest` is blake3 of the parameter arena: equal on all replicas of a stage."""

    digest: Digest
    busy_nanoseconds: Number = 0


class RunEntryPoint(msgspec.Struct, frozen=True, tag="Run", array_like=True):
    """Run an entry point without gradients, over the states of a session; an unknown session begins anew.

    `codec` as in `Forward`.
    """

    session: Annotated[bytes, msgspec.Meta(min_length=1, max_length=SESSION_BYTES_MAX)]
    entry: Annotated[str, msgspec.Meta(max_length=64)]
    input: Payload
    codec: Codec = "raw"


class Ran(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The outputs, in their order."""

    output: Payload


class Export(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the stage's parameters."""


class Exported(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`data` is a safetensors file of the stage's parameters and named constants, by state-dict names."""

    data: bytes


class Import(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take the parameters from a safetensors file that holds exactly this stage's.

    Forgets the micro-batches and zeroes the sums, which belong to the parameters replaced. The
    optimizer's moments stay as they are.
    """

    data: bytes


class Reload(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The node has written the arena `parameters` itself: take it from there, as `Import` does."""


class Restore(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The node has written `parameters` and `moments` as they are after `step` steps: go on from there.

    Forgets the micro-batches and zeroes the sums. The next step is this one, and any other is refused. A
    restored stage computes, to the bit, what the stage computes that the values come from.
    """

    step: Number


class StageDone(msgspec.Struct, frozen=True, tag="Done", array_like=True):
    """The answer to `Discard`, `EndSession`, `Forget`, `CopySession`, `Import`, `Reload` and `Restore`."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a request that no correct peer makes. The stage is as it was before.

    `part` is the payload that no replica can use; "" where none of them is wrong. The `fault` is "values"
    where a payload is whole and the model does not take a number in it, and "divergence" where all payloads
    are sound and what the stage computes of them is not finite: every other replica would say the same.
    "position" is a unit of `session` that begins after what the stage holds of it, or ends beyond the longest
    session; "room" one that there are no pages for.
    """

    reason: Reason
    part: PayloadPart | Literal[""] = ""
    fault: Literal["", "values", "divergence", "position", "room"] = ""
    session: Annotated[bytes, msgspec.Meta(max_length=SESSION_BYTES_MAX)] = b""


Request = (
    Forward
    | Backward
    | Forget
    | Discard
    | Norm
    | Apply
    | RunEntryPoint
    | Serve
    | FindBits
    | ReadValues
    | CopySession
    | EndSession
    | Export
    | Import
    | Reload
    | Restore
)
Reply = (
    Admitted
    | Forwarded
    | BackwardDone
    | Normed
    | Applied
    | Ran
    | Served
    | BitsFound
    | ValuesRead
    | StageDone
    | Exported
    | Refused
)


def timed(reply: Reply, busy_nanoseconds: int) -> Reply:
    """A reply with how long it took, where it is one that says so."""
    if isinstance(reply, Forwarded | BackwardDone | Applied | Served):
        return msgspec.structs.replace(reply, busy_nanoseconds=min(busy_nanoseconds, NUMBER_MAX))
    return reply
