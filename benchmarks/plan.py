"""The quality and speed of plans, compared with the exact optimum and with other systems' rules.

The instances are random: 48 layers, and 8 unequal peers with unequal links. The other systems' rules are
reimplemented here and get the same tables: an even split, exo's split by memory, Petals' rule (blocks of
equal length; each peer joins where throughput is lowest), and Parallax's rule (fewest stages by memory, then
layers by rate). Plans of a thousand and three thousand peers are then compared with a bound that no placement
can beat.
"""

import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

from partition.plan.cost import STAGE_BASELINE_BYTES, LayerCost
from partition.plan.cuts import Groups, best_cut
from partition.plan.exact import ExactSearch
from partition.plan.problem import Link, Problem, uniform_peers
from partition.plan.search import search
from partition.plan.spans import route, spread
from partition.plan.tables import IMPOSSIBLE, Tables

LAYERS, PEERS = 48, 8
INSTANCES, INSTANCES_QUICK = 200, 24
FIRST_SEED = 1_000_000
"""First seed of the instances; the planner was never tuned on them."""
MIB = 1 << 20
MICROBATCHES = 1_024
MEAN_GOAL, P95_GOAL, SECONDS_GOAL = 1.02, 1.05, 0.2
BOUND_GOAL = 0.98
FRAMES_BYTES = 512 * MIB
"""Memory for the activations and gradients that a stage keeps, in addition to a peer's share of the model."""


def instance(seed: int, peers: int = PEERS, *, linked: bool = True) -> Problem:
    """Return a model of unequal layers, whose FLOPs differ by a factor of up to 4, and unequal peers: their
    rates differ by a factor of up to 30, their memory by up to 7 and the links between them by up to 60."""
    random = Random(seed)
    layers = tuple(
        LayerCost(
            int(random.uniform(8, 40) * MIB),
            int(random.uniform(0.5, 2) * 1e9),
            int(random.uniform(4, 40) * MIB),
            int(random.choice([0.5, 1, 2, 4]) * MIB),
        )
        for _ in range(LAYERS)
    )
    need = 5 * sum(layer.parameter_bytes for layer in layers)
    low, high = (0.12, 0.8) if linked else (0.05, 0.5)
    offers = [
        (
            f"peer-{number:05}",
            int(10 ** random.uniform(10, 11.5)),
            STAGE_BASELINE_BYTES + FRAMES_BYTES + int(need * random.uniform(low, high)),
        )
        for number in range(peers)
    ]
    links = {}
    if linked:
        uplinks = [10 ** random.uniform(6.3, 8.1) for _ in offers]
        for one, (name, _, _) in enumerate(offers):
            for other, (another, _, _) in enumerate(offers):
                if one != other:
                    rate = min(uplinks[one], uplinks[other]) * random.uniform(0.7, 1)
                    links[name, another] = Link(int(rate), int(random.uniform(0.2, 40) * 1e6))
    return Problem(layers, uniform_peers(layers, offers), MICROBATCHES, links, hides_links=True)


def bottleneck(tables: Tables, ranges: list[tuple[int, int]], groups: Groups) -> int | None:
    """Return the nanoseconds of the slowest stage or edge for the given ranges; None if memory does not
    suffice."""
    worst = 0
    for number, ((first, last), group) in enumerate(zip(ranges, groups, strict=True)):
        worst = max(worst, int(tables.stage(group, len(groups) - number)[first, last]))
        if number + 1 < len(groups):
            worst = max(worst, int(tables.edge(group, groups[number + 1])[last]))
    return worst if worst < IMPOSSIBLE else None


def by_shares(shares: list[float]) -> list[tuple[int, int]]:
    """Return ranges in proportion to the shares, each with at least one layer."""
    ends, done = [0], 0.0
    for number, share in enumerate(shares):
        done += share
        left = len(shares) - number - 1
        ends.append(min(LAYERS - left, max(ends[-1] + 1, round(LAYERS * done / sum(shares)))))
    return list(zip(ends, [*ends[1:-1], LAYERS], strict=False))


def even(tables: Tables) -> int | None:
    """Give each peer a stage with the same number of layers, in the given order."""
    groups = tuple((place,) for place in range(PEERS))
    return bottleneck(tables, by_shares([1.0] * PEERS), groups)


def by_memory(tables: Tables) -> int | None:
    """Give each peer a stage, the peer with the most memory first, with layers in proportion to its
    memory."""
    peers = tables.problem.peers
    order = sorted(range(PEERS), key=lambda place: -peers[place].memory_bytes)
    shares = [float(peers[place].memory_bytes - peers[place].baseline_bytes) for place in order]
    return bottleneck(tables, by_shares(shares), tuple((place,) for place in order))


def petals(tables: Tables) -> int | None:
    """Give each peer as many consecutive layers as its memory holds, where the layers' total rate is lowest.
    The bottleneck is the layer with the lowest rate, or the slowest link used if that is slower."""
    found = spread(tables)
    slowest = 0
    for hop, after in zip(route(tables, found.spans), route(tables, found.spans)[1:], strict=False):
        slowest = max(slowest, int(tables.edge((hop.peer,), (after.peer,))[hop.last]))
    return max((1 << 56) // found.rate, slowest)


def parallax(tables: Tables) -> int | None:
    """Build parallel pipelines. Each has the fewest peers whose memory holds the model, and gives each peer
    layers in proportion to its rate ("water filling"). Micro-batches go to the pipelines in proportion to
    their rates. Return the result for the best number of pipelines."""
    peers = tables.problem.peers
    order = sorted(range(PEERS), key=lambda place: -tables.weights[place])
    best: int | None = None
    for pipelines in range(1, PEERS // 2 + 1):
        rows = [order[number::pipelines] for number in range(pipelines)]
        rate = 0.0
        for row in rows:
            values = []
            for count in range(1, len(row) + 1):
                group = tuple((place,) for place in row[:count])
                shares = [float(tables.weights[place]) for place in row[:count]]
                values.append(bottleneck(tables, by_shares(shares), group))
            fits = [value for value in values if value is not None]
            rate += 1 / fits[0] if fits else 0.0
        if rate and (best is None or 1 / rate < best):
            best = int(1 / rate)
    assert len(peers) == PEERS
    return best


def exact_order(tables: Tables) -> int | None:
    """Order the peers by rate, fastest first, and cut optimally, as a planner without a search does."""
    order = sorted(range(PEERS), key=lambda place: (-tables.weights[place], place))
    cut = best_cut(tables, tuple((place,) for place in order))
    return None if cut is None or not cut.fits else cut.value


RULES = {
    "even": even,
    "memory (exo)": by_memory,
    "Petals": petals,
    "Parallax": parallax,
    "fastest first": exact_order,
}


def small(count: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare our planner and the other systems' rules with the exact optimum."""
    ours: list[float] = []
    seconds: list[float] = []
    others: dict[str, list[float]] = {name: [] for name in RULES}
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        problem = instance(seed)
        begun = time.process_time()
        tables = Tables(problem)
        cut = search(tables)[0]
        seconds.append(time.process_time() - begun)
        least = ExactSearch(tables).least(cut.value // 4, cut.value)
        ours.append(cut.value / least)
        for name, rule in RULES.items():
            if (value := rule(tables)) is not None:
                others[name].append(value / least)
    rows = [
        {
            "rule": name,
            "instances": count,
            "fits": len(values),
            "mean": round(statistics.mean(values), 4) if values else None,
            "p95": round(quantile(values, 0.95), 4) if values else None,
            "worst": round(max(values), 3) if values else None,
        }
        for name, values in {"ours": ours, **others}.items()
    ]
    goals = [
        Goal("mean relative to the exact optimum", statistics.mean(ours), "<=", MEAN_GOAL),
        Goal("CPU seconds per plan, median", statistics.median(seconds), "<=", SECONDS_GOAL),
    ]
    if count >= INSTANCES:
        # With few instances, the 95th percentile is close to the worst one, so it may miss a goal that 200
        # instances meet; with eight, one time in four.
        goals.append(
            Goal("95th percentile relative to the exact optimum", quantile(ours, 0.95), "<=", P95_GOAL)
        )
    rows.append({"seconds a plan": round(statistics.mean(seconds), 3), "worst": round(max(seconds), 3)})
    return rows, goals


def quantile(values: list[float], share: float) -> float:
    """Return the value that a `share` of all values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def large() -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare plans of thousands of peers with the bound."""
    rows, goals = [], []
    for count, limit in ((200, 0.5), (1_000, 0.5), (3_000, 1.0)):
        problem = instance(count, count, linked=False)
        begun = time.process_time()
        tables = Tables(problem)
        found = spread(tables)
        seconds = time.process_time() - begun
        begun = time.process_time()
        hops = route(tables, found.spans)
        routed = time.process_time() - begun
        share = found.rate / found.bound
        rows.append(
            {
                "peers": count,
                "of the bound": round(share, 4),
                "seconds": round(seconds, 3),
                "hops": len(hops),
                "seconds a route": round(routed, 3),
            }
        )
        if count >= 1_000:
            goals.append(Goal(f"{count} peers, CPU seconds", seconds, "<=", limit))
            goals.append(Goal(f"{count} peers, relative to the bound", share, ">=", BOUND_GOAL))
    return rows, goals


def main() -> int:
    options = arguments("Plans compared with the exact optimum and other systems' rules.")
    rows, goals = small(INSTANCES_QUICK if options.quick else INSTANCES)
    more, further = large()
    return report("plan", rows + more, goals + further, as_json=options.json)


if __name__ == "__main__":
    leave(main())
