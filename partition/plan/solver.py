"""Which peers hold which layers: a contiguous split that minimises the slowest stage.

Peers of one stage are its replicas and share its micro-batches, so a stage's rate is the sum of
its replicas' rates and each replica must hold all of the stage. For every order of the groups (all
orders up to ORDERS_EXACT_MAX stages, fastest first beyond) a dynamic programme over the cut points
finds the best bottleneck of max(compute, transfer) under each group's memory limit. Such
order-plus-cut solvers come within some tens of percent of the optimum; an exact search over subsets
of peers comes with the real planner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, permutations

from partition.plan.cost import (
    STAGE_BASELINE_BYTES,
    LayerCost,
    Resources,
    compute_nanoseconds,
    stage_memory_bytes,
    transfer_nanoseconds,
)

ORDERS_EXACT_MAX = 5
"""120 orders at most are tried; beyond that only fastest first."""
TRIES = (2, 16)
"""Bottlenecks, as multiples of what no split can beat, below which one is looked for before any will do."""
LINK_BYTES_PER_SECOND = 12_500_000
"""Assumed where no link was measured: 100 Mbit/s, a home uplink at its best."""
FRAME_BYTES_MAX = 2**63 - 1
"""Unless the caller's frames are bounded."""


class Infeasible(Exception):
    """No split fits. The message says how much is missing, in words for a person."""


@dataclass(frozen=True)
class Split:
    """`ranges[s]` are stage s's layers (half open), `groups[s]` indices into the peers given."""

    ranges: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    bottleneck_nanoseconds: int


def solve(
    layers: Sequence[LayerCost],
    peers: Sequence[Resources],
    *,
    stages: int,
    replicas: int,
    microbatches_in_flight: int,
    recompute: bool = False,
    bytes_per_second: int = LINK_BYTES_PER_SECOND,
    frame_bytes_max: int = FRAME_BYTES_MAX,
) -> Split:
    """The best split into `stages` of `replicas` peers each; 0 lets the solver choose.

    `microbatches_in_flight` is how many one replica may hold between forward and backward, which it does
    again in part where it is to `recompute`; `frame_bytes_max` what one may be between two stages.

    Raises:
        Infeasible: too few peers or layers, or no split fits into memory.
    """
    best: Split | None = None
    problem = _Problem(
        tuple(layers), tuple(peers), microbatches_in_flight, recompute, bytes_per_second, frame_bytes_max
    )
    for count, most in _shapes(len(peers), len(layers), stages, replicas):
        # More replicas are faster, but each holds the whole stage: fewer only where more do not fit.
        fewer = [most] if replicas else range(most, 0, -1)
        split = next((split for copies in fewer if (split := problem.best(count, copies))), None)
        # Fewer stages win a tie: each boundary costs latency that the bottleneck does not show.
        if split is not None and (best is None or split.bottleneck_nanoseconds < best.bottleneck_nanoseconds):
            best = split
    if best is None:
        cuts = sum(layer.output_bytes <= frame_bytes_max for layer in layers[:-1])
        if cuts + 1 < min(stages, len(layers)):
            raise Infeasible(
                f"a micro-batch is too large to be sent between {stages} stages; "
                "a smaller train.microbatch is needed"
            )
        raise Infeasible(_missing(problem, stages, replicas))
    return best


def _shapes(peers: int, layers: int, stages: int, replicas: int) -> Iterator[tuple[int, int]]:
    for count in [stages] if stages else range(1, min(peers, layers) + 1):
        copies = replicas or peers // count
        if copies and count <= layers and count * copies <= peers:
            yield count, copies


def _missing(problem: "_Problem", stages: int, replicas: int) -> str:
    layers, peers = problem.layers, problem.peers
    if not layers:
        return "the model has no layers"
    if stages > len(layers):
        return f"{stages} stages are asked for, the model has {len(layers)} layers to cut between"
    wanted = max(1, stages) * max(1, replicas)
    if wanted > len(peers):
        shape = f"{max(1, stages)} stages x {max(1, replicas)}"
        return f"{wanted} peers are needed ({shape}), {len(peers)} offer a slot"
    largest_layer = max(problem.memory_bytes([layer]) for layer in layers)
    largest_peer = max(peer.memory_bytes for peer in peers)
    if largest_layer > largest_peer:
        return (
            f"one layer alone needs {largest_layer / 1e9:.2f} GB to train, "
            f"the largest of {len(peers)} peers offers {largest_peer / 1e9:.2f} GB"
        )
    copies = max(1, replicas)
    baselines = (max(1, stages) - 1) * STAGE_BASELINE_BYTES
    need = copies * (problem.memory_bytes(layers) + baselines)
    offer = sum(peer.memory_bytes for peer in peers)
    if need > offer:
        return f"the model needs {need / 1e9:.2f} GB to train, {len(peers)} peers offer {offer / 1e9:.2f} GB"
    shape = f"{stages or 'any number of'} stages x {replicas or 'any number of'} replicas"
    return (
        f"no cut into {shape} fits the memory of {len(peers)} peers, though together they offer "
        f"{offer / 1e9:.2f} GB and the model needs {need / 1e9:.2f} GB"
    )


@dataclass(frozen=True)
class _Problem:
    layers: tuple[LayerCost, ...]
    peers: tuple[Resources, ...]
    microbatches_in_flight: int
    recompute: bool
    bytes_per_second: int
    frame_bytes_max: int

    def memory_bytes(self, layers: Sequence[LayerCost]) -> int:
        """Of one replica that holds `layers`."""
        return stage_memory_bytes(layers, self.microbatches_in_flight, recompute=self.recompute)

    def best(self, stages: int, replicas: int) -> Split | None:
        """The best split over the fastest peers, or over the largest where these hold too little."""
        speeds = [peer.flops_per_second for peer in self.peers]
        sizes = [peer.memory_bytes for peer in self.peers]
        indices = range(len(self.peers))
        fastest = sorted(indices, key=lambda index: (-speeds[index], -sizes[index], index))
        largest = sorted(indices, key=lambda index: (-sizes[index], -speeds[index], index))
        split = self._best_of(self._groups(fastest, stages, replicas))
        return split or self._best_of(self._groups(largest, stages, replicas))

    def _best_of(self, groups: list[tuple[int, ...]]) -> Split | None:
        orders = permutations(groups) if len(groups) <= ORDERS_EXACT_MAX else iter([tuple(groups)])
        rate = sum(self.peers[index].flops_per_second for group in groups for index in group)
        ideal = 1 + compute_nanoseconds(self._flops[-1], rate, recompute=self.recompute)
        best: Split | None = None
        for order in orders:
            # Below a near bound few cuts need a look; without one every pair of layers does.
            bounds = [best.bottleneck_nanoseconds] if best else [*(ideal * times for times in TRIES), None]
            best = next((split for bound in bounds if (split := self._cut(order, bound))), best)
        return best

    def _groups(self, ranked: list[int], stages: int, replicas: int) -> list[tuple[int, ...]]:
        """The first peers, alike beside alike: a stage is held back by its smallest replica's memory."""
        chosen = sorted(
            ranked[: stages * replicas],
            key=lambda index: (-self.peers[index].memory_bytes, ranked.index(index)),
        )
        return [tuple(sorted(chosen[i * replicas : (i + 1) * replicas])) for i in range(stages)]

    def _cut(self, order: tuple[tuple[int, ...], ...], below: int | None) -> Split | None:
        """Dynamic programme: a row holds the least bottleneck of the stages so far, by layers covered.

        With `below` only a split whose bottleneck is less is looked for.
        """
        total = len(self.layers)
        best: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {0: (0, ())}
        for number, group in enumerate(order):
            row: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
            left = len(order) - number - 1
            earliest = self._earliest(order[number + 1 :], below) if left else total
            for start, (bottleneck, ranges) in best.items():
                for end, cost in self._costs(group, start, max(start + 1, earliest), total - left, below):
                    candidate = (max(bottleneck, cost), (*ranges, (start, end)))
                    if end not in row or candidate < row[end]:
                        row[end] = candidate
            best = row
        if total not in best:
            return None
        bottleneck, ranges = best[total]
        return Split(ranges, order, bottleneck)

    def _earliest(self, later: tuple[tuple[int, ...], ...], below: int | None) -> int:
        """The first layer from which the later groups, all together, compute the rest in time."""
        if below is None:
            return 0
        rate = sum(max(1, self.peers[index].flops_per_second) for group in later for index in group)
        flops = self._flops
        return next(
            end
            for end in range(len(flops))
            if compute_nanoseconds(flops[-1] - flops[end], rate, recompute=self.recompute) < max(1, below)
        )

    def _costs(
        self, group: tuple[int, ...], start: int, first: int, last: int, below: int | None
    ) -> Iterator[tuple[int, int]]:
        """(end, nanoseconds) of the stages of `group` from layer `start` to before `first`, ..., `last`."""
        memory = min(self.peers[index].memory_bytes for index in group)
        rate = sum(self.peers[index].flops_per_second for index in group)
        for end in range(first, last + 1):
            flops = self._flops[end] - self._flops[start]
            cost = compute_nanoseconds(flops, rate, recompute=self.recompute)
            # Neither gets better with more layers.
            if self._needed[start][end - start - 1] > memory or (below is not None and cost >= below):
                return
            if end < len(self.layers):
                if self.layers[end - 1].output_bytes > self.frame_bytes_max:
                    continue
                cost = max(cost, transfer_nanoseconds(self.layers[end - 1], self.bytes_per_second))
            if below is None or cost < below:
                yield end, cost

    @cached_property
    def _flops(self) -> list[int]:
        """Of the layers before each."""
        return list(accumulate((layer.forward_flops for layer in self.layers), initial=0))

    @cached_property
    def _needed(self) -> list[list[int]]:
        """Memory of the stages that begin with each layer, by how many more they hold."""
        return [
            [self.memory_bytes([both]) for both in accumulate(self.layers[start:], _together)]
            for start in range(len(self.layers))
        ]


def _together(first: LayerCost, second: LayerCost) -> LayerCost:
    """One layer that costs a stage what both do; its output is the larger one, the rest of them is kept."""
    output = max(first.output_bytes, second.output_bytes)
    return LayerCost(
        parameter_bytes=first.parameter_bytes + second.parameter_bytes,
        forward_flops=first.forward_flops + second.forward_flops,
        saved_bytes=first.saved_bytes
        + second.saved_bytes
        + first.output_bytes
        + second.output_bytes
        - output,
        output_bytes=output,
    )
