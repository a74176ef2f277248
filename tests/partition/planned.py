"""Problems for the tests of planning: random small problems, and the cost of a split by definition."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations

from hypothesis import strategies as st

from partition.plan.cost import STAGE_BASELINE_BYTES, LayerCost, stage_memory_bytes
from partition.plan.problem import Constraints, Link, PeerCost, Problem, Split

MIB = 1 << 20

layer_costs = st.builds(
    LayerCost,
    parameter_bytes=st.integers(0, 40 * MIB),
    forward_flops=st.integers(0, 10**8),
    saved_bytes=st.integers(0, 4 * MIB),
    output_bytes=st.integers(1, MIB),
    working_bytes=st.integers(0, MIB),
)
links = st.builds(Link, st.integers(10**6, 10**9), st.integers(0, 10**7))


@st.composite
def problems(
    draw: st.DrawFn, layers_max: int = 7, peers_max: int = 4, objective: str = "throughput"
) -> Problem:
    """Return a problem with few layers and peers, and with every kind of constraint."""
    layers = tuple(draw(st.lists(layer_costs, min_size=1, max_size=layers_max)))
    times = st.lists(st.integers(10**4, 10**8), min_size=len(layers), max_size=len(layers)).map(tuple)
    peers = tuple(
        PeerCost(
            f"peer-{number}",
            draw(st.integers(STAGE_BASELINE_BYTES, STAGE_BASELINE_BYTES + 600 * MIB)),
            draw(times),
            draw(times),
        )
        for number in range(draw(st.integers(1, peers_max)))
    )
    names = [peer.name for peer in peers]
    pairs = {pair: draw(links) for pair in permutations(names, 2)}
    first = draw(st.integers(0, len(layers) - 1))
    rules = Constraints(
        stages=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
        replicas=draw(st.sampled_from([0, 0, 0, 1, 2])),
        replicas_min=draw(st.sampled_from([1, 1, 1, 2])),
        together=draw(st.sampled_from([(), ((first, min(len(layers), first + 3)),)])),
        frame_bytes_max=draw(st.sampled_from([2**63 - 1, MIB // 2])),
    )
    return Problem(
        layers,
        peers,
        microbatches=draw(st.integers(1, 64)),
        links=pairs,
        objective=objective,  # type: ignore[arg-type]  # of any field
        pipeline=draw(st.sampled_from(["1f1b", "gpipe"])),
        recompute=draw(st.booleans()),
        moments=draw(st.integers(0, 2)),
        trains=objective != "latency",
        input_bytes=draw(st.integers(0, MIB)),
        constraints=rules,
        hides_links=True,
    )


def groupings(peers: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every ordered grouping of every subset except the empty one."""
    for size in range(1, len(peers) + 1):
        for group in combinations(peers, size):
            yield (group,)
            rest = [peer for peer in peers if peer not in group]
            for others in groupings(rest):
                yield (group, *others)


def is_allowed(problem: Problem, ranges: Sequence[tuple[int, int]], groups: Sequence[Sequence[int]]) -> bool:
    """Return whether a split respects memory and constraints, by definition."""
    rules = problem.constraints
    if rules.stages and len(ranges) != rules.stages:
        return False
    for number, ((first, last), group) in enumerate(zip(ranges, groups, strict=True)):
        wanted = len(group) == rules.replicas if rules.replicas else len(group) >= rules.replicas_min
        if not wanted or (last < len(problem.layers) and not problem.may_cut(last)):
            return False
        need = memory_of(problem, first, last, len(ranges) - number)
        if any(need > problem.peers[place].memory_bytes for place in group):
            return False
    return True


def memory_of(problem: Problem, first: int, last: int, stages_left: int) -> int:
    """Return the peak bytes of a stage, by `stage_memory_bytes`, which a provider uses too."""
    given = problem.input_bytes if first == 0 else problem.layers[first - 1].output_bytes
    if not problem.trains:
        layers = problem.layers[first:last]
        working = max(layer.working_bytes for layer in layers)
        return STAGE_BASELINE_BYTES + sum(layer.parameter_bytes for layer in layers) + working
    return stage_memory_bytes(
        problem.layers[first:last],
        problem.in_flight(stages_left),
        recompute=problem.recompute,
        moments=problem.moments,
        input_bytes=given,
        microbatches=problem.microbatches,
    )


def splits(problem: Problem) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]]]:
    """Yield every allowed split."""
    count = len(problem.layers)
    for groups in groupings(range(len(problem.peers))):
        if len(groups) <= count:
            for cuts in combinations(range(1, count), len(groups) - 1):
                ranges = tuple(pairwise((0, *cuts, count)))
                if is_allowed(problem, ranges, groups):
                    yield ranges, groups


def bottleneck(problem: Problem, ranges: Sequence[tuple[int, int]], groups: Sequence[Sequence[int]]) -> float:
    """Return the nanoseconds of the slowest stage or edge, by definition."""
    worst = 0.0
    for number, ((first, last), group) in enumerate(zip(ranges, groups, strict=True)):
        rate = sum(1 / _time(problem, place, first, last) for place in group)
        worst = max(worst, 1 / rate + _reduction(problem, first, last, group))
        if number + 1 < len(groups):
            size = problem.layers[last - 1].output_bytes
            after = groups[number + 1]
            worst = max(worst, size * _edge(problem, group, after), size * _edge(problem, after, group))
    return worst


def _time(problem: Problem, place: int, first: int, last: int) -> int:
    peer = problem.peers[place]
    times = peer.forward[first:last] + peer.backward[first:last]
    return sum(times) + (sum(peer.forward[first:last]) if problem.recompute else 0)


def _reduction(problem: Problem, first: int, last: int, group: Sequence[int]) -> float:
    count = len(group)
    if count == 1:
        return 0.0
    size = sum(layer.parameter_bytes for layer in problem.layers[first:last])
    pairs = [problem.link(one, other) for one, other in permutations(group, 2)]
    slowest = min(pairs, key=lambda link: (link.bytes_per_second, -link.nanoseconds))
    step = size * 2 * (count - 1) * 1e9 / count / slowest.bytes_per_second
    return (step + 2 * (count - 1) * slowest.nanoseconds) / problem.microbatches


def _edge(problem: Problem, senders: Sequence[int], receivers: Sequence[int]) -> float:
    """Return the nanoseconds per byte. Each peer sends and receives its share of the micro-batches."""
    out, into = dict.fromkeys(senders, 0.0), dict.fromkeys(receivers, 0.0)
    for one in senders:
        for other in receivers:
            share = _share(problem, one, senders) * _share(problem, other, receivers)
            part = share * 1e9 / problem.link(one, other).bytes_per_second
            out[one] += part
            into[other] += part
    return max(*out.values(), *into.values())


def _share(problem: Problem, place: int, group: Sequence[int]) -> float:
    count = len(problem.layers)
    rates = {peer: 1 / _time(problem, peer, 0, count) for peer in group}
    return rates[place] / sum(rates.values())


def layers_in_order(split: Split) -> list[int]:
    """All layers in the order of their stages."""
    return [layer for first, last in split.ranges for layer in range(first, last)]


def shuffled(problem: Problem, order: Sequence[int]) -> Problem:
    """Return the same problem with its peers in a different order."""
    return replace(problem, peers=tuple(problem.peers[place] for place in order))
