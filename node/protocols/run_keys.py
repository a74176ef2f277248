"""Refuses keys of RUN.toml that would have no effect: a key that its run's mode does not use is an error.

No I/O. `EXACT_ONLY` and `LOCAL_ONLY` name the keys that only one mode reads; `tests/test_keys.py` tests each
of them.
"""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Protocol

from msgspec.structs import fields

from node.errors import UsageError

GRAPH_SUFFIX = ".peerloom"

LOCAL_ONLY = MappingProxyType(
    {
        "train.local_steps": "in exact mode gradients are summed in every step",
        "train.strategy": "in exact mode nothing is averaged",
        "train.damping": "in exact mode nothing is averaged",
        "train.codec": "in exact mode use train.frames, which compresses what stages exchange",
        "train.weighting": "in exact mode every sample counts once",
        "train.evaluate_every": "in exact mode use train.validate_every",
    }
)
"""Keys that only `train.mode = "local"` reads, and why exact mode does not."""
EXACT_ONLY = MappingProxyType(
    {
        "train.frames": "in local mode use train.codec, which compresses what members exchange",
        "train.on_divergence": "in local mode a member whose loss is not finite returns to the others' state",
        "plan.trainers": "in local mode every member feeds its own samples",
        "plan.pipeline": "in local mode no plan orders micro-batches",
        "plan.on_lost_quorum": "in local mode members need no quorum",
        "plan.replicas_min": "in local mode plan.replicas is the number of members; 0 takes any number",
        "plan.standbys": "in local mode every member has the whole state",
        "plan.objective": "in local mode there is no plan to optimize",
        "plan.priority": "in local mode members join when a slot is free, without a queue",
        "plan.deadline_minutes": "in local mode members join when a slot is free, without a queue",
        "goal.seconds": "in local mode every member trains at its own pace",
        "goal.samples_per_second": "in local mode every member trains at its own pace",
    }
)
"""Keys that only `train.mode = "exact"` reads, and why local mode does not."""


class RunKeys(Protocol):
    """The parts of a RUN.toml that are checked here; implemented by `node.protocols.run_file.RunFile`."""

    @property
    def model(self) -> str: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def source(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def train(self) -> Any: ...
    @property
    def plan(self) -> Any: ...
    @property
    def goal(self) -> Any: ...


def is_given(run: RunKeys, key: str) -> bool:
    """Return whether a key, such as `train.codec`, differs from its default."""
    table, _, name = key.partition(".")
    found = getattr(run, table)
    default = next(each.default for each in fields(type(found)) if each.name == name)
    return bool(getattr(found, name) != default)


def unused_keys(run: RunKeys) -> Iterator[tuple[str, str]]:
    """Yield each given key that the run's mode does not read, and the reason."""
    if run.train.mode == "auto":
        return  # the planner may choose either mode
    other = LOCAL_ONLY if run.train.mode == "exact" else EXACT_ONLY
    yield from ((key, why) for key, why in other.items() if is_given(run, key))


def check_keys(run: RunKeys, where: str) -> None:
    """Refuse the first key without an effect. Raises UsageError."""
    train, plan = run.train, run.plan
    for key, why in unused_keys(run):
        raise UsageError(
            f'{where}: {key}: has no effect with train.mode = "{train.mode}": {why}',
            f'omit {key}, or set train.mode = "{"local" if train.mode == "exact" else "exact"}"',
        )
    if train.momentum and train.optimizer != "sgd":
        raise UsageError(
            f'{where}: train.momentum: has no effect with train.optimizer = "{train.optimizer}"',
            'omit train.momentum, or set train.optimizer = "sgd"',
        )
    if plan.replicas and plan.replicas_min > 1:
        raise UsageError(
            f"{where}: plan.replicas and plan.replicas_min: give one of the two",
            "plan.replicas = 0 allows any number from plan.replicas_min up",
        )
    if plan.objective == "energy" and is_given(run, "plan.standbys"):
        raise UsageError(
            f'{where}: plan.standbys: has no effect with plan.objective = "energy": idle machines stay idle',
            'omit plan.standbys, or set plan.objective = "throughput"',
        )
    if is_given(run, "goal.seconds") and not run.goal.samples_per_second:
        raise UsageError(
            f"{where}: goal.seconds: has no effect without goal.samples_per_second",
            "set goal.samples_per_second too, for example to 100",
        )
    if run.tokenizer and ".py:" in run.source:
        raise UsageError(
            f"{where}: tokenizer: has no effect on {run.source}, which returns samples instead of text",
            "omit tokenizer, and apply it inside the function",
        )
    if run.model.endswith(GRAPH_SUFFIX):
        captured = [("options", run.options), ("train.dtype", is_given(run, "train.dtype"))]
        for key, is_set in captured:
            if is_set:
                raise UsageError(
                    f"{where}: {key}: has no effect on {run.model}, which is captured already",
                    f"omit {key}, and capture the model again with it: `peerloom model capture`",
                )
