"""The contents of the page, as plain documents: pure functions of `State` (ARCHITECTURE law 5).

Rows of members are lists in the order of `MEMBER_COLUMNS`, because an answer may have a thousand of them. A
peer is shown by the end of its id, as on every screen; `peer_key` is long enough to be unique.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from crypto.identity import PeerId, peer_text
from node import documents, state_documents
from node.state import MemberView, RunView, State

KEY_LETTERS = 12
"""Number of characters of a key: seventy bits of a peer id."""
ENDED_RUNS_SHOWN_MAX = 32
MEMBER_COLUMNS = (
    "key", "name", "status", "since", "reason", "noticed_by", "found_through", "address", "location",
    "device", "cores", "memory_free_bytes", "flops_per_second",
)  # fmt: skip
_OVER = ("done", "failed", "stopped")


@lru_cache(maxsize=8_192)
def peer_key(peer: PeerId) -> str:
    """Return the end of a peer's id, which is the page's key for the peer."""
    return peer_text(peer)[-KEY_LETTERS:]


def member_row(member: MemberView) -> list[object]:
    """Return one member as a row, in the order of `MEMBER_COLUMNS`."""
    capacity = member.capacity
    offers: tuple[object, ...] = ("", "", 0, 0, 0)
    if capacity is not None:
        speed = int(capacity.flops_per_second)
        offers = (capacity.location, capacity.device, capacity.cores, capacity.memory_free_bytes, speed)
    return [
        peer_key(member.peer),
        member.name,
        member.status,
        round(member.since, 1),
        "" if member.reason == member.status else member.reason,
        peer_key(member.noticed_by) if member.noticed_by is not None else "",
        member.found_through,
        member.addresses[0] if member.addresses else "",
        *offers,
    ]


def run_row(view: RunView) -> dict[str, Any]:
    """Return one run, with its plan expressed in peer keys."""
    document = state_documents.run_document(view)
    document["requester"] = peer_key(view.requester)
    if view.plan is not None:
        document["plan"] |= {
            "planner": peer_key(view.plan.planner),
            "trainer": peer_key(view.plan.trainer),
            "trainers": [peer_key(peer) for peer in view.plan.trainers],
            "stages": [
                {
                    "layers": list(layers),
                    "replicas": [peer_key(peer) for peer in replicas],
                    "standbys": [peer_key(peer) for peer in replicas if peer in view.plan.standbys],
                }
                for layers, replicas in zip(view.plan.layers, view.plan.stages, strict=True)
            ],
        }
    return document


def node_document(state: State, counters: Mapping[str, int], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return this node's document: addresses, offer and counters. `limits` come from its configuration."""
    started = state.started
    return {
        "peer": peer_text(started.peer) if started else "",
        "key": peer_key(started.peer) if started else "",
        "name": started.name if started else "",
        "swarm": started.swarm if started else "",
        "is_private": started.is_private if started else False,
        "addresses": list(started.addresses) if started else [],
        "join_address": started.join_address if started else None,
        "data_dir": started.data_dir if started else "",
        "started": started.at if started else None,
        "capacity": documents.capacity_document(state.capacity),
        "fences": documents.fences_document(state.fences),
        "reachability": documents.reachability_document(state.reachability),
        "joins": [documents.join_document(join) for join in state.joins],
        "limits": dict(limits),
        "refused": dict(state.refused),
        "counters": dict(sorted(counters.items())),
    }


def alert_rows(state: State) -> list[dict[str, str]]:
    """Return the active alerts."""
    return [
        {"kind": raised.alert.replace("_", " "), "level": raised.level, "text": raised.text}
        for raised in state.alerts.values()
    ]


def shown_runs(state: State) -> dict[str, RunView]:
    """Return all running runs, and the newest finished ones."""
    ended = [run for run, view in state.runs.items() if view.status in _OVER]
    hidden = set(ended[:-ENDED_RUNS_SHOWN_MAX])
    return {run: view for run, view in state.runs.items() if run not in hidden}


def members_changed(before: State, after: State) -> tuple[list[list[object]], list[str]]:
    """Return the rows of new or changed members, and the keys of those that are gone."""
    if before.members is after.members:
        return [], []
    rows = [
        member_row(member) for peer, member in after.members.items() if before.members.get(peer) is not member
    ]
    gone = [peer_key(peer) for peer in before.members if peer not in after.members]
    return rows, gone


def runs_changed(before: State, after: State) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of new or changed runs, and the ids of those that are gone."""
    if before.runs is after.runs:
        return [], []
    rows = [run_row(view) for run, view in after.runs.items() if before.runs.get(run) is not view]
    return rows, [run for run in before.runs if run not in after.runs]
