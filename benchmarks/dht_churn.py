"""The DHT in the simulator: churn, liars, an eclipse, a healed split, and search by capability.

    python benchmarks/dht_churn.py [--json] [--quick] [--seeds N] [--first-seed N] [--nodes N]
        [--minutes N] [--only CASE]

Bare Kademlia cores (`tests.dht.table_world`) detect deaths by themselves here; nodes of a swarm also have
SWIM. Loss is 2 %, one-way latency 50 ms. The population is constant, with exponential lifetimes, and a
newcomer knows only three addresses. --quick uses 200 nodes, and minutes instead of hours.
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from _figures import Goal, leave, report

from crypto.identity import PeerId
from dht.capabilities import Query
from dht.kademlia import Kademlia
from dht.keys import node_number, record_key
from dht.settings import KademliaSettings
from tests.dht.liars import KINDS, FalseNeighbours, liar_of
from tests.dht.table_world import GIGABYTE, Entry, TableWorld, grind, some_advert

RECORDS = 60
SAMPLE_SECONDS = 300.0
LOOKUPS_PER_SECOND = 0.5
LIARS_SHARE = 0.2
ECLIPSE_IDS = 500
ECLIPSE_NETWORKS = 5
CASES = ("hour", "ten minutes", "large", "liars", "eclipse", "split", "capability")

Rows = list[dict[str, Any]]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a `share` of all values do not exceed; nan if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def share(values: Sequence[bool]) -> float:
    """Return the share of true values; nan if there are none."""
    return sum(values) / len(values) if values else math.nan


def churn(seed: int, nodes: int, seconds: float, median_seconds: float) -> TableWorld:
    """Play a swarm in which records are stored at the start and looked up all the time."""
    world = TableWorld(nodes, seed, median_seconds=median_seconds)
    for number in range(RECORDS):
        world.at(5.0 + number, world.store)
    begin = 5.0 + RECORDS
    world.at(begin, world.every, LOOKUPS_PER_SECOND, seconds - 30.0, world.look)
    world.at(begin, world.every, LOOKUPS_PER_SECOND / 5, seconds - 30.0, world.measure_recall)
    due = min(SAMPLE_SECONDS, seconds - 30.0)
    while due < seconds:
        world.at(due, world.sample)
        due += SAMPLE_SECONDS
    world.run(seconds)
    return world


def churn_row(case: str, seed: int, world: TableWorld) -> dict[str, Any]:
    """Return the figures of one run."""
    figures = world.figures
    seconds = [found.seconds for found in figures.found]
    counts = [count for _, each in figures.replicas for count in each]
    return {
        "case": case,
        "seed": seed,
        "nodes": len(world.lives),
        "minutes": round(world.now / 60),
        "lookups": len(figures.found),
        "found": share([found.is_found for found in figures.found]),
        "newest": share([found.is_newest for found in figures.found]),
        "forged": sum(found.is_forged for found in figures.found),
        "seconds_p50": round(quantile(seconds, 0.5), 3),
        "seconds_p95": round(quantile(seconds, 0.95), 3),
        "rounds_p95": quantile([found.rounds for found in figures.found], 0.95),
        "replicas_min": min(counts, default=0),
        "replicas_mean": round(sum(counts) / max(1, len(counts)), 1),
        "stale_max": round(max(figures.stale, default=math.nan), 3),
        "recall": round(sum(figures.recall) / max(1, len(figures.recall)), 4),
    }


def lying(seed: int, nodes: int, seconds: float, paths: int) -> dict[str, Any]:
    """Play a swarm in which a fifth of the nodes lie, a third of them in each of three ways."""
    is_liar = [random.Random(f"{seed} {number}").random() < LIARS_SHARE for number in range(nodes)]
    make = liar_of(KINDS)
    world = TableWorld(nodes, seed, core_of=lambda n: make if n < nodes and is_liar[n] else Kademlia)
    liars = [life.peer for life in world.lives.values() if isinstance(life.core, FalseNeighbours)]
    for life in world.lives.values():
        if isinstance(life.core, FalseNeighbours):
            type(life.core).liars = liars
    for number in range(RECORDS):
        world.at(5.0 + number, world.store)
    world.at(10.0 + RECORDS, world.every, 1.0, seconds - 30.0, lambda: world.look(paths=paths))
    world.run(seconds)
    return churn_row(f"20 % liars, {paths} paths", seed, world) | {"liars": len(liars)}


def eclipse(seed: int, nodes: int) -> dict[str, Any]:
    """Play 500 ids near one key, in five address groups. An honest record is then stored and looked up
    there."""
    key = record_key("table", b"eclipsed")
    world = TableWorld(nodes, seed, host_of=_host_of(nodes))
    FalseNeighbours.liars = ground = grind(seed, key, ECLIPSE_IDS, 40 * nodes)
    world._core_of = lambda _number: FalseNeighbours
    for number, peer in enumerate(ground):
        world.at(1.0 + number * 0.1, _attack, world, peer)
    settled = 120.0 + ECLIPSE_IDS * 0.1
    stored: list[Entry] = []
    world.at(settled, lambda: stored.extend(filter(None, [world.store(key=key)])))
    for number in range(200):
        world.at(settled + 10 + number * 0.5, lambda: world.look(entry=stored[0], paths=world.settings.paths))
    world.run(settled + 130)
    place = int.from_bytes(key, "big")
    honest = sorted(node_number(p) ^ place for p, life in world.lives.items() if type(life.core) is Kademlia)
    nearer = sum((node_number(peer) ^ place) < honest[19] for peer in ground)
    row = churn_row("eclipse", seed, world)
    return row | {"ids_nearer_than_the_20th_honest": nearer, "holders": len(world.holders(stored[0]))}


def _host_of(nodes: int) -> Callable[[int], str]:
    """Return a function that gives each honest node its own network, and the attackers a few together."""

    def host(number: int) -> str:
        if number < nodes:
            return f"20.{number >> 8 & 255}.{number & 255}.1"
        return f"99.0.{number % ECLIPSE_NETWORKS}.{1 + number // ECLIPSE_NETWORKS % 250}"

    return host


def split(seed: int, nodes: int, republish_seconds: float) -> dict[str, Any]:
    """Play a swarm split into halves for 30 minutes (or for one republish interval), while each publisher
    makes a new version."""
    world = TableWorld(nodes, seed, settings=KademliaSettings(republish_seconds=republish_seconds))
    peers = list(world.lives)
    for number in range(20):
        world.at(5.0 + number, world.store)
    world.at(60.0, world.links.split, peers[::2], peers[1::2])
    apart = min(1_800.0, republish_seconds)
    for number in range(20):
        world.at(60.0 + apart / 2 + number, _renew, world, number)
    world.at(60.0 + apart, world.links.heal)
    end = 60.0 + apart + 1.1 * republish_seconds + 30.0
    for peer in peers[:40]:
        world.at(end, _look_for_all, world, peer)
    world.run(end + 30.0)
    return churn_row("split healed, after one republish", seed, world)


def _attack(world: TableWorld, peer: PeerId) -> None:
    world.begin(peer=peer, endless=True)


def _look_for_all(world: TableWorld, peer: PeerId) -> None:
    for entry in world.entries:
        world.look(world.lives[peer], entry=entry)


def _renew(world: TableWorld, number: int) -> None:
    entry = world.entries[number]
    world.store(world.lives[entry.publisher], entry=entry)


def capability(seed: int, nodes: int, seconds: float) -> dict[str, Any]:
    """Play searches under churn, for rare and for common classes."""
    world = TableWorld(nodes, seed, median_seconds=3_600.0, advert_of=some_advert)
    warm = 400.0
    world.run(warm)
    before = {peer: _sent(world, [peer]) for peer in world.lives}
    askers: set[PeerId] = set()

    def hunt(query: Query) -> None:
        if (life := world.pick()) is not None:
            askers.add(life.peer)
            world.hunt(query, life)

    world.every(0.2, warm + seconds - 10, lambda: hunt(Query("cuda", 8 * GIGABYTE)))
    world.every(0.1, warm + seconds - 10, lambda: hunt(Query("cpu", 8 * GIGABYTE, "eu-west")))
    world.run(warm + seconds)
    hunts = world.figures.hunts
    sent = {peer: _sent(world, [peer]) - before[peer] for peer in world.lives if peer in before}
    loads = list(sent.values())
    # A searching peer sends some hundred requests within a moment; this is the cost for the other peers.
    others = max(count for peer, count in sent.items() if peer not in askers)
    return {
        "case": "capability",
        "seed": seed,
        "nodes": nodes,
        "searches": len(hunts),
        "seconds_p50": round(quantile([hunt[0] for hunt in hunts], 0.5), 3),
        "seconds_p95": round(quantile([hunt[0] for hunt in hunts], 0.95), 3),
        "nodes_found_mean": round(sum(hunt[1] for hunt in hunts) / max(1, len(hunts)), 1),
        "still_true": round(sum(hunt[2] for hunt in hunts) / max(1, sum(hunt[1] for hunt in hunts)), 4),
        "of_those_there": round(sum(hunt[3] for hunt in hunts) / max(1, len(hunts)), 3),
        "busiest_over_mean": round(max(loads) * len(loads) / max(1, sum(loads)), 2),
        "busiest_other_over_mean": round(others * len(loads) / max(1, sum(loads)), 2),
        "messages_per_node_second": round(sum(loads) / len(loads) / seconds, 2),
    }


def _sent(world: TableWorld, peers: list[Any]) -> int:
    return sum(sent.messages for peer in peers for sent in world.engine.traffic(peer).values())


def goals_of(rows: Rows) -> list[Goal]:
    """Return the goals for the cases that ran, with the value of the worst seed."""
    goals: list[Goal] = []

    def worst(case: str, name: str, figure: str, operator: str, bound: float) -> None:
        values = [row[figure] for row in rows if row["case"] == case]
        if values:
            goals.append(Goal(f"{case}: {name}", (min if operator == ">=" else max)(values), operator, bound))

    for case, found in (("session median 60 min", 0.999), ("session median 10 min", 0.99)):
        worst(case, "found", "found", ">=", found)
    hour = "session median 60 min"
    worst(hour, "live replicas, lowest", "replicas_min", ">=", 10)
    worst(hour, "rounds p95", "rounds_p95", "<=", 3)
    worst(hour, "seconds p50", "seconds_p50", "<=", 0.5)
    worst(hour, "seconds p95", "seconds_p95", "<=", 2.0)
    worst(hour, "stale contacts", "stale_max", "<=", 0.1)
    worst(hour, "top-20 recall", "recall", ">=", 0.97)
    worst("large", "found", "found", ">=", 1.0)
    worst("large", "rounds p95", "rounds_p95", "<=", 5)
    liars = f"20 % liars, {KademliaSettings().paths} paths"
    worst(liars, "found", "found", ">=", 0.99)
    worst(liars, "forged", "forged", "<=", 0)
    worst("eclipse", "found", "found", ">=", 0.95)
    worst("split healed, after one republish", "newest", "newest", ">=", 1.0)
    worst("capability", "seconds p95", "seconds_p95", "<=", 3.0)
    worst("capability", "still true", "still_true", ">=", 0.95)
    worst("capability", "busiest over mean", "busiest_over_mean", "<=", 10)
    return goals


def run_case(case: str, seed: int, nodes: int, seconds: float, *, is_quick: bool) -> Rows:
    short = min(seconds, 240.0)
    match case:
        case "hour":
            return [churn_row("session median 60 min", seed, churn(seed, nodes, seconds, 3_600.0))]
        case "ten minutes":
            return [churn_row("session median 10 min", seed, churn(seed, nodes, seconds, 600.0))]
        case "large":
            return [churn_row("large", seed, churn(seed, 10 * nodes, 600.0, 3_600.0))]
        case "liars":
            return [lying(seed, nodes, short, paths) for paths in (1, KademliaSettings().paths)]
        case "eclipse":
            return [eclipse(seed, nodes)]
        case "split":
            return [split(seed, nodes // 2 if is_quick else nodes, 600.0 if is_quick else 1_800.0)]
        case _:
            return [capability(seed, nodes, short / 2)]


def measure(flags: argparse.Namespace) -> Rows:
    """Run the cases."""
    nodes = flags.nodes or (200 if flags.quick else 1_000)
    seconds = 60.0 * (flags.minutes or (5 if flags.quick else 120))
    first = flags.first_seed
    seeds = range(first, first + (flags.seeds or (1 if flags.quick else 5)))
    rows: Rows = []
    for seed in seeds:
        for case in CASES:
            if flags.only not in ("", case) or (flags.quick and case in ("large", "eclipse")):
                continue
            found = run_case(case, seed, nodes, seconds, is_quick=flags.quick)
            rows += found
            for row in found if not flags.json else ():
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a small form, under 50 s")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--minutes", type=int, default=0)
    parser.add_argument("--only", default="", choices=("", *CASES))
    flags = parser.parse_args()
    rows = measure(flags)
    return report("dht_churn", rows if flags.json else [], goals_of(rows), as_json=flags.json)


if __name__ == "__main__":
    leave(main())
