"""The state of a node for screens: `apply(state, event)` is pure, and every screen is a function of `State`.

It holds only what a person or a program may ask about; cores keep the protocol state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch
from types import MappingProxyType
from typing import Any

import msgspec

from crypto.identity import PeerId
from node import averaging_events, events, result_events
from node.settings_events import NodeConfigured, RunGoalSet

JOINS_MAX = 64
"""Number of the newest join attempts to keep; older ones no longer explain the current state."""
_OVER = ("done", "failed", "stopped")
RUNS_KEPT_MAX = 256
MEMBERS_KEPT_MAX = 2_048
"""Number of ended runs, and of departed members, to keep. Strangers can create any number of either."""
ALERTS_MAX = 64
"""Maximum number of alerts shown at once. There are few kinds, each at most once per active run."""
LOSSES_MAX, VALIDATIONS_MAX = 100_000, 1_000
"""Number of losses, and of validations, to keep per run: enough for the whole curve of a long run."""


@dataclass(frozen=True)
class MemberView:
    """Another member as this node sees it. `status`: alive, suspect, dead, left."""

    peer: PeerId
    name: str
    addresses: tuple[str, ...]
    status: str
    since: float
    reason: str
    found_through: str
    capacity: events.CapacityMeasured | None
    noticed_by: PeerId | None = None
    """The peer that suspected this member, if it is suspect or dead."""
    standing: events.Standing | None = None
    degraded: events.MemberDegraded | None = None
    """The member's late or indirect answers to this node; None if it answers normally."""


@dataclass(frozen=True)
class RunView:
    """A run as this node knows it. `status` is one of `partition.run.states`, and `reason` explains it.
    `waits_for` lists the peers, with names, whose return would end a pause. `result` is "here" (on this
    node's disk), "elsewhere", or empty if there is none."""

    run: str
    model: str
    data: str
    steps: int
    requester: PeerId
    status: str
    plan: events.RunPlanned | None = None
    covered: events.RunCovered | None = None
    """The committer's latest assessment; set only if this node is the committer."""
    losses: tuple[float, ...] = ()
    step: int = 0
    microbatches_replayed: int = 0
    accuracy: float | None = None
    metrics: tuple[str, ...] = ()
    evaluated: events.RunEvaluated | None = None
    validations: tuple[events.RunEvaluated, ...] = ()
    detail: str = ""
    weights: str = ""
    result: str = ""
    others: tuple[tuple[PeerId, str], ...] = ()
    """Members that reported a different result of the run, with their result (`ResultDiffers`)."""
    reason: str = ""
    reason_at: float = 0.0
    """When `reason` began to hold, in Unix seconds."""
    steps_lost: int = 0
    steps_skipped: int = 0
    committed: events.StepCommitted | None = None
    revised: events.RunRevised | None = None
    goal: RunGoalSet | None = None
    waits_for: tuple[tuple[PeerId, str], ...] = ()
    rounds: int = 0
    last_round: averaging_events.AveragingEnded | None = None
    """In local mode: the number of averaging rounds that this node took part in, and the newest of them."""


@dataclass(frozen=True)
class AveragingView:
    """An averaging run that this node takes part in. `last` is its newest round on this node, `step` the
    global step; `rounds` and `failed` count the rounds since this node started."""

    run: str
    peers: int = 0
    step: int = 0
    rounds: int = 0
    failed: int = 0
    last: averaging_events.AveragingEnded | None = None
    admit: str = "open"
    """The rule for admission: open (anybody), invited or vouched."""


@dataclass(frozen=True)
class State:
    """Everything a screen may show. Times are Unix seconds."""

    started: events.NodeStarted | None = None
    capacity: events.CapacityMeasured | None = None
    fences: events.FencesTried | None = None
    joins: tuple[events.JoinTried, ...] = ()
    members: Mapping[PeerId, MemberView] = field(default_factory=lambda: MappingProxyType({}))
    runs: Mapping[str, RunView] = field(default_factory=lambda: MappingProxyType({}))
    averaging: Mapping[str, AveragingView] = field(default_factory=lambda: MappingProxyType({}))
    reachability: events.ReachabilityFound | None = None
    datagrams: events.DatagramsBlocked | None = None
    clock: events.ClockCompared | None = None
    page: events.PageOpened | None = None
    offer: events.OfferChanged | None = None
    configured: NodeConfigured | None = None
    alerts: Mapping[tuple[str, str], events.AlertRaised] = field(default_factory=lambda: MappingProxyType({}))
    table: events.TableMeasured | None = None
    refused: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def alive(self) -> tuple[MemberView, ...]:
        """Return the members believed alive (including suspects), ordered by peer id."""
        return tuple(m for _, m in sorted(self.members.items()) if m.status in ("alive", "suspect"))


@singledispatch
def _fold(_: events.Event, state: State) -> State:
    return state


def apply(state: State, event: events.Event) -> State:
    """Return the state after `event`. An event that does not affect the state returns it unchanged."""
    return _fold(event, state)


@_fold.register
def _(event: events.TableMeasured, state: State) -> State:
    return replace(state, table=event)


@_fold.register
def _(event: events.NodeStarted, state: State) -> State:
    return replace(state, started=event)


@_fold.register
def _(event: events.CapacityMeasured, state: State) -> State:
    return replace(state, capacity=event)


@_fold.register
def _(event: events.FencesTried, state: State) -> State:
    return replace(state, fences=event)


@_fold.register
def _(event: events.PageOpened, state: State) -> State:
    return replace(state, page=event)


@_fold.register
def _(event: events.OfferChanged, state: State) -> State:
    return replace(state, offer=event)


@_fold.register
def _(event: NodeConfigured, state: State) -> State:
    return replace(state, configured=event)


@_fold.register
def _(event: events.AlertRaised, state: State) -> State:
    alerts = {**state.alerts, (event.alert, event.about): event}
    return replace(state, alerts=MappingProxyType(dict(list(alerts.items())[-ALERTS_MAX:])))


@_fold.register
def _(event: events.AlertCleared, state: State) -> State:
    alerts = {key: raised for key, raised in state.alerts.items() if key != (event.alert, event.about)}
    return replace(state, alerts=MappingProxyType(alerts))


@_fold.register
def _(event: events.JoinTried, state: State) -> State:
    others = tuple(join for join in state.joins if join.address != event.address)
    return replace(state, joins=(*others, event)[-JOINS_MAX:])


@_fold.register
def _(event: events.DatagramsBlocked, state: State) -> State:
    return replace(state, datagrams=event)


@_fold.register
def _(event: events.ClockCompared, state: State) -> State:
    return replace(state, clock=event)


@_fold.register
def _(event: events.ReachabilityFound, state: State) -> State:
    started = state.started
    if started is not None:
        started = msgspec.structs.replace(started, addresses=event.addresses)
    return replace(state, reachability=event, started=started)


@_fold.register
def _(event: events.MemberJoined, state: State) -> State:
    known = state.members.get(event.peer)
    since = known.since if known is not None and known.status == "alive" else event.at
    return _with_member(
        state,
        MemberView(
            peer=event.peer,
            name=event.name,
            addresses=event.addresses,
            status="alive",
            since=since,
            reason="",
            found_through=event.found_through,
            capacity=event.capacity,
            standing=event.standing,
        ),
    )


@_fold.register
def _(event: events.MemberChanged, state: State) -> State:
    member = state.members.get(event.peer)
    if member is None:
        return state
    changed = replace(member, name=event.name, addresses=event.addresses, capacity=event.capacity)
    return _with_member(state, replace(changed, standing=event.standing))


@_fold.register
def _(event: events.MemberDegraded, state: State) -> State:
    member = state.members.get(event.peer)
    if member is None:
        return state
    return _with_member(state, replace(member, degraded=event if event.condition else None))


@_fold.register
def _(event: events.MemberSuspected, state: State) -> State:
    return _with_status(state, event.peer, "suspect", event.at, event.reason or "no ack", event.by)


@_fold.register
def _(event: events.MemberRefuted, state: State) -> State:
    return _with_status(state, event.peer, "alive", event.at, "")


@_fold.register
def _(event: events.MemberLost, state: State) -> State:
    member = state.members.get(event.peer)
    by = member.noticed_by if member is not None else None
    return _with_status(state, event.peer, "dead", event.at, event.reason, by)


@_fold.register
def _(event: events.MemberLeft, state: State) -> State:
    return _with_status(state, event.peer, "left", event.at, event.reason)


@_fold.register
def _(event: events.RunAccepted, state: State) -> State:
    if event.run in state.runs:
        return state
    view = RunView(
        event.run, event.model, event.data, event.steps, event.requester, "placing", metrics=event.metrics
    )
    return _with_run(state, view)


@_fold.register
def _(event: events.RunPlanned, state: State) -> State:
    view = state.runs.get(event.run)
    return state if view is None else _with_run(state, replace(view, plan=event))


@_fold.register
def _(event: events.RunCovered, state: State) -> State:
    view = state.runs.get(event.run)
    return state if view is None else _with_run(state, replace(view, covered=event))


@_fold.register
def _(event: events.RunChanged, state: State) -> State:
    view = state.runs.get(event.run)
    if view is None:
        return state
    names = {peer: member.name for peer, member in state.members.items()}
    missing = tuple((peer, names.get(peer, "")) for peer in event.waits_for)
    return _with_run(
        state, replace(view, status=event.state, reason=event.reason, reason_at=event.at, waits_for=missing)
    )


@_fold.register
def _(event: events.RunRevised, state: State) -> State:
    view = state.runs.get(event.run)
    return state if view is None else _with_run(state, replace(view, steps=event.steps, revised=event))


@_fold.register
def _(event: RunGoalSet, state: State) -> State:
    view = state.runs.get(event.run)
    return state if view is None else _with_run(state, replace(view, goal=event))


@_fold.register
def _(event: events.RunResumed, state: State) -> State:
    view = state.runs.get(event.run)
    if view is None:
        return state
    lost = view.steps_lost + event.lost_steps
    return _with_run(state, replace(view, steps_lost=lost, step=event.step))


@_fold.register
def _(event: events.ReplicaDropped, state: State) -> State:
    view = state.runs.get(event.run)
    if view is None:
        return state
    replayed = view.microbatches_replayed + event.microbatches_replayed
    return _with_run(state, replace(view, microbatches_replayed=replayed))


@_fold.register
def _(event: events.StepCommitted, state: State) -> State:
    view = state.runs.get(event.run)
    if view is None:
        return state
    if event.diverged:
        return _with_run(state, replace(view, step=event.step + 1, steps_skipped=view.steps_skipped + 1))
    losses = (*view.losses, event.loss)[-LOSSES_MAX:]
    return _with_run(state, replace(view, losses=losses, step=event.step + 1, committed=event))


@_fold.register
def _(event: events.RunEvaluated, state: State) -> State:
    view = state.runs.get(event.run)
    if view is None:
        return state
    if event.step is not None:
        view = replace(view, validations=(*view.validations, event)[-VALIDATIONS_MAX:])
    return _with_run(state, replace(view, accuracy=event.accuracy, evaluated=event))


@_fold.register
def _(event: events.RunReleased, state: State) -> State:
    view = state.runs.get(event.run)
    if view is None or view.plan is not None:  # this node had a part in an earlier plan
        return state
    return replace(state, runs={run: other for run, other in state.runs.items() if run != event.run})


@_fold.register
def _(event: events.RunEnded, state: State) -> State:
    view = state.runs.get(event.run)
    if view is None:
        return state
    view = replace(view, status=event.outcome, detail=event.detail, weights=event.weights)
    return _with_run(state, replace(view, result=_result(event)))


@_fold.register
def _(event: result_events.RunRemembered, state: State) -> State:
    view = RunView(
        event.run,
        event.model,
        event.data,
        event.steps,
        event.requester,
        event.outcome,
        losses=() if event.loss is None else (event.loss,),
        step=event.step,
        accuracy=event.accuracy,
        detail=event.detail,
        weights=event.weights,
        result=_result(event),
        others=event.others,
    )
    return _with_run(state, view)


@_fold.register
def _(event: result_events.ResultDiffers, state: State) -> State:
    view = state.runs.get(event.run)
    if view is None or len(view.others) >= result_events.RESULTS_SHOWN_MAX:
        return state
    return _with_run(state, replace(view, others=(*view.others, (event.peer, event.weights))))


@_fold.register
def _(event: result_events.ResultEvicted, state: State) -> State:
    view = state.runs.get(event.run)
    return state if view is None else _with_run(state, replace(view, result="elsewhere"))


def _result(event: events.RunEnded | result_events.RunRemembered) -> str:
    if event.is_here:
        return "here"
    return "elsewhere" if event.outcome == "done" else ""


@_fold.register
def _(event: averaging_events.AveragingOpened, state: State) -> State:
    return _with_averaging(state, event.run, admit=event.admit)


@_fold.register
def _(event: averaging_events.AveragingJoined, state: State) -> State:
    return _with_averaging(state, event.run, peers=event.peers)


@_fold.register
def _(event: averaging_events.AveragingLeft, state: State) -> State:
    return _with_averaging(state, event.run, peers=event.peers)


@_fold.register
def _(event: averaging_events.AveragingStepped, state: State) -> State:
    return _with_averaging(state, event.run, step=event.step, peers=event.peers)


@_fold.register
def _(event: averaging_events.StateFetched, state: State) -> State:
    return _with_averaging(state, event.run, step=event.step)


@_fold.register
def _(event: averaging_events.AveragingEnded, state: State) -> State:
    view = state.averaging.get(event.run, AveragingView(event.run))
    state = _with_round(state, event)
    rounds, failed = (1, 0) if event.outcome == "ok" else (0, 1)
    return _with_averaging(
        state,
        event.run,
        step=event.step,
        rounds=view.rounds + rounds,
        failed=view.failed + failed,
        last=event,
    )


def _with_round(state: State, event: averaging_events.AveragingEnded) -> State:
    """Record a round of local mode. `event.run` has the run's id, then a stage's number if it has several."""
    kind, _, name = event.run.partition(":")
    run = state.runs.get(name.partition(":")[0]) if kind == "run" else None
    if run is None:
        return state
    return _with_run(state, replace(run, rounds=run.rounds + 1, last_round=event))


def _with_averaging(state: State, run: str, **changed: Any) -> State:
    view = replace(state.averaging.get(run, AveragingView(run)), **changed)
    # A node averages in few runs at a time, but may join many over time, so the oldest are dropped.
    kept = {name: other for name, other in state.averaging.items() if name != run}
    for name in list(kept)[: len(kept) + 1 - RUNS_KEPT_MAX]:
        del kept[name]
    return replace(state, averaging=MappingProxyType({**kept, run: view}))


@_fold.register
def _(event: events.StrangerRefused, state: State) -> State:
    return replace(state, refused=MappingProxyType({**state.refused, event.reason: event.count}))


def _with_member(state: State, member: MemberView) -> State:
    members = {**state.members, member.peer: member}
    gone = [view for view in members.values() if view.status in ("dead", "left")]
    if len(members) > MEMBERS_KEPT_MAX and gone:
        del members[min(gone, key=lambda view: view.since).peer]
    return replace(state, members=MappingProxyType(members))


def _with_status(
    state: State, peer: PeerId, status: str, at: float, reason: str, by: PeerId | None = None
) -> State:
    member = state.members.get(peer)
    if member is None:
        return state
    degraded = member.degraded if status in ("alive", "suspect") else None
    changed = replace(member, status=status, since=at, reason=reason, noticed_by=by, degraded=degraded)
    return _with_member(state, changed)


def _with_run(state: State, view: RunView) -> State:
    runs = {**state.runs, view.run: view}
    over = next((run for run, other in runs.items() if other.status in _OVER), None)
    if len(runs) > RUNS_KEPT_MAX and over is not None:
        del runs[over]
    return replace(state, runs=MappingProxyType(runs))
