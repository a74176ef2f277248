"""The solver against trying every cut by hand."""

import time
from collections.abc import Sequence
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.plan.cost import (
    STAGE_BASELINE_BYTES,
    LayerCost,
    Resources,
    stage_memory_bytes,
    stage_nanoseconds,
    transfer_nanoseconds,
)
from partition.plan.solver import Infeasible, Split, solve

MIB = 1024 * 1024
IN_FLIGHT, LINK = 4, 10_000_000

layer_costs = st.builds(
    LayerCost,
    parameter_bytes=st.integers(0, 40 * MIB),
    forward_flops=st.integers(0, 10**8),
    saved_bytes=st.integers(0, 4 * MIB),
    output_bytes=st.integers(1, MIB),
)
resources = st.builds(
    Resources,
    flops_per_second=st.integers(10**8, 10**11),
    memory_bytes=st.integers(STAGE_BASELINE_BYTES, STAGE_BASELINE_BYTES + 600 * MIB),
)


def solved(
    layers: Sequence[LayerCost], peers: Sequence[Resources], stages: int = 0, replicas: int = 0
) -> Split:
    return solve(
        layers,
        peers,
        stages=stages,
        replicas=replicas,
        microbatches_in_flight=IN_FLIGHT,
        bytes_per_second=LINK,
    )


def cost_of(
    layers: Sequence[LayerCost],
    peers: Sequence[Resources],
    ranges: Sequence[tuple[int, int]],
    groups: Sequence[tuple[int, ...]],
) -> int | None:
    """The slowest stage, or None where a replica has too little memory: the definition, not the algorithm."""
    worst = 0
    for (first, last), group in zip(ranges, groups, strict=True):
        part = layers[first:last]
        if any(stage_memory_bytes(part, IN_FLIGHT) > peers[index].memory_bytes for index in group):
            return None
        rate = sum(peers[index].flops_per_second for index in group)
        worst = max(worst, stage_nanoseconds(part, rate))
        if last < len(layers):
            worst = max(worst, transfer_nanoseconds(part[-1], LINK))
    return worst


def best_by_hand(
    layers: Sequence[LayerCost], peers: Sequence[Resources], groups: Sequence[tuple[int, ...]]
) -> int | None:
    """Every contiguous cut, for these groups in every order."""
    found = []
    for order in permutations(groups):
        for cuts in combinations(range(1, len(layers)), len(groups) - 1):
            edges = (0, *cuts, len(layers))
            ranges = list(pairwise(edges))
            found.append(cost_of(layers, peers, ranges, order))
    return min((cost for cost in found if cost is not None), default=None)


@given(
    st.lists(layer_costs, min_size=1, max_size=7),
    st.lists(resources, min_size=1, max_size=6),
    st.integers(0, 3),
    st.integers(0, 2),
)
@settings(max_examples=300)
def test_a_split_is_the_best_of_all_cuts_for_its_groups_and_fits_everywhere(
    layers: list[LayerCost], peers: list[Resources], stages: int, replicas: int
) -> None:
    try:
        split = solved(layers, peers, stages, replicas)
    except Infeasible:
        return
    assert split.bottleneck_nanoseconds == cost_of(layers, peers, split.ranges, split.groups)
    assert split.bottleneck_nanoseconds == best_by_hand(layers, peers, split.groups)
    assert [layer for first, last in split.ranges for layer in range(first, last)] == list(range(len(layers)))
    used = [index for group in split.groups for index in group]
    assert len(used) == len(set(used))
    assert all(first < last for first, last in split.ranges)
    assert stages in (0, len(split.ranges))
    assert all(len(group) == (replicas or len(split.groups[0])) for group in split.groups)
    assert split == solved(layers, peers, stages, replicas)


@given(st.lists(layer_costs, min_size=1, max_size=5), st.lists(resources, min_size=1, max_size=4))
@settings(max_examples=200)
def test_where_one_peer_can_hold_the_model_it_is_never_infeasible(
    layers: list[LayerCost], peers: list[Resources]
) -> None:
    assert solved(layers, [*peers, Resources(1, stage_memory_bytes(layers, IN_FLIGHT))])


def layer(mebibytes: int, flops: int = 1_000_000) -> LayerCost:
    return LayerCost(mebibytes * MIB, flops, 0, 1_000)


BIG, SMALL = Resources(10**9, 4096 * MIB), Resources(10**9, STAGE_BASELINE_BYTES + 60 * MIB)


def test_a_fast_peer_gets_more_layers() -> None:
    split = solved([layer(1)] * 8, [Resources(10**9, BIG.memory_bytes), Resources(3 * 10**9, 4096 * MIB)], 2)
    share = dict(zip(split.groups, (last - first for first, last in split.ranges), strict=True))
    assert share == {(0,): 2, (1,): 6}


def test_a_fast_peer_without_memory_gives_way_to_a_slow_one_with_it() -> None:
    split = solved([layer(100)], [Resources(10**12, SMALL.memory_bytes), BIG], 1, 1)
    assert split.groups == ((1,),)


def test_fewer_replicas_are_taken_where_more_do_not_fit() -> None:
    assert solved([layer(100)], [SMALL, BIG]).groups == ((1,),)


def test_a_stage_that_recomputes_fits_where_one_that_keeps_everything_does_not() -> None:
    layers = [LayerCost(MIB, 1_000_000, 30 * MIB, MIB)]
    peer = Resources(10**9, STAGE_BASELINE_BYTES + 60 * MIB)
    with pytest.raises(Infeasible):
        solve(layers, [peer], stages=1, replicas=1, microbatches_in_flight=IN_FLIGHT)
    split = solve(layers, [peer], stages=1, replicas=1, microbatches_in_flight=IN_FLIGHT, recompute=True)
    assert split.bottleneck_nanoseconds == stage_nanoseconds(layers, 10**9) * 4 // 3


def test_a_model_of_very_many_layers_is_split_with_few_of_the_cuts_looked_at() -> None:
    """A planner solves this for any stranger who asks."""
    rates = (50, 41, 33, 27, 20)
    peers = [Resources(rate * 10**9, 8192 * MIB) for rate in rates]
    layers = [LayerCost(MIB, 10**9 + 7 * number, MIB, 1_000) for number in range(100)]
    split = solved(layers, peers)
    assert split.bottleneck_nanoseconds < 1.05 * stage_nanoseconds(layers, sum(rates) * 10**9)
    began = time.process_time()
    solved(layers, peers)
    assert time.process_time() - began < 10, "looking at every cut takes a minute"


def test_fewer_stages_win_a_tie() -> None:
    nothing = [LayerCost(MIB, 0, 0, 0)] * 4
    assert len(solved(nothing, [BIG] * 4).ranges) == 1


@pytest.mark.parametrize(
    ("layers", "peers", "stages", "replicas", "words"),
    [
        ([layer(1)] * 3, [BIG] * 9, 4, 1, "4 stages are asked for, the model has 3 layers"),
        ([layer(1)] * 3, [BIG] * 3, 2, 2, "4 peers are needed (2 stages x 2), 3 offer a slot"),
        ([layer(1)], [], 0, 0, "1 peers are needed (1 stages x 1), 0 offer a slot"),
        ([layer(100)], [SMALL] * 3, 0, 0, "one layer alone needs 0.94 GB to train, the largest of 3 peers"),
        ([layer(10)] * 20, [SMALL] * 2, 0, 0, "the model needs 1.47 GB to train, 2 peers offer 0.96 GB"),
        ([layer(10)] * 4, [BIG, SMALL], 1, 2, "no cut into 1 stages x 2 replicas fits"),
        ([], [BIG], 0, 0, "the model has no layers"),
    ],
)
def test_an_infeasible_run_says_what_is_missing(
    layers: list[LayerCost], peers: list[Resources], stages: int, replicas: int, words: str
) -> None:
    with pytest.raises(Infeasible) as refused:
        solved(layers, peers, stages, replicas)
    assert words in str(refused.value)
