"""Predicts a run's plan without some peers, with the code of `peerloom plan`, over the live peers.

Only a node in the run has its graph. For all others `node.web.whatif` scales the latest step. If both exist,
the page shows both.
"""

from collections.abc import Set
from dataclasses import replace
from typing import Any, Protocol

import trio

from node.errors import Unreachable, UsageError
from node.placement.leases import constraints_of
from node.planning.peers import Peers, live_peers
from node.planning.planner import plan_model
from node.planning.report import PlanWish, plan_document
from node.protocols.manifest import Manifest
from node.runs.runs import Runs
from node.seams import Seams
from node.services.measurements import Measurements
from node.state import State
from node.state_documents import peers_document, status_document
from node.web.views import KEY_LETTERS
from partition.model.graph import Graph
from partition.plan.problem import Infeasible

PEERS_MAX = 256
"""Maximum number of peers planned for on a click; `peerloom plan` has no such limit."""
FIND_SECONDS_MAX = 2.0


class PlannedNode(Protocol):
    """The part of `node.runtime.Node` that a prediction uses."""

    seams: Seams
    measurements: Measurements

    @property
    def state(self) -> State: ...
    @property
    def runs(self) -> Runs: ...


class Predictor:
    """Makes plans for one page, one at a time; the latest answer is cached."""

    def __init__(self, node: PlannedNode) -> None:
        self._node = node
        self._lock = trio.Lock()
        self._last: tuple[object, dict[str, Any]] | None = None

    async def predict(self, run: str, without: Set[str]) -> dict[str, Any] | None:
        """Return the plan with all peers, and the plan without the peers of these keys. Return None if this
        node does not have the run's graph."""
        node = self._node
        members = node.runs.members.values()
        member = next((each for each in members if each.run.text == run), None)
        if member is None:
            return None
        async with self._lock:
            manifest = member.run.manifest
            graph: Graph | None = None
            with trio.move_on_after(FIND_SECONDS_MAX):
                try:
                    graph = await node.runs.models.get(manifest.graph_hash, ())
                except Unreachable:
                    return None
            if graph is None:
                return None
            found, wanted = graph, wanted_of(manifest)
            measured = await node.measurements.document([peer.peer for peer in node.state.alive()])
            peers = _alive(node.state, frozenset(), measured)
            left = _alive(node.state, without, measured)
            asked = run, peers, left
            if self._last is None or self._last[0] != asked:
                document = await node.seams.executor.run(lambda: _compare(found, peers, left, wanted))
                self._last = asked, document
            return self._last[1]


def wanted_of(manifest: Manifest) -> PlanWish:
    """Return the planning request for a run's manifest."""
    settings = manifest.optimizer
    return PlanWish(
        batch=manifest.microbatch * manifest.microbatches,
        microbatch=manifest.microbatch,
        recompute=manifest.recompute,
        pipeline=manifest.pipeline,
        optimizer=settings.kind,
        optimizer_moments=settings.moments,
        constraints=constraints_of(manifest),
    )


def _alive(state: State, without: Set[str], measured: dict[str, Any]) -> Peers:
    status, others = (
        status_document(state, 0.0, {}),
        peers_document(state, 0.0),
    )
    rows = [row for row in others["peers"] if row["peer"][-KEY_LETTERS:] not in without]
    if str(status["peer"])[-KEY_LETTERS:] in without:
        status = {**status, "capacity": None}
    return live_peers(status, {"peers": rows[:PEERS_MAX]}, measured)


def _compare(graph: Graph, peers: Peers, left: Peers, wanted: PlanWish) -> dict[str, Any]:
    now, then = _plan(graph, peers, wanted), _plan(graph, left, wanted)
    share = None
    if now["is_feasible"] and then["is_feasible"]:
        share = then["samples_per_second"] / max(1e-12, now["samples_per_second"])
    return {"now": now, "then": then, "rate_share": share}


def _plan(graph: Graph, peers: Peers, wanted: PlanWish) -> dict[str, Any]:
    try:
        document = plan_document(plan_model(graph, peers, wanted))
    except (Infeasible, UsageError) as error:
        if wanted.constraints.replicas:  # a run may continue with fewer replicas than it began with
            freer = replace(wanted.constraints, replicas=0)
            return _plan(graph, peers, replace(wanted, constraints=freer))
        return {"is_feasible": False, "text": str(error)}
    rows = [
        {
            "layers": [stage["first_layer"], stage["last_layer"]],
            "peers": stage["peers"],
            "seconds": stage["seconds"],
            "memory_bytes": stage["memory_bytes"],
        }
        for stage in document["stages"]
    ]
    return {
        "is_feasible": True,
        "samples_per_second": document["samples_per_second"],
        "step_seconds": document["step_seconds"],
        "bubble": document["bubble"],
        "stages": rows,
        "text": "; ".join(document["reasons"][:2]),
    }
