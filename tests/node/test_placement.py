"""The first plan of a run among members that overstate their speed and then decline. Whole nodes in virtual
time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import encode
from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from node.events import RunPlanned
from node.executor import RealExecutor
from node.placement.leases import (
    CLAIM_RATIO_MAX,
    Offer,
    PlacementFailed,
    cap_claims,
    make_plan,
    place,
    problem_of,
    smaller_shapes,
)
from node.protocols.manifest import PlaceWish, make_run
from node.protocols.runs import (
    LEASE_PURPOSE,
    LeaseBody,
    Leased,
    LeaseRequest,
    Reply,
    Request,
)
from node.runtime import Node
from node.services.capacity import Capacity
from node.services.metadata import FLOPS_PER_SECOND_MAX, Metadata, encode_metadata, read_metadata
from partition.plan.observed import Knowledge, LinkRow, Observed, StageRow
from partition.plan.plan import decode_plan, plan_hash
from partition.plan.rates import OperatorPace, assumed
from partition.run.asks import Declined, Done
from partition.run.decliners import DECLINERS_MAX, Decliners
from partition.run.settings import RunSettings
from tests.stack import manifest, prepare, simple_cnn, simulate, swarm, train

ENORMOUS = 9e18
PEERS = [PeerId(bytes([number]) * 32) for number in range(200)]


def claim(node: Node, flops_per_second: float) -> None:
    """Have this node claim this speed from now on instead of its measured one."""
    said = read_metadata(encode_metadata(node.capacity, accepts_runs=True))
    assert said is not None
    said = msgspec.structs.replace(said, flops_per_second=flops_per_second)
    node.membership.update(replace(node.machine.profile(), metadata=encode(said)))


def decline(node: Node, asked: list[str], name: str) -> None:
    """Have this node decline every request from now on, and record the senders."""

    def accepts(_run: object) -> str:
        asked.append(name)
        return "not today"

    node.runs.accepts = accepts


@pytest.mark.parametrize("flops_per_second", [ENORMOUS, FLOPS_PER_SECOND_MAX])
def test_eight_overstating_decliners_do_not_prevent_placement(flops_per_second: float) -> None:
    asked: list[str] = []
    planned: list[Sequence[str]] = []

    async def scenario() -> None:
        async with swarm("abcdefghijk", preset="lan") as group:
            for name in "abcdefgh":
                claim(group.nodes[name], flops_per_second)
                decline(group.nodes[name], asked, name)
            await trio.sleep(5)  # virtual seconds, until all have heard the claims
            for seed in (1, 2):
                _, events = await train(group, "k", manifest(stages=1, replicas=2, steps=1, seed=seed))
                (plan,) = (event for event in events if isinstance(event, RunPlanned))
                planned.append([group.name_of(peer) for stage in plan.stages for peer in stage])

    simulate(scenario)
    assert [sorted(stage) for stage in planned] == [["i", "j"], ["i", "j"]]
    # Each decliner was asked at most once: the second run knows which peers declined the first.
    assert len(asked) == len(set(asked))


def test_a_claimed_speed_counts_for_a_limited_multiple_of_the_median() -> None:
    rates = [1e9, 2e9, 3e9, 9e15]
    offers = [Offer(peer, rate, 1, has_slot=True) for peer, rate in zip(PEERS, rates, strict=False)]
    without = Offer(PEERS[9], 1e15, 1, has_slot=False)
    capped = cap_claims([*offers, without])
    assert [offer.flops_per_second for offer in capped[:3]] == rates[:3]
    assert capped[3].flops_per_second == CLAIM_RATIO_MAX * 2e9
    assert capped[4] == without
    assert cap_claims([]) == []


def test_an_impossible_claimed_rate_is_ignored() -> None:
    measured = Capacity("cpu", 1, 1, 1, 1e24, "")
    said = read_metadata(encode_metadata(measured, accepts_runs=True))
    assert said is not None
    assert said.flops_per_second == FLOPS_PER_SECOND_MAX
    for rate in (1.01 * FLOPS_PER_SECOND_MAX, 1e24, float("inf"), float("nan"), -1.0):
        assert read_metadata(encode(Metadata(1, True, "cpu", 1, 1, 1, rate, ""))) is None


def test_recent_decliners_are_remembered_for_a_while() -> None:
    decliners = Decliners()
    decliners.note(PEERS[0], 0.0, 10.0)
    assert decliners.now(9.9) == {PEERS[0]}
    assert decliners.now(10.0) == set()
    for number in range(DECLINERS_MAX + 5):
        decliners.note(PeerId(number.to_bytes(32, "big")), 20.0, 10.0)
    assert len(decliners.now(21.0)) == DECLINERS_MAX
    assert PeerId(bytes(32)) not in decliners.now(21.0)


@given(stages=st.integers(0, 9), replicas=st.integers(0, 9), peers=st.integers(0, 40))
def test_a_run_is_reduced_to_the_peers_that_exist(stages: int, replicas: int, peers: int) -> None:
    found = list(smaller_shapes((stages, replicas), peers))
    for fewer, copies in found:
        assert max(1, fewer) * max(1, copies) <= peers
        assert fewer <= stages
        assert copies <= replicas
        assert bool(fewer) == bool(stages)
        assert bool(copies) == bool(replicas)
    assert bool(found) == (0 < peers < max(1, stages) * max(1, replicas))


def test_a_reduced_run_keeps_its_stages_before_its_replicas() -> None:
    assert list(smaller_shapes((2, 2), 3)) == [(2, 1), (1, 2)]


def test_a_placement_continues_after_refusals_while_other_peers_are_free() -> None:
    decliners = 20
    captured = simple_cnn("float64")
    signers = [
        IdentitySigner(Identity(number.to_bytes(32, "big")), "test") for number in range(decliners + 3)
    ]
    requester, free, busy = signers[0], signers[1:3], {signer.peer for signer in signers[3:]}
    run = make_run(requester, manifest(captured, stages=1, replicas=2))
    asked: list[PeerId] = []

    async def ask(peer: PeerId, request: Request, _seconds: float) -> Reply:
        if not isinstance(request, LeaseRequest):
            return Done()
        asked.append(peer)
        if peer in busy:
            return Declined("not today")
        signer = next(signer for signer in free if signer.peer == peer)
        body = LeaseBody(run.id, plan_hash(decode_plan(request.plan)), request.stage, 60)
        return Leased(signer.sign(LEASE_PURPOSE, encode(body)))

    # The fastest peers decline, each slightly faster than the one after it.
    rates = {peer: 50e9 + place * 1e9 for place, peer in enumerate(sorted(busy))}
    offers = [
        Offer(signer.peer, rates.get(signer.peer, 1e9), 10**10, has_slot=True) for signer in signers[1:]
    ]
    offers.append(Offer(requester.peer, 1e9, 10**10, has_slot=False))
    plan = trio.run(
        partial(
            place, run, captured.graph, requester, offers, ask, RealExecutor(), settings=RunSettings(),
            decliners=Decliners(), monotonic=time.monotonic,
        )
    )  # fmt: skip
    assert {peer for stage in plan.stages for peer in stage.replicas} == {signer.peer for signer in free}
    assert sorted(peer for peer in asked if peer in busy) == sorted(busy)


def test_a_busy_placement_says_why_other_members_have_no_slot() -> None:
    captured = simple_cnn("float64")
    requester = IdentitySigner(Identity(bytes(32)), "test")
    run = make_run(requester, manifest(captured, stages=1, replicas=1))
    offers = [Offer(PEERS[1], 1e9, 10**10, has_slot=True)]
    offers.append(Offer(PEERS[2], 1e9, 10**10, has_slot=False, lacks="observer"))

    async def ask(_peer: PeerId, _request: Request, _seconds: float) -> Reply:
        return Declined("busy")

    with pytest.raises(PlacementFailed, match="members without a slot: 1 only watching") as failed:
        trio.run(
            partial(
                place, run, captured.graph, requester, offers, ask, RealExecutor(), settings=RunSettings(),
                decliners=Decliners(), monotonic=time.monotonic,
            )
        )  # fmt: skip
    assert "busy" in failed.value.reason


def test_recent_decliners_cost_a_placement_one_plan_per_refusal() -> None:
    captured = simple_cnn("float64")
    requester = IdentitySigner(Identity(bytes(32)), "test")
    run = make_run(requester, manifest(captured, stages=1, replicas=2))
    offers = [Offer(peer, 1e9, 10**10, has_slot=True) for peer in PEERS[1:9]]
    decliners, plans = Decliners(), 0
    for offer in offers:
        decliners.note(offer.peer, time.monotonic())

    class Counting(RealExecutor):
        async def run(self, function: Callable[[], Any], **options: Any) -> Any:
            nonlocal plans
            plans += 1
            return await super().run(function, **options)

    async def ask(_peer: PeerId, _request: Request, _seconds: float) -> Reply:
        return Declined("busy")

    with pytest.raises(PlacementFailed, match="1 offers a slot"):
        trio.run(
            partial(
                place, run, captured.graph, requester, offers, ask, Counting(), settings=RunSettings(),
                decliners=decliners, monotonic=time.monotonic,
            )
        )  # fmt: skip
    assert plans == len(offers) + 1, (
        "not exactly one plan was made without the decliners and then one per refusal"
    )


def test_a_plan_separates_neighbours_with_a_slow_measured_link() -> None:
    model = simple_cnn()
    run = make_run(IdentitySigner(Identity(bytes(32)), "test"), manifest(stages=2, replicas=1))
    offers = [Offer(peer, 1e9, 8 << 30, has_slot=True) for peer in PEERS[:3]]
    for slow in combinations(PEERS[:3], 2):
        rows = {
            peer: Observed(
                tuple(
                    LinkRow(other, 1_000 if {peer, other} == set(slow) else 10**9, 0)
                    for other in PEERS[:3]
                    if other != peer
                )
            )
            for peer in PEERS[:3]
        }
        plan = make_plan(run, model.graph, offers, knowledge=Knowledge(None, {}, rows))
        assert {PeerId(peer) for stage in plan.stages for peer in stage.replicas} != set(slow)


@pytest.mark.parametrize("is_public_slow", [False, True])
def test_hidden_peers_are_neighbours_only_in_the_best_possible_plan(is_public_slow: bool) -> None:
    run = make_run(IdentitySigner(Identity(bytes(32)), "test"), manifest(stages=2, replicas=1))
    hidden, public = PEERS[:2], PEERS[2]
    rates = dict.fromkeys(hidden, 1e9) | {public: 1e5 if is_public_slow else 1e9}
    offers = [Offer(peer, rate, 8 << 30, has_slot=True) for peer, rate in rates.items()]
    rows = {public: Observed(tuple(LinkRow(peer, 10**8, 10**8, 10**6) for peer in hidden))}
    known = Knowledge(None, {}, rows, frozenset(hidden))
    plan = make_plan(run, simple_cnn().graph, offers, knowledge=known)
    placed = {PeerId(peer) for stage in plan.stages for peer in stage.replicas}
    assert (placed == set(hidden)) == is_public_slow


def test_a_plan_keeps_layers_together_and_fills_every_stage() -> None:
    model = simple_cnn()
    offers = [Offer(peer, 1e10, 8 << 30, has_slot=True) for peer in PEERS[:4]]
    signer = IdentitySigner(Identity(bytes(32)), "test")
    free = make_plan(make_run(signer, manifest(stages=2, replicas=0)), model.graph, offers)
    border = free.stages[0].last_layer
    around = ((border - 1, border + 1),)
    run = make_run(signer, manifest(stages=2, replicas=0, replicas_min=2, together=around))
    kept = make_plan(run, model.graph, offers)
    assert kept.stages[0].last_layer != border
    assert [len(stage.replicas) for stage in kept.stages] == [2, 2]
    with pytest.raises(PlacementFailed, match="4 peers are needed"):
        make_plan(run, model.graph, offers[:3], may_reduce=True)


def test_a_plan_uses_observed_rates_and_own_calibrations() -> None:
    model = simple_cnn()
    run = make_run(IdentitySigner(Identity(bytes(32)), "test"), manifest(stages=1, replicas=3))
    offers = [Offer(peer, 1e10, 8 << 30, has_slot=True) for peer in PEERS[:3]]
    observed = {PEERS[9]: Observed((), (StageRow(PEERS[0], 10**9),))}
    known = Knowledge(PEERS[9], {PEERS[1]: assumed(2 * 10**9)}, observed)
    (stage,) = make_plan(run, model.graph, offers, knowledge=known).stages
    rates = dict(zip(stage.replicas, stage.rates, strict=True))
    assert rates[PEERS[0]] == 10**9
    assert rates[PEERS[1]] == pytest.approx(2e9, rel=0.05)
    assert rates[PEERS[2]] == 10**10


def test_a_requester_with_a_stage_is_planned_to_feed_and_commit_too() -> None:
    run = make_run(IdentitySigner(Identity(bytes(32)), "test"), manifest(stages=1, replicas=2))
    offers = [Offer(peer, 1e10, 8 << 30, has_slot=True) for peer in (run.requester, PEERS[1])]
    device = msgspec.structs.replace(
        assumed(10**10),
        node=OperatorPace(2_000_000, 0, 3_000),
        node_step=5_000_000,
        frame=OperatorPace(0, 0, 0),
    )
    known = Knowledge(PEERS[9], {offer.peer: device for offer in offers}, {})
    problem = problem_of(run, simple_cnn().graph, offers, known)
    costs = {peer.name: peer for peer in problem.peers}
    mine, other = costs[run.requester.hex()], costs[PEERS[1].hex()]
    assert mine.node_nanoseconds[0] == pytest.approx(3.5 * other.node_nanoseconds[0], rel=0.01)
    assert mine.node_step_nanoseconds == other.node_step_nanoseconds
    assert (mine.forward, mine.node_nanoseconds[1]) == (other.forward, other.node_nanoseconds[1])


def test_a_run_for_energy_uses_the_peers_with_the_lowest_power() -> None:
    model = simple_cnn()
    signer = IdentitySigner(Identity(bytes(32)), "test")
    offers = [Offer(peer, 1e10, 8 << 30, has_slot=True) for peer in PEERS[:3]]
    drawn = {PEERS[0]: 200_000, PEERS[1]: 20_000, PEERS[2]: 120_000}
    paces = {
        peer: msgspec.structs.replace(assumed(10**10), busy_milliwatts=milliwatts, idle_milliwatts=10_000)
        for peer, milliwatts in drawn.items()
    }
    known = Knowledge(PEERS[9], paces, {})

    def placed(objective: str) -> list[bytes]:
        run = make_run(signer, manifest(stages=1, replicas=0, objective=objective))
        (stage,) = make_plan(run, model.graph, offers, knowledge=known).stages
        return list(stage.replicas)

    assert placed("energy") == [PEERS[1]]
    assert PEERS[1] != placed("throughput")[0] or len(placed("throughput")) > 1


def test_a_run_may_require_peers_of_a_measured_speed() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            a = group.nodes["a"]
            offers = [
                Offer(PEERS[0], 4e10, 8 << 30, has_slot=True),
                Offer(PEERS[1], 6e10, 8 << 30, has_slot=True),
            ]
            run = prepare(a, manifest(place=PlaceWish(gflops_min=50.0)))
            assert [offer.peer for offer in a.runs.places.choose(run, offers) if offer.has_slot] == [PEERS[1]]
            with pytest.raises(PlacementFailed, match=r"of 3 with a slot 0 are at 50 GFLOP/s or more"):
                await a.runs.submit(run)

    simulate(scenario)
