"""The solver compared with an exhaustive search of all splits."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.plan.cost import KEPT_FRAMES_BYTES_MAX, STAGE_BASELINE_BYTES, LayerCost
from partition.plan.exact import ExactSearch
from partition.plan.problem import (
    Constraints,
    Infeasible,
    Link,
    PeerCost,
    Problem,
    Split,
    uniform_peers,
)
from partition.plan.search import search
from partition.plan.solver import solve
from partition.plan.tables import Tables
from tests.partition.planned import (
    MIB,
    bottleneck,
    is_allowed,
    layers_in_order,
    problems,
    shuffled,
    splits,
)
from tests.source import ROOT

FAST_LINK = Link(10**10, 0)


def check(problem: Problem, split: Split) -> None:
    """Check the properties of every answer."""
    assert layers_in_order(split) == list(range(len(problem.layers)))
    used = [place for group in split.groups for place in group]
    assert len(used) == len(set(used))
    assert is_allowed(problem, split.ranges, split.groups)


@given(problems())
@settings(max_examples=50, deadline=None)
def test_a_small_split_is_the_best_of_all_allowed_ones(problem: Problem) -> None:
    found = [bottleneck(problem, ranges, groups) for ranges, groups in splits(problem)]
    try:
        split = solve(problem)
    except Infeasible:
        assert not found, "no split was found although one fits"
        return
    assert found, "the solver returned a split that is not allowed"
    check(problem, split)
    assert split.is_exact
    value = bottleneck(problem, split.ranges, split.groups)
    assert split.bottleneck_nanoseconds == pytest.approx(value, rel=1e-3, abs=50)


@given(
    st.sampled_from(["throughput", "latency", "energy"]).flatmap(
        lambda objective: problems(objective=objective)
    ),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_problem_is_infeasible_exactly_when_no_split_is_allowed(
    problem: Problem, hides_links: bool
) -> None:
    """Up to 7 layers and 4 peers; every split is examined for each objective."""
    problem = replace(problem, hides_links=hides_links)
    possible = next(splits(problem), None)
    try:
        split = solve(problem)
    except Infeasible:
        assert possible is None, "no split was found although one is allowed"
        return
    assert possible is not None, "the solver returned a split that is not allowed"
    check(problem, split)
    for first, last in problem.constraints.together:
        assert all(not first < end < last for _, end in split.ranges)


@given(problems())
@settings(max_examples=25, deadline=None)
def test_a_long_step_is_split_for_the_least_bottleneck(problem: Problem) -> None:
    # The step is so long that filling the pipeline costs nothing. So many frames are kept on the disk.
    peers = tuple(
        replace(peer, memory_bytes=peer.memory_bytes + KEPT_FRAMES_BYTES_MAX) for peer in problem.peers
    )
    problem = replace(problem, microbatches=10**6, pipeline="1f1b", peers=peers)
    found = [bottleneck(problem, ranges, groups) for ranges, groups in splits(problem)]
    if found:
        split = solve(problem)
        assert bottleneck(problem, split.ranges, split.groups) <= min(found) * 1.001 + 50


@given(problems(objective="latency"), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_a_plan_for_latency_uses_the_shortest_of_all_paths(problem: Problem, shuffle: object) -> None:
    tables = Tables(problem)
    try:
        split = solve(problem)
    except Infeasible:
        assert not list(splits(problem))
        return
    check(problem, split)
    if max(len(group) for group in split.groups) == 1:
        passed = tables.pass_times(split.ranges, split.groups)[0]
        others = [
            tables.pass_times(ranges, groups)[0]
            for ranges, groups in splits(problem)
            if max(len(group) for group in groups) == 1
        ]
        assert passed <= min(others) + 20


@given(problems(peers_max=6))
@settings(max_examples=25, deadline=None)
def test_a_search_respects_every_rule_and_finds_a_split_if_one_exists(problem: Problem) -> None:
    exact = ExactSearch(Tables(problem)).split((1 << 56) - 1)
    try:
        split = solve(problem)
    except Infeasible:
        assert exact is None
        return
    assert exact is not None
    check(problem, split)


@given(problems(layers_max=5, peers_max=4))
@settings(max_examples=25, deadline=None)
def test_the_lower_bound_is_the_least_bottleneck(problem: Problem) -> None:
    tables = Tables(problem)
    exact = ExactSearch(tables)
    found = [bottleneck(problem, ranges, groups) for ranges, groups in splits(problem)]
    cut = exact.split((1 << 56) - 1)
    assert (cut is None) == (not found)
    if cut is not None:
        assert exact.least(0, cut.value) == pytest.approx(min(found), rel=2e-4, abs=20)


@given(problems(peers_max=6), st.data())
@settings(max_examples=25, deadline=None)
def test_the_order_of_peers_changes_nothing(problem: Problem, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(problem.peers))))
    assert _answer(problem) == _answer(shuffled(problem, order))


def _answer(problem: Problem) -> object:
    try:
        return solve(problem)
    except Infeasible as infeasible:
        return str(infeasible)


PROGRAM = """
import sys
from random import Random
from partition.plan.cost import LayerCost
from partition.plan.problem import Link, Problem, uniform_peers
from partition.plan.solver import solve
layers = tuple(LayerCost(10**7 + 10**6 * (n % 7), 10**9 + 10**8 * (n % 5), 10**6, 10**6) for n in range(24))
offers = [(f"peer {n}", 10**10 * (n % 4 + 1), 10**9 + 10**8 * (n % 5)) for n in range(20)]
Random(int(sys.argv[1])).shuffle(offers)
names = {name for name, _, _ in offers}
links = {(a, b): Link(10**7 * (len(a) + hash(b) * 0)) for a in names for b in names}
print(solve(Problem(layers, uniform_peers(layers, offers), microbatches=16, links=links)))
"""


def test_two_processes_with_other_hash_seeds_make_the_same_plan() -> None:
    answers = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(seed)],
            cwd=ROOT,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in (1, 2)
    }
    assert len(answers) == 1


# Examples


def layer(mebibytes: int, flops: int = 1_000_000) -> LayerCost:
    return LayerCost(mebibytes * MIB, flops, 0, 1_000)


BIG, SMALL = 4096 * MIB, STAGE_BASELINE_BYTES + 60 * MIB


def problem_of(
    layers: list[LayerCost], peers: list[tuple[int, int]], stages: int = 0, replicas: int = 0, **rest: object
) -> Problem:
    """Peers are (FLOP/s, memory); a thousand micro-batches over links that cost nothing."""
    offers = [(f"{number:03}", rate, memory) for number, (rate, memory) in enumerate(peers)]
    return Problem(
        tuple(layers),
        uniform_peers(layers, offers),
        default_link=FAST_LINK,
        constraints=Constraints(stages=stages, replicas=replicas),
        **({"microbatches": 4} | rest),  # type: ignore[arg-type]  # of any field
    )


def test_a_fast_peer_gets_more_layers() -> None:
    layers = [layer(1, 10**9)] * 8
    split = solve(problem_of(layers, [(10**9, BIG), (3 * 10**9, BIG)], 2))
    share = dict(zip(split.groups, (last - first for first, last in split.ranges), strict=True))
    assert share == {(0,): 2, (1,): 6}


def test_a_slow_peer_with_memory_is_preferred_to_a_fast_one_without() -> None:
    split = solve(problem_of([layer(100)], [(10**12, SMALL), (10**9, BIG)], 1, 1))
    assert split.groups == ((1,),)


def test_a_small_peer_is_unused_if_it_cannot_hold_the_stage() -> None:
    assert solve(problem_of([layer(100)], [(10**9, SMALL), (10**9, BIG)])).groups == ((1,),)


def test_recomputation_makes_a_large_stage_fit() -> None:
    layers = [LayerCost(MIB, 1_000_000, 30 * MIB, MIB)] * 2
    peers = [(10**9, STAGE_BASELINE_BYTES + 100 * MIB)]
    problem = problem_of(layers, peers, 1, 1, pipeline="gpipe")
    with pytest.raises(Infeasible):
        solve(problem)
    split = solve(replace(problem, recompute=True))
    assert split.bottleneck_nanoseconds == 8 * 10**6


def test_one_peer_computes_alone_if_links_are_slower() -> None:
    layers = [LayerCost(MIB, 10**7, MIB, 10 * MIB)] * 8
    problem = replace(problem_of(layers, [(10**11, BIG)] * 4), default_link=Link(10**6, 10**6))
    assert len(solve(problem).groups) == 1
    assert len(solve(problem).groups[0]) == 1


def test_the_number_of_stages_is_the_one_that_pays_despite_the_bubble() -> None:
    layers = [layer(1, 10**9)] * 16
    few, many = (
        solve(problem_of(layers, [(10**9, BIG)] * 8, replicas=1, microbatches=count)) for count in (1, 256)
    )
    assert len(few.groups) == 1
    assert len(many.groups) == 8


@pytest.mark.slow
def test_a_model_of_very_many_layers_is_split_quickly() -> None:
    """A planner solves this for any peer that asks."""
    peers = [(rate * 10**9, 8192 * MIB) for rate in (50, 41, 33, 27, 20)]
    layers = [LayerCost(MIB, 10**9 + 7 * number, MIB, 1_000) for number in range(500)]
    began = time.process_time()
    split = solve(problem_of(layers, peers, replicas=1, microbatches=1024))
    assert time.process_time() - began < 30
    whole = 3 * sum(cost.forward_flops for cost in layers) * 10**9 // sum(rate for rate, _ in peers)
    assert split.bottleneck_nanoseconds < 1.05 * whole


def test_hundreds_of_peers_share_stages_at_equal_rates() -> None:
    layers = [layer(1, 10**9)] * 24
    peers = [(10**9 * (1 + number % 5), BIG) for number in range(300)]
    began = time.process_time()
    split = solve(problem_of(layers, peers, microbatches=1024))
    assert time.process_time() - began < 10
    rates = [sum(1 + place % 5 for place in group) / (last - first)
             for (first, last), group in zip(split.ranges, split.groups, strict=True)]  # fmt: skip
    assert max(rates) < 1.3 * min(rates)


def test_the_search_alone_is_within_some_percent_of_the_lower_bound() -> None:
    layers = tuple(LayerCost((8 + n % 9) * MIB, 10**9 * (1 + n % 3), 4 * MIB, MIB) for n in range(24))
    names = [f"p{number}" for number in range(6)]
    offers = [
        (name, 10**10 * (number + 1), STAGE_BASELINE_BYTES + 900 * MIB) for number, name in enumerate(names)
    ]
    links = {(a, b): Link(10**7 * (1 + len(a + b) % 3), 10**6) for a in names for b in names}
    problem = Problem(layers, uniform_peers(layers, offers), 64, links, hides_links=True)
    tables = Tables(problem)
    value = search(tables)[0].value
    assert value <= 1.05 * ExactSearch(tables).least(value // 2, value)


@pytest.mark.parametrize(
    ("layers", "peers", "stages", "replicas", "words"),
    [
        ([layer(1)] * 3, [(1, BIG)] * 9, 4, 1, "4 stages are requested, but the model has only 3 layers"),
        ([layer(1)] * 3, [(1, BIG)] * 3, 2, 2, "4 peers are needed (2 stages x 2), 3 offer a slot"),
        ([layer(1)], [], 0, 0, "1 peer is needed (1 stage x 1), 0 offer a slot"),
        ([layer(100)], [(1, SMALL)] * 3, 0, 0, "one layer alone needs 0.94 GB to train, the largest of 3"),
        ([layer(10)] * 20, [(1, SMALL)] * 2, 0, 0, "the model needs 1.47 GB to train, 2 peers offer 0.96 GB"),
        ([layer(10)] * 4, [(1, BIG), (1, SMALL)], 1, 2, "no cut into 1 stage x 2 replicas fits"),
        ([], [(1, BIG)], 0, 0, "the model has no layers"),
    ],
)
def test_an_infeasible_run_states_what_is_missing(
    layers: list[LayerCost], peers: list[tuple[int, int]], stages: int, replicas: int, words: str
) -> None:
    with pytest.raises(Infeasible) as refused:
        solve(problem_of(layers, peers, stages, replicas))
    assert words in str(refused.value)


def test_peers_with_the_same_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="two peers have the same name"):
        Problem((layer(1),), (PeerCost("a", BIG, (1,), (1,)),) * 2)


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
def test_cuts_that_are_equal_by_their_links_share_the_computing(pipeline: str) -> None:
    """If all links are assumed slow, all cuts of a small model take equally long. The first cut would give
    one peer only one layer."""
    layers = tuple(LayerCost(0, 0, 0, 100_000, 0) for _ in range(11))
    peers = tuple(PeerCost(name, 8 * 2**30, (100_000,) * 11, (200_000,) * 11) for name in "ab")
    problem = Problem(
        layers=layers,
        peers=peers,
        microbatches=8,
        input_bytes=100_000,
        pipeline=pipeline,  # type: ignore[arg-type]  # a literal
        constraints=Constraints(stages=2, replicas=1),
    )
    sizes = sorted(last - first for first, last in solve(problem).ranges)
    assert sizes == [5, 6]
