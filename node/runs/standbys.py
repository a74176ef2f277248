"""As the committer, assigns idle machines as standbys, so that a holder's death does not force the run back
to a checkpoint.

Not here: the choice of stage and machine (`partition.run.standbys`), and the change of plan by which they
join (`partition.run.member.Member.recut`).
"""

from collections.abc import Callable, Sequence
from functools import partial

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, short_peer
from node.errors import Unreachable
from node.events import RunCovered
from node.placement.leases import Offer
from node.protocols.manifest import Run
from node.runs.context import RunService
from partition.model.graph import Graph
from partition.plan.change import Change, Joining
from partition.plan.cost import MOMENTS
from partition.plan.model_costs import ModelCosts
from partition.plan.plan import Plan
from partition.run.standbys import (
    Following,
    FollowWatch,
    StageSize,
    Uncovered,
    cover,
    next_standby,
)

SLOWS = "its work as a standby made the run's steps slower"


class Standbys:
    """The standbys of one member, over all plans of a run. `recut` is called with the change that adds a
    standby; `idle` returns the offers of peers; `absent` is called with a peer that the next plan must
    exclude, and the reason."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        recut: Callable[[Plan, Change], None],
        idle: Callable[[], Sequence[Offer]],
        absent: Callable[[PeerId, str], None],
    ) -> None:
        self._service = service
        self._run = run
        self._recut = recut
        self._idle = idle
        self._absent = absent
        self._watch = FollowWatch()
        self._slow: set[PeerId] = set()
        self._plan: Plan | None = None
        # Also the delay from a plan to the first check, because adding a replica to a stage, or splitting a
        # stage, comes first.
        self._look_seconds = service.settings.refill_seconds
        self._look_at = 0.0
        self._is_looking = False
        self._told: tuple[object, ...] = ()

    def begin(self, plan: Plan) -> None:
        """Begin with a new plan."""
        self._plan = plan
        self._watch.begin(is_following=bool(plan.standbys))
        self._look_at = self._now + self._look_seconds
        if plan.committer == self._service.signer.peer and self._run.manifest.standbys:
            self._tell(plan, None)

    def stepped(self, plan: Plan, seconds: float) -> None:
        """Record the duration of a step."""
        if plan != self._plan or not self._run.manifest.standbys:
            return
        if self._watch.stepped(seconds) and plan.standbys:
            self._slow |= set(plan.standbys)
            for peer in plan.standbys:
                self._absent(peer, SLOWS)
        elif self._now >= self._look_at and not self._is_looking:
            self._look_at = self._now + self._look_seconds
            self._is_looking = True
            # If the search fails, the run continues unchanged.
            self._service.start_task(self._look, plan, seconds, of=None)

    @property
    def _now(self) -> float:
        return self._service.seams.clock.monotonic()

    def _losses(self, peer: PeerId) -> int:
        return self._service.losses.count(self._now, peer)

    async def _look(self, plan: Plan, seconds: float) -> None:
        try:
            await self._find(plan, seconds)
        except (Unreachable, RemoteProtocolError, ValueError):
            return
        finally:
            self._is_looking = False

    async def _find(self, plan: Plan, seconds: float) -> None:
        service, run = self._service, self._run
        idle = [
            offer.peer
            for offer in self._idle()
            if offer.has_slot and plan.stage_of(offer.peer) is None and offer.peer not in self._slow
        ]
        idle.sort(key=lambda peer: peer in plan.trainers)  # trainers last, because they already have work
        graph = await service.models.get(run.manifest.graph_hash, list(plan.members))
        sizes = await service.seams.executor.run(partial(stage_sizes, run, graph, plan), apart=True)
        knowledge = await service.measurements.learn([*plan.members, *idle])
        links = knowledge.links([*plan.members, *idle])
        found = next_standby(
            plan, sizes, idle, self._losses, lambda one, other: links.get((one, other)), step_seconds=seconds
        )
        if plan != self._plan:
            return
        self._tell(plan, found if isinstance(found, Uncovered) else None)
        if isinstance(found, Following) and len(plan.standbys) < run.manifest.standbys:
            self._recut(plan, Change(joined=(Joining(found.peer, found.stage, 0),)))

    def _tell(self, plan: Plan, uncovered: Uncovered | None) -> None:
        """Announce how well the stages are covered, if that has changed."""
        covers = tuple(round(cover(stage, self._losses), 3) for stage in plan.stages)
        lost = [(peer, self._losses(peer)) for peer in plan.members]
        unreliable = ", ".join(
            f"{short_peer(peer)} was lost {_times(count)}" for peer, count in lost if count
        )
        reason = "" if uncovered is None else f"stage {uncovered.stage + 1}: {uncovered.reason}"
        told = covers, plan.standbys, unreliable, reason
        if told == self._told:
            return
        self._told = told
        self._service.publish(
            RunCovered(
                at=self._service.seams.clock.wall(),
                run=self._run.text,
                covers=covers,
                unreliable=unreliable,
                reason=reason,
            )
        )


def _times(count: int) -> str:
    return ("once", "twice")[count - 1] if count < 3 else f"{count} times"


def stage_sizes(run: Run, graph: Graph, plan: Plan) -> list[StageSize]:
    """Return the sizes of each stage of a plan in bytes. Raises ValueError if the manifest's sizes do not fit
    the graph."""
    layers = ModelCosts(graph, run.manifest.sizes_max).layers
    found = []
    for stage in plan.stages:
        size = sum(layer.parameter_bytes for layer in layers[stage.first_layer : stage.last_layer])
        found.append(StageSize(size, size * (1 + MOMENTS)))
    return found
