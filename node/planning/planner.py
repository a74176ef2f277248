"""The best plan of a model over given peers, with its reasons: a pure function for the screen and the
library.

In addition to the split, it chooses the micro-batch and recomputation, so that users need not, and reports
whether smaller frames would pay off. It also reports which peers hold nothing and why, the rate of one peer
alone, and the single change that would help most. It needs a captured graph, but not torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from crypto.errors import RemoteProtocolError
from node.errors import UsageError
from node.planning.peers import LINKED_PEERS_MAX, Peers, PeerSpecification
from node.planning.report import LeftOut, PlanReport, PlanWish
from partition.model.cut import reference_sizes
from partition.model.graph import ITEM_BYTES, Graph
from partition.model.sizes import check_sizes, evaluate, shape_of
from partition.plan.forecast import forecast
from partition.plan.layer_costs import layer_costs
from partition.plan.operations import Operations, layer_operations
from partition.plan.problem import (
    Constraints,
    Infeasible,
    Link,
    PeerCost,
    Problem,
    Split,
)
from partition.plan.solver import solve
from partition.plan.tables import IMPOSSIBLE, Tables

MICROBATCHES_MAX = 64
"""Maximum number of micro-batches that a stage of a run may hold at once."""
MICROBATCHES_TRIED = 7
LOCAL_GAIN_MIN = 0.5
"""Minimum gain in samples for choosing local steps, as a share, because they learn less from a sample than
exact steps."""
GAIN_MIN = 0.05
"""Minimum improvement that is reported, as a share."""
BFLOAT16_PERMILLE = 307
"""The size of real activations (of a GPT) in bfloat16 with zstd, in permille of their exact size."""
LINK_STEPS = (1_250_000, 12_500_000, 125_000_000, 1_250_000_000)
HELP_TRIED_MAX = 6


def plan_model(graph: Graph, peers: Peers, wanted: PlanWish, *, name: str = "") -> PlanReport:
    """Return the best plan found.

    Raises:
        Infeasible: no plan fits; the error names the need, the supply, and a remedy.
        UsageError: the model does not accept the batch.
    """
    planner = _Planner(graph, peers, wanted)
    problem, split, reasons = planner.best()
    problem, split, frames, why = planner.frames_of(problem, split)
    mode, other = planner.mode_of(problem, split)
    played = forecast(problem, split)
    report = PlanReport(
        model=name or graph.name,
        problem=problem,
        split=split,
        forecast=played,
        wanted=wanted,
        microbatch=planner.microbatch_of(problem),
        tokens=planner.tokens,
        left_out=tuple(planner.left_out(problem, split)),
        reasons=(*reasons, *why, *other),
        frames=frames,
        mode=mode,
        alone=planner.alone(problem),
        help=None,
    )
    return replace(report, help=planner.what_helps(report))


class _Planner:
    def __init__(self, graph: Graph, peers: Peers, wanted: PlanWish) -> None:
        self._graph = graph
        self._peers = peers
        self._wanted = wanted
        self._sizes = (0, *wanted.sizes) if wanted.sizes else reference_sizes(graph)
        self.tokens = self._tokens()

    def _tokens(self) -> int:
        entry = self._graph.entries[0]
        kind = self._graph.types[entry.inputs[0].type]
        if not kind.dtype.startswith("int") or len(kind.shape) != 2:
            return 0
        return shape_of(kind, evaluate(self._graph.expressions, self._sizes))[1]

    def microbatch_of(self, problem: Problem) -> int:
        return self._wanted.batch // problem.microbatches if self._trains else self._wanted.batch

    @property
    def _trains(self) -> bool:
        return self._wanted.objective != "latency"

    # Problems for the solver

    def _problem(self, microbatch: int, *, recompute: bool, peers: Peers) -> Problem:
        sizes = (microbatch, *self._sizes[1:])
        try:
            check_sizes(self._graph.symbols, sizes)
            layers = layer_costs(self._graph, sizes)
            operations = layer_operations(self._graph, sizes)
        except (ValueError, RemoteProtocolError) as error:
            raise UsageError(f"--batch: {error}") from None
        rows = [peer for peer in peers.peers if not peer.reason]
        names = [peer.name for peer in rows]
        entry = self._graph.entries[0]
        values = evaluate(self._graph.expressions, sizes)
        kinds = [self._graph.types[port.type] for port in entry.inputs]
        fed = 0
        for kind in kinds:
            count = ITEM_BYTES[kind.dtype]
            for side in shape_of(kind, values):
                count *= side
            fed += count
        return Problem(
            layers=tuple(layers),
            peers=tuple(_cost(peer, operations) for peer in rows),
            microbatches=max(1, self._wanted.batch // microbatch) if self._trains else 1,
            links={(one, other): peers.link(one, other) for one in names for other in names if one != other}
            if len(names) <= LINKED_PEERS_MAX
            else {},
            objective=self._wanted.objective,
            pipeline=self._wanted.pipeline,
            recompute=recompute,
            moments=self._wanted.optimizer_moments,
            trains=self._trains,
            input_bytes=fed,
            constraints=self._wanted.constraints,
        )

    def _microbatches(self) -> list[int]:
        wanted = self._wanted
        if not self._trains:
            return [wanted.batch]
        if wanted.microbatch:
            if wanted.batch % wanted.microbatch:
                raise UsageError(
                    f"--batch {wanted.batch} is not a multiple of --microbatch {wanted.microbatch}"
                )
            return [wanted.microbatch]
        divisors = [
            size
            for size in range(wanted.batch, 0, -1)
            if wanted.batch % size == 0 and wanted.batch // size <= MICROBATCHES_MAX
        ]
        most = self._graph.symbols[0].maximum if self._graph.symbols else wanted.batch
        least = self._graph.symbols[0].minimum if self._graph.symbols else 1
        fitting = [size for size in divisors if least <= size <= most] or divisors[-1:]
        step = -(-len(fitting) // MICROBATCHES_TRIED)
        return fitting[::step] if len(fitting) > MICROBATCHES_TRIED else fitting

    def best(self) -> tuple[Problem, Split, list[str]]:
        """Return the problem with the best solution, that solution, and the reasons. Raises Infeasible."""
        found: list[tuple[float, Problem, Split]] = []
        failure: Infeasible | None = None
        tried = [False, True] if self._wanted.recompute is None else [self._wanted.recompute]
        for recompute in tried if self._trains else [False]:
            for microbatch in self._microbatches():
                problem = self._problem(microbatch, recompute=recompute, peers=self._peers)
                if not problem.peers:
                    raise Infeasible("no peer takes runs", do="join peers that do, or --peers FILE")
                try:
                    split = solve(problem)
                except Infeasible as infeasible:
                    failure = infeasible
                    continue
                found.append((self._value(problem, split), problem, split))
            if found:
                # Recomputing is only for models that do not fit otherwise.
                break
        if not found:
            assert failure is not None
            raise failure
        found.sort(key=lambda row: (row[0], row[1].microbatches))
        return found[0][1], found[0][2], list(self._reasons(found))

    def _value(self, problem: Problem, split: Split) -> float:
        """Return the value that the best plan minimizes: time, delay or energy per sample."""
        if self._wanted.objective == "throughput":
            return forecast(problem, split).step_nanoseconds / self._wanted.batch
        if self._wanted.objective == "energy":
            return split.score * problem.microbatches / self._wanted.batch
        return split.score

    def _reasons(self, found: Sequence[tuple[float, Problem, Split]]) -> Iterator[str]:
        value, problem, split = found[0]
        if self._trains:
            size = self.microbatch_of(problem)
            others = [row for row in found[1:] if row[1].recompute == problem.recompute]
            told = f"micro-batch {size}: {problem.microbatches} of a step"
            if others:
                other = self.microbatch_of(others[0][1])
                told += f"; {other} would take {others[0][0] / value * 100 - 100:.0f} % longer"
            yield told
        stages, peers = len(split.groups), sum(map(len, split.groups))
        yield (
            f"{_count(stages, 'stage')} on {_count(peers, 'peer')}: "
            + ("no split of the layers is better" if split.is_exact else "the best of those looked at")
        )
        if problem.recompute:
            yield "recomputing, because the values kept for the backward pass would not fit otherwise"
        if stages > 1:
            yield "links as measured" if self._peers.is_measured else "links as assumed or written"

    def frames_of(
        self, problem: Problem, split: Split
    ) -> tuple[Problem, Split, Literal["exact", "bfloat16"], tuple[str, ...]]:
        """Choose exact or smaller frames by the gain of the smaller ones. Return the problem and split with
        the chosen frames, the choice, and its reason."""
        if len(split.groups) < 2 or not problem.trains:
            return problem, split, "exact", ()
        lean = replace(problem, wire_permille=BFLOAT16_PERMILLE)
        leaner = solve(lean)
        gain = self._value(problem, split) / self._value(lean, leaner) - 1
        if gain <= GAIN_MIN:
            return problem, split, "exact", ("frames exact, because links are not the bottleneck",)
        if self._wanted.frames == "exact":
            return problem, split, "exact", (f"frames exact; bfloat16 would give {gain * 100:+.0f} %",)
        return lean, leaner, "bfloat16", (f"frames bfloat16: {gain * 100:+.0f} % compared with exact frames",)

    def mode_of(self, problem: Problem, split: Split) -> tuple[Literal["exact", "local"], tuple[str, ...]]:
        """Choose exact steps, or local steps with averages in between, by the samples per second of both;
        return the choice with its reasons."""
        if problem.trains and self._wanted.objective == "energy" and self._wanted.mode == "auto":
            return "exact", ("exact steps, because the energy of local steps is not known",)
        if not problem.trains or self._wanted.objective != "throughput":
            return "exact", ()
        rate, peers = self._local_rate(problem)
        step = forecast(problem, split).step_nanoseconds
        gain = rate * step / problem.microbatches - 1
        told = f"{gain * 100:+.0f} % samples a second on {_count(peers, 'peer')}"
        if peers < 2 or gain <= GAIN_MIN:
            return "exact", ("exact steps, because local steps would not be faster",) if peers > 1 else ()
        if self._wanted.mode == "auto" and gain >= LOCAL_GAIN_MIN and self._wanted.constraints.stages < 2:
            return "local", (f"local steps with averages: {told}",)
        return "exact", (f"exact steps; local ones with averages would give {told}",)

    def _local_rate(self, problem: Problem) -> tuple[float, int]:
        """Return the micro-batches per nanosecond if each peer trains the whole model, and how many peers
        can. Every few steps the peers wait for an average over the slowest of their links."""
        whole = replace(problem, constraints=Constraints(), microbatches=1)
        tables = Tables(whole)
        layers = len(problem.layers)
        able = [
            place
            for place in range(len(problem.peers))
            if int(tables.stage((place,), 1)[0, layers]) < IMPOSSIBLE
        ]
        if not able:
            return 0.0, 0
        rate = sum(1.0 / int(tables.segment(place)[0, layers]) for place in able)
        steps = self._wanted.local_steps * problem.microbatches / (rate * len(able))
        average = int(tables.reduction(tuple(able))[0, layers])
        # Members continue while they average, and wait only for what the links do not carry in time.
        return rate * min(1.0, steps * len(able) / max(1.0, average)), len(able)

    # Further findings

    def left_out(self, problem: Problem, split: Split) -> Iterator[LeftOut]:
        """Yield all peers without a stage, by name."""
        used = {problem.peers[place].name for group in split.groups for place in group}
        played = forecast(problem, split)
        smallest = min(row.memory_bytes for row in played.stages)
        for peer in sorted(self._peers.peers, key=lambda peer: peer.name):
            if peer.name in used:
                continue
            if peer.reason:
                yield LeftOut(peer.name, peer.reason)
            elif peer.memory_bytes < smallest:
                yield LeftOut(
                    peer.name,
                    (
                        f"{peer.memory_bytes / 1e9:.1f} GB free, but the smallest stage needs "
                        f"{smallest / 1e9:.1f}"
                    ),
                )
            else:
                yield LeftOut(peer.name, "the others are faster without it")

    def alone(self, problem: Problem) -> tuple[str, float] | None:
        """Return the best single peer and its samples per second; None if no peer can hold the model."""
        best: tuple[str, float] | None = None
        for peer in problem.peers:
            own = replace(problem, peers=(peer,), constraints=Constraints())
            try:
                split = solve(own)
            except Infeasible:
                continue
            played = forecast(own, split)
            time = played.step_nanoseconds if self._trains else played.pass_nanoseconds
            rate = self._wanted.batch * 1e9 / max(1, time)
            if best is None or rate > best[1]:
                best = peer.name, rate
        return best

    def what_helps(self, report: PlanReport) -> tuple[str, float] | None:
        """Return the one change that would help most, and its gain; None if none would."""
        if self._wanted.objective == "energy":
            return None
        microbatch = report.microbatch
        before = self._value(report.problem, report.split)
        best: tuple[str, float] | None = None
        for told, peers in list(self._changes(report))[:HELP_TRIED_MAX]:
            problem = self._problem(microbatch, recompute=report.problem.recompute, peers=peers)
            try:
                gain = before / self._value(problem, solve(problem)) - 1
            except Infeasible:
                continue
            if gain > GAIN_MIN and (best is None or gain > best[1]):
                best = told, gain
        return best

    def _changes(self, report: PlanReport) -> Iterator[tuple[str, Peers]]:
        groups = [report.peers_of(stage) for stage in range(len(report.split.groups))]
        for senders, receivers in pairwise(groups):
            one, other = senders[0], receivers[0]
            link = self._peers.link(one, other)
            faster = [rate for rate in LINK_STEPS if rate > 1.5 * link.bytes_per_second]
            if faster and report.forecast.waits_for == "link":
                changed = Link(faster[0], link.nanoseconds)
                yield (
                    f"{rate_text(faster[0])} between {one} and {other}",
                    self._peers.with_link(one, other, changed),
                )
        ranked = sorted(
            (peer for peer in self._peers.peers if not peer.reason),
            key=lambda peer: (peer.calibration.flops_per_second, peer.name),
        )
        typical = ranked[len(ranked) // 2]
        yield (
            f"another {typical.name}",
            replace(self._peers, peers=(*self._peers.peers, replace(typical, name=f"{typical.name}'"))),
        )
        for left in report.left_out:
            peer = next(peer for peer in self._peers.peers if peer.name == left.name)
            if not peer.reason and "GB free" in left.reason:
                larger = replace(peer, memory_bytes=peer.memory_bytes + 4_000_000_000)
                rest = tuple(larger if row is peer else row for row in self._peers.peers)
                yield f"4 GB more on {peer.name}", replace(self._peers, peers=rest)


def _cost(peer: PeerSpecification, operations: Sequence[Operations]) -> PeerCost:
    forward, backward = peer.calibration.model_nanoseconds(operations)
    return PeerCost(
        name=peer.name,
        memory_bytes=peer.memory_bytes,
        forward=forward,
        backward=backward,
        baseline_bytes=peer.calibration.baseline_bytes,
        step_nanoseconds=peer.calibration.step_nanoseconds,
        node_nanoseconds=peer.calibration.node_nanoseconds,
        node_step_nanoseconds=peer.calibration.node_step_nanoseconds,
        busy_milliwatts=peer.busy_milliwatts,
        idle_milliwatts=peer.idle_milliwatts,
    )


def rate_text(bytes_per_second: int) -> str:
    """Format a rate such as `100 Mbit/s`."""
    bits = 8.0 * bytes_per_second
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if bits < 1000 or unit == "Gbit/s":
            return f"{bits:g} {unit}"
        bits /= 1000
    raise AssertionError("the last unit accepts all rates")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
