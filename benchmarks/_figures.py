"""The code shared by all benchmarks: flags, the JSON output, and the exit code for a missed goal."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPERATORS = {"<=": lambda value, bound: value <= bound, ">=": lambda value, bound: value >= bound}


@dataclass(frozen=True)
class Goal:
    """A figure compared with a bound, such as ("status, median seconds", 0.3, "<=", 0.5)."""

    name: str
    value: float
    operator: str
    bound: float

    @property
    def met(self) -> bool:
        return bool(OPERATORS[self.operator](self.value, self.bound))


def arguments(description: str, numbers: Mapping[str, str] = {}, **flags: str) -> argparse.Namespace:
    """Return the parsed flags. `--json` prints one object, and `--quick` takes under 50 s. `flags` are
    additional flags with their help; `numbers` are those that accept any number of integers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, under 50 s")
    for name, told in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=told)
    for name, told in numbers.items():
        parser.add_argument(f"--{name}", type=int, nargs="*", default=[], help=told)
    return parser.parse_args()


def report(name: str, rows: list[dict[str, Any]], goals: list[Goal], *, as_json: bool) -> int:
    """Print the figures; return 1 if a goal is missed."""
    if as_json:
        document = {
            "benchmark": name,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "rows": rows,
            "goals": [
                {"name": g.name, "value": g.value, "goal": f"{g.operator} {g.bound}", "met": g.met}
                for g in goals
            ],
        }
        print(json.dumps(document))
    else:
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()))
        for g in goals:
            print(
                f"{'met   ' if g.met else 'MISSED'}  {g.name}: {g.value:.4g}, goal {g.operator} {g.bound:g}"
            )
    return 0 if all(g.met for g in goals) else 1


def leave(code: int) -> None:
    """Exit with this code."""
    sys.exit(code)
