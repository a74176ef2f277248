"""The documents of `--json`, the page and the log: a node's `State`, and any event, as plain values.

Each document names its schema. Fields may be added to a schema, but never removed. `node.documents` has the
parts about machines' offers.
"""

from collections.abc import Mapping
from typing import Any

from crypto.identity import PeerId, peer_text
from node import averaging_events, events
from node.documents import (
    capacity_document,
    clock_document,
    cover_document,
    datagrams_document,
    degraded_document,
    fences_document,
    follow_document,
    goal_document,
    join_document,
    offer_document,
    plan_document,
    reachability_document,
    revision_document,
    rfc3339,
    standing_document,
    step_document,
)
from node.state import AveragingView, RunView, State


def status_document(state: State, now: float, counters: Mapping[str, int]) -> dict[str, Any]:
    """Return the document of `status --json`, schema `peerloom/status/1`. Fields are only ever added."""
    started = state.started
    alive = [member for member in state.members.values() if member.status == "alive"]
    return {
        "schema": "peerloom/status/1",
        "peer": peer_text(started.peer) if started else "",
        "name": started.name if started else "",
        "swarm": started.swarm if started else "",
        "is_private": started.is_private if started else False,
        "addresses": list(started.addresses) if started else [],
        "data_dir": started.data_dir if started else "",
        "started": rfc3339(started.at) if started else None,
        "up_seconds": round(now - started.at, 3) if started else 0.0,
        "capacity": capacity_document(state.capacity),
        "fences": fences_document(state.fences),
        "reachability": reachability_document(state.reachability),
        "datagrams": datagrams_document(state.datagrams),
        "clock": clock_document(state.clock),
        "offer": offer_document(state.offer),
        "follow": follow_document(state.configured),
        "page": state.page.address if state.page is not None else None,
        "alerts": [
            {"kind": raised.alert, "about": raised.about, "level": raised.level, "text": raised.text}
            for raised in state.alerts.values()
        ],
        "joins": [join_document(join) for join in state.joins],
        "members_alive": len(alive),
        "members_known": len(state.members),
        "runs": [run_document(view) for view in state.runs.values()],
        "averaging": [averaging_document(view) for view in state.averaging.values()],
        "dht": None if state.table is None else state.table.document,
        "counters": dict(sorted(counters.items())),
    }


def peers_document(state: State, now: float) -> dict[str, Any]:
    """Return the document of `peers --json`, schema `peerloom/peers/1`."""
    return {
        "schema": "peerloom/peers/1",
        "peers": [
            {
                "peer": peer_text(member.peer),
                "name": member.name,
                "status": member.status,
                "reason": member.reason,
                "noticed_by": peer_text(member.noticed_by) if member.noticed_by is not None else None,
                "since": rfc3339(member.since),
                "since_seconds": round(max(0.0, now - member.since), 3),
                "found_through": member.found_through,
                "addresses": list(member.addresses),
                "capacity": capacity_document(member.capacity),
                "standing": standing_document(member.standing),
                "degraded": degraded_document(member.degraded),
            }
            for _, member in sorted(state.members.items())
        ],
    }


def averaging_document(view: AveragingView) -> dict[str, Any]:
    """Return one averaging run, with its newest round on this node."""
    last = view.last
    return {
        "run": view.run,
        "admit": view.admit,
        "peers": view.peers,
        "step": view.step,
        "rounds": view.rounds,
        "rounds_failed": view.failed,
        "last_round": None
        if last is None
        else {
            "outcome": last.outcome,
            "reason": last.reason,
            "members": last.members,
            "averaged": [peer_text(peer) for peer in last.averaged],
            "seconds": last.seconds,
            "sent_bytes": last.sent_bytes,
            "received_bytes": last.received_bytes,
        },
    }


def peer_names(state: State) -> dict[str, str]:
    """Return the names of all members, including this node, by peer id as text."""
    names = {peer_text(peer): row.name for peer, row in state.members.items() if row.name}
    if state.started is not None:
        names[peer_text(state.started.peer)] = state.started.name
    return names


def run_document(view: RunView) -> dict[str, Any]:
    """Return one run, with its plan and its latest loss."""
    evaluated, committed = view.evaluated, view.committed
    return {
        "run": view.run,
        "model": view.model,
        "data": view.data,
        "requester": peer_text(view.requester),
        "status": view.status,
        "detail": view.detail,
        "step": view.step,
        "steps": view.steps,
        "loss": view.losses[-1] if view.losses else None,
        "accuracy": view.accuracy,
        "loss_held_out": None if evaluated is None else evaluated.loss,
        "metrics": {} if evaluated is None else _means(view, evaluated),
        "validations": list({event.step: _validation(view, event) for event in view.validations}.values()),
        "microbatches_replayed": view.microbatches_replayed,
        "reason": view.reason,
        "reason_since": rfc3339(view.reason_at) if view.reason_at else None,
        "waits_for": [{"peer": peer_text(peer), "name": name} for peer, name in view.waits_for],
        "revised": revision_document(view.revised),
        "goal": goal_document(view.goal),
        "steps_lost": view.steps_lost,
        "steps_skipped": view.steps_skipped,
        "last_step": step_document(committed),
        "last_round": None if view.last_round is None else round_document(view.last_round, view.rounds),
        "weights": view.weights,
        "result": view.result,
        "other_results": [{"peer": peer_text(peer), "weights": weights} for peer, weights in view.others],
        "plan": plan_document(view.plan),
        "covered": cover_document(view.covered),
    }


def round_document(last: averaging_events.AveragingEnded, number: int) -> dict[str, Any]:
    """Return an averaging round of a run in local mode. `error` is empty if the round succeeded. `peers` are
    those whose tensors were included; under the rule `aggregate`, up to `liars_max` of them may have lied.
    `rounding` is the error that the codec added."""
    return {
        "round": number,
        "step": last.step,
        "peers": [peer_text(peer) for peer in last.averaged],
        "error": last.reason if last.outcome != "ok" else "",
        "rounding": last.rounding,
        "aggregate": last.aggregate,
        "liars_max": last.liars_max,
        "seconds": last.seconds,
    }


def _validation(view: RunView, event: events.RunEvaluated) -> dict[str, Any]:
    row = {"step": event.step, "best_step": event.best_step, "loss": event.loss, "accuracy": event.accuracy}
    return row | {"metrics": _means(view, event)}


def _means(view: RunView, event: events.RunEvaluated) -> dict[str, float]:
    return {n: value / max(1, event.samples) for n, value in zip(view.metrics, event.metrics, strict=False)}


def event_document(event: events.Event) -> dict[str, Any]:
    """Return any event as JSON: its class name, its time, and its fields, with peers as text.

    If `step` identifies a step (counted from 0) rather than a number of completed steps, `step_number` is the
    same step counted from 1, as screens show it. `SECRETS` of an event are left out.
    """
    document: dict[str, Any] = {"kind": type(event).__name__}
    for name in event.__struct_fields__:
        if name not in event.SECRETS:
            document[name] = _plain(getattr(event, name))
    if isinstance(event, events.StepCommitted | events.ReplicaDropped | events.RunResumed):
        document["step_number"] = event.step + 1
    document["at"] = rfc3339(event.at)
    document["at_seconds"] = event.at
    return document


def screen_document(event: events.Event) -> dict[str, Any]:
    """Return any event with its secrets, for the screen of the person who started the node."""
    return event_document(event) | {name: getattr(event, name) for name in event.SECRETS}


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            return peer_text(PeerId(value))
        case tuple():
            return [_plain(item) for item in value]
        case events.CapacityMeasured():
            return capacity_document(value)
        case events.Standing():
            return standing_document(value)
        case _:
            return value
