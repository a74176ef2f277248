"""The planner's part: from what members offer to a plan whose stages are leased and open.

PLACEHOLDER for the plan chain: one member, the live one with the lowest id, decides alone
(`partition.plan.plan.planner_of`). Leases are taken in provider-id order, all or none.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import trio

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId, short_peer
from node.errors import Unreachable
from node.runs.admission import check_model, train_entry
from node.runs.manifest import Manifest, Run
from node.runs.requests import (
    LEASE_PURPOSE,
    Begin,
    Declined,
    Done,
    LeaseBody,
    Leased,
    LeaseRequest,
    Release,
    Reply,
    Request,
    Start,
)
from node.seams import Executor
from partition.model.graph import ITEM_BYTES, Graph
from partition.model.sizes import evaluate, shape_of
from partition.plan.cost import Resources
from partition.plan.layer_costs import layer_costs
from partition.plan.plan import HASH_BYTES, Plan, StagePlan, encode_plan, plan_hash
from partition.plan.solver import Infeasible, Split, solve
from partition.steps.frames import PAYLOAD_BYTES_MAX

LEASE_SECONDS_MAX = 30.0
"""A provider fetches and checks the model's graph before it answers."""
START_SECONDS_MAX = 120.0
"""Opening a stage imports torch, which takes seconds on a cold, busy machine."""
REPLANS_MAX = 8
"""Providers that may turn out busy before a placement gives up."""
RATE_DIGITS = 2
"""Significant digits of a rate in a plan: measuring noise must not deal equal machines unequal shares."""
FRAME_BYTES_MAX = PAYLOAD_BYTES_MAX - PAYLOAD_BYTES_MAX // 64
"""A micro-batch between two stages; zstd may add a little to what it cannot compress."""

Ask = Callable[[PeerId, Request, float], Awaitable[Reply]]


@dataclass(frozen=True)
class Offer:
    """What one live member offers to runs."""

    peer: PeerId
    flops_per_second: float
    memory_bytes: int
    has_slot: bool


class NotPlaced(Exception):
    """No plan came about, and why, in words for a person."""


class NotStarted(NotPlaced):
    """Some of a plan's replicas, or its trainer, did not start: `peers`."""

    def __init__(self, failures: Mapping[PeerId, str]) -> None:
        super().__init__("; ".join(f"{short_peer(peer)}: {reason}" for peer, reason in failures.items()))
        self.peers = tuple(failures)


def fed_bytes(manifest: Manifest, graph: Graph) -> int:
    """The larger of the two frames by which a trainer feeds one micro-batch: inputs and labels."""
    entry = train_entry(graph)
    values = evaluate(graph.expressions, manifest.sizes_max)
    largest = 0
    for ports in (entry.inputs, entry.labels):
        kinds = [graph.types[port.type] for port in ports]
        largest = max(largest, sum(prod(shape_of(kind, values)) * ITEM_BYTES[kind.dtype] for kind in kinds))
    return largest


def make_plan(run: Run, graph: Graph, planner: PeerId, offers: Sequence[Offer]) -> Plan:
    """The first plan of a run. The requester trains; it holds a stage only where peers are short.

    Raises:
        NotPlaced: with what is missing.
    """
    manifest = run.manifest
    providers = sorted((offer for offer in offers if offer.has_slot), key=lambda offer: offer.peer)
    others = [offer for offer in providers if offer.peer != run.requester]
    needed = max(1, manifest.stages) * max(1, manifest.replicas)
    # A trainer that computes no stage keeps feeding while stages compute.
    spare = len(others) >= needed and (bool(manifest.stages) or len(others) >= 2)
    chosen = others if spare else providers
    try:
        check_model(manifest, graph)
        input_bytes = fed_bytes(manifest, graph)
        if input_bytes > FRAME_BYTES_MAX:
            raise NotPlaced(
                f"a micro-batch of inputs is {input_bytes / 1e6:.0f} MB, at most "
                f"{FRAME_BYTES_MAX / 1e6:.0f} MB can be sent; a smaller train.microbatch is needed"
            )
        split = solve(
            layer_costs(graph, manifest.sizes_max),
            [Resources(int(offer.flops_per_second), offer.memory_bytes) for offer in chosen],
            stages=manifest.stages,
            replicas=manifest.replicas,
            microbatches_in_flight=manifest.microbatches,
            recompute=manifest.recompute,
            frame_bytes_max=FRAME_BYTES_MAX,
        )
    except (Infeasible, RemoteProtocolError, ValueError) as error:
        raise NotPlaced(f"{manifest.model}: {error}") from None
    return Plan(
        run=run.id,
        parent=bytes(HASH_BYTES),
        height=0,
        planner=planner,
        trainer=run.requester,
        requester=run.requester,
        microbatches=manifest.microbatches,
        stages=_stages(split, chosen),
    )


def _stages(split: Split, offers: Sequence[Offer]) -> tuple[StagePlan, ...]:
    stages = []
    for (first, last), group in zip(split.ranges, split.groups, strict=True):
        members = [offers[index] for index in group]
        rates = tuple(_rounded(member.flops_per_second) for member in members)
        stages.append(StagePlan(first, last, tuple(member.peer for member in members), rates))
    return tuple(stages)


def _rounded(rate: float) -> int:
    """`rate` to RATE_DIGITS significant digits, at least 1."""
    whole = max(1, int(rate))
    return max(1, round(whole, RATE_DIGITS - len(str(whole))))


def plan_without(plan: Plan, planner: PeerId, trainer: PeerId, live: Sequence[PeerId]) -> Plan:
    """The next link after a trainer's death: the same stages less the dead, another trainer.

    Raises:
        NotPlaced: a stage has no live replica.
    """
    stages = []
    for number, stage in enumerate(plan.stages):
        rows = [(p, r) for p, r in zip(stage.replicas, stage.rates, strict=True) if p in live]
        if not rows:
            raise NotPlaced(
                f"stage {number + 1} of {len(plan.stages)} has no live replica; its parameters are gone"
            )
        stages.append(
            StagePlan(
                stage.first_layer, stage.last_layer, tuple(p for p, _ in rows), tuple(r for _, r in rows)
            )
        )
    return Plan(
        run=plan.run,
        parent=plan_hash(plan),
        height=plan.height + 1,
        planner=planner,
        trainer=trainer,
        requester=plan.requester,
        microbatches=plan.microbatches,
        stages=tuple(stages),
    )


async def place(
    run: Run, graph: Graph, signer: Signer, offers: Sequence[Offer], ask: Ask, executor: Executor
) -> Plan:
    """Plan, lease and start a run; a busy or silent provider is planned around.

    Raises:
        NotPlaced: no plan came about; every lease taken on the way was given back.
    """
    left = list(offers)
    reasons: list[str] = []
    for _ in range(REPLANS_MAX):
        try:
            # Among many peers, an infeasible run takes the solver seconds to find out.
            plan = await executor.run(partial(make_plan, run, graph, signer.peer, tuple(left)))
        except NotPlaced as error:
            raise NotPlaced("; ".join([str(error), *reasons])) from None
        refused = await _lease_all(run, plan, signer, ask)
        if refused is None:
            return await _start_or_release(run, plan, ask)
        peer, reason = refused
        reasons.append(f"{short_peer(peer)} {reason}")
        left = [offer for offer in left if offer.peer != peer]
    raise NotPlaced("; ".join(["providers kept declining", *reasons]))


async def _lease_all(run: Run, plan: Plan, signer: Signer, ask: Ask) -> tuple[PeerId, str] | None:
    """Lease every replica's slot in provider-id order; None, or who declined and why."""
    data = encode_plan(plan)
    taken: list[PeerId] = []
    rows = sorted((PeerId(p), index) for index, stage in enumerate(plan.stages) for p in stage.replicas)
    for peer, stage in rows:
        reason = await _lease(peer, LeaseRequest(run.fact, data, stage), run, plan, signer, ask)
        if reason is not None:
            # The one that gave no answer too: it may have leased, and its answer was lost.
            await _release(run, plan, [*taken, peer], ask)
            return peer, reason
        taken.append(peer)
    return None


async def _lease(
    peer: PeerId, request: LeaseRequest, run: Run, plan: Plan, signer: Signer, ask: Ask
) -> str | None:
    reply = await _try(ask, peer, request, LEASE_SECONDS_MAX)
    if isinstance(reply, Declined):
        return reply.reason
    if not isinstance(reply, Leased):
        return "gave no lease"
    try:
        body: LeaseBody = decode(reply.lease.body, LeaseBody, bytes_max=512)
        author = signer.check(LEASE_PURPOSE, reply.lease)
    except RemoteProtocolError as error:
        return str(error)
    if (author, body.run, body.plan, body.stage) != (peer, run.id, plan_hash(plan), request.stage):
        return "leased something else"
    return None


async def _start_or_release(run: Run, plan: Plan, ask: Ask) -> Plan:
    """Start a plan; where replicas die meanwhile but their stages have others, the plan without them."""
    live: Sequence[PeerId] = plan.members
    while True:
        try:
            await start_all(run, plan, ask, live)
            return plan
        except NotStarted as error:
            failed = error.peers
            live = [peer for peer in live if peer not in failed]
            await _release(run, plan, failed, ask)
            try:
                if plan.trainer in failed:
                    raise
                plan = plan_without(plan, PeerId(plan.planner), PeerId(plan.trainer), live)
            except NotPlaced:
                await _release(run, plan, live, ask)
                raise error from None


async def _release(run: Run, plan: Plan, peers: Sequence[PeerId], ask: Ask) -> None:
    for peer in peers:
        await _try(ask, peer, Release(run.id, plan_hash(plan)), LEASE_SECONDS_MAX)


async def start_all(run: Run, plan: Plan, ask: Ask, only: Sequence[PeerId] | None = None) -> None:
    """Give every member the plan, replicas opening their stages side by side, then let the trainer begin.

    `only` limits it to the members that live. Raises NotStarted where a replica or the trainer fails.
    """
    data = encode_plan(plan)
    failures: dict[PeerId, str] = {}
    members = [peer for peer in plan.members if only is None or peer in only]

    async def start(peer: PeerId) -> None:
        reply = await _try(ask, peer, Start(run.fact, data), START_SECONDS_MAX)
        if not isinstance(reply, Done):
            failures[peer] = reply.reason if isinstance(reply, Declined) else "did not start"

    async with trio.open_nursery() as nursery:
        for peer in members:
            nursery.start_soon(start, peer)
    essential = [p for p in members if p in failures and (p == plan.trainer or plan.stage_of(p) is not None)]
    if not essential:
        reply = await _try(ask, PeerId(plan.trainer), Begin(plan_hash(plan)), LEASE_SECONDS_MAX)
        if isinstance(reply, Done):
            return
        essential = [PeerId(plan.trainer)]
        failures[essential[0]] = reply.reason if isinstance(reply, Declined) else "did not begin"
    raise NotStarted({peer: failures[peer] for peer in essential})


async def _try(ask: Ask, peer: PeerId, request: Request, seconds: float) -> Reply:
    """A peer that cannot be reached declines."""
    try:
        return await ask(peer, request, seconds)
    except Unreachable as error:
        return Declined(f"{error.reason}: {error.detail}"[:300])
