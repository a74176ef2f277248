"""A node under attack: the cost of each attack, the node's growth, and the service that an honest peer gets.

First every attack runs alone, and the CPU time above idle is measured for each refused item; then ten
thousand connections are opened; then all attacks run together, while an honest peer sends requests all the
time. `--minutes` sets the duration. Victim, honest peer and attackers are processes on loopback.

With `--member` the hostile peer is a member of the swarm instead, with its own runs: it sends every message
of every protocol, while honest runs go on (`tests.hostile.member_scene`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, leave, report

from crypto.facts import IdentitySigner
from crypto.identity import Identity
from node.protocols.manifest import make_run
from node.storage.blobs import GUEST_BYTES_MAX
from node.transport.settings import TRANSPORT
from tests.hostile.attack import Attack
from tests.hostile.client import BY_CONNECTIONS, BY_PACKETS, rates_of
from tests.hostile.guests import Guests
from tests.hostile.packets import PatientPackets, RandomPackets, UnwelcomePackets
from tests.hostile.scene import Outcome, Scene, scene
from tests.hostile.visitors import DrippingVisitors, HalfVisitors, RecordedVisitors, SilentVisitors

RANDOM_GOAL_MICROSECONDS, REFUSED_GOAL_MICROSECONDS = 15.0, 100.0
GROWTH_GOAL_MIB = 50.0
MEMBER_GROWTH_GOAL_MIB = 100.0
CONNECTIONS, CONNECTIONS_PER_SECOND = 10_000, 2_000.0
COMPUTED = (UnwelcomePackets, PatientPackets, HalfVisitors, RecordedVisitors, Guests)
"""Attacks that make a node compute a handshake before it can refuse. The number of such handshakes is
bounded, but not the cost of one."""
STANDING = (SilentVisitors, DrippingVisitors)
"""Attacks whose connections stay half-open until there is no room, or until their deadline."""
STANDING_SECONDS_MIN = 2.0
"""Minimum duration of such an attack, whose first part only fills the queue of half-open connections."""

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="shorter, under 50 s")
    parser.add_argument("--minutes", type=float, default=0.5, help="how long all attacks run together")
    parser.add_argument(
        "--member", action="store_true", help="attacks by a member of the swarm instead of unknown peers"
    )
    parser.add_argument("--seed", type=int, default=1, help="of what a member says")
    return parser.parse_args()


def refused(outcome: Outcome, attacks: Sequence[type[Attack]]) -> int:
    return sum(outcome.refused.get(name, 0) for name in {name for each in attacks for name in each.counters})


def alone(played: Scene, attack: type[Attack], seconds: float, peace_share: float) -> Row:
    """Play one attack without other attacks, and without the honest peer."""
    if issubclass(attack, STANDING):
        seconds = max(seconds, STANDING_SECONDS_MIN)
    outcome = played.run(rates_of([attack]), seconds=seconds, honest=False)
    cpu_seconds = max(0.0, outcome.cpu_seconds - peace_share * outcome.seconds)
    strikes, count = outcome.strikes[attack.__name__], refused(outcome, [attack])
    if issubclass(attack, STANDING):
        # Half-open connections that remain were accepted and are not closed yet, so half of them count.
        count += min(strikes, TRANSPORT.half_open_max) // 2
    if issubclass(attack, DrippingVisitors):
        # Each byte and each connection counts, because a closed connection is opened again.
        count += strikes
    return {
        "attack": attack.__name__,
        "per_second": round(strikes / outcome.seconds, 1),
        "refused": count,
        "microseconds_each": round(1e6 * cpu_seconds / max(1, count, strikes // 2), 1),
        "core_share": round(cpu_seconds / outcome.seconds, 3),
    }


def with_honest(name: str, outcome: Outcome) -> Row:
    """Return a row with the honest peer's service during an attack."""
    return {
        "phase": name,
        "seconds": round(outcome.seconds, 1),
        "strikes": sum(outcome.strikes.values()),
        "refused": refused(outcome, (*BY_PACKETS, *BY_CONNECTIONS)),
        "core_share": round(outcome.cpu_seconds / outcome.seconds, 3),
        "highest_mib": round(outcome.highest_bytes / 2**20, 1),
        **{
            kind: f"{tally['answered']}/{tally['asked']} in {tally['tries']} tries,"
            f" slowest {tally['slowest_seconds']:.2f} s"
            for kind, tally in outcome.tallies.items()
        },
    }


def goals_of(rows: list[Row], outcomes: list[Outcome], before_bytes: int) -> list[Goal]:
    computed = {each.__name__ for each in (*BY_PACKETS, *BY_CONNECTIONS) if issubclass(each, COMPUTED)}
    cheap = {row["attack"]: row["microseconds_each"] for row in rows if row.get("attack", "") not in computed}
    random_microseconds = cheap.pop(RandomPackets.__name__)
    unanswered = sum(
        tally["asked"] - tally["answered"] for outcome in outcomes for tally in outcome.tallies.values()
    )
    highest_bytes = max(outcome.highest_bytes for outcome in outcomes)
    return [
        Goal("honest requests not answered", unanswered, "<=", 0),
        Goal("growth of memory, MiB", (highest_bytes - before_bytes) / 2**20, "<=", GROWTH_GOAL_MIB),
        Goal(
            "CPU per refused random datagram, microseconds",
            random_microseconds,
            "<=",
            RANDOM_GOAL_MICROSECONDS,
        ),
        *(
            Goal(
                f"CPU per refused item of {name}, microseconds", microseconds, "<=", REFUSED_GOAL_MICROSECONDS
            )
            for name, microseconds in cheap.items()
        ),
    ]


def by_member(flags: argparse.Namespace) -> int:
    """Play a hostile member together with honest runs."""
    # Imported here, because victims' processes import this file too, and a node should have none of torch's
    # objects to collect.
    from tests.hostile.member_scene import member_run, member_scene
    from tests.stack import is_equal, reference, simple_cnn

    expected = reference(make_run(IdentitySigner(Identity(bytes(32)), "any"), member_run()))
    with member_scene(simple_cnn(), member_run(), flags.seed) as played:
        found = played.play(60 * flags.minutes)
    wrong = sum(not is_equal(result, expected, "float64") for result in found.results)
    rows: list[Row] = [
        {
            "victim": name,
            "grown_mib": round(found.grown_bytes[name] / 2**20, 1),
            "disk_mib": round(found.disk_bytes[name] / 2**20, 1),
            "steps": found.steps[name],
            "longest_step": str(next(iter(found.longest[name]), "none worth a look")),
            "contained": sum(found.failures[name].values()),
        }
        for name in found.grown_bytes
    ]
    rows += [{"honest_run": outcome} for outcome in found.outcomes] + [{"put_off": found.put_off}]
    rows += [{"said": said, "times": times} for said, times in sorted(found.sent.items())]
    step = found.longest_step
    goals = [
        Goal("victims that ended", len(found.ended), "<=", 0),
        Goal("failures contained", sum(row.get("contained", 0) for row in rows), "<=", 0),
        Goal("longest step of an event loop, ms of CPU", 1e3 * step.cpu_seconds if step else 0.0, "<=", 50.0),
        Goal(
            "growth of memory, MiB",
            max(found.grown_bytes.values(), default=0) / 2**20,
            "<=",
            MEMBER_GROWTH_GOAL_MIB,
        ),
        Goal("disk, MiB", max(found.disk_bytes.values(), default=0) / 2**20, "<=", GUEST_BYTES_MAX / 2**20),
        Goal("honest runs that did not end well", sum(each != "done" for each in found.outcomes), "<=", 0),
        Goal("honest runs that took too long", len(found.unfinished), "<=", 0),
        Goal("wrong results", wrong, "<=", 0),
        Goal("right results", len(found.results) - wrong, ">=", 1),
    ]
    for unfinished in found.unfinished:
        print(unfinished, file=sys.stderr)
    for name, log in found.logs.items():
        print(f"{name} has logged:\n{log}", file=sys.stderr)
    return report("hostile member", rows, goals, as_json=flags.json)


def main() -> int:
    """Play peace, each attack alone, ten thousand connections, and all together; or a hostile member."""
    flags = arguments()
    if flags.member:
        return by_member(flags)
    alone_seconds = 0.7 if flags.quick else 5.0
    with scene() as played:
        peace = played.run({}, seconds=2.0, honest=False)
        played.run({}, seconds=1.0)  # the honest peer's sessions and streams do not count as growth
        before_bytes = played.figures()["rss_bytes"]
        peace_share = peace.cpu_seconds / peace.seconds
        rows = [
            alone(played, attack, alone_seconds, peace_share) for attack in (*BY_PACKETS, *BY_CONNECTIONS)
        ]
        crowd = played.run(
            {SilentVisitors.__name__: CONNECTIONS_PER_SECOND},
            seconds=1.1 * CONNECTIONS / CONNECTIONS_PER_SECOND,
        )
        everything = played.run(
            rates_of((*BY_PACKETS, *BY_CONNECTIONS)), seconds=6.0 if flags.quick else 60 * flags.minutes
        )
        after = played.run({}, seconds=1.0)
    found = [
        with_honest("connections", crowd),
        with_honest("all at once", everything),
        with_honest("after", after),
    ]
    goals = goals_of(rows, [crowd, everything, after], before_bytes)
    return report("hostile", [*rows, *found], goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
