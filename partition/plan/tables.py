"""Integer tables of every stage that a group of peers could hold, and of every edge between two groups.

A stage's row is its first layer, and its column is the layer before which it ends. The time of a group is
that of its replicas working in parallel, 1 / sum(1 / t), plus the share of its all-reduce that falls to one
micro-batch. The time of an edge is what its slowest sender or receiver needs for one micro-batch; activations
travel one way and gradients the other, simultaneously. A stage that does not fit has a value above IMPOSSIBLE
that grows with the missing memory, so that a search knows in which direction to improve.

All numbers are int64 and all divisions are in integers: the same inputs give the same tables on every
machine.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from partition.plan.cost import GRADIENT_ARENAS, KEPT_FRAMES_BYTES_MAX, NANOSECONDS
from partition.plan.problem import Link, Problem

Times = NDArray[np.int64]

IMPOSSIBLE = 1 << 56
"""Two years in nanoseconds. From this value on, a stage does not fit, or a cut is not allowed."""
TIME_MAX = 1 << 54
_RATE_BITS = 56
_WEIGHT_BITS = 20
_KIBIBYTE_BITS = 10
_CACHED_MAX = 4_096
"""Maximum number of cached tables. With 48 layers a table has 19 kB, so they take at most 80 MB."""


class Tables:
    """The tables of one problem, each made on first use."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.count = len(problem.layers)
        size = self.count + 1
        self._is_stage = np.triu(np.ones((size, size), dtype=bool), 1)
        self._parameters = _prefix([layer.parameter_bytes for layer in problem.layers])
        self._saved = _prefix([layer.saved_bytes + layer.output_bytes for layer in problem.layers])
        outputs = [layer.output_bytes for layer in problem.layers]
        self._inputs = np.array([problem.input_bytes, *outputs], dtype=np.int64)
        self._outputs = np.array([0, *outputs], dtype=np.int64)
        self._working = _running_max([layer.working_bytes for layer in problem.layers])
        self.cut_bytes = self._outputs * problem.wire_permille // 1000
        self._may_cut = np.array([False, *map(problem.may_cut, range(1, self.count)), True])
        self._segments: dict[int, Times] = {}
        self._memories: dict[int, Times] = {}
        self._stages: dict[tuple[tuple[int, ...], int], Times] = {}
        self._edges: dict[tuple[tuple[int, ...], tuple[int, ...]], Times] = {}
        self._means: dict[tuple[int, tuple[int, ...], bool], tuple[int, int]] = {}
        passes = [_pass_times(problem, place) for place in range(len(problem.peers))]
        self._prefixes = [_prefix(times) for times in passes]
        self.weights = [max(1, (1 << _RATE_BITS) // max(1, sum(times))) for times in passes]
        """Each peer's rate over the whole model, in a common unit; at least 1, however slow the peer claims
        to be."""

    def segment(self, place: int) -> Times:
        """Return the nanoseconds of one micro-batch on one peer, for every stage."""
        if place not in self._segments:
            prefix = self._prefixes[place]
            time = prefix[None, :] - prefix[:, None] + self.node_time(place)
            self._segments[place] = np.clip(time, 1, TIME_MAX)
        return self._segments[place]

    def node_time(self, place: int) -> Times:
        """Return the nanoseconds of one micro-batch that a peer's node takes in addition to computing, for
        every stage."""
        call, mebibyte = self.problem.peers[place].node_nanoseconds
        ways = 2 if self.problem.trains else 1
        frames = (self._inputs[:, None] + self._outputs[None, :]) * self.problem.wire_permille // 1000
        return _times(ways * frames, mebibyte) + call * ways // 2

    def prefix(self, place: int) -> Times:
        """Return the nanoseconds that one peer needs for all layers before each layer, for one
        micro-batch."""
        return self._prefixes[place]

    def memory(self, depth: int) -> Times:
        """Return the peak bytes in addition to the process's own, for every stage with `depth` stages left to
        the end, including itself."""
        if depth not in self._memories:
            problem = self.problem
            in_flight = problem.in_flight(depth)
            parameters = self._parameters[None, :] - self._parameters[:, None]
            saved = self._saved[None, :] - self._saved[:, None]
            if not problem.trains:
                found = parameters + self._working
            else:
                saved = saved + in_flight * self._inputs[:, None] if problem.recompute else saved * in_flight
                frames = problem.microbatches * (self._outputs[None, :] + self._inputs[:, None])
                kept = np.minimum(frames, KEPT_FRAMES_BYTES_MAX)
                arenas = 1 + GRADIENT_ARENAS + problem.moments
                found = arenas * parameters + saved + kept + self._working
            self._memories[depth] = found
        return self._memories[depth]

    def stage(self, group: tuple[int, ...], depth: int) -> Times:
        """Return the nanoseconds per micro-batch (nanojoules if the objective is energy) of every stage that
        `group` could hold."""
        key = group, depth
        if key not in self._stages:
            if len(self._stages) >= _CACHED_MAX:
                self._stages.clear()
            self._stages[key] = self._fitting(self._value(group), group, depth)
        return self._stages[key]

    def _fitting(self, value: Times, group: tuple[int, ...], depth: int) -> Times:
        peers = self.problem.peers
        room = min(peers[place].memory_bytes - peers[place].baseline_bytes for place in group)
        missing = self.memory(depth) - room
        over = IMPOSSIBLE + np.minimum(missing >> _KIBIBYTE_BITS, IMPOSSIBLE >> 1)
        value = np.where(missing > 0, over, value)
        # An empty range is worse than any stage that does not fit.
        found: Times = np.where(self._is_stage, value, 2 * IMPOSSIBLE)
        return found

    def _value(self, group: tuple[int, ...]) -> Times:
        if self.problem.objective == "energy":
            return self._energy(group)
        if self.problem.objective == "latency":
            # A single pass goes through one replica, which may be the slowest.
            found = self.segment(group[0])
            for place in group[1:]:
                found = np.maximum(found, self.segment(place))
            return found
        return self.group_time(group)

    def group_time(self, group: tuple[int, ...]) -> Times:
        """Return the nanoseconds per micro-batch of every stage on `group`, whether the stage fits or not."""
        if len(group) == 1:
            return self.segment(group[0])
        rate = sum((1 << _RATE_BITS) // self.segment(place) for place in group)
        time = (1 << _RATE_BITS) // np.maximum(rate, 1)
        if self.problem.trains:
            time = time + self.reduction(group) // max(1, self.problem.microbatches)
        found: Times = np.clip(time, 1, TIME_MAX)
        return found

    def reduction(self, group: tuple[int, ...]) -> Times:
        """Return the nanoseconds of a step's all-reduce among the replicas of every stage; 0 for a single
        replica."""
        count = len(group)
        parameters = np.clip(self._parameters[None, :] - self._parameters[:, None], 0, None)
        if count == 1:
            return np.zeros_like(parameters)
        slowest = min(
            (self.problem.link(one, other) for one in group for other in group if one != other),
            key=lambda link: (link.bytes_per_second, -link.nanoseconds),
        )
        unit = _unit(slowest) * 2 * (count - 1) // count
        return _times(parameters, unit) + 2 * (count - 1) * slowest.nanoseconds

    def _energy(self, group: tuple[int, ...]) -> Times:
        """Return the nanojoules of one micro-batch: each replica's power above idle power, weighted by its
        share."""
        peers = self.problem.peers
        whole = sum(self.weights[place] for place in group)
        total = np.zeros((self.count + 1, self.count + 1), dtype=np.int64)
        for place in group:
            milliwatts = max(1, peers[place].busy_milliwatts - peers[place].idle_milliwatts)
            share = (self.weights[place] << _WEIGHT_BITS) // whole
            # ns x mW = pJ; thousandths of that are nJ.
            total += ((self.segment(place) // 1000 * milliwatts >> 8) * share) >> (_WEIGHT_BITS - 8)
        return np.clip(total, 1, TIME_MAX)

    def edge(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> Times:
        """Return the nanoseconds for one micro-batch over each cut between two groups, in the slower
        direction."""
        key = senders, receivers
        if key not in self._edges:
            if len(self._edges) >= _CACHED_MAX:
                self._edges.clear()
            forward, latency = self._crossing(senders, receivers)
            unit = forward
            if self.problem.trains:
                backward, other = self._crossing(receivers, senders)
                unit, latency = max(forward, backward), max(latency, other)
            time = _times(self.cut_bytes, unit)
            if self.problem.objective == "latency":
                time = time + latency
            elif self.problem.objective == "energy":
                time = np.zeros_like(time)
            self._edges[key] = np.where(self._may_cut, time, 2 * IMPOSSIBLE)
        return self._edges[key]

    def transfer(self, senders: tuple[int, ...], receivers: tuple[int, ...], position: int) -> int:
        """Return the nanoseconds of one micro-batch over the cut before layer `position`, for any
        objective."""
        units = [self._crossing(senders, receivers)[0]]
        if self.problem.trains:
            units.append(self._crossing(receivers, senders)[0])
        return max(units) * int(self.cut_bytes[position]) >> _WEIGHT_BITS

    def _crossing(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[int, int]:
        """Return (nanoseconds per 2**20 bytes, latency) between two groups in which each peer sends and
        receives its share."""
        units, latencies = [], []
        for ones, others, is_out in ((senders, receivers, True), (receivers, senders, False)):
            whole = sum(self.weights[place] for place in ones)
            for place in ones:
                unit, latency = self._mean_link(place, others, is_out)
                units.append(unit * self.weights[place] // whole)
                latencies.append(latency)
        return max(units), max(latencies)

    def _mean_link(self, place: int, others: tuple[int, ...], is_out: bool) -> tuple[int, int]:
        """Return a peer's time per 2**20 bytes to send to, or receive from, a group whose members share by
        rate; and the latency."""
        key = place, others, is_out
        if key not in self._means:
            links = [
                self.problem.link(place, other) if is_out else self.problem.link(other, place)
                for other in others
            ]
            whole = sum(self.weights[other] for other in others)
            parts = sum(_unit(link) * self.weights[other] for link, other in zip(links, others, strict=True))
            self._means[key] = parts // whole, max(link.nanoseconds for link in links)
        return self._means[key]

    def hop(self, sender: int, receiver: int, position: int) -> int:
        """Return the nanoseconds of one micro-batch from one peer to another over the cut before layer
        `position`."""
        link = self.problem.link(sender, receiver)
        return (_unit(link) * int(self.cut_bytes[position]) >> _WEIGHT_BITS) + link.nanoseconds

    def pass_times(
        self, split_ranges: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]
    ) -> list[int]:
        """Return, for each stage, the nanoseconds of one micro-batch from this stage to the end and back, if
        nothing else is in flight."""
        found: list[int] = []
        total = 0
        for number in range(len(groups) - 1, -1, -1):
            first, last = split_ranges[number]
            group = groups[number]
            total += max(int(self.segment(place)[first, last]) for place in group)
            if number + 1 < len(groups):
                after = groups[number + 1]
                ways = [self._crossing(group, after)]
                if self.problem.trains:
                    ways.append(self._crossing(after, group))
                size = int(self.cut_bytes[last])
                total += sum((unit * size >> _WEIGHT_BITS) + latency for unit, latency in ways)
            found.append(total)
        return found[::-1]


def _pass_times(problem: Problem, place: int) -> list[int]:
    """Return the time of each layer on a peer for one micro-batch."""
    peer = problem.peers[place]
    if not problem.trains:
        return list(peer.forward)
    again = peer.forward if problem.recompute else (0,) * len(peer.forward)
    return [sum(parts) for parts in zip(peer.forward, peer.backward, again, strict=True)]


def _prefix(values: Sequence[int]) -> Times:
    """Return the sum of the values before each index, at most TIME_MAX."""
    sums = [0]
    for value in values:
        sums.append(min(sums[-1] + value, TIME_MAX))
    return np.array(sums, dtype=np.int64)


def _running_max(values: Sequence[int]) -> Times:
    """Return the largest value of each range."""
    size = len(values) + 1
    found: Times = np.zeros((size, size), dtype=np.int64)
    for first in range(size - 1):
        found[first, first + 1 :] = np.maximum.accumulate(np.array(values[first:], dtype=np.int64))
    return found


def _unit(link: Link) -> int:
    """Return nanoseconds per 2**20 bytes."""
    return (NANOSECONDS << _WEIGHT_BITS) // max(1, link.bytes_per_second)


def _times(sizes: Times, unit: int) -> Times:
    """Return the nanoseconds for these bytes at `unit` nanoseconds per 2**20 bytes, without overflow."""
    largest = int(sizes.max(initial=1))
    shift = max(0, (largest * max(1, unit)).bit_length() - 62)
    found: Times = np.minimum((sizes * (unit >> shift) >> _WEIGHT_BITS) << shift, TIME_MAX)
    return found
