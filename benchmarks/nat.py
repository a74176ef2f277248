"""Bulk and probes through a relay, beside a direct connection: sites of 100 Mbit/s behind real NATs.

    python benchmarks/nat.py [--json] [--quick]

A laboratory of network namespaces (`tests.lab.nat`). A node behind a home router sends to one with a public
address, which it dials, and to one behind a symmetric router, through a relay with a public address.
"""

import json
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
PROBE_SECONDS_MAX = 0.05
OPENED_SECONDS_MAX = 2.0


class Program:
    """One node on a machine, and what it says."""

    def __init__(self, lab: Internet, name: str, *words: str) -> None:
        program = ["ip", "netns", "exec", name, python(), NODE, *words]
        self._process = subprocess.Popen(
            [*lab.enter, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        document: dict[str, Any] = json.loads(self._process.stdout.readline())
        return document

    def close(self) -> None:
        self._process.communicate(timeout=20)


def figures(seconds: float) -> dict[str, dict[str, Any]]:
    """What the guest found, directly and through the relay."""
    sites = [named("public", "relay", rate=RATE), named("home", "guest", rate=RATE)]
    sites.append(named("symmetric", "hidden", rate=RATE))
    with internet(sites) as lab, ExitStack() as stack:

        def begin(name: str, *words: str) -> dict[str, Any]:
            program = Program(lab, name, *words)
            stack.callback(program.close)
            return program.said()

        (there, *_) = begin("relay", "relay")["addresses"]
        (circuit,) = begin("hidden", "hidden", there)["addresses"]
        direct = begin("guest", "guest", str(seconds), there)
        return {"direct": direct, "relayed": begin("guest", "guest", str(seconds), circuit)}


def main() -> None:
    flags = arguments("Bulk and probes through a relay of 100 Mbit/s, beside a direct connection.")
    found = figures(4.0 if flags.quick else 15.0)
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
    share = found["relayed"]["bytes_per_second"] / found["direct"]["bytes_per_second"]
    goals = [
        Goal("bulk through a relay, share of a direct connection", share, ">=", RELAYED_MIN),
        Goal(
            "probe beside bulk through a relay, p95 seconds",
            found["relayed"]["probe_p95_seconds"],
            "<=",
            PROBE_SECONDS_MAX,
        ),
        Goal(
            "a stream through a relay, seconds", found["relayed"]["opened_seconds"], "<=", OPENED_SECONDS_MAX
        ),
    ]
    leave(report("nat", rows, goals, as_json=flags.json))


if __name__ == "__main__":
    main()
