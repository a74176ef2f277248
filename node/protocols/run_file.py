"""RUN.toml, in which a person describes a run: its tables, and the checks of keys that depend on each
other."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import msgspec

from gossip.averaging.aggregates import chosen, obstacle_of
from gossip.averaging.catalogue import OUTER
from node import toml
from node.errors import UsageError
from node.protocols.data_table import DataTable
from node.protocols.manifest import DEVICE_KINDS, LOSS, STANDBYS_MAX, DeviceKind, Objective, PlaceWish
from node.protocols.run_keys import check_keys
from partition.codecs.choice import Frames
from partition.model.together import RANGES_MAX
from partition.plan.plan import STEPS_MAX, TRAINERS_MAX
from partition.run.local_settings import (
    EVALUATIONS_MAX,
    LOCAL_STEPS_MAX,
    AggregateName,
    CodecName,
    LocalSettings,
    StrategyName,
    Weighting,
)
from partition.stage import (
    GROUPS_MAX,
    IN_FLIGHT_MAX,
    GroupSettings,
    OptimizerSettings,
    Schedule,
)
from partition.steps.validation import EVERY_MAX

Share = Annotated[float, msgspec.Meta(ge=0, le=0.9)]


class GroupTable(msgspec.Struct, frozen=True):
    """`[[train.groups]]`: parameters whose names match one of the patterns in `match` (`*.bias`, `*norm*`).
    The first table that matches a parameter counts. `rate_factor` multiplies the learning rate."""

    match: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=64)]
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    rate_factor: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0


LayerGroup = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=200)], ...],
    msgspec.Meta(min_length=1, max_length=64),
]
Auto = Literal["auto"]
"""The planner chooses the value when a run is placed, and reports its reasons."""


class TrainTable(msgspec.Struct, frozen=True):
    """`[train]` of RUN.toml. `batch` and `microbatch` are numbers of samples; `window` is the number of bytes
    of text in a sample.

    With `epochs` the number of steps follows from that many passes over the training samples, and `steps` is
    not given. `window` 0 means the model's, or 64 if the model's can vary. The learning rate rises over
    `warmup_steps`, then follows the schedule to 0 at the last step. `clip_norm` 0 means no clipping. `frames`
    is the allowed loss of precision in data sent from stage to stage; `exact` allows only lossless
    compression. If the loss or gradient of a step is not finite, the run ends as failed (`on_divergence`
    "stop"), or the step changes nothing and is counted as skipped ("continue"). More than ten such steps in a
    row end the run too.

    `microbatch`, `recompute`, `frames` and `mode` may be "auto": `node.planning.choices` then chooses.

    If the data has validation samples, a run in exact mode computes them after every `validate_every` steps
    (0: about twenty times in all) and after the last step. Each time it uses all of them, with the same split
    on every node. `watch` is the measure by which states are compared: "loss", "accuracy" or another metric
    of the model. A higher metric is better, or a lower one if the name begins with "-". The run ends after
    `patience` consecutive validations (in mode "local", evaluations) without an improvement of at least
    `improvement`; 0 means that it does not end early. With `keep` "best" the result is the state with the
    best validation.

    With `mode` "exact", gradients are summed over all members in every step. With `mode` "local", every
    member (or, with `plan.stages`, a column of members) trains the whole model on its own shard for at most
    `steps` steps, and averages after every `local_steps` of them. See
    `partition.run.local_settings.LocalSettings` for the keys from there on. With `federated`, in mode
    "local", data stays with its owners: every member trains on its own data set, to which it gives the name
    that the run uses (docs/data.md).
    """

    RENAMED: ClassVar[Mapping[str, str]] = MappingProxyType({"compress": "frames"})
    """Keys that had other names in older files."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=STEPS_MAX)] = 200
    epochs: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    batch: Annotated[int, msgspec.Meta(ge=1, le=1_048_576)] = 128
    microbatch: Annotated[int, msgspec.Meta(ge=1, le=65_536)] | Auto = 16
    window: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    learning_rate: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.001
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    clip_norm: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    autocast: Literal["off", "bfloat16"] = "off"
    recompute: bool | Auto = False
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    dtype: Literal["float32", "float64"] = "float32"
    frames: Frames | Auto = "exact"
    on_divergence: Literal["stop", "continue"] = "stop"
    groups: Annotated[tuple[GroupTable, ...], msgspec.Meta(max_length=GROUPS_MAX - 1)] = ()
    mode: Literal["exact", "local", "auto"] = "exact"
    federated: bool = False
    local_steps: Annotated[int, msgspec.Meta(ge=1, le=LOCAL_STEPS_MAX)] = 20
    strategy: StrategyName = "average"
    codec: CodecName = "float32"
    weighting: Weighting = "samples"
    aggregate: AggregateName = "auto"
    damping: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    evaluate_every: Annotated[int, msgspec.Meta(ge=1, le=EVALUATIONS_MAX)] = 1
    patience: Annotated[int, msgspec.Meta(ge=0, le=EVALUATIONS_MAX)] = 0
    improvement: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    validate_every: Annotated[int, msgspec.Meta(ge=0, le=EVERY_MAX)] = 0
    watch: Annotated[str, msgspec.Meta(pattern=r"^-?[A-Za-z0-9][A-Za-z0-9._-]{0,39}\Z")] = LOSS
    keep: Literal["last", "best"] = "last"


GOAL_MAX = 1e9
"""Highest goal, in samples per second; no swarm trains faster."""
GOAL_SECONDS = 60
GOAL_SECONDS_MIN, GOAL_SECONDS_MAX = 5, 86_400
"""Limits of a goal's period. Alerts are checked every two seconds, and people look at least once a day."""
COMMON = "common"
"""Stands for kinds of devices: those of nearby peers, the most frequent first."""


class PlanTable(msgspec.Struct, frozen=True):
    """`[plan]` of RUN.toml. With 0 stages or replicas, the solver chooses.

    `trainers` is the number of members that feed samples, each its share; with more than the requester, the
    run can continue without the requester. `pipeline` is the order of work in a stage: `1f1b` holds few
    micro-batches at a time, `gpipe` all of a step. Every `checkpoint_every` steps (0: never) the state of all
    stages is copied to other members, so that at most these steps are lost when a stage loses its last
    replica. In mode "local" each member saves its own state to its disk.

    `on_lost_quorum` says what happens when fewer than a majority are left: the run waits for the others, or
    continues as a `fork`. With `requester`, half of the voters are enough if the requester is one of them, so
    in a run of two members it can continue alone.

    If providers are busy, the runs of one requester are ordered by `priority`, the highest first, and then by
    when `deadline_minutes` end, the earliest first. Neither counts against runs of other requesters. The
    requester is alerted if the run cannot be done by its deadline. Neither is in the manifest, so both may be
    revised.

    With `place`, only peers of this location hold stages. With `near` (a location or a peer id), only peers
    within `max_rtt_milliseconds` of it do (30 if that is 0). Without `near`, `max_rtt_milliseconds` counts
    from the requester. With `devices`, only peers that compute on one of these kinds hold stages, and a later
    kind is used only if there are too few peers of the earlier ones; "common" alone stands for the kinds
    nearby, the most frequent first. With `gflops_min`, only peers with at least that measured speed do (10^9
    float32 operations a second, of one slot).

    With `objective` "energy", peers and cuts minimize joules, and borders do not move; with "throughput",
    they maximize samples per second. Up to `standbys` idle machines follow the stages whose loss would cost
    most. They hold the newest state and compute nothing, take over immediately when a stage loses its last
    replica, and leave when another run needs their slot. If `replicas` is 0, each stage gets at least
    `replicas_min` peers. The layers from the first to the last of a group in `together` (modules, layers by
    name or number, ranges such as "3-5") stay in one stage; with `keep_tied`, so do layers that use one
    weight.
    """

    stages: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    replicas: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    replicas_min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    standbys: Annotated[int, msgspec.Meta(ge=0, le=STANDBYS_MAX)] = 2
    objective: Objective = "throughput"
    together: Annotated[tuple[LayerGroup, ...], msgspec.Meta(max_length=RANGES_MAX)] = ()
    keep_tied: bool = False
    trainers: Annotated[int, msgspec.Meta(ge=1, le=TRAINERS_MAX)] = 1
    pipeline: Literal["1f1b", "gpipe"] = "1f1b"
    checkpoint_every: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 20
    on_lost_quorum: Literal["wait", "fork", "requester"] = "wait"
    place: Annotated[str, msgspec.Meta(max_length=64)] = ""
    near: Annotated[str, msgspec.Meta(max_length=64)] = ""
    max_rtt_milliseconds: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    devices: Annotated[tuple[DeviceKind | Literal["common"], ...], msgspec.Meta(max_length=DEVICE_KINDS)] = ()
    gflops_min: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    priority: Annotated[int, msgspec.Meta(ge=0, le=9)] = 5
    deadline_minutes: Annotated[int, msgspec.Meta(ge=0, le=525_600)] = 0


class GoalTable(msgspec.Struct, frozen=True):
    """`[goal]` of RUN.toml: the requester is alerted when the run trains less than `samples_per_second` over
    the last `seconds`; 0 means no goal. Not in the manifest, because it concerns only the requester."""

    samples_per_second: Annotated[float, msgspec.Meta(ge=0, le=GOAL_MAX)] = 0.0
    seconds: Annotated[int, msgspec.Meta(ge=GOAL_SECONDS_MIN, le=GOAL_SECONDS_MAX)] = GOAL_SECONDS


class SplitsTable(msgspec.Struct, frozen=True):
    """`[splits]` of RUN.toml: where validation and test samples come from. `validation` and `test` are other
    sources, like `data`; the shares are shares of the training samples. If neither is given, the parts that
    `data` itself has are used, or else a fifth of it for tests."""

    validation: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    test: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    validation_share: Share = 0.0
    test_share: Share = 0.0


class RunFile(msgspec.Struct, frozen=True):
    """RUN.toml as a whole; every key has a default.

    `model` is a built-in name, a captured FILE.peerloom, PATH.py:FUNCTION, "vision" or "language". If it is
    not given, one of the last two is chosen (`node.api.task_defaults`). `options` are further arguments of
    the model (such as `layers` and `width` of a gpt). `data` is one of these: `digits`; a folder with
    train.npz and test.npz (arrays x and y, or named like the model's inputs and labels); a text file; a
    source that `node.content.sources` converts to such a folder (a table, arrays, images); or
    PATH.py:FUNCTION, which returns a Dataset, an iterator or arrays (`node.content.samples`). If it is a
    table, `[data]`, it also has the keys that say how to read the source. With `tokenizer`, a tokenizer.json,
    a text consists of its tokens, and `train.window` counts tokens.
    """

    model: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    data: Annotated[str, msgspec.Meta(min_length=1, max_length=4_096)] | DataTable = "digits"
    options: dict[str, bool | int | float | str] = {}
    train: TrainTable = TrainTable()
    plan: PlanTable = PlanTable()
    splits: SplitsTable = SplitsTable()
    goal: GoalTable = GoalTable()
    tokenizer: Annotated[str, msgspec.Meta(max_length=4_096)] = ""

    @property
    def source(self) -> str:
        """The source that `data` names."""
        return self.data if isinstance(self.data, str) else self.data.source

    @property
    def data_keys(self) -> DataTable:
        """How to read the source."""
        return DataTable(self.data) if isinstance(self.data, str) else self.data

    @property
    def optimizer(self) -> OptimizerSettings:
        """The optimizer's settings in the form that a stage takes."""
        train = self.train
        return OptimizerSettings(
            kind=train.optimizer,
            learning_rate=train.learning_rate,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            schedule=Schedule(train.schedule, train.warmup_steps, train.steps),
            clip_norm=train.clip_norm,
            groups=self._groups,
        )

    @property
    def place(self) -> PlaceWish | None:
        """Where stages may be; None for anywhere."""
        plan = self.plan
        # the node has already replaced it with kinds
        devices = tuple(kind for kind in plan.devices if kind != "common")
        wish = PlaceWish(plan.place, plan.near, plan.max_rtt_milliseconds, devices, plan.gflops_min)
        return None if wish == PlaceWish() else wish

    @property
    def local(self) -> LocalSettings | None:
        """How members train in local mode; None in exact mode."""
        train = self.train
        if train.mode != "local":
            return None
        return LocalSettings(
            train.local_steps,
            train.strategy,
            train.codec,
            train.weighting,
            train.evaluate_every,
            train.patience,
            train.improvement,
            aggregate=train.aggregate,
            damping=train.damping,
        )

    @property
    def _groups(self) -> tuple[GroupSettings, ...]:
        """The groups of parameters; the first holds all parameters that no table matches."""
        tables = self.train.groups
        if not tables:
            return ()
        rest = GroupSettings(weight_decay=self.train.weight_decay)
        return (rest, *(GroupSettings(table.rate_factor, table.weight_decay) for table in tables))


def read_run_file(text: str, name: str) -> RunFile:
    """Parse and check the text of a RUN.toml; errors refer to it as `name`. Raises UsageError."""
    run = toml.parse(text, RunFile, name=name).value
    check_run_file(run, name)
    return run


def check_run_file(run: RunFile, where: str) -> None:
    """Check rules that no single key's range expresses. Raises UsageError."""
    train = run.train
    check_keys(run, where)
    if isinstance(train.microbatch, int):
        _check_batch(train.batch, train.microbatch, where)
    if len(set(run.plan.devices)) < len(run.plan.devices):
        raise UsageError(
            f"{where}: plan.devices: {', '.join(run.plan.devices)}: name each device at most once"
        )
    if COMMON in run.plan.devices and len(run.plan.devices) > 1:
        raise UsageError(
            f'{where}: plan.devices: "{COMMON}" must stand alone', f'plan.devices = ["{COMMON}"]'
        )
    for part in ("validation", "test"):
        if getattr(run.splits, part) and getattr(run.splits, f"{part}_share"):
            raise UsageError(f"{where}: splits.{part} and splits.{part}_share: give one of the two")
    if train.epochs and train.steps != TrainTable().steps:
        raise UsageError(f"{where}: train.steps and train.epochs: give one of the two")
    if train.schedule != "constant" and not train.epochs and train.warmup_steps >= train.steps:
        raise UsageError(
            f"{where}: train.warmup_steps {train.warmup_steps} leaves no step in which the rate could fall"
        )
    _check_local(run, where)


def _check_batch(batch: int, microbatch: int, where: str) -> None:
    if batch % microbatch:
        raise UsageError(f"{where}: train.batch {batch} is not a multiple of train.microbatch {microbatch}")
    if batch // microbatch > IN_FLIGHT_MAX:
        raise UsageError(
            f"{where}: train.batch {batch} is {batch // microbatch} micro-batches of "
            f"{microbatch}; at most {IN_FLIGHT_MAX} are allowed",
            f"set train.batch to at most {IN_FLIGHT_MAX * microbatch}, or train.microbatch = "
            f"{_least_divisor(batch, -(-batch // IN_FLIGHT_MAX))} if the model and the peers can take that",
        )


def _least_divisor(number: int, least: int) -> int:
    """Return the least divisor of `number` that is at least `least`. There always is one, because `number`
    divides itself."""
    return next(each for each in range(least, number + 1) if number % each == 0)


def _check_local(run: RunFile, where: str) -> None:
    train = run.train
    if train.federated:
        _check_federated(run, where)
    if train.mode != "local":
        if train.aggregate != "auto":
            raise UsageError(
                f'{where}: train.aggregate: is only for train.mode = "local"; in mode "{train.mode}" a step '
                "is the sum over all members, which cannot tolerate a lying one",
                'set train.mode = "local", or omit train.aggregate',
            )
        return
    try:
        chosen(train.aggregate, is_private=False, obstacle=obstacle_of(train.strategy, train.codec))
    except ValueError as error:
        raise UsageError(f"{where}: train.{error}", 'set train.aggregate = "mean" or "auto"') from None
    for key in ("validate_every", "watch", "keep"):
        if getattr(train, key) != getattr(TrainTable(), key):
            raise UsageError(
                f'{where}: train.{key}: is only for train.mode = "exact"; in mode "local" members '
                "evaluate by the loss every train.evaluate_every rounds, and the best state is the result",
            )
    if train.damping < 1 and train.strategy in OUTER:
        raise UsageError(
            (
                f"{where}: train.damping: {train.strategy} makes outer steps, which members "
                "cannot take partially"
            ),
            'omit train.damping, or set train.strategy = "average"',
        )
    if train.codec.startswith("topk") and train.strategy not in ("diloco", "sparseloco"):
        raise UsageError(
            f"{where}: train.codec {train.codec} keeps few values, but {train.strategy} averages all of them",
            'train.strategy = "sparseloco"',
        )


def _check_federated(run: RunFile, where: str) -> None:
    if run.train.mode != "local":
        raise UsageError(
            f'{where}: train.federated: data stays with its owners only in train.mode = "local"; in mode '
            f'"{run.train.mode}" samples travel to the stages',
            'train.mode = "local"',
        )
    if run.plan.stages > 1:
        raise UsageError(
            f"{where}: train.federated: with plan.stages = {run.plan.stages} labels and activations of each "
            "sample would travel from stage to stage",
            "set plan.stages = 1, so that every member trains the whole model",
        )
