"""SWIM: the detection time of deaths, the cost per member, and the effect of hostile members.

    python benchmarks/swim.py [--json] [--quick] [--seeds N] [--members N] [--only PART]

Bare cores run on the simulator's engine (`_swarm`) with the lan preset and links of 10 to 80 ms. Everything
is in virtual time, so a loaded machine changes no figure. The full form uses 20 seeds of 1,000 members,
`--quick` fewer seeds and members. A crash counts as suspected when any member suspects it, and as dead for
each observer when that observer reports it.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from _figures import Goal, leave, report
from _swarm import LINKS, LOSSY, Swarm

from crypto.facts import Fact
from gossip.member import MemberDown, MemberSuspected, Profile, Status
from gossip.messages import AliveBody, DeadBody, Gossip, SuspectBody, sign_body
from gossip.settings import SwimSettings
from gossip.swim import PROTOCOL
from sim.seeds import HashSigner

LAN = SwimSettings()
WITHOUT_LIFEGUARD = replace(
    LAN, suspicion_max_multiplier=1.0, confirmations=0, health_max=0, stall_seconds=0.99
)
SETTLED_SECONDS = 5.0


@dataclass(frozen=True)
class Size:
    """The size of the experiment."""

    members: int
    seeds: int
    crashes: int
    watched_seconds: float
    hostile_seconds: float


FULL = Size(1_000, 20, 20, 180.0, 60.0)
QUICK = Size(120, 2, 10, 60.0, 40.0)


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def detection(size: Size, seed: int, loss: bool) -> dict[str, Any]:
    """Measure crashes one after another: the first suspicion, and the verdicts of all other members."""
    swarm = Swarm(size.members, LAN, LOSSY if loss else LINKS, seed)
    swarm.run(SETTLED_SECONDS)
    crashed: dict[bytes, float] = {}
    for number in range(size.crashes):
        swarm.run(0.5 + 2 * swarm.rng.random())
        swarm.crash(number)
        crashed[swarm.peers[number]] = swarm.now
    swarm.run(90.0)
    suspected: dict[bytes, float] = {}
    dead = []
    for at, _, event in swarm.events:
        begun = crashed.get(event.peer, float("inf"))
        if at >= begun and isinstance(event, MemberSuspected):
            suspected.setdefault(event.peer, at - begun)
        if at >= begun and isinstance(event, MemberDown):
            dead.append(at - begun)
    return {"suspected": list(suspected.values()), "dead": dead, "false_deaths": swarm.false_deaths()}


def traffic(size: Size, seed: int, loss: bool, *, scoped: bool = False) -> dict[str, Any]:
    """Measure traffic while no member comes or goes."""
    swarm = Swarm(size.members, LAN, LOSSY if loss else LINKS, seed, scoped=scoped)
    swarm.run(SETTLED_SECONDS)
    before = swarm.sent_bytes()
    swarm.run(size.watched_seconds)
    return {
        "bytes_per_second": swarm.rate(before, size.watched_seconds),
        "false_deaths": swarm.false_deaths(),
        "node_hours": size.members * size.watched_seconds / 3600,
    }


def news(size: Size, seed: int) -> float:
    """Return the seconds until all members know a new profile, at 10 % loss."""
    swarm = Swarm(size.members, LAN, LOSSY, seed)
    swarm.run(SETTLED_SECONDS)
    told = swarm.profile(0)
    changed = Profile(told.name, told.addresses, b"new")
    begun = swarm.now
    swarm.engine.call(begun, swarm.peers[0], lambda core, now: core.update(now, changed), protocol=PROTOCOL)
    while swarm.now < begun + 60.0:
        swarm.run(0.05)
        members = (core.member(swarm.peers[0]) for core in swarm.cores.values())
        if all(member is not None and member.metadata == b"new" for member in members):
            break
    return swarm.now - begun


def blocked(size: Size, seed: int, settings: SwimSettings) -> tuple[int, int]:
    """Return the number of false deaths of healthy members: according to any observer, and according to
    healthy ones.

    Lifeguard's experiment (Dadgar et al. 2018, section V): 5 % of members take turns at being slow, for 2 to
    10 s at a time with 0.5 to 4 s between. Messages to and from a slow member wait until it is over, while
    its timers run on. (A process that does not run at all cannot accuse anybody.)
    """
    swarm = Swarm(size.members, settings, LINKS, seed, blockable=True)
    swarm.run(SETTLED_SECONDS)
    rng, slow = Random(seed), range(max(2, size.members // 20))
    due = [(swarm.now + rng.uniform(0.0, 4.0), number) for number in slow]
    end = swarm.now + 2 * size.hostile_seconds
    while min(due)[0] < end:
        at, number = min(due)
        swarm.run(max(0.0, at - swarm.now))
        until = swarm.now + rng.uniform(2.0, 10.0)
        swarm.block(number, until)
        due[due.index((at, number))] = until + rng.uniform(0.5, 4.0), number
    swarm.run(20.0)
    deaths = [(peer, event.peer) for _, peer, event in swarm.of(MemberDown)]
    sick = {swarm.peers[number] for number in slow}
    healthy = [observer for observer, subject in deaths if subject not in sick]
    return len(healthy), sum(observer not in sick for observer in healthy)


def one_way(size: Size, seed: int) -> int:
    """Return the number of false deaths if 10 % of all pairs are blocked in one direction."""
    swarm = Swarm(size.members, LAN, LINKS, seed)
    rng = Random(seed)
    for one in swarm.peers:
        for other in rng.sample(swarm.peers, size.members // 20):
            if other != one:
                swarm.links.block(one, other)
    swarm.run(size.watched_seconds)
    return swarm.false_deaths()


def healed(size: Size, seed: int) -> float:
    """Return the seconds from the end of a split of 60 s until every member lists all others as live
    again."""
    swarm = Swarm(size.members, LAN, LINKS, seed)
    swarm.run(SETTLED_SECONDS)
    half = size.members // 2
    swarm.links.split(swarm.peers[:half], swarm.peers[half:])
    swarm.run(60.0)
    swarm.links.heal()
    begun = swarm.now
    while swarm.now < begun + 300.0:
        swarm.run(1.0)
        if all(status is Status.ALIVE for core in swarm.cores.values() for status in core.statuses.values()):
            break
    return swarm.now - begun


def hostile(size: Size, seed: int, liars: int) -> dict[str, Any]:
    """Play liars. Ten times a second, each tells random members that others are suspect or dead, with the
    current incarnation, an old one or a future one. Liars also replay and forge facts, and jump to new
    incarnations of their own."""
    swarm = Swarm(size.members, LAN, LINKS, seed)
    swarm.run(SETTLED_SECONDS)
    honest = swarm.peers[liars:]
    before = swarm.sent_bytes(honest)
    swarm.run(size.hostile_seconds)
    idle = swarm.sent_bytes(honest) - before
    before, since = swarm.sent_bytes(honest), swarm.now
    rng, heard = Random(seed), []
    for _ in range(int(size.hostile_seconds * 10)):
        for liar in range(liars):
            victim, receiver = (swarm.peers[rng.randrange(liars, size.members)] for _ in range(2))
            held = swarm.cores[swarm.numbers[victim]].member(victim)
            incarnation = held.incarnation if held is not None else 0
            lies = _lies(swarm, liar, victim, incarnation + rng.choice((0, 0, 0, -1, 5)), rng)
            heard += [fact for fact in lies if rng.random() < 0.01]
            lies += (rng.choice(heard),) if heard else ()
            _tell(swarm, liar, receiver, lies)
        swarm.run(0.1)
    taken = swarm.sent_bytes(honest) - before
    moved = [
        number
        for number in range(liars, size.members)
        for observer in (size.members - 1, size.members - 2)
        if swarm.holds(observer, number) is not Status.ALIVE
    ]
    deaths = sum(swarm.numbers[event.peer] >= liars for _, _, event in swarm.of(MemberDown, since))
    return {"deaths": deaths, "moved": len(moved), "cost": taken / idle}


def _lies(swarm: Swarm, liar: int, victim: bytes, incarnation: int, rng: Random) -> tuple[Fact, ...]:
    signer = HashSigner(swarm.peers[liar], "swarm", swarm.seed)
    incarnation = max(incarnation, 0)
    lies = [
        sign_body(signer, SuspectBody(victim, incarnation, rng.randrange(2_000))),
        sign_body(signer, DeadBody(victim, incarnation, rng.randrange(2_000))),
        sign_body(signer, AliveBody(2 + rng.randrange(2**41), f"node-{liar}", (), b"")),
    ]
    if rng.random() < 0.1:  # a fact that is not signed by its author ends the reading of a message
        forged = lies[0]
        lies.append(Fact(bytes(victim), forged.body, forged.signature))
    return tuple(lies)


def _tell(swarm: Swarm, liar: int, receiver: Any, lies: tuple[Fact, ...]) -> None:
    swarm.engine.command(swarm.peers[liar], lambda _core, _now: [(receiver, Gossip(lies))], protocol=PROTOCOL)


class Played:
    """The results so far: rows, printed as they are added, and goals."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.seeds = range(1, size.seeds + 1)
        self.few = range(1, max(2, size.seeds // 5) + 1)
        self.rows: list[dict[str, Any]] = []
        self.goals: list[Goal] = []

    def note(self, what: str, **figures: Any) -> None:
        """Add a row."""
        self.rows.append({"what": what, "members": self.size.members, **figures})
        print(self.rows[-1], file=sys.stderr, flush=True)

    def goal(self, name: str, value: float, bound: float) -> None:
        """Compare a figure with an upper bound."""
        self.goals.append(Goal(name, value, "<=", bound))


def play_crashes(played: Played) -> None:
    """Measure how soon a crash is suspected, and how soon all members know it."""
    for loss, name in ((False, "no loss"), (True, "10 % loss")):
        suspected: list[float] = []
        dead: list[float] = []
        falsely = 0
        for seed in played.seeds:
            one = detection(played.size, seed, loss)
            suspected += one["suspected"]
            dead += one["dead"]
            falsely += one["false_deaths"]
            mean, p99 = sum(suspected) / len(suspected), quantile(suspected, 0.99)
            played.note(f"crashes, {name}", seeds=seed, crashes=len(suspected), mean=mean, p99=p99,
                        dead_p50=quantile(dead, 0.5), dead_max=max(dead), false_deaths=falsely)  # fmt: skip
        played.goal(f"suspected, mean intervals, {name}", mean, 2.2)
        played.goal(f"suspected, p99 intervals, {name}", p99, 6.0)
        played.goal(f"dead at others, p50 seconds, {name}", quantile(dead, 0.5), 20.0)
        played.goal(f"dead at others, longest seconds, {name}", max(dead), 80.0)
        played.goal(f"false deaths during crashes, {name}", falsely, 0)


def play_idle(played: Played) -> None:
    """Measure the cost and the false deaths while no member comes or goes."""
    for loss, name in ((False, "no loss"), (True, "10 % loss")):
        rate, falsely, hours = 0.0, 0, 0.0
        for seed in played.seeds:
            one = traffic(played.size, seed, loss)
            rate = max(rate, one["bytes_per_second"])
            falsely += one["false_deaths"]
            hours += one["node_hours"]
            played.note(f"traffic, {name}", seeds=seed, bytes_per_node_second=rate, node_hours=hours,
                        false_deaths=falsely)  # fmt: skip
        played.goal(f"bytes per second and member, {name}", rate, 3_000.0 if loss else 2_000.0)
        played.goal(f"false deaths, {name}", falsely, 0)


def play_scoped(played: Played) -> None:
    """Measure the cost per member with ten times as many members, each of which lists its neighbourhood."""
    size = replace(played.size, members=10 * played.size.members)
    for loss, name in ((False, "no loss"), (True, "10 % loss")):
        one = traffic(size, 1, loss, scoped=True)
        played.note(f"scoped traffic, {name}", all_members=size.members, **one)
        rate, falsely = one["bytes_per_second"], one["false_deaths"]
        played.goal(f"bytes per second and member, scoped, {name}", rate, 3_000.0 if loss else 2_000.0)
        played.goal(f"false deaths, scoped, {name}", falsely, 0)


def play_news(played: Played) -> None:
    """Measure how soon all members know a change."""
    spread = []
    for seed in played.seeds:
        spread.append(news(played.size, seed))
        mean = sum(spread) / len(spread)
        played.note("news to all, 10 % loss", seeds=seed, longest_seconds=max(spread), mean_seconds=mean)
    played.goal("news to all, longest seconds, 10 % loss", max(spread), 2.5)


def play_blocked(played: Played) -> None:
    """Compare runs with and without Lifeguard, with the same seeds."""
    on, off = [0, 0], [0, 0]
    for seed in played.few:
        for counts, settings in ((on, LAN), (off, WITHOUT_LIFEGUARD)):
            everywhere, at_healthy = blocked(played.size, seed, settings)
            counts[0] += everywhere
            counts[1] += at_healthy
        played.note("5 % blocked for 2-10 s", seeds=seed, deaths_with_lifeguard=on[0], deaths_without=off[0],
                    at_healthy_with=on[1], at_healthy_without=off[1])  # fmt: skip
    played.goal("false deaths with Lifeguard, relative to those without", on[0] / max(off[0], 1), 0.02)
    played.goal("false deaths at healthy members", on[1], 0)


def play_paths(played: Played) -> None:
    """Play pairs that are blocked one way, and a split that heals."""
    each: tuple[tuple[str, Callable[[Size, int], float], float], ...] = (
        ("false deaths, 10 % of pairs one way", one_way, 0),
        ("seconds until views are whole after a split of 60 s", healed, 30.0),
    )
    for name, run, bound in each:
        worst = max(run(played.size, seed) for seed in played.few)
        played.note(name, worst=worst)
        played.goal(name, worst, bound)


def play_hostile(played: Played) -> None:
    """Play with one liar, and with one liar in twenty members."""
    for name, liars in (("one liar", 1), ("5 % liars", played.size.members // 20)):
        lied = [hostile(played.size, seed, liars) for seed in played.few]
        cost = max(row["cost"] for row in lied)
        deaths, moved = sum(row["deaths"] for row in lied), sum(row["moved"] for row in lied)
        played.note(name, deaths=deaths, moved=moved, cost=cost)
        played.goal(f"honest members declared dead or not listed as alive, {name}", deaths + moved, 0)
        played.goal(f"cost to others as a multiple of idle, {name}", cost, 2.0)


PARTS: dict[str, Callable[[Played], None]] = {
    "crashes": play_crashes,
    "idle": play_idle,
    "scoped": play_scoped,
    "news": play_news,
    "blocked": play_blocked,
    "paths": play_paths,
    "hostile": play_hostile,
}


def main() -> int:
    """Play the parts that the flags select."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer members and seeds, under 50 s")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--members", type=int, default=0)
    parser.add_argument("--only", default="", choices=("", *PARTS))
    flags = parser.parse_args()
    size = QUICK if flags.quick else FULL
    played = Played(replace(size, seeds=flags.seeds or size.seeds, members=flags.members or size.members))
    for name, play in PARTS.items():
        if flags.only in ("", name):
            play(played)
    return report("swim", played.rows if flags.json else [], played.goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
