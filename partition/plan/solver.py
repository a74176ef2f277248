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
from itertools import permutations

from partition.plan.cost import (
    STAGE_BASELINE_BYTES,
    LayerCost,
    Resources,
    stage_memory_bytes,
    stage_nanoseconds,
    transfer_nanoseconds,
)

ORDERS_EXACT_MAX = 5
"""120 orders at most are tried; beyond that only fastest first."""
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
    samples: int,
    samples_in_flight: int,
    bytes_per_second: int = LINK_BYTES_PER_SECOND,
    frame_bytes_max: int = FRAME_BYTES_MAX,
) -> Split:
    """The best split into `stages` of `replicas` peers each; 0 lets the solver choose.

    `samples` is a micro-batch, `samples_in_flight` how many one replica may hold between forward
    and backward, `frame_bytes_max` what one micro-batch may be between two stages.

    Raises:
        Infeasible: too few peers or layers, or no split fits into memory.
    """
    best: Split | None = None
    problem = _Problem(
        tuple(layers), tuple(peers), samples, samples_in_flight, bytes_per_second, frame_bytes_max
    )
    for count, most in _shapes(len(peers), len(layers), stages, replicas):
        # More replicas are faster, but each holds the whole stage: fewer only where more do not fit.
        fewer = [most] if replicas else range(most, 0, -1)
        split = next((split for copies in fewer if (split := problem.best(count, copies))), None)
        # Fewer stages win a tie: each boundary costs latency that the bottleneck does not show.
        if split is not None and (best is None or split.bottleneck_nanoseconds < best.bottleneck_nanoseconds):
            best = split
    if best is None:
        cuts = sum(samples * layer.output_bytes <= frame_bytes_max for layer in layers[:-1])
        if cuts + 1 < min(stages, len(layers)):
            raise Infeasible(
                f"a micro-batch of {samples} samples is too large to be sent between {stages} stages; "
                "a smaller train.microbatch is needed"
            )
        raise Infeasible(_missing(layers, peers, stages, replicas, samples_in_flight))
    return best


def _shapes(peers: int, layers: int, stages: int, replicas: int) -> Iterator[tuple[int, int]]:
    for count in [stages] if stages else range(1, min(peers, layers) + 1):
        copies = replicas or peers // count
        if copies and count <= layers and count * copies <= peers:
            yield count, copies


def _missing(
    layers: Sequence[LayerCost], peers: Sequence[Resources], stages: int, replicas: int, in_flight: int
) -> str:
    if not layers:
        return "the model has no layers"
    if stages > len(layers):
        return f"{stages} stages are asked for, the model has {len(layers)} layers to cut between"
    wanted = max(1, stages) * max(1, replicas)
    if wanted > len(peers):
        shape = f"{max(1, stages)} stages x {max(1, replicas)}"
        return f"{wanted} peers are needed ({shape}), {len(peers)} offer a slot"
    largest_layer = max(stage_memory_bytes([layer], in_flight) for layer in layers)
    largest_peer = max(peer.memory_bytes for peer in peers)
    if largest_layer > largest_peer:
        return (
            f"one layer alone needs {largest_layer / 1e9:.2f} GB to train, "
            f"the largest of {len(peers)} peers offers {largest_peer / 1e9:.2f} GB"
        )
    copies = max(1, replicas)
    baselines = (max(1, stages) - 1) * STAGE_BASELINE_BYTES
    need = copies * (stage_memory_bytes(layers, in_flight) + baselines)
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
    samples: int
    samples_in_flight: int
    bytes_per_second: int
    frame_bytes_max: int

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
        best: Split | None = None
        for order in orders:
            split = self._cut(order)
            if split is not None and (
                best is None or split.bottleneck_nanoseconds < best.bottleneck_nanoseconds
            ):
                best = split
        return best

    def _groups(self, ranked: list[int], stages: int, replicas: int) -> list[tuple[int, ...]]:
        """The first peers, alike beside alike: a stage is held back by its smallest replica's memory."""
        chosen = sorted(
            ranked[: stages * replicas],
            key=lambda index: (-self.peers[index].memory_bytes, ranked.index(index)),
        )
        return [tuple(sorted(chosen[i * replicas : (i + 1) * replicas])) for i in range(stages)]

    def _cut(self, order: tuple[tuple[int, ...], ...]) -> Split | None:
        """Dynamic programme: a row holds the least bottleneck of the stages so far, by layers covered."""
        total = len(self.layers)
        best: list[dict[int, tuple[int, tuple[tuple[int, int], ...]]]] = [{0: (0, ())}]
        for number, group in enumerate(order):
            row: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
            left = len(order) - number - 1
            for start, (bottleneck, ranges) in best[-1].items():
                for end in range(start + 1, total - left + 1) if left else [total]:
                    cost = self._stage_cost(group, start, end)
                    if cost is None:
                        continue
                    candidate = (max(bottleneck, cost), (*ranges, (start, end)))
                    if end not in row or candidate < row[end]:
                        row[end] = candidate
            best.append(row)
        if total not in best[-1]:
            return None
        bottleneck, ranges = best[-1][total]
        return Split(ranges, order, bottleneck)

    def _stage_cost(self, group: tuple[int, ...], start: int, end: int) -> int | None:
        layers = self.layers[start:end]
        memory = min(self.peers[index].memory_bytes for index in group)
        if stage_memory_bytes(layers, self.samples_in_flight) > memory:
            return None
        rate = sum(self.peers[index].flops_per_second for index in group)
        compute = stage_nanoseconds(layers, self.samples, rate)
        if end == len(self.layers) or not layers:
            return compute
        if self.samples * layers[-1].output_bytes > self.frame_bytes_max:
            return None
        return max(compute, transfer_nanoseconds(layers[-1], self.samples, self.bytes_per_second))
