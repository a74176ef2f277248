"""As the committer, measures replicas and decides whether different borders between stages, or an additional
stage, are worth a pause. The core carries the decision out (`partition.run.recutting`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import Unreachable
from node.events import StageDegraded
from node.placement.leases import Offer, problem_of, rounded
from node.protocols.manifest import Run
from node.runs.context import RunService
from node.runs.splitting import IDLE_MAX, another_stage, split_of
from partition.model.graph import Graph
from partition.plan.change import Change
from partition.plan.observed import NOTHING, Knowledge
from partition.plan.plan import STAGES_MAX, Plan
from partition.plan.problem import Link, Problem
from partition.plan.rebalance import measured, move_borders
from partition.plan.tables import Tables
from partition.run.quota_watch import QuotaWatch
from partition.run.rate_watch import RateWatch
from partition.steps.slowness import SlowReplicas

PAUSE_NANOSECONDS = 5_000_000_000
"""CPU time of moving any layer, in addition to copying its bytes: for saving, deciding, and importing torch
if no process can be reused. With a CPU quota of 0.15 such a pause lasted 37 s."""
COMPUTING_SHARE = 0.5
"""The share of a step's time that the slowest stage must explain. Otherwise links set the pace, and moving
layers would not change it."""
ASSUMED_LINK = Link(1_250_000_000, 100_000)
"""The link that is assumed if none was measured, since computing explains the step's time."""
CONTRADICTED = 2
"""Neighbours' measurements count if they are at least this many times a replica's own claim. Below that they
are ignored, because they include other work of its node."""
FASTER_MAX = 2.0
"""Maximum factor by which one run raises the rating of a replica that is faster than planned, relative to the
others."""


class Rebalancing:
    """The rebalancing of one member, over all plans of a run. `recut` is called with a better change; `idle`
    returns the offers of peers that could take a stage."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        recut: Callable[[Plan, Change], None],
        idle: Callable[[], Sequence[Offer]],
    ) -> None:
        self._service = service
        self._run = run
        self._recut = recut
        self._idle = idle
        self._stages = 0
        self._watch = RateWatch()
        self._quotas = QuotaWatch()
        self._slow = SlowReplicas()
        self._base: tuple[Plan, Problem] | None = None
        self._cuts: tuple[int, ...] | None = None

    def begin(self, plan: Plan) -> None:
        """Begin with a new plan."""
        cuts = _cuts(plan)
        self._slow.begin()
        # Stages are only merged after a death, which says nothing against moving borders.
        self._watch.begin(has_moved=self._cuts not in (None, cuts) and len(cuts) >= len(self._cuts or ()))
        self._stages = max(self._stages, len(plan.stages))
        self._cuts, self._base = cuts, None

    def stepped(
        self, plan: Plan, step: int, seconds: float, paces: Mapping[PeerId, int], seen: Mapping[PeerId, int]
    ) -> None:
        """Record a committed step with the nanoseconds per micro-batch of each replica: `paces` are the
        replicas' own claims (0 if unknown), `seen` is what their neighbours measured."""
        for slow in self._slow.stepped(plan, paces):
            self._service.publish(
                StageDegraded(
                    at=self._service.seams.clock.wall(),
                    run=self._run.text,
                    stage=slow.stage,
                    peer=slow.peer,
                    rate=slow.rate,
                    reason="" if slow.rate >= 1 else f"computes at {slow.rate:.0%} of what was promised",
                )
            )
        is_due = self._watch.stepped(seconds)
        steps_left = self._run.manifest.steps - step - 1
        if is_due and any(paces.values()) and (len(paces) > 1 or self._may_grow(plan)):
            # If the check fails, the run continues unchanged.
            self._service.start_task(self._look, plan, steps_left, dict(paces), seen, of=None)

    async def _look(
        self, plan: Plan, steps_left: int, said: Mapping[PeerId, int], seen: Mapping[PeerId, int]
    ) -> None:
        service = self._service
        try:
            graph = await service.models.get(self._run.manifest.graph_hash, list(plan.members))
            offers = tuple(service.offers())
            run = service.seams.executor.run
            knowledge = await service.measurements.learn(list(plan.members))
            if self._base is None or self._base[0] != plan:
                making = partial(base_problem, self._run, graph, plan, offers, knowledge)
                self._base = plan, await run(making, apart=True)
            base = relinked(self._base[1], plan, knowledge)
            paces = self._without_pauses(base, plan, believed_paces(base, plan, said, seen), knowledge)
            service.measurements.stages_found(found_rates(base, plan, paces))
            # a faster cut may be worse for a different objective
            if steps_left < 1 or self._run.manifest.objective != "throughput":
                return
            if self._may_grow(plan):
                idle = self._joinable(plan)
                growing = partial(grown, base, self._run, graph, plan, paces, idle, knowledge, steps_left)
                if (change := await run(growing, apart=True)) is not None:
                    self._found(plan, change)
                    return
            if len(plan.stages) < 2:
                self._found(plan, Change())  # so that an earlier check does not agree with the next
                return
            seconds = self._watch.seconds
            pause = pause_nanoseconds(plan, knowledge)
            work = partial(
                better_cuts,
                base,
                plan,
                paces,
                steps_left=steps_left,
                seconds=seconds,
                pause_nanoseconds=pause,
            )
            cuts = await run(work, apart=True)
        except (Unreachable, RemoteProtocolError, ValueError):
            return
        self._found(plan, Change(cuts=cuts))

    def _found(self, plan: Plan, wanted: Change) -> None:
        cuts = wanted.cuts or tuple(stage.last_layer for stage in wanted.stages)
        if self._cuts == _cuts(plan) and self._watch.found(cuts):
            self._recut(plan, wanted)

    def _may_grow(self, plan: Plan) -> bool:
        """Return whether an additional stage is possible: the plan has fewer stages than the run once had, or
        than are worthwhile."""
        wanted = self._run.manifest.stages or STAGES_MAX
        return len(plan.stages) < max(self._stages, wanted) and bool(self._joinable(plan))

    def _joinable(self, plan: Plan) -> list[Offer]:
        """Return the peers with a slot for this run that compute none of its stages, the fastest first."""
        busy = {peer for stage in plan.stages for peer in stage.computing}
        found = [offer for offer in self._idle() if offer.has_slot and offer.peer not in busy]
        return sorted(found, key=lambda offer: -offer.flops_per_second)[:IDLE_MAX]

    def _without_pauses(
        self, problem: Problem, plan: Plan, paces: Mapping[PeerId, int], knowledge: Knowledge
    ) -> dict[PeerId, int]:
        shares = {peer.hex(): row.share_permille for peer, row in knowledge.calibrations.items()}
        named = {peer.hex(): pace for peer, pace in paces.items()}
        found = self._quotas.without_pauses(problem, split_of(problem, plan), named, shares)
        return {peer: found[peer.hex()] for peer in paces}


def _cuts(plan: Plan) -> tuple[int, ...]:
    return tuple(stage.last_layer for stage in plan.stages[:-1])


def base_problem(
    run: Run, graph: Graph, plan: Plan, offers: Sequence[Offer], knowledge: Knowledge = NOTHING
) -> Problem:
    """Return a plan's own problem, with the rates with which it was made. Raises ValueError,
    RemoteProtocolError."""
    memory = {offer.peer: offer.memory_bytes for offer in offers}
    rows = [
        Offer(PeerId(peer), float(rate), memory.get(PeerId(peer), 0), has_slot=True)
        for stage in plan.stages
        for peer, rate in zip(stage.replicas, stage.rates, strict=True)
        if peer in stage.computing
    ]
    problem = problem_of(run, graph, rows, knowledge)
    problem = replace(problem, objective="throughput", default_link=ASSUMED_LINK, hides_links=True)
    # What a peer already holds must fit, even if it now offers less.
    tables, split = Tables(problem), split_of(problem, plan)
    needed = {
        place: int(tables.memory(len(split.groups) - number)[first, last])
        for number, ((first, last), group) in enumerate(zip(split.ranges, split.groups, strict=True))
        for place in group
    }
    peers = tuple(
        replace(peer, memory_bytes=max(peer.memory_bytes, peer.baseline_bytes + needed[place]))
        for place, peer in enumerate(problem.peers)
    )
    return replace(problem, peers=peers)


def relinked(problem: Problem, plan: Plan, knowledge: Knowledge) -> Problem:
    """Return a plan's problem with the links as known now; a link without current knowledge stays unchanged.
    A link measured in one direction is assumed to be the same in the other. Otherwise sending time would be
    attributed to the sender's computing."""
    found = knowledge.links([PeerId(peer) for stage in plan.stages for peer in stage.replicas])
    links = {(one.hex(), other.hex()): link for (one, other), link in found.items()}
    back = {(other, one): link for (one, other), link in links.items()}
    return replace(problem, links={**problem.links, **back, **links})


def believed_paces(
    problem: Problem, plan: Plan, said: Mapping[PeerId, int], seen: Mapping[PeerId, int]
) -> dict[PeerId, int]:
    """Return the nanoseconds per micro-batch of each replica: its own claim, unless its neighbours measured
    far more than the claim and the transfer of its frames."""
    links = replace(problem, default_link=Link())
    places = {peer.name: place for place, peer in enumerate(problem.peers)}
    groups = [[places[PeerId(peer).hex()] for peer in stage.computing] for stage in plan.stages]
    found = dict(said)
    for number, stage in enumerate(plan.stages):
        for name in stage.computing:
            peer, place = PeerId(name), places[PeerId(name).hex()]
            way = 0
            for other, border in ((number - 1, stage.first_layer), (number + 1, stage.last_layer)):
                if 0 <= other < len(groups):
                    size = problem.layers[border - 1].output_bytes
                    ends = [links.link(sender, place) for sender in groups[other]]
                    way += max(
                        size * 1_000_000_000 // max(1, end.bytes_per_second) + end.nanoseconds for end in ends
                    )
            took = seen.get(peer, 0) - way
            if took > CONTRADICTED * said.get(peer, 0):
                found[peer] = took
    return found


def found_rates(problem: Problem, plan: Plan, paces: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Return the rates for the next plan, from each replica's time relative to the others.

    Effects outside the model slow all replicas down, so the (upper) median is assumed to be as fast as
    planned.
    """
    peers = {peer.name: peer for peer in problem.peers}
    shares: dict[PeerId, Fraction] = {}
    rates: dict[PeerId, int] = {}
    for stage in plan.stages:
        for name, rate in zip(stage.replicas, stage.rates, strict=True):
            if name not in stage.computing:
                continue
            peer = peers[PeerId(name).hex()]
            span = slice(stage.first_layer, stage.last_layer)
            modelled = sum(peer.forward[span]) + sum(peer.backward[span])
            if pace := paces.get(PeerId(name), 0):
                shares[PeerId(name)], rates[PeerId(name)] = Fraction(max(1, modelled), pace), rate
    if len(shares) < 2:
        return {}
    usual = sorted(shares.values())[len(shares) // 2]
    return {
        peer: max(1, int(rates[peer] * min(share / usual, Fraction(FASTER_MAX))))
        for peer, share in shares.items()
    }


def pause_nanoseconds(plan: Plan, knowledge: Knowledge) -> int:
    """Return how long a run pauses when layers move: until the replica with the smallest CPU share has loaded
    its new stage."""
    replicas = {PeerId(peer) for stage in plan.stages for peer in stage.replicas}
    shares = [row.share_permille for peer, row in knowledge.calibrations.items() if peer in replicas]
    return PAUSE_NANOSECONDS * 1000 // min(shares, default=1000)


def better_cuts(
    problem: Problem,
    plan: Plan,
    paces: Mapping[PeerId, int],
    *,
    steps_left: int,
    seconds: float,
    pause_nanoseconds: int = PAUSE_NANOSECONDS,
) -> tuple[int, ...]:
    """Return the best borders of a plan according to its replicas' measured times; () if the present ones are
    good enough.

    `seconds` is the time of a step, `pause_nanoseconds` the cost of moving layers in addition to copying
    their bytes.
    """
    old = split_of(problem, plan)
    now = measured(problem, old, {peer.hex(): pace for peer, pace in paces.items()})
    tables = Tables(now)
    slowest = max(
        int(tables.group_time(group)[first, last])
        for (first, last), group in zip(old.ranges, old.groups, strict=True)
    )
    ways = zip(pairwise(old.groups), (last for _, last in old.ranges[:-1]), strict=True)
    slowest = max(slowest, *(tables.transfer(one, other, last) for (one, other), last in ways))
    if slowest * plan.microbatches < COMPUTING_SHARE * seconds * 1e9:
        return ()
    decision = move_borders(now, old, steps_left=steps_left, pause_nanoseconds=pause_nanoseconds)
    return tuple(last for _, last in decision.split.ranges[:-1]) if decision.is_change else ()


def grown(
    base: Problem,
    run: Run,
    graph: Graph,
    plan: Plan,
    paces: Mapping[PeerId, int],
    offers: Sequence[Offer],
    knowledge: Knowledge,
    steps_left: int,
) -> Change | None:
    """Return the change by which one of the offering peers joins with an additional stage; None if none is
    worth it.

    Raises ValueError or RemoteProtocolError if sizes do not fit.
    """
    costs = problem_of(run, graph, offers, knowledge).peers
    wider = replace(base, peers=(*base.peers, *costs))
    # A peer without a stage was not measured, so its claim is assumed to be as wrong as those of the others.
    now = measured(wider, split_of(wider, plan), {peer.hex(): pace for peer, pace in paces.items()})
    idle = {row.peer: rounded(row.flops_per_second) for row in offers}
    pause = pause_nanoseconds(plan, knowledge)
    return another_stage(now, plan, idle, steps_left=steps_left, pause_nanoseconds=pause)
