"""Plain values for `--json`, the page and the log: offers, conditions and events of machines and runs."""

from datetime import UTC, datetime
from typing import Any

from crypto.identity import peer_text
from node import events
from node.offering import SENDS_LESS
from node.settings_events import NodeConfigured, RunGoalSet
from node.text import cover_text

_LAST_SECOND = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def rfc3339(at: float) -> str:
    """Format Unix seconds as RFC 3339 in UTC, to the millisecond. Times outside the range of RFC 3339, which
    another node may claim, are clamped."""
    at = max(0.0, min(at, _LAST_SECOND))
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def reachability_document(found: events.ReachabilityFound | None) -> dict[str, Any] | None:
    """Return whether other nodes can reach this one; None before any was asked, or if none needs to be."""
    if found is None:
        return None
    return {
        "reachable": found.reachable,
        "asked": found.asked,
        "of": found.of,
        "relays": [peer_text(relay) for relay in found.relays],
        "nat": found.nat,
        "mapping": found.mapping,
    }


def clock_document(found: events.ClockCompared | None) -> dict[str, Any] | None:
    """Return how far this machine's clock is ahead of its peers' clocks; None if it never differed, or before
    peers were heard."""
    return None if found is None else {"seconds": found.seconds, "peers": found.peers}


def datagrams_document(found: events.DatagramsBlocked | None) -> dict[str, Any] | None:
    """Return to which members no datagram gets through, and of how many; None if that never happened."""
    if found is None:
        return None
    return {"blocked": [peer_text(peer) for peer in found.peers], "of": found.of}


def fences_document(tried: events.FencesTried | None) -> dict[str, Any] | None:
    """Return the fences of a stage's process; None before they were tried, or if this node computes
    nothing."""
    if tried is None:
        return None
    return {
        "fences": list(tried.fences),
        "unfenced": list(tried.unfenced),
        "allow_unfenced": tried.is_allowed,
        "takes_stages_of_others": tried.is_allowed or not tried.unfenced,
    }


def capacity_document(capacity: events.CapacityMeasured | None) -> dict[str, Any] | None:
    """Return the offer of a machine."""
    if capacity is None:
        return None
    return {
        "device": capacity.device,
        "cores": capacity.cores,
        "memory_free_bytes": capacity.memory_free_bytes,
        "memory_total_bytes": capacity.memory_total_bytes,
        "flops_per_second": capacity.flops_per_second,
        "location": capacity.location,
        "corrected": list(capacity.corrected),
        "small": list(capacity.small),
    }


def standing_document(standing: events.Standing | None) -> dict[str, Any] | None:
    """Return a member's latest statement about itself; None if it has made none."""
    if standing is None:
        return None
    return {
        "capabilities": list(standing.capabilities),
        "sends_less": SENDS_LESS in standing.capabilities,
        "load_percent": standing.load_percent,
        "memory_available_bytes": standing.memory_available_bytes,
        "slots_free": standing.slots_free,
        "stages": [{"run": run, "stage": stage} for run, stage in standing.stages],
    }


def degraded_document(degraded: events.MemberDegraded | None) -> dict[str, Any] | None:
    """Return the fault of a live member, as this node measured it; None if it has none."""
    if degraded is None:
        return None
    return {
        "condition": degraded.condition,
        "rate": round(degraded.rate, 3),
        "seconds": round(degraded.seconds, 4),
        "reason": degraded.reason,
    }


def step_document(committed: events.StepCommitted | None) -> dict[str, Any] | None:
    """Return the newest step as `status --json` shows it; None before the first. `step` counts from 0;
    `step_number` counts from 1, as screens do."""
    if committed is None:
        return None
    return {
        "step": committed.step,
        "step_number": committed.step + 1,
        "seconds": committed.seconds,
        "samples": committed.samples,
        "utilisation": list(committed.utilisation),
        "bubble": committed.bubble,
        "sent_bytes": list(committed.sent_bytes),
        "returned_bytes": list(committed.returned_bytes),
    }


def join_document(join: events.JoinTried) -> dict[str, Any]:
    """Return one row of the join table."""
    return {
        "address": join.address,
        "outcome": join.outcome,
        "detail": join.detail,
        "peer": peer_text(join.peer) if join.peer is not None else None,
        "seconds": round(join.seconds, 6),
        "found_by": join.found_by,
        "at": rfc3339(join.at),
    }


def revision_document(revised: events.RunRevised | None) -> dict[str, Any] | None:
    """Return the changes that a run's requester has made to it; None if there are none."""
    if revised is None:
        return None
    return {
        "number": revised.number,
        "steps": revised.steps,
        "learning_rate": revised.learning_rate,
        "priority": revised.priority,
        "is_paused": revised.is_paused,
    }


def offer_document(offer: events.OfferChanged | None) -> dict[str, Any] | None:
    """Return whether this machine serves others now; None if it always has."""
    if offer is None:
        return None
    return {
        "may_serve": offer.may_serve,
        "reason": offer.reason,
        "unread": list(offer.unread),
        "sends_less": offer.sends_less,
    }


def cover_document(covered: events.RunCovered | None) -> dict[str, Any] | None:
    """Return how well each stage of a run is covered; None if this node does not commit the run, or has not
    assessed it yet."""
    if covered is None:
        return None
    found = {"stages": list(covered.covers), "unreliable": covered.unreliable, "reason": covered.reason}
    return {**found, "text": cover_text(found)}


def plan_document(plan: events.RunPlanned | None) -> dict[str, Any] | None:
    """Return which peers hold which stage of a run; None before its first plan."""
    if plan is None:
        return None
    return {
        "plan": plan.plan,
        "height": plan.height,
        "planner": peer_text(plan.planner),
        "trainer": peer_text(plan.trainer),
        "trainers": [peer_text(peer) for peer in plan.trainers],
        "restored_step": plan.restored_step,
        "stages": [
            {
                "layers": list(layers),
                "replicas": [peer_text(peer) for peer in replicas],
                "standbys": [peer_text(peer) for peer in replicas if peer in plan.standbys],
            }
            for layers, replicas in zip(plan.layers, plan.stages, strict=True)
        ],
    }


def follow_document(event: NodeConfigured | None) -> dict[str, Any] | None:
    """Return `follow` of a status document; None if the node follows no key."""
    if event is None:
        return None
    return {
        "key": peer_text(event.key),
        "name": event.name,
        "version": event.version or None,
        "since": rfc3339(event.since) if event.version else None,
        "settings": list(event.settings),
        "skipped": list(event.skipped),
    }


def goal_document(goal: RunGoalSet | None) -> dict[str, Any] | None:
    """Return `goal` of a run's document: how fast its requester wants it. None if no goal is set, or on other
    nodes than the requester's."""
    if goal is None or not goal.samples_per_second:
        return None
    return {"samples_per_second": goal.samples_per_second, "seconds": goal.seconds}
