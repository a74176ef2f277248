"""Worlds of cores: speed relative to real time, memory, and the growth of cost with the number of peers.

Each world is `sim.worlds.cores.CoresWorld`, with its stream of events and their digest on, in a separate
process: SWIM with the lan preset, the DHT with work on its records, links of 10 to 80 ms with jitter and
loss. The peers know each other from the start (`start.acquainted`); that and a first minute are reported
separately. The measured ten minutes contain one refresh of each bucket of the DHT; `--quick` measures less.
Times are CPU seconds of that process, reported with the wall time and the pace of a plain loop. Memory is the
growth of the process since its imports.
"""

import argparse
import gc
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from _figures import Goal, leave, report

from sim.churn.model import Churn, Distribution
from sim.network.model import NetworkModel
from sim.observers import Observation, Watch
from sim.scenario import MembershipScenario, RecordsScenario, Scenario, SwarmStart
from sim.worlds.cores import CoresWorld

SEED = 5
NETWORK = NetworkModel(nearest_seconds=0.01, farthest_seconds=0.08, jitter_seconds=0.01, loss=0.01)
MEDIAN_SESSION_SECONDS = 3600.0
CHURN = Churn(
    sessions=Distribution("exponential", MEDIAN_SESSION_SECONDS / math.log(2)),
    absences=Distribution("exponential", 600.0),
)
STORES_PER_PEER, LOOKUPS_PER_PEER = 0.2 / 1_000, 1.0 / 1_000
THOUSAND_GOAL, MYRIAD_GOAL = 20.0, 1.0
KILOBYTES_GOAL = 100.0
GROWTH_GOAL = math.log(100 * math.log(10_000) / math.log(100)) / math.log(100)
"""The exponent of n log n between 100 and 10,000, which is 1.15."""


@dataclass(frozen=True)
class Case:
    """One world, measured from `settled_seconds` on."""

    nodes: int
    scope: str = "all"
    churns: bool = False
    settled_seconds: float = 60.0
    measured_seconds: float = 60.0

    @property
    def scenario(self) -> Scenario:
        return Scenario(
            name="benchmark",
            about="many peers",
            nodes=self.nodes,
            seconds=self.settled_seconds + self.measured_seconds,
            sample_seconds=self.settled_seconds,
            network=NETWORK,
            start=SwarmStart(spread_seconds=0.0, acquainted=True),
            # The load per peer is the same in a small world as in a large one.
            records=RecordsScenario(
                stores_per_second=self.nodes * STORES_PER_PEER,
                lookups_per_second=self.nodes * LOOKUPS_PER_PEER,
            ),
            membership=MembershipScenario(scope="all" if self.scope == "all" else "neighbourhood"),
            churn=CHURN if self.churns else Churn(),
        )


class Clocks:
    """CPU and wall time since the previous reset."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def lap(self) -> tuple[float, float]:
        before = self._cpu, self._wall
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return self._cpu - before[0], self._wall - before[1]


def play(case: Case) -> dict[str, Any]:
    """Run one world in this process; return its row of figures."""
    process = psutil.Process()
    watch = Watch(())
    gc.collect()
    empty_bytes, clocks = process.memory_info().rss, Clocks()
    world = CoresWorld(case.scenario, SEED, lambda observed: _watched(watch, observed, world))
    begun: list[tuple[float, int]] = []

    def sample() -> None:
        """Reset the clocks at the end of the settling time, which does not count."""
        if not begun:
            begun.append((clocks.lap()[0], world.counters()["sent"]))

    world.play(sample)
    (start_cpu, sent), (cpu, wall) = begun[0], clocks.lap()
    gc.collect()
    grown_bytes = process.memory_info().rss - empty_bytes
    listed = [
        len(world.believes(peer)) for peer in world.peers[:: max(1, case.nodes // 100)] if world.is_up(peer)
    ]
    return {
        "nodes": case.nodes,
        "scope": case.scope,
        "churn": case.churns,
        "times_real": round(case.measured_seconds / cpu, 2),
        "cpu_ms_per_virtual_second": round(1000 * cpu / case.measured_seconds, 2),
        "wall_times_real": round(case.measured_seconds / wall, 2),
        "messages_per_cpu_second": round((world.counters()["sent"] - sent) / cpu),
        "kilobytes_per_node": round(grown_bytes / 1000 / case.nodes, 1),
        "members_listed": round(sum(listed) / len(listed)),
        "start_virtual_seconds": case.settled_seconds,
        "start_cpu_seconds": round(start_cpu, 1),
        "events": watch.count,
        "digest": watch.digest()[:8],
        "loop_nanoseconds": round(loop_nanoseconds()),
    }


def loop_nanoseconds() -> float:
    """Return the time of one iteration of a plain loop, which shows the machine's present speed. CPU seconds,
    too, get longer if other programs share its caches and cores."""
    turns = 2_000_000
    begun = time.process_time()
    total = 0
    for turn in range(turns):
        total += turn & 7
    return (time.process_time() - begun) / turns * 1e9


def _watched(watch: Watch, observed: Observation, world: CoresWorld) -> None:
    watch.publish(observed, world)


def play_apart(case: Case) -> dict[str, Any]:
    """Run a world in a fresh process, so that nothing else affects its memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        row = pool.apply(play, (case,))
    print(row, file=sys.stderr)  # shown as progress, because the largest worlds take long
    return row


def exponent(rows: Sequence[dict[str, Any]]) -> float:
    """Return the exponent b if the cost of a virtual second grows like nodes to the power of b; fitted as a
    line through the logarithms."""
    points = [(math.log(row["nodes"]), math.log(row["cpu_ms_per_virtual_second"])) for row in rows]
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    above = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return above / sum((x - middle_x) ** 2 for x, _ in points)


def draw(rows: Sequence[dict[str, Any]], growth: float, path: str) -> None:
    """Draw the cost by number of peers, with both axes logarithmic, and n log n for comparison."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    nodes = [row["nodes"] for row in rows]
    cost = [row["cpu_ms_per_virtual_second"] / 1000 for row in rows]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.loglog(nodes, cost, "o-", label=f"measured: n to the {growth:.2f}")
    bound = [cost[0] * n * math.log(n) / (nodes[0] * math.log(nodes[0])) for n in nodes]
    axes.loglog(nodes, bound, "--", color="gray", label="n log n")
    axes.set_xlabel("peers, each with SWIM of its neighbourhood and the DHT")
    axes.set_ylabel("CPU seconds per virtual second")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


QUICK = (Case(300, measured_seconds=120.0), Case(300, churns=True))
FULL = tuple(Case(1_000, churns=churns, measured_seconds=600.0) for churns in (False, True))
QUICK_GROWTH = tuple(Case(nodes, "neighbourhood", measured_seconds=120.0) for nodes in (100, 200, 400))
FULL_GROWTH = tuple(
    Case(nodes, "neighbourhood", measured_seconds=600.0) for nodes in (100, 300, 1_000, 3_000, 10_000)
)


def main() -> int:
    """Measure one world after the other, each without other load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small worlds, under 50 s")
    parser.add_argument("--picture", metavar="FILE", help="draw the growth of the cost as a PNG")
    flags = parser.parse_args()
    worlds = [play_apart(case) for case in (QUICK if flags.quick else FULL)]
    growing = [play_apart(case) for case in (QUICK_GROWTH if flags.quick else FULL_GROWTH)]
    growth = exponent(growing)
    # A small world is compared with a large one at the same work per peer.
    share, largest_share = worlds[0]["nodes"] / 1_000, growing[-1]["nodes"] / 10_000
    goals = [
        Goal("1,000 peers, times real time", worlds[0]["times_real"] * share, ">=", THOUSAND_GOAL),
        Goal("1,000 peers with churn, times real time", worlds[1]["times_real"] * share, ">=", THOUSAND_GOAL),
        Goal("10,000 peers, times real time", growing[-1]["times_real"] * largest_share, ">=", MYRIAD_GOAL),
        Goal("exponent of the cost by number of peers", growth, "<=", GROWTH_GOAL),
    ]
    if not flags.quick:  # with few peers the fixed cost of a process would weigh too much
        goals += [
            Goal(f"{row['nodes']:,} peers, kB each", row["kilobytes_per_node"], "<=", KILOBYTES_GOAL)
            for row in (worlds[0], growing[-1])
        ]
    if flags.picture:
        draw(growing, growth, flags.picture)
    return report("simulator", worlds + growing, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
