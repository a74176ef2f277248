"""Placement for thousands of peers: each peer holds a span of layers, and each micro-batch takes the shortest
path through the spans.

Peers are placed one after the other, the fastest first, each where the model is weakest. This is the rule of
SWARM (Ryabinin and others 2023) and of Petals (Borzunov and others 2023), for peers that are all known from
the beginning. A span is as long as the peer's memory allows. A layer's rate is the sum of its holders' rates,
and a peer's rate is that of its whole span. So the model's rate is that of its weakest layer; no placement
can exceed `bound`.

`route` finds the path of one micro-batch by a dynamic program over layers, in which a peer costs its queue,
its computing, and the link to it (as in Parallax). If a plan needs whole stages, `fill_stages` gives peers to
stages of equal work by the same rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from partition.plan.cuts import Cut, best_cut
from partition.plan.problem import Infeasible
from partition.plan.tables import Tables

RATE_BITS = 56
"""Exponent of the unit of rates: micro-batches in 2**56 ns, some two years."""
MOVES_MAX = 200
"""Maximum number of moves of spans after all peers are placed. Each strengthens the weakest layer a
little."""
REPLICAS_MAX = 64
STAGES_MAX = 64


@dataclass(frozen=True)
class LayerSpan:
    """A peer, given by its index in the problem, and the layers that it holds (half open)."""

    peer: int
    first: int
    last: int


@dataclass(frozen=True)
class Spread:
    """Spans, their combined rate, and an upper bound on the rate of any spans: micro-batches in 2**56 ns."""

    spans: tuple[LayerSpan, ...]
    rate: int
    bound: int


def spread(tables: Tables) -> Spread:
    """Give a span to every peer that can hold a layer.

    Raises:
        Infeasible: the peers hold too few layers to cover the model.
    """
    order = sorted(range(len(tables.problem.peers)), key=lambda place: (-tables.weights[place], place))
    lengths = _lengths(tables)
    prefixes = {place: tables.prefix(place) for place in order if lengths[place]}
    rates = np.zeros(tables.count, dtype=np.int64)
    spans: dict[int, LayerSpan] = {}
    for place in order:
        if lengths[place]:
            spans[place] = _join(place, lengths[place], prefixes[place], rates)
    for _ in range(MOVES_MAX):
        if not _improve(spans, lengths, prefixes, rates):
            break
    rate = int(rates.min()) if spans else 0
    if not rate:
        raise Infeasible(
            "the peers together cannot hold all layers",
            do="add a peer, or free memory on the present peers",
        )
    found = tuple(spans[place] for place in sorted(spans))
    return Spread(found, rate, sum(tables.weights[place] for place in sorted(prefixes)))


def _lengths(tables: Tables) -> list[int]:
    """Return, for each peer, how many layers it can hold wherever they are, with one micro-batch in
    flight."""
    needed = tables.memory(1)
    size = tables.count
    longest = [
        max(int(needed[first, first + length]) for first in range(size - length + 1))
        for length in range(1, size + 1)
    ]
    found = []
    for peer in tables.problem.peers:
        room = peer.memory_bytes - peer.baseline_bytes
        length = 0
        while length < size and longest[length] <= room:
            length += 1
        found.append(length)
    return found


def _join(place: int, length: int, prefix: Any, rates: Any) -> LayerSpan:
    """Give a peer the span that holds the weakest layer and has the lowest total rate; add the peer's
    rate."""
    weakest = int(rates.argmin())
    low, high = max(0, weakest - length + 1), min(weakest, len(rates) - length)
    sums = np.concatenate(([0], np.cumsum(rates >> 8)))
    totals = sums[low + length : high + length + 1] - sums[low : high + 1]
    first = low + int(totals.argmin())
    span = LayerSpan(place, first, first + length)
    rates[span.first : span.last] += _rate(span, prefix)
    return span


def _rate(span: LayerSpan, prefix: Any) -> int:
    return (1 << RATE_BITS) // max(1, int(prefix[span.last] - prefix[span.first]))


def _improve(
    spans: dict[int, LayerSpan], lengths: Sequence[int], prefixes: Mapping[int, Any], rates: Any
) -> bool:
    """Move a span from layers where the model is strong to its weakest layer; return whether that helped."""
    weakest, least = int(rates.argmin()), int(rates.min())
    strong = sorted(
        (span for span in spans.values() if not span.first <= weakest < span.last),
        key=lambda span: (-int(rates[span.first : span.last].min()), span.peer),
    )
    for span in strong[:4]:
        kept = rates.copy()
        rates[span.first : span.last] -= _rate(span, prefixes[span.peer])
        moved = _join(span.peer, lengths[span.peer], prefixes[span.peer], rates)
        if int(rates.min()) > least or (int(rates.min()) == least and int(rates[weakest]) > least):
            spans[span.peer] = moved
            return True
        rates[:] = kept
    return False


@dataclass(frozen=True)
class Hop:
    """A part of a route: a peer computes these layers."""

    peer: int
    first: int
    last: int


def route(
    tables: Tables, spans: Sequence[LayerSpan], queues: Mapping[int, int] | None = None
) -> tuple[Hop, ...]:
    """Return the route on which one micro-batch finishes soonest. A span may be used in part.

    `queues` are nanoseconds of work that wait at each peer.

    Raises:
        Infeasible: some layer is held by no peer.
    """
    waiting = dict(queues or {})
    by_layer: list[list[LayerSpan]] = [[] for _ in range(tables.count)]
    for span in spans:
        by_layer[span.first].append(span)
    # Keyed by (layer reached, the peer that has the activations): the nanoseconds until then, and the hops.
    best: dict[tuple[int, int], tuple[int, tuple[Hop, ...]]] = {(0, -1): (0, ())}
    active: list[LayerSpan] = []
    for layer in range(tables.count):
        active = [span for span in active if span.last > layer] + by_layer[layer]
        arrivals = sorted(
            (time, peer, hops) for (position, peer), (time, hops) in best.items() if position == layer
        )[:4]
        if not arrivals:
            continue
        for span in active:
            prefix = tables.prefix(span.peer)
            start = waiting.get(span.peer, 0)
            time, hops = min(
                (time + (tables.hop(peer, span.peer, layer) if peer >= 0 else 0), hops)
                for time, peer, hops in arrivals
                if peer != span.peer
            ) if any(peer != span.peer for _, peer, _ in arrivals) else (1 << 62, ())  # fmt: skip
            # A span that is entered is used to its end.
            total = time + start + int(prefix[span.last] - prefix[layer])
            key = span.last, span.peer
            if total < best.get(key, (1 << 62, ()))[0]:
                best[key] = total, (*hops, Hop(span.peer, layer, span.last))
    ends = [(time, hops) for (position, _), (time, hops) in best.items() if position == tables.count]
    if not ends:
        raise Infeasible("some layer is held by no peer")
    return min(ends, key=lambda end: (end[0], [(hop.peer, hop.first) for hop in end[1]]))[1]


def fill_stages(tables: Tables) -> Cut | None:
    """Deal all peers to stages of equal work, for the best number of stages; return None if nothing fits."""
    best: Cut | None = None
    for stages in _stage_counts(tables):
        cut = _fill(tables, stages)
        if cut is not None and cut.fits and (best is None or cut.order < best.order):
            best = cut
    return best


def _stage_counts(tables: Tables) -> list[int]:
    rules = tables.problem.constraints
    if rules.stages:
        return [rules.stages]
    peers = len(tables.problem.peers)
    most = min(tables.count, STAGES_MAX, peers // max(1, rules.replicas or rules.replicas_min))
    found, step = [], 1
    while step <= most:
        found.append(step)
        step = max(step + 1, step * 5 // 4)
    return found


def _fill(tables: Tables, stages: int) -> Cut | None:
    """Give each peer, the fastest first, to the weakest stage that it can hold, as if all stages had equal
    work; return None if a stage gets too few replicas."""
    rules, peers = tables.problem.constraints, tables.problem.peers
    size_max = rules.replicas or REPLICAS_MAX
    ends = [number * tables.count // stages for number in range(stages + 1)]
    needed = [int(tables.memory(stages - s)[ends[s], ends[s + 1]]) for s in range(stages)]
    groups: list[list[int]] = [[] for _ in range(stages)]
    heap = [(0, s) for s in range(stages)]
    heapify(heap)
    for place in sorted(range(len(peers)), key=lambda place: (-tables.weights[place], place)):
        room = peers[place].memory_bytes - peers[place].baseline_bytes
        passed = []
        while heap:
            rate, stage = heappop(heap)
            if needed[stage] <= room:
                groups[stage].append(place)
                if len(groups[stage]) < size_max:
                    passed.append((rate + tables.weights[place], stage))
                break
            passed.append((rate, stage))
        for row in passed:
            heappush(heap, row)
    if any(len(group) < (rules.replicas or rules.replicas_min) for group in groups):
        return None
    return best_cut(tables, tuple(tuple(sorted(group)) for group in groups))
