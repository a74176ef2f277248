"""How many rounds Moshpit's grid needs, with the grid that peers use.

Each peer has a value from N(0, 1), and in each round each peer is absent with probability p. The rounds until
the variance over all peers is below 1e-9 are counted. In a second table, peers die in the middle of an
all-reduce, with the real cores on a simulated network: a dead owner makes an attempt fail, and the others try
again.
"""

import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

from crypto.identity import PeerId
from gossip.averaging.grid import Grid
from gossip.averaging.outcome import Averaged
from tests.gossip.averaging.network import Rounds
from tests.gossip.swarm import peer_of

VARIANCE = 1e-9
ITEMS = 8 * 4_096
"""Length of a peer's vector if it is sent: one part for each of eight owners."""
ROUNDS_MAX = 50
SEEDS, SEEDS_QUICK = 200, 12
TOLERANCE = 0.2
DEATHS = (0.0, 0.01, 0.05)


@dataclass(frozen=True)
class Row:
    """A grid of this many peers. `axes` None: sized as peers do. `start`: "even", or "random" distinct cells
    as in the paper's half-filled grid. `expected` is the number of rounds by absence."""

    name: str
    count: int
    axes: tuple[int, ...] | None
    start: str
    expected: dict[float, float]


ROWS = (
    Row("1024, 32x32", 1024, None, "even", {0.0: 2.0, 0.001: 3.7, 0.005: 5.2, 0.01: 5.9}),
    Row("1024, random groups of 32", 1024, None, "groups", {0.0: 6.0, 0.001: 6.2, 0.005: 6.8, 0.01: 7.0}),
    Row("512, 8x8x8", 512, (8, 8, 8), "even", {0.0: 3.0, 0.001: 5.1, 0.005: 7.5, 0.01: 8.35}),
    Row("512 in 32x32", 512, (32, 32), "random", {0.0: 8.2, 0.01: 8.9}),
)
RESIZED = (
    Row("512 resized", 512, None, "even", {0.0: 2.2}),
    Row("509 resized", 509, None, "even", {0.0: 5.0}),
)


def rounds_of(row: Row, absence: float, seed: int) -> int:
    """Return the number of rounds until all peers have nearly the same value."""
    draws = np.random.default_rng([seed, row.count])
    peers = [peer_of(number) for number in range(row.count)]
    grid = Grid(b"%d" % seed, 0, peers, 32)
    grid.axes = row.axes or grid.axes
    values = draws.standard_normal(row.count)
    cells = [grid.start(peer) for peer in peers]
    if row.start == "random" or row.axes:
        chosen = draws.choice(prod(grid.axes), row.count, replace=False)
        cells = [tuple(map(int, np.unravel_index(cell, grid.axes))) for cell in chosen]
    for number in range(ROUNDS_MAX):
        present = np.flatnonzero(draws.random(row.count) >= absence)
        groups: dict[Any, list[int]] = {}
        if row.start == "groups":
            shuffled = draws.permutation(present).tolist()
            groups = {at: shuffled[at : at + 32] for at in range(0, len(shuffled), 32)}
        else:
            for place in map(int, present):
                groups.setdefault(grid.key(number, cells[place]), []).append(place)
        for group in groups.values():
            values[group] = values[group].mean()
            if row.start != "groups":
                axis = grid.axis(number)
                held = {peers[place]: cells[place][axis] for place in group}
                moved = grid.moved(number, cells[group[0]], held)
                for place in group:
                    cells[place] = moved[peers[place]]
        if values.var() < VARIANCE:
            return number + 1
    return ROUNDS_MAX


def dying(count: int, side: int, deaths: float, seed: int) -> tuple[int, float, int, int]:
    """Return results with the real cores: the rounds until the variance over all peers is below 1e-9, the
    attempts per group and round, the peers that failed a round, and the pairs of differing successes of one
    attempt.

    In each round each peer dies with probability `deaths` while it sends, and comes back for the next round.
    """
    rng = Random(f"{count} {deaths} {seed}")
    draws = np.random.default_rng(seed)
    values: dict[int, Any] = {n: draws.standard_normal(ITEMS) for n in range(count)}
    peers = {peer_of(n): n for n in range(count)}
    grid = Grid(b"%d" % seed, 0, peers, side)
    cells = {peer: grid.start(peer) for peer in peers}
    attempts = groups_held = failures = lies = 0
    for number in range(ROUNDS_MAX):
        groups: dict[bytes, list[PeerId]] = {}
        for peer in peers:
            groups.setdefault(grid.key(number, cells[peer]), []).append(peer)
        for group in groups.values():
            victims = {peer for peer in group if rng.random() < deaths}
            world = hold(group, peers, values, victims, rng.randrange(1 << 30))
            winners: dict[bytes, Averaged] = {}
            for peer in group:
                core = world.attempts[peers[peer]]
                if peer in victims or not isinstance(core.result, Averaged) or core.attempt is None:
                    failures += peer not in victims
                    continue
                first = winners.setdefault(core.attempt.id, core.result)
                lies += first.vector.tobytes() != core.result.vector.tobytes()
                values[peers[peer]] = core.result.vector
            attempts += max(world.attempts[peers[peer]].attempt_count for peer in group)
            groups_held += 1
            axis = grid.axis(number)
            held = {peer: cells[peer][axis] for peer in group if peer not in victims}
            cells.update(grid.moved(number, cells[group[0]], held))
        if np.var([value[0] for value in values.values()]) < VARIANCE:
            return number + 1, attempts / groups_held, failures, lies
    return ROUNDS_MAX, attempts / groups_held, failures, lies


def hold(
    group: list[PeerId], peers: dict[PeerId, int], values: dict[int, Any], victims: set[PeerId], seed: int
) -> Rounds:
    """Play one round of one group; each victim dies after it has begun to send."""
    numbers = [peers[peer] for peer in group]
    world = Rounds({n: values[n] for n in numbers}, 0, dtype="float64", numbers=numbers, seed=seed)

    def die() -> None:
        for victim in victims:
            running = world.attempts[peers[victim]].attempt
            if running is not None and running.sent_bytes and peers[victim] not in world.gone:
                world.kill(peers[victim], noticed_after=0.1)

    if victims:
        world.hooks.append(die)
    world.start()
    world.run()
    return world


def main() -> int:
    flags = arguments("Rounds of Moshpit averaging.")
    seeds = SEEDS_QUICK if flags.quick else SEEDS
    rows: list[dict[str, Any]] = []
    goals = []
    for row in ROWS:
        for absence, expected in row.expected.items():
            found = [rounds_of(row, absence, seed) for seed in range(seeds)]
            mean = float(np.mean(found))
            error = float(np.std(found)) / seeds**0.5
            rows.append(
                {"grid": row.name, "absent": absence, "rounds": round(mean, 2), "error": round(error, 2)}
            )
            # With few seeds, the mean itself is uncertain.
            slack = TOLERANCE if seeds == SEEDS else TOLERANCE + 3 * error
            goals.append(
                Goal(
                    f"{row.name}, p {absence}: rounds above the paper", mean - expected, "<=", round(slack, 3)
                )
            )
    for row in RESIZED:
        mean = float(np.mean([rounds_of(row, 0.0, seed) for seed in range(seeds)]))
        rows.append({"grid": row.name, "absent": 0.0, "rounds": round(mean, 2)})
        goals.append(Goal(f"{row.name}, rounds", mean, "<=", row.expected[0.0]))
    for deaths in DEATHS:
        found_all = [dying(64, 8, deaths, seed) for seed in range(1 if flags.quick else 4)]
        lies = sum(lies for _, _, _, lies in found_all)
        rows.append(
            {
                "grid": "64 in 8x8, cores",
                "die in an all-reduce": deaths,
                "rounds": round(float(np.mean([found for found, *_ in found_all])), 2),
                "attempts": round(float(np.mean([tries for _, tries, *_ in found_all])), 2),
                "survivors that failed": sum(failures for *_, failures, _ in found_all),
                "different bytes": lies,
            }
        )
        goals.append(Goal(f"deaths {deaths}: successes that differ", lies, "<=", 0))
    return report("moshpit", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
