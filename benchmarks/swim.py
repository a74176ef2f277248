"""SWIM: how soon a death is noticed, what it costs a member, and what hostile members can do.

Bare cores on the simulator's engine (`_swarm`), the lan preset, links of 10 to 80 ms: everything is in
virtual time, so that a loaded machine changes no figure. In full 20 seeds of 1,000 members; with `--quick`
fewer of fewer. A crash is suspected when any member does, and dead for each other when that one says so.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from _figures import Goal, arguments, leave, report
from _swarm import LINKS, LOSSY, Swarm

from crypto.facts import Fact
from gossip.member import MemberDown, MemberSuspected, Profile, Status
from gossip.messages import AliveBody, DeadBody, Gossip, SuspectBody, sign_body
from gossip.settings import Settings
from gossip.swim import PROTOCOL
from sim.seeds import HashSigner

LAN = Settings()
WITHOUT_LIFEGUARD = replace(
    LAN, suspicion_max_multiplier=1.0, confirmations=0, health_max=0, stall_seconds=0.99
)
SETTLED_SECONDS = 5.0


@dataclass(frozen=True)
class Size:
    """How much is played."""

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
    """Crashes one after another: first suspicions, and verdicts at all others."""
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


def traffic(size: Size, seed: int, loss: bool) -> dict[str, Any]:
    """Nobody comes and nobody goes."""
    swarm = Swarm(size.members, LAN, LOSSY if loss else LINKS, seed)
    swarm.run(SETTLED_SECONDS)
    before = swarm.sent_bytes()
    swarm.run(size.watched_seconds)
    return {
        "bytes_per_second": swarm.rate(before, size.watched_seconds),
        "false_deaths": swarm.false_deaths(),
        "node_hours": size.members * size.watched_seconds / 3600,
    }


def news(size: Size, seed: int) -> float:
    """Seconds until all know of a new profile, at 10 % loss."""
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


def freezes(size: Size, seed: int, settings: Settings) -> int:
    """False deaths of members that were never frozen; 5 % of all are frozen at a time, for 2 to 10 s."""
    swarm = Swarm(size.members, settings, LOSSY, seed)
    swarm.run(SETTLED_SECONDS)
    rng, frozen = Random(seed), range(max(2, size.members // 20))
    for _ in range(int(size.hostile_seconds // 6)):
        for number in frozen:
            swarm.engine.freeze(swarm.peers[number], swarm.now + rng.random(), rng.uniform(2.0, 10.0))
        swarm.run(6.0)
    sick = {swarm.peers[number] for number in frozen}
    return sum(event.peer not in sick for _, _, event in swarm.of(MemberDown))


def one_way(size: Size, seed: int) -> int:
    """False deaths where one of the two ways between 10 % of all pairs is blocked."""
    swarm = Swarm(size.members, LAN, LINKS, seed)
    rng = Random(seed)
    for one in swarm.peers:
        for other in rng.sample(swarm.peers, size.members // 20):
            if other != one:
                swarm.links.block(one, other)
    swarm.run(size.watched_seconds)
    return swarm.false_deaths()


def healed(size: Size, seed: int) -> float:
    """Seconds after a split of 60 s until everybody lists everybody as live again."""
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
    """Liars tell random members, ten times a second each, that others are suspect and dead: in the present
    incarnation, an old one and one to come; and replay, forge and jump incarnations of their own."""
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
    if rng.random() < 0.1:  # one that is not signed by its author ends what is read of a message
        forged = lies[0]
        lies.append(Fact(bytes(victim), forged.body, forged.signature))
    return tuple(lies)


def _tell(swarm: Swarm, liar: int, receiver: Any, lies: tuple[Fact, ...]) -> None:
    swarm.engine.command(swarm.peers[liar], lambda _core, _now: [(receiver, Gossip(lies))], protocol=PROTOCOL)


def play(size: Size) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Everything; the rows and the goals."""
    seeds = range(1, size.seeds + 1)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []

    def note(what: str, **figures: Any) -> None:
        rows.append({"what": what, "members": size.members, "seeds": size.seeds, **figures})
        print(rows[-1], file=sys.stderr)

    falsely, hours = 0, 0.0
    for loss in (False, True):
        name = "10 % loss" if loss else "no loss"
        played = [detection(size, seed, loss) for seed in seeds]
        suspected = [value for each in played for value in each["suspected"]]
        dead = [value for each in played for value in each["dead"]]
        mean, p99 = sum(suspected) / len(suspected), quantile(suspected, 0.99)
        note(f"crashes, {name}", crashes=len(suspected), mean=mean, p99=p99,
             dead_p50=quantile(dead, 0.5), dead_max=max(dead))  # fmt: skip
        goals += [
            Goal(f"suspected, mean intervals, {name}", mean, "<=", 2.2),
            Goal(f"suspected, p99 intervals, {name}", p99, "<=", 6.0),
            Goal(f"dead at others, p50 seconds, {name}", quantile(dead, 0.5), "<=", 20.0),
            Goal(f"dead at others, longest seconds, {name}", max(dead), "<=", 80.0),
        ]
        idle = [traffic(size, seed, loss) for seed in seeds]
        rate = max(each["bytes_per_second"] for each in idle)
        falsely += sum(each["false_deaths"] for each in (*played, *idle)) if loss else 0
        hours += sum(each["node_hours"] for each in idle) if loss else 0.0
        note(f"traffic, {name}", bytes_per_node_second=rate)
        goals.append(Goal(f"bytes a second and member, {name}", rate, "<=", 3_000.0 if loss else 2_000.0))
    note("false deaths, 10 % loss", deaths=falsely, node_hours=hours)
    goals.append(Goal("false deaths at 10 % loss", falsely, "<=", 0))
    spread = [news(size, seed) for seed in seeds]
    note("news to all, 10 % loss", longest_seconds=max(spread), mean_seconds=sum(spread) / len(spread))
    goals.append(Goal("news to all, longest seconds, 10 % loss", max(spread), "<=", 2.5))
    few = range(1, max(2, size.seeds // 5) + 1)
    on = sum(freezes(size, seed, LAN) for seed in few)
    off = sum(freezes(size, seed, WITHOUT_LIFEGUARD) for seed in few)
    note("5 % frozen for 2-10 s", deaths_with_lifeguard=on, deaths_without=off)
    goals.append(Goal("false deaths with Lifeguard, share of those without", on / max(off, 1), "<=", 0.02))
    each: tuple[tuple[str, Callable[[Size, int], float], float], ...] = (
        ("false deaths, 10 % of pairs one way", one_way, 0),
        ("seconds until views are whole after a split of 60 s", healed, 30.0),
    )
    for name, run, bound in each:
        worst = max(run(size, seed) for seed in few)
        note(name, worst=worst)
        goals.append(Goal(name, worst, "<=", bound))
    for name, liars in (("one liar", 1), ("5 % liars", size.members // 20)):
        lied = [hostile(size, seed, liars) for seed in few]
        cost = max(row["cost"] for row in lied)
        deaths, moved = sum(row["deaths"] for row in lied), sum(row["moved"] for row in lied)
        note(name, deaths=deaths, moved=moved, cost=cost)
        goals += [
            Goal(f"honest members dead or moved, {name}", deaths + moved, "<=", 0),
            Goal(f"cost to others as a multiple of idle, {name}", cost, "<=", 2.0),
        ]
    return rows, goals


def main() -> int:
    """Play what the flags ask for."""
    flags = arguments(__doc__ or "")
    rows, goals = play(QUICK if flags.quick else FULL)
    return report("swim", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
