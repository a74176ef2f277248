"""The forecast of a split: the timeline of one step with 1F1B or GPipe, in nanoseconds, before anything runs.

The micro-batches of a step are dealt to replicas in the same way as the committer deals them. Each replica
computes one pass at a time. Each link carries one frame at a time in each direction, at the same time as
computing. After the last micro-batch, the replicas of a stage reduce their sums, and the optimizer steps.
Only the first part of a long step is simulated: once the pipeline is full, each further micro-batch takes as
long as the slowest part of the pipeline.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from partition.plan.assignment import deal
from partition.plan.cuts import in_flight_pace
from partition.plan.problem import Problem, Split
from partition.plan.tables import Tables

PLAYED_MAX = 96
"""Maximum number of micro-batches of a step that are simulated one by one."""
Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Bar:
    """One pass of one micro-batch on one peer."""

    peer: int
    stage: int
    microbatch: int
    kind: Pass
    start: int
    end: int


@dataclass(frozen=True)
class StageForecast:
    """The forecast of one stage: its peers (indices in the problem), time for a micro-batch, memory, and
    bytes sent."""

    first_layer: int
    last_layer: int
    peers: tuple[int, ...]
    nanoseconds: int
    memory_bytes: int
    memory_offered: int
    sent_bytes: int
    sent_nanoseconds: int
    reduce_nanoseconds: int


@dataclass(frozen=True)
class Forecast:
    """The forecast of a step: its time, and its bottleneck.

    `busy` has the nanoseconds that each peer computes in a step, `link_bytes` the traffic of each link in a
    step (sender, receiver, bytes). `bars` are the passes of the simulated micro-batches. `slowest` is the
    stage that is the bottleneck, and `waits_for` tells whether its computing or its sending is slow.
    """

    step_nanoseconds: int
    pass_nanoseconds: int
    stages: tuple[StageForecast, ...]
    busy: tuple[tuple[int, int], ...]
    link_bytes: tuple[tuple[int, int, int], ...]
    bars: tuple[Bar, ...]
    slowest: int
    waits_for: Literal["compute", "link"]
    microjoules: int
    """The energy of a micro-batch."""

    @property
    def bubble(self) -> float:
        """The mean share of the step during which a peer with a stage does not compute."""
        idle = [1 - busy / max(1, self.step_nanoseconds) for _, busy in self.busy]
        return max(0.0, sum(idle) / len(idle))


def forecast(problem: Problem, split: Split, tables: Tables | None = None) -> Forecast:
    """Simulate a step of `split`."""
    tables = tables or Tables(problem)
    stages = _stages(problem, split, tables)
    play = _Play(problem, split, tables)
    total = max(1, problem.microbatches)
    played = min(total, PLAYED_MAX)
    play.run(played)
    pace = max(
        split.bottleneck_nanoseconds,
        in_flight_pace(tables, split.groups, tables.pass_times(split.ranges, split.groups)),
    )
    pipeline = play.now + (total - played) * pace
    rest = 0
    if problem.trains:
        rest = max(row.reduce_nanoseconds + _step(tables, row) for row in stages)
    busy = {place: time * total // played for place, time in play.busy.items()}
    links = tuple(
        (one, other, size * total // played) for (one, other), size in sorted(play.sent.items()) if size
    )
    paces = [(row.nanoseconds, number, "compute") for number, row in enumerate(stages)]
    paces += [(row.sent_nanoseconds, number, "link") for number, row in enumerate(stages)]
    _, slowest, kind = max(paces, key=lambda row: (row[0], -row[1]))
    return Forecast(
        step_nanoseconds=pipeline + rest,
        pass_nanoseconds=tables.pass_times(split.ranges, split.groups)[0],
        stages=tuple(stages),
        busy=tuple(sorted(busy.items())),
        link_bytes=links,
        bars=tuple(play.bars),
        slowest=slowest,
        waits_for="link" if kind == "link" else "compute",
        microjoules=_microjoules(problem, busy, pipeline + rest, total),
    )


def _stages(problem: Problem, split: Split, tables: Tables) -> list[StageForecast]:
    found = []
    count = len(split.groups)
    for number, ((first, last), group) in enumerate(zip(split.ranges, split.groups, strict=True)):
        memory = int(tables.memory(count - number)[first, last])
        is_last = number + 1 == count
        found.append(
            StageForecast(
                first_layer=first,
                last_layer=last,
                peers=group,
                nanoseconds=int(tables.group_time(group)[first, last]),
                memory_bytes=memory + max(problem.peers[place].baseline_bytes for place in group),
                memory_offered=min(problem.peers[place].memory_bytes for place in group),
                sent_bytes=0 if is_last else int(tables.cut_bytes[last]),
                sent_nanoseconds=0 if is_last else tables.transfer(group, split.groups[number + 1], last),
                reduce_nanoseconds=int(tables.reduction(group)[first, last]) if problem.trains else 0,
            )
        )
    return found


def _step(tables: Tables, stage: StageForecast) -> int:
    layers = tables.problem.layers[stage.first_layer : stage.last_layer]
    count = sum(layer.parameters for layer in layers)
    size = sum(layer.parameter_bytes for layer in layers)
    peers = [tables.problem.peers[place] for place in stage.peers]
    return max(
        count * peer.step_nanoseconds[0]
        + (size * peer.step_nanoseconds[1] >> 20)
        + peer.node_step_nanoseconds
        for peer in peers
    )


def _microjoules(problem: Problem, busy: dict[int, int], step: int, microbatches: int) -> int:
    """Return the energy per micro-batch that the peers of the plan draw in a step, including idle time."""
    total = 0
    for place, time in busy.items():
        peer = problem.peers[place]
        # ns x mW = pJ.
        total += step * peer.idle_milliwatts + time * (peer.busy_milliwatts - peer.idle_milliwatts)
    return total // 1_000_000 // microbatches


@dataclass
class _Play:
    """One simulated step. Times are nanoseconds since it was opened."""

    problem: Problem
    split: Split
    tables: Tables
    now: int = 0
    busy: dict[int, int] = field(default_factory=dict)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def run(self, microbatches: int) -> None:
        """Simulate this many micro-batches until all are done."""
        stages = len(self.split.groups)
        self._owners = [self._deal(number, microbatches) for number in range(stages)]
        self._ready: dict[int, tuple[list[int], list[int]]] = {}
        self._free: dict[int, bool] = {}
        self._held: dict[int, int] = {}
        self._links: dict[tuple[int, int], int] = {}
        self._homes = {place: number for number, group in enumerate(self.split.groups) for place in group}
        for place in self._homes:
            self._ready[place], self._free[place], self._held[place] = ([], []), True, 0
            self.busy[place] = 0
        self._events: list[tuple[int, int, int, int, int]] = []
        self._counter = 0
        for number in range(microbatches):
            heappush(self._ready[self._owners[0][number]][0], number)
        for place in sorted(self._homes):
            self._begin(place)
        while self._events:
            self.now, _, what, place, number = heappop(self._events)
            if what >= 2:
                heappush(self._ready[place][what - 2], number)
            else:
                self._free[place] = True
                self._finished(place, number, is_backward=bool(what))
            self._begin(place)

    def _deal(self, stage: int, microbatches: int) -> list[int]:
        group = self.split.groups[stage]
        first, last = self.split.ranges[stage]
        rates = [10**18 // max(1, int(self.tables.segment(place)[first, last])) for place in group]
        dealt = deal(range(microbatches), range(len(group)), rates)
        return [group[dealt[number]] for number in range(microbatches)]

    def _begin(self, place: int) -> None:
        """Begin the next pass on a peer if it is free. 1F1B prefers a backward pass, GPipe a forward pass."""
        if not self._free[place]:
            return
        forwards, backwards = self._ready[place]
        stage = self._homes[place]
        most = self.problem.in_flight(len(self.split.groups) - stage)
        is_free = self._held[place] < most or not self.problem.trains or self.problem.hides_links
        may_forward = bool(forwards) and is_free
        if self.problem.pipeline == "gpipe" and may_forward:
            self._compute(place, heappop(forwards), is_backward=False)
        elif backwards:
            self._compute(place, heappop(backwards), is_backward=True)
        elif may_forward:
            self._compute(place, heappop(forwards), is_backward=False)

    def _compute(self, place: int, number: int, *, is_backward: bool) -> None:
        stage = self._homes[place]
        first, last = self.split.ranges[stage]
        peer = self.problem.peers[place]
        is_last = stage + 1 == len(self.split.groups)
        time = sum((peer.backward if is_backward else peer.forward)[first:last])
        if self.problem.trains and is_last:
            time += sum(peer.backward[first:last])  # the last stage does the backward pass immediately
        elif is_backward and self.problem.recompute:
            time += sum(peer.forward[first:last])
        ways = 2 if is_last or not self.problem.trains else 1
        time += int(self.tables.node_time(place)[first, last]) * ways // 2
        self._free[place] = False
        self.busy[place] += time
        kind: Pass = "backward" if is_backward else "forward"
        self.bars.append(Bar(place, stage, number, kind, self.now, self.now + time))
        if not is_backward and not is_last:
            self._held[place] += 1
        self._later(self.now + time, int(is_backward), place, number)

    def _finished(self, place: int, number: int, *, is_backward: bool) -> None:
        stage = self._homes[place]
        is_last = stage + 1 == len(self.split.groups)
        if is_backward:
            self._held[place] -= 1
        if not is_backward and not is_last:
            self._send(place, self._owners[stage + 1][number], stage, number, is_back=False)
        elif self.problem.trains and stage > 0:
            self._send(place, self._owners[stage - 1][number], stage - 1, number, is_back=True)

    def _send(self, sender: int, receiver: int, cut: int, number: int, *, is_back: bool) -> None:
        link = self.problem.link(sender, receiver)
        size = int(self.tables.cut_bytes[self.split.ranges[cut][1]])
        begin = max(self.now, self._links.get((sender, receiver), 0))
        end = begin + size * 1_000_000_000 // max(1, link.bytes_per_second)
        self._links[sender, receiver] = end
        self.sent[sender, receiver] = self.sent.get((sender, receiver), 0) + size
        self._later(end + link.nanoseconds, 3 if is_back else 2, receiver, number)

    def _later(self, at: int, what: int, place: int, number: int) -> None:
        self._counter += 1
        heappush(self._events, (at, self._counter, what, place, number))
