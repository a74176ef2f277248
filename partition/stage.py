"""The Stage API: the specification of a stage, its requests and its replies. Structs only, no torch.

A stage is a `StageGraph`, held by one replica. Its values are in four flat arenas that the node and the
stage's process share:

    parameters   values: trainable parameters, batch statistics, then what is frozen
    gradients    sums over the micro-batches of one step, not means; and the step's share of the statistics
    totals       the total of the replicas' sums; the node writes them, `Apply` takes them
    moments      the optimizer's state: nothing, one vector (momentum) or two (Adam)

All have the same layout (`partition.stage_layout`), without gaps. `gradients` and `totals` end before the
frozen parameters, and `moments` repeats that part. A stage that trains has one type, float32 or float64. In
other stages, parameters keep the types in which they are stored, the widest types first, so that each value
is aligned. `partition.execute` computes; `node.stages.host` runs it in a process.
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
"""The order in which the arenas' file descriptors are passed to the stage's process."""

VECTOR_BYTES_MAX = 1 << 34
"""Maximum size of one arena: 16 GiB, four billion float32 parameters in one stage. A node may refuse far
less."""
MICROBATCH_BYTES_MAX = 1 << 30
"""Maximum number of bytes into or out of a stage for one micro-batch. A real one has a few MB."""
THREADS_MAX = 1_024
IN_FLIGHT_MAX = 64
"""Maximum number of micro-batches between forward and backward pass: a pipeline holds about as many as it has
stages."""
MICROBATCHES_MAX = 1 << 20
"""Maximum number of micro-batches that a stage remembers within one step, in order to refuse a second one
with the same number."""
SESSIONS_MAX = 64
"""Maximum number of sessions with their own states (KV caches) in one stage."""
GROUPS_MAX = 16
METRICS_MAX = 16
RUN_BYTES_MAX = 64
SERVED_SESSIONS_MAX = 4_096
"""Maximum number of sessions with keys and values in one stage. Most services run out of memory long
before."""
REASON_LENGTH_MAX = 400
FENCES_MAX = 16

SAMPLES_MAX = NUMBER_MAX
"""Limit for samples, steps and micro-batches: the largest number that every language counts exactly."""
Sign = Literal[1, -1]
"""The sign of a micro-batch in the sums: 1 adds it, -1 takes out one that the sums hold."""
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
            raise ValueError("a schedule's floor must be between 0 and 1")
        if self.kind != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError("a schedule that falls must have more total_steps than warmup_steps")


class GroupSettings(msgspec.Struct, frozen=True, array_like=True):
    """The settings of one parameter group: a factor on the learning rate, and the weight decay."""

    rate_factor: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not all(isfinite(number) and number >= 0 for number in (self.rate_factor, self.weight_decay)):
            raise ValueError("a group's values must be finite and not negative")


class OptimizerSettings(msgspec.Struct, frozen=True, array_like=True):
    """torch.optim's SGD, Adam or AdamW, with torch's names for the settings.

    `momentum` applies to sgd only, `betas` and `epsilon` to adam and adamw only. `groups` are indexed by
    `Parameter.group`; without them every parameter has `weight_decay`. `clip_norm` limits the norm of the
    *mean* gradient over all stages; 0 disables it.
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
            raise ValueError("an optimizer's values must be finite and not negative")
        if max(self.momentum, *self.betas) >= 1:
            raise ValueError("momentum and betas must be below 1")

    @property
    def moments(self) -> int:
        """The number of vectors in the optimizer's state, each with the size of the gradients."""
        if self.kind != "sgd":
            return 2
        return 1 if self.momentum else 0


class StageSpecification(msgspec.Struct, frozen=True):
    """The full specification of a stage: two replicas with equal specifications compute the same.

    `seed` determines the first values of parameters that have a recipe, each by its name, and `run` the seeds
    of random operators, so neither depends on the cut. `sizes_max` bounds the graph's symbols; a step has
    `microbatches`. `autocast` computes in bfloat16 like `torch.autocast`; `recompute` keeps only a
    micro-batch's input and computes it again for the backward pass. `cache_bytes` are for the keys and values
    of all served sessions together. `memory_bytes_max` and `flops_max` (for one micro-batch, forward and
    backward; 0 for no limit) are the provider's offer. The replica itself chooses `threads`, `device` and
    `allow_unfenced`, which permits a system that cannot enforce limits on the process.

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
                f"the parameters of a stage that trains must all be float32 or all float64, not {found}"
            )
        vector, boundary = vector_bytes(self), boundary_bytes(self)
        if vector > VECTOR_BYTES_MAX:
            raise ValueError(f"a stage of {vector} bytes, at most {VECTOR_BYTES_MAX} allowed")
        if boundary > MICROBATCH_BYTES_MAX:
            raise ValueError(f"a micro-batch of {boundary} bytes, at most {MICROBATCH_BYTES_MAX} allowed")

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """The type of the arenas of a stage that trains. In other stages each `Slot` has its value's type."""
        rows = self.graph.parameters
        return "float64" if rows and rows[0].type.dtype == "float64" else "float32"

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def vector_bytes(specification: StageSpecification) -> int:
    """Return the bytes of `parameters`; 0 if the stage has none."""
    return sum(row.stored_bytes for row in specification.graph.parameters)


def boundary_bytes(specification: StageSpecification) -> int:
    """Return the maximum bytes into or out of the stage for one micro-batch, over its entry points."""
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
    """The process is ready. It reports the results of its dry run at the largest sizes, for one micro-batch.

    `flops` are for forward and backward pass; `saved_bytes` are kept between them; `peak_bytes` is the
    maximum without the arenas; `seconds` is how long the admission took. `fences` are the limits on the
    process and how they are enforced, `unfenced` those that this system could not enforce, and why.
    """

    flops: Number
    saved_bytes: Number
    peak_bytes: Number
    seconds: float
    fences: Annotated[tuple[Reason, ...], msgspec.Meta(max_length=FENCES_MAX)] = ()
    unfenced: Annotated[tuple[Reason, ...], msgspec.Meta(max_length=FENCES_MAX)] = ()


class Forward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute one micro-batch of the entry point `train`: `input` has the stage's inputs in order.

    The last stage needs labels, and with `train` it immediately goes backward. Any other stage keeps the data
    that its `Backward` will need. If `train` is false, nothing is kept and nothing is random. `codec` packs
    the answer: it is chosen for the answer's link.

    With the sign -1, a micro-batch that the sums hold is computed again in order to take it out: with the
    same draws, and with the gradients and the share of the statistics negated. After that it counts as never
    given.
    """

    step: Number
    microbatch: Number
    train: bool
    input: Payload
    labels: Payload | None = None
    codec: Codec = "raw"
    sign: Sign = 1


class Forwarded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Forward`: `output` from all but the last stage, `gradient` of the inputs from the last
    stage.

    `samples` is the batch size, or what the graph counts instead (tokens). `loss` and `metrics` are *sums*
    over them, in the graph's order; 0 and () except at the last stage. A micro-batch that is taken out has
    neither output nor gradient, because the neighbours have already received theirs. `busy_nanoseconds` is
    the time of the stage's process, including decoding and encoding, but not waiting. `rounding` is the
    codec's rounding of the answer's tensors.
    """

    output: Payload | None
    gradient: Payload | None
    loss: float
    samples: int
    metrics: Annotated[tuple[float, ...], msgspec.Meta(max_length=METRICS_MAX)] = ()
    busy_nanoseconds: Number = 0
    rounding: Rounding = Rounding()


class Backward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The gradients of the loss for the outputs that have one, in order. The other fields are as in
    `Forward`."""

    step: Number
    microbatch: Number
    gradient: Payload
    codec: Codec = "raw"
    sign: Sign = 1


class BackwardDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Backward`. `gradient` is for the previous stage; it is None from the first stage, and if
    a micro-batch is taken out.

    `busy_nanoseconds` and `rounding` are as in `Forwarded`.
    """

    gradient: Payload | None
    busy_nanoseconds: Number = 0
    rounding: Rounding = Rounding()


class Forget(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget a micro-batch that has had its forward but not its backward pass: it counts as never given.

    A micro-batch that was being taken out stays in the sums.
    """

    step: Number
    microbatch: Number


class Discard(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget the micro-batches of this step and zero the gradient sums."""


class Norm(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the squared norm of `totals` over the parameters for which this stage reports.

    The first stage that holds a tied parameter reports it, so that the sum over all stages is the model's
    norm.
    """


class Normed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer: the squared norm of the sums, not of the mean. It is infinite if any value in `totals` is
    not finite."""

    squared_norm: float


class Apply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Perform one optimizer step by `totals` / `samples`; then zero sums and totals, and forget the
    micro-batches.

    `step` is the number of the committed step, counted from 0. Schedules and Adam's bias correction depend on
    it, so a replica that joins later steps like the others. `squared_norm` is that of the totals of *all*
    stages; it is needed if the settings clip. `is_skipped` discards the sums and totals of a step that
    diverged: parameters, statistics and moments stay unchanged, and the step still counts. `rate` multiplies
    the learning rate.
    """

    step: Number
    samples: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    squared_norm: float | None = None
    is_skipped: bool = False
    rate: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0


class Applied(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Apply`. `digest` is blake3 of the parameter arena: equal on all replicas of a stage."""

    digest: Digest
    busy_nanoseconds: Number = 0


class RunEntryPoint(msgspec.Struct, frozen=True, tag="Run", array_like=True):
    """Run an entry point without gradients, on the states of a session; an unknown session begins anew.

    `codec` is as in `Forward`.
    """

    session: Annotated[bytes, msgspec.Meta(min_length=1, max_length=SESSION_BYTES_MAX)]
    entry: Annotated[str, msgspec.Meta(max_length=64)]
    input: Payload
    codec: Codec = "raw"


class Ran(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `RunEntryPoint`: the outputs, in order."""

    output: Payload


class Export(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the stage's parameters."""


class Exported(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Export`. `data` is a safetensors file of the stage's parameters and named constants, by
    state-dict names."""

    data: bytes


class Import(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read the parameters from a safetensors file that holds exactly this stage's.

    This forgets the micro-batches and zeroes the sums, which belong to the replaced parameters. The
    optimizer's moments stay unchanged.
    """

    data: bytes


class Reload(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read the arena `parameters`, which the node has written itself; otherwise like `Import`."""


class Restore(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Continue from the arenas `parameters` and `moments`, which the node has written in their state after
    `step` steps.

    This forgets the micro-batches and zeroes the sums. The next step must be this one; any other is refused.
    A restored stage computes the same bits as the stage from which the values come.
    """

    step: Number


class StageDone(msgspec.Struct, frozen=True, tag="Done", array_like=True):
    """The answer to `Discard`, `EndSession`, `Forget`, `CopySession`, `Import`, `Reload` and `Restore`."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a request that no correct peer makes. The stage is unchanged.

    `part` is the payload that no replica can use; "" if no payload is wrong. The `fault` is "values" if a
    payload is intact but the model does not accept a value in it. It is "divergence" if all payloads are
    sound but what the stage computes from them is not finite: every other replica would answer the same.
    "position" refers to a unit of `session` that begins after the tokens that the stage holds, or ends beyond
    the longest session; "room" to one for which there are no pages.
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
    """Return the reply with its duration, if it has a field for that."""
    if isinstance(reply, Forwarded | BackwardDone | Applied | Served):
        return msgspec.structs.replace(reply, busy_nanoseconds=min(busy_nanoseconds, NUMBER_MAX))
    return reply
