"""Notices that a run's committer sends to the other members, for their screens. Nothing depends on their
arrival.

Each notice has the fields of one event of `node.events`, except the time, which is the receiver's own, and
the run, which the plan identifies. Its numbers are bounded so that a screen can show them.
"""

from typing import Annotated

import msgspec

from node.events import ReplicaDropped, RunEvaluated, RunResumed, StepCommitted
from partition.plan.plan import STAGES_MAX, Hash, Peer, StageNumber, StepNumber
from partition.run.messages import Reason
from partition.stage import METRICS_MAX

NUMBER_MAX = 2**53
"""The largest integer that every JSON reader represents exactly."""
SECONDS_MAX = 1e9
"""The longest duration of a step: thirty years, so that a screen can multiply it by the steps left."""
FINITE_MAX = 1.7e308

Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Finite = Annotated[float, msgspec.Meta(ge=-FINITE_MAX, le=FINITE_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
StageFigures = Annotated[tuple[Finite, ...], msgspec.Meta(max_length=STAGES_MAX)]
StageCounts = Annotated[tuple[Number, ...], msgspec.Meta(max_length=STAGES_MAX)]


class StepNotice(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """The fields of `node.events.StepCommitted`."""

    step: StepNumber
    loss: Finite
    samples: Number
    seconds: Seconds
    replicas: Number
    utilisation: StageFigures
    bubble: Finite
    sent_bytes: StageCounts
    returned_bytes: StageCounts
    replayed: Number
    rounding: StageFigures
    height: Number
    diverged: Reason
    counted: Number


class DropNotice(msgspec.Struct, frozen=True, tag="drop", kw_only=True):
    """The fields of `node.events.ReplicaDropped`."""

    step: StepNumber
    stage: StageNumber
    peer: Peer
    microbatches_replayed: Number


class EvaluationNotice(msgspec.Struct, frozen=True, tag="evaluation", kw_only=True):
    """The fields of `node.events.RunEvaluated`."""

    accuracy: Finite | None
    loss: Finite
    samples: Number
    metrics: Annotated[tuple[Finite, ...], msgspec.Meta(max_length=METRICS_MAX)]
    step: StepNumber | None
    best_step: StepNumber
    best: Finite
    since: Number


class ResumeNotice(msgspec.Struct, frozen=True, tag="resume", kw_only=True):
    """The fields of `node.events.RunResumed`."""

    height: Number
    step: StepNumber
    replayed: Number
    lost_steps: StepNumber
    filled: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=STAGES_MAX)]
    seconds: Seconds


News = StepNotice | DropNotice | EvaluationNotice | ResumeNotice
RunEvent = StepCommitted | ReplicaDropped | RunEvaluated | RunResumed

NEWS: dict[type[RunEvent], type[News]] = {
    StepCommitted: StepNotice,
    ReplicaDropped: DropNotice,
    RunEvaluated: EvaluationNotice,
    RunResumed: ResumeNotice,
}
_EVENTS = {news: event for event, news in NEWS.items()}


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """An event, sent by the committer to all other members of the plan."""

    plan: Hash
    news: News


def news_of(event: RunEvent) -> News:
    """Return the notice of an event."""
    kind = NEWS[type(event)]
    return kind(**{name: getattr(event, name) for name in kind.__struct_fields__})


def event_of(news: News, *, at: float, run: str) -> RunEvent:
    """Return the event for a notice, as shown on this node."""
    fields = {name: getattr(news, name) for name in news.__struct_fields__}
    return _EVENTS[type(news)](at=at, run=run, **fields)
