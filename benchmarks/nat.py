"""Bulk transfer and small probes through a relay, compared with a direct connection. The sites have 100
Mbit/s links and sit behind real NATs.

    python benchmarks/nat.py [--json] [--quick]

This runs in a laboratory of network namespaces (`tests.lab.nat`). A node behind a home router (the guest)
sends to two peers. It dials the first directly, at its public address. The second is behind a symmetric NAT
and is reached through a public relay. The relay's cost is read from its own process. Then two nodes behind
home routers, each 10 ms from the internet, open a circuit and punch a hole. This is repeated several times,
with new nodes each time.
"""

import json
import math
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _figures import Goal, arguments, leave, report

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.lab.nat import Internet, internet, named
from tests.lab.network import python

RATE = "100mbit"
NODE = str(Path(__file__).with_name("_nat_node.py"))
RELAYED_MIN = 0.45
DELAY_SECONDS = 0.01
"""One-way delay from a home to the rest of the internet; a round trip between two homes takes 40 ms."""
TRIES_QUICK, TRIES = 4, 20
CROWD = 8
"""Number of circuits to one peer from peers of one public network."""
CPU_SECONDS_PER_GB_MAX = 20.0
CIRCUIT_BYTES_MAX = 2**20
USABLE_TRIPS_MAX = 2.5
"""Two round trips between the peers, plus time for computation. In the first, the relay connects them and
they shake hands; in the second, they open a stream."""
STRANGER_TRIPS_MAX = 3.5
"""One more round trip between the peers, which is as long as two round trips to the relay: one to connect to
it and one for the handshake."""
PUNCHED_SECONDS_MAX = 2.0
PROBE_SECONDS_MAX = 0.05
OPENED_SECONDS_MAX = 2.0


class Program:
    """One node on a machine, and its output."""

    def __init__(self, lab: Internet, name: str, *words: str) -> None:
        program = ["ip", "netns", "exec", name, python(), NODE, *words]
        self._process = subprocess.Popen(
            [*lab.enter, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        document: dict[str, Any] = json.loads(self._process.stdout.readline())
        return document

    def asked(self) -> dict[str, Any]:
        """Send a line of input to the node, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.said()

    def close(self) -> None:
        self._process.communicate(timeout=20)


def figures(seconds: float) -> dict[str, dict[str, Any]]:
    """Return the guest's figures, direct and through the relay."""
    sites = [named("public", "relay", rate=RATE), named("home", "guest", rate=RATE)]
    sites.append(named("symmetric", "hidden", rate=RATE))
    with internet(sites) as lab, ExitStack() as stack:

        def begin(name: str, *words: str) -> tuple[Program, dict[str, Any]]:
            program = Program(lab, name, *words)
            stack.callback(program.close)
            return program, program.said()

        relay, told = begin("relay", "relay")
        there = told["addresses"][0]
        (circuit,) = begin("hidden", "hidden", there)[1]["addresses"]
        direct = begin("guest", "guest", str(seconds), there)[1]
        before = relay.asked()
        relayed = begin("guest", "guest", str(seconds), circuit)[1]
        after = relay.asked()
        begin("guest", "crowd", str(CROWD), circuit)
        crowded = relay.asked()
        carried = after["carried_bytes"] - before["carried_bytes"]
        cost = {
            "cpu_seconds_per_gb": (after["cpu_seconds"] - before["cpu_seconds"]) / carried * 1e9,
            "bytes_per_circuit": (crowded["resident_bytes"] - after["resident_bytes"])
            / (crowded["circuits"] - after["circuits"]),
        }
        return {"direct": direct, "relayed": relayed, "cost": cost}


def tries(count: int, role: str) -> list[dict[str, Any]]:
    """Set up two new nodes behind home routers `count` times, one of them with the given `role`, and return
    the figures of each try."""
    found = []
    for _ in range(count):
        sites = [named("public", "relay"), named("public", "other")]
        sites += [named("home", name, delay_seconds=DELAY_SECONDS) for name in ("guest", "hidden")]
        with internet(sites) as lab, ExitStack() as stack:
            there = []
            for name in ("relay", "other"):
                program = Program(lab, name, "relay")
                stack.callback(program.close)
                there.append(program.said()["addresses"][0])
            hidden = Program(lab, "hidden", "hidden", *there)
            stack.callback(hidden.close)
            circuit = hidden.said()["addresses"][0]
            puncher = Program(lab, "guest", role, circuit, *there)
            stack.callback(puncher.close)
            found.append(puncher.said())
    return found


def p95(ordered: list[float]) -> float:
    return ordered[max(0, math.ceil(0.95 * len(ordered)) - 1)]


def main() -> None:
    flags = arguments(
        "Bulk transfer and probes through a relay, compared with a direct connection, over 100 Mbit/s links."
    )
    found = figures(4.0 if flags.quick else 15.0)
    cost = found.pop("cost")
    count = TRIES_QUICK if flags.quick else TRIES
    met, strangers = tries(count, "puncher"), tries(count, "stranger")
    usable, usable_cold = (
        sorted(each["opened_seconds"] / each["round_trip_seconds"] for each in found_by)
        for found_by in (met, strangers)
    )
    met += strangers
    punched = sorted(each["punched_seconds"] or float("inf") for each in met)
    assert found["relayed"]["way"] == "relayed", found
    rows = [
        {
            "way": way,
            "MB/s": round(row["bytes_per_second"] / 1e6, 2),
            "probe p95 ms": round(1e3 * row["probe_p95_seconds"], 1),
            "opened ms": round(1e3 * row["opened_seconds"], 1),
        }
        for way, row in found.items()
    ]
    rows.append(
        {
            "way": "relay",
            "CPU s/GB": round(cost["cpu_seconds_per_gb"], 2),
            "KiB/circuit": round(cost["bytes_per_circuit"] / 1024),
        }
    )
    rows.append(
        {
            "way": f"hole punching, {len(met)} tries",
            "circuit, round trips": round(usable[len(usable) // 2], 1),
            "circuit without a relay connection, round trips": round(usable_cold[len(usable_cold) // 2], 1),
            "circuit ms": round(1e3 * max(each["opened_seconds"] for each in met)),
            "punched s": round(punched[len(punched) // 2], 2),
            "punched max s": round(punched[-1], 2),
        }
    )
    share = found["relayed"]["bytes_per_second"] / found["direct"]["bytes_per_second"]
    goals = [
        Goal("bulk rate through a relay, relative to a direct connection", share, ">=", RELAYED_MIN),
        Goal(
            "probe during a bulk transfer through a relay, p95 seconds",
            found["relayed"]["probe_p95_seconds"],
            "<=",
            PROBE_SECONDS_MAX,
        ),
        Goal(
            "time to open a stream through a relay, seconds",
            found["relayed"]["opened_seconds"],
            "<=",
            OPENED_SECONDS_MAX,
        ),
        Goal("CPU of a relay, seconds per GB", cost["cpu_seconds_per_gb"], "<=", CPU_SECONDS_PER_GB_MAX),
        Goal("memory of a relay, bytes per circuit", cost["bytes_per_circuit"], "<=", CIRCUIT_BYTES_MAX),
        Goal("circuit usable, median round trips", usable[len(usable) // 2], "<=", USABLE_TRIPS_MAX),
        Goal(
            "circuit usable without a relay connection, median round trips",
            usable_cold[len(usable_cold) // 2],
            "<=",
            STRANGER_TRIPS_MAX,
        ),
        Goal("punched after the first relayed byte, p95 seconds", p95(punched), "<=", PUNCHED_SECONDS_MAX),
    ]
    leave(report("nat", rows, goals, as_json=flags.json))


if __name__ == "__main__":
    main()
