"""Makes the first plan of a run: from members' offers to a plan whose slots are leased.

The requester makes it, since nobody has a vote before there is a roster. Leases are taken in the order of
provider ids, all or none.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import trio
from blake3 import blake3

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId, short_peer
from node.errors import Unreachable
from node.placement.admission import check_model, input_frame_bytes
from node.placement.contest import settle
from node.placement.estimate import expected_wait
from node.planning.peers import LINKED_PEERS_MAX
from node.protocols.manifest import Manifest, Run
from node.protocols.runs import (
    LEASE_PURPOSE,
    LeaseBody,
    Leased,
    LeaseRequest,
    PrepareStage,
    Release,
    Reply,
    Request,
    Start,
)
from node.seams import Executor
from partition.model.graph import Graph
from partition.plan.history import History
from partition.plan.model_costs import ModelCosts
from partition.plan.observed import NOTHING, Knowledge
from partition.plan.operations import Operations
from partition.plan.plan import NO_HASH, Plan, StagePlan, encode_plan, plan_hash
from partition.plan.problem import Constraints, Infeasible, PeerCost, Problem, Split
from partition.plan.rates import assumed, equivalent_rate
from partition.plan.solver import solve
from partition.run.asks import Declined, Done
from partition.run.decliners import Decliners
from partition.run.messages import REASON_LENGTH_MAX
from partition.run.next_change import choose_witnesses
from partition.run.settings import RunSettings
from partition.steps.frames import PAYLOAD_BYTES_MAX

PLACEMENT_SECONDS_MAX = 300.0
"""How long placement plans around providers that decline: time for ten silent ones. With a limit on refusals,
that number of members that only decline could stop every run."""
CLAIM_RATIO_MAX = 100
"""Maximum of a claimed rate, as a multiple of the median. A GPU among CPUs is about as much faster, and a
peer that claims more does not get the whole plan."""
REASONS_MAX = 8
"""Maximum number of refusals, the latest ones, that are named when placement gives up."""
RATE_MAX = 1e18
"""Maximum FLOP/s in a plan, whose numbers have 63 bits; no machine has more."""
RATE_DIGITS = 2
"""Significant digits of a rate in a plan; measuring noise must not give equal machines unequal shares."""
FRAME_BYTES_MAX = PAYLOAD_BYTES_MAX - PAYLOAD_BYTES_MAX // 64
"""Maximum size of a micro-batch between two stages; zstd may add a little to incompressible data."""

Ask = Callable[[PeerId, Request, float], Awaitable[Reply]]


@dataclass(frozen=True)
class Offer:
    """The offer of one live member to runs."""

    peer: PeerId
    flops_per_second: float
    memory_bytes: int
    has_slot: bool
    device: str = ""
    """The kind as torch names it: cuda, mps or cpu; "" if it is not known."""
    lacks: str = ""
    """Why it has no slot, as one of LACKS; "" if it has one, or if the reason is not known."""


LACKS = {
    "observer": "only watching (--observer)",
    "never": "with accept_runs = never",
    "unreachable": "that no other node can dial (is its port open there, TCP and UDP? see `peerloom doctor`)",
    "unfenced": "that cannot fence in stages of others (no Landlock? see `peerloom doctor` there;"
    " allow_unfenced = true there takes them all the same)",
    "hours": "outside of its hours",
    "battery": "on battery",
    "in use": "in use by its owner",
    "loaded": "busy with other programs",
    "metered": "on a metered link",
    "version": "of a version that takes no stages of this one",
    "device": "that has not measured how fast it computes",
    "not said": "taking no stages of others, without a reason",
}
"""Reasons that members announce for having no slot (`node.placement.offers`), as texts that follow a number
of members."""


def lacks_text(offers: Iterable[Offer]) -> str:
    """Return why members without a slot have none, in words for people; "" if nothing is known."""
    counts = Counter(offer.lacks for offer in offers if not offer.has_slot)
    told = [f"{counts[reason]} {text}" for reason, text in LACKS.items() if counts[reason]]
    return f"members without a slot: {', '.join(told)}" if told else ""


def cap_claims(offers: Sequence[Offer]) -> list[Offer]:
    """Cap the offers' rates at CLAIM_RATIO_MAX times the (lower) median of those with a slot."""
    rates = sorted(offer.flops_per_second for offer in offers if offer.has_slot)
    if not rates:
        return list(offers)
    most = CLAIM_RATIO_MAX * rates[(len(rates) - 1) // 2]
    return [
        replace(offer, flops_per_second=most) if offer.has_slot and offer.flops_per_second > most else offer
        for offer in offers
    ]


class PlacementFailed(Exception):
    """No plan was found; the text is the reason, for people. `wait_seconds` is the providers' estimate of
    when busy slots may become free; None if unknown."""

    def __init__(self, reason: str, wait_seconds: int | None = None) -> None:
        free = "" if wait_seconds is None else f"; slots may be free in about {about(wait_seconds)}"
        super().__init__(f"{reason}{free} (train --wait 10m waits for them)" if free else reason)
        self.reason = reason
        self.wait_seconds = wait_seconds


def about(seconds: float) -> str:
    """Return a time with one or two digits, since it is an estimate."""
    if seconds < 55:
        return f"{max(10, round(seconds, -1)):.0f} s"
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    return f"{max(2, round(seconds / 3600))} h"


def make_plan(
    run: Run,
    graph: Graph,
    offers: Sequence[Offer],
    *,
    knowledge: Knowledge = NOTHING,
    may_reduce: bool = False,
    costs: ModelCosts | None = None,
) -> Plan:
    """Return the first plan of a run, based on the measurements of peers and links.

    The requester trains; it holds a stage only if there are too few peers. A run of two members takes an idle
    peer as a witness. With `may_reduce`, a run with too few peers gets fewer replicas, then fewer stages.
    `costs` are the graph's, if known.

    Raises:
        PlacementFailed: with what the requested run lacks.
    """
    manifest = run.manifest
    providers = sorted((offer for offer in offers if offer.has_slot), key=lambda offer: offer.peer)
    shape = manifest.stages, manifest.replicas
    costs = costs or ModelCosts(graph, manifest.sizes_max)
    try:
        return _plan_as(run, graph, providers, shape, knowledge, costs)
    except PlacementFailed:
        for smaller in smaller_shapes(shape, len(providers)) if may_reduce else ():
            with suppress(PlacementFailed):
                return _plan_as(run, graph, providers, smaller, knowledge, costs)
        raise


def is_short(manifest: Manifest, offers: Iterable[Offer]) -> bool:
    """Return whether too few members have a slot for the run as requested."""
    needed = max(1, manifest.stages) * max(1, manifest.replicas or manifest.replicas_min)
    return sum(offer.has_slot for offer in offers) < needed


def smaller_shapes(shape: tuple[int, int], peers: int) -> Iterator[tuple[int, int]]:
    """Yield smaller shapes (stages and replicas) for which `peers` suffice: the most stages first, each with
    the most replicas."""
    stages, replicas = (max(1, number) for number in shape)
    if stages * replicas > peers:
        for fewer in range(min(stages, peers), 0, -1):
            yield (fewer if shape[0] else 0), (min(replicas, peers // fewer) if shape[1] else 0)


def reduction(manifest: Manifest, plan: Plan) -> str:
    """Return how a plan falls short of the request, as a text for people; "" if it does not."""
    wanted = max(1, manifest.stages), manifest.replicas or manifest.replicas_min
    found = len(plan.stages), min(len(stage.replicas) for stage in plan.stages)
    if found[0] >= wanted[0] and found[1] >= wanted[1]:
        return ""
    shape = "{} stage{} x {}".format(wanted[0], "" if wanted[0] == 1 else "s", wanted[1])
    return "reduced to {} x {} for want of peers: {} were asked for".format(*found, shape)


def _plan_as(
    run: Run,
    graph: Graph,
    providers: Sequence[Offer],
    shape: tuple[int, int],
    knowledge: Knowledge,
    costs: ModelCosts,
) -> Plan:
    """Return the first plan with this number of stages and replicas; 0 means any. Raises PlacementFailed."""
    manifest = run.manifest
    others = [offer for offer in providers if offer.peer != run.requester]
    needed = max(1, shape[0]) * max(1, shape[1])
    # A trainer that holds no stage can keep feeding while stages compute.
    spare = len(others) >= needed and (bool(shape[0]) or len(others) >= 2)
    chosen = others if spare else providers
    try:
        check_model(manifest, graph)
        input_bytes = input_frame_bytes(manifest, graph)
        if input_bytes > FRAME_BYTES_MAX:
            raise PlacementFailed(
                f"a micro-batch of inputs is {input_bytes / 1e6:.0f} MB, at most "
                f"{FRAME_BYTES_MAX / 1e6:.0f} MB can be sent; a smaller train.microbatch is needed"
            )
        chosen = rated_offers(chosen, knowledge, costs.operations)
        problem = problem_of(run, graph, chosen, knowledge, costs)
        rules = replace(problem.constraints, stages=shape[0], replicas=shape[1])
        split = solve(replace(problem, constraints=rules))
    except (Infeasible, RemoteProtocolError, ValueError) as error:
        raise PlacementFailed(f"{manifest.model}: {error}") from None
    stages = _stages(split, chosen)
    replicas = {peer for stage in stages for peer in stage.replicas}
    members = replicas | {run.requester}
    # In the order of a hash that nobody controls, so that equal nodes are equally often witnesses.
    idle = sorted((offer.peer for offer in others), key=lambda peer: blake3(run.id + peer).digest())
    return Plan(
        run=run.id,
        parent=NO_HASH,
        height=0,
        roster=tuple(sorted(members.union(choose_witnesses(members, idle)))),
        trainers=_trainers(run, replicas),
        microbatches=manifest.microbatches,
        stages=stages,
    )


def rated_offers(
    offers: Sequence[Offer], knowledge: Knowledge, operations: Sequence[Operations]
) -> list[Offer]:
    """Return the offers with rates for planning these layers: from a peer's calibration if it has one, but at
    most the rate that others measured, and at most a multiple of the median."""
    rated = []
    for offer in offers:
        calibration = knowledge.calibrations.get(offer.peer)
        claimed = whole_rate(offer.flops_per_second)
        if calibration is not None:
            claimed = equivalent_rate(calibration, operations)
        rate = knowledge.flops_per_second(offer.peer, claimed)
        rated.append(replace(offer, flops_per_second=float(rate)))
    return cap_claims(rated)


def problem_of(
    run: Run,
    graph: Graph,
    offers: Sequence[Offer],
    knowledge: Knowledge = NOTHING,
    costs: ModelCosts | None = None,
) -> Problem:
    """Return the solver's problem for a run. Raises ValueError or RemoteProtocolError if sizes do not fit."""
    manifest = run.manifest
    costs = costs or ModelCosts(graph, manifest.sizes_max)
    peers = [offer.peer for offer in offers]
    links = knowledge.links(peers) if len(peers) <= LINKED_PEERS_MAX else {}
    return Problem(
        layers=costs.layers,
        peers=tuple(_cost(run, offer, costs.operations, knowledge) for offer in offers),
        links={(one.hex(), other.hex()): link for (one, other), link in links.items()},
        microbatches=manifest.microbatches,
        objective=manifest.objective,
        pipeline=manifest.pipeline,
        recompute=manifest.recompute,
        moments=manifest.optimizer.moments,
        input_bytes=input_frame_bytes(manifest, graph),
        constraints=constraints_of(manifest),
    )


def constraints_of(manifest: Manifest) -> Constraints:
    """Return the constraints of every plan of a run."""
    return Constraints(
        stages=manifest.stages,
        replicas=manifest.replicas,
        replicas_min=manifest.replicas_min,
        together=manifest.together,
        frame_bytes_max=FRAME_BYTES_MAX,
    )


def _cost(run: Run, offer: Offer, operations: Sequence[Operations], knowledge: Knowledge) -> PeerCost:
    """Return the layers' times on a peer, from its calibration slowed down to the planned rate. Without a
    calibration, all classes of operators are in proportion to that rate."""
    rate = whole_rate(offer.flops_per_second)
    if (calibration := knowledge.calibrations.get(offer.peer)) is None:
        device = assumed(rate)
    else:
        device = calibration.scaled(rate * 1000 // equivalent_rate(calibration, operations))
    if offer.peer == run.requester:
        device = device.as_requester()
    return PeerCost(
        offer.peer.hex(),
        offer.memory_bytes,
        *device.model_nanoseconds(operations),
        step_nanoseconds=device.step_nanoseconds,
        node_nanoseconds=device.node_nanoseconds,
        node_step_nanoseconds=device.node_step_nanoseconds,
        busy_milliwatts=device.draw_milliwatts[0],
        idle_milliwatts=device.draw_milliwatts[1],
    )


def _trainers(run: Run, replicas: Collection[bytes]) -> tuple[bytes, ...]:
    """Return the requester, then as many replicas as the manifest wants, in an order that nobody controls."""
    others = sorted(set(replicas) - {run.requester}, key=lambda peer: blake3(run.id + peer).digest())
    return (run.requester, *others[: run.manifest.trainers - 1])


def _stages(split: Split, offers: Sequence[Offer]) -> tuple[StagePlan, ...]:
    stages = []
    for (first, last), group in zip(split.ranges, split.groups, strict=True):
        members = [offers[index] for index in group]
        rates = tuple(rounded(member.flops_per_second) for member in members)
        stages.append(StagePlan(first, last, tuple(member.peer for member in members), rates))
    return tuple(stages)


def rounded(rate: float) -> int:
    """Return a rate rounded to RATE_DIGITS significant digits, from 1 to RATE_MAX."""
    whole = whole_rate(rate)
    return max(1, round(whole, RATE_DIGITS - len(str(whole))))


def whole_rate(rate: float) -> int:
    """Return a rate as a whole number from 1 to RATE_MAX, whatever was claimed or measured."""
    return int(max(1.0, min(rate, RATE_MAX)))  # in this order of arguments NaN becomes 1


async def place(
    run: Run,
    graph: Graph,
    signer: Signer,
    offers: Sequence[Offer],
    ask: Ask,
    executor: Executor,
    *,
    decliners: Decliners,
    monotonic: Callable[[], float],
    settings: RunSettings,
    knowledge: Knowledge = NOTHING,
    may_reduce: bool = False,
    revision: Fact | None = None,
) -> Plan:
    """Plan a run and lease its slots. Busy or silent providers are planned around and noted in `decliners`,
    which are asked again only if the others are too few. `knowledge`, `may_reduce`: as in `make_plan`.

    Raises:
        PlacementFailed: no plan was found; all leases were released.
    """
    left = list(offers)
    reasons: list[str] = []
    waits: list[int] = []
    costs = ModelCosts(graph, run.manifest.sizes_max)  # reused for all plans after refusals
    planning = partial(make_plan, run, graph, knowledge=knowledge, may_reduce=may_reduce, costs=costs)
    until = monotonic() + PLACEMENT_SECONDS_MAX
    others_do, is_settled = True, False
    while monotonic() < until:
        try:
            last = decliners.now(monotonic()) if others_do else ()
            plan, is_without_last = await _plan(planning, left, last, executor)
            others_do = others_do and is_without_last  # the number of others only decreases
        except PlacementFailed as error:
            free = sum(offer.has_slot for offer in left)
            seconds = expected_wait(run.manifest, free, waits)
            lacking = lacks_text(offers) if is_short(run.manifest, left) else ""
            said = filter(None, [str(error), lacking, *reasons[-REASONS_MAX:]])
            raise PlacementFailed("; ".join(said), seconds) from None
        rows: dict[PeerId, int | None] = dict.fromkeys(plan.witnesses)
        rows |= {PeerId(peer): index for index, stage in enumerate(plan.stages) for peer in stage.replicas}
        refused = await lease_all(run, plan, rows, signer, ask, settings, revision=revision)
        if refused is None:
            return plan
        peer, refusal = refused
        if refusal.is_contested and not is_settled:
            is_settled, contest_seconds = True, float(refusal.wait_seconds or 0)
            free_now = [offer.peer for offer in left if offer.has_slot]
            await settle(run, free_now, ask, decliners, revision, monotonic, contest_seconds)
            continue
        decliners.note(peer, monotonic())
        reasons.append(f"{short_peer(peer)} {refusal.reason}")
        if refusal.wait_seconds is not None:
            waits.append(refusal.wait_seconds)
        left = [offer for offer in left if offer.peer != peer]
    raise PlacementFailed("; ".join(["providers kept declining", *reasons[-REASONS_MAX:]]))


async def _plan(
    planning: Callable[[Sequence[Offer]], Plan],
    offers: Sequence[Offer],
    last: Collection[PeerId],
    executor: Executor,
) -> tuple[Plan, bool]:
    """Plan without the peers in `last`, or with them if that is impossible. Return the plan and whether it is
    without them. Raises PlacementFailed."""
    first = [offer for offer in offers if offer.peer not in last]
    # With many peers, it takes the solver seconds to find that a run is infeasible.
    if len(first) < len(offers):
        with suppress(PlacementFailed):
            return await executor.run(partial(planning, tuple(first))), True
    return await executor.run(partial(planning, tuple(offers))), len(first) == len(offers)


async def lease_all(
    run: Run,
    plan: Plan,
    rows: Mapping[PeerId, int | None],
    signer: Signer,
    ask: Ask,
    settings: RunSettings,
    history: History | None = None,
    revision: Fact | None = None,
) -> tuple[PeerId, Declined] | None:
    """Lease the slots of `rows` (peer to stage, None for a witness) in the order of provider ids. Return
    None, or the peer that declined and its reason."""
    data = encode_plan(plan)
    taken: list[PeerId] = []
    for peer, stage in sorted(rows.items()):
        request = LeaseRequest(run.fact, data, stage, history, revision)
        refusal = await lease(peer, request, plan, signer, ask, settings)
        if refusal is not None:
            # Also release a peer that gave no answer: it may have leased, and its answer was lost.
            await release(run, plan, [*taken, peer], ask, settings)
            return peer, refusal
        taken.append(peer)
    return None


async def lease(
    peer: PeerId, request: LeaseRequest, plan: Plan, signer: Signer, ask: Ask, settings: RunSettings
) -> Declined | None:
    """Lease a stage of `plan`, or have `peer` agree to be a witness. Return None, or why that failed."""
    seconds = settings.witness_seconds_max if request.stage is None else settings.lease_seconds_max
    reply = await _try(ask, peer, request, seconds)
    if isinstance(reply, Declined):
        return reply
    if not isinstance(reply, Leased):
        return Declined("gave no lease")
    try:
        body: LeaseBody = decode(reply.lease.body, LeaseBody, bytes_max=512)
        author = signer.check(LEASE_PURPOSE, reply.lease)
    except RemoteProtocolError as error:
        return Declined(str(error)[:REASON_LENGTH_MAX])
    if (author, body.run, body.plan, body.stage) != (peer, plan.run, plan_hash(plan), request.stage):
        return Declined("leased something else")
    return None


async def release(run: Run, plan: Plan, peers: Sequence[PeerId], ask: Ask, settings: RunSettings) -> None:
    """Release the leases of an abandoned plan."""
    for peer in peers:
        await _try(ask, peer, Release(run.id, plan_hash(plan)), settings.lease_seconds_max)


async def start(
    run: Run, plan: Plan, history: History, peers: Collection[PeerId], ask: Ask, settings: RunSettings
) -> dict[PeerId, str]:
    """Send the plan to `peers` concurrently; return the peers that did not accept it, with reasons."""
    return await ask_all(Start(run.fact, encode_plan(plan), history), peers, ask, settings.lease_seconds_max)


async def ask_all(
    request: Start | PrepareStage, peers: Collection[PeerId], ask: Ask, seconds: float
) -> dict[PeerId, str]:
    """Send a request about a plan to `peers`; return the peers that did not answer Done, with reasons."""
    failures: dict[PeerId, str] = {}

    async def tell(peer: PeerId) -> None:
        reply = await _try(ask, peer, request, seconds)
        if not isinstance(reply, Done):
            failures[peer] = reply.reason if isinstance(reply, Declined) else "did not start"

    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(tell, peer)
    return failures


async def _try(ask: Ask, peer: PeerId, request: Request, seconds: float) -> Reply:
    """Send a request; an unreachable peer counts as declining."""
    try:
        return await ask(peer, request, seconds)
    except Unreachable as error:
        return Declined(f"{error.reason}: {error.detail}"[:300])
