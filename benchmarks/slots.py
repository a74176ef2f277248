"""How much a second busy slot slows down the first: operators are measured in one process, then in several in
parallel.

    python benchmarks/slots.py [--slots 2] [--times 4]      half a minute each time

A node with `[offer] slots` measures itself in the same way at its start (`node.services.calibration`), so
that plans use the rate that a slot has while the others are busy. The slots share the cores. Even with one
core for each, they compete for memory bandwidth, caches and clocks.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from _figures import leave, report

from node.services.calibration import CalibrationSettings, CalibrationWish, MeasuringProcesses, MeasuringTurn
from tests.slowdown import slowdown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="two seconds a measurement")
    parser.add_argument("--slots", type=int, nargs="+", default=[2])
    parser.add_argument(
        "--times", type=int, default=4, help=("how often to measure, alone and with the others in turn")
    )
    options = parser.parse_args()
    seconds = 2.0 if options.quick else CalibrationSettings().measure_seconds
    cores = psutil.cpu_count() or 1
    rows: list[dict[str, Any]] = []
    for slots in options.slots:
        threads = max(1, cores // slots)
        found = [
            MeasuringProcesses().measure_now(
                CalibrationWish("cpu", "float32", threads, count), seconds, MeasuringTurn()
            )
            for count in (1, slots) * options.times
        ]
        measured = [each for each in found if each is not None]
        if len(measured) < len(found):
            raise SystemExit("torch cannot compute on this machine")
        for one, other in zip(measured[::2], measured[1::2], strict=True):
            rows.append(
                {
                    "slots": slots,
                    "threads": threads,
                    "alone_gflops": round(one.flops_per_second / 1e9, 1),
                    "beside_gflops": round(other.flops_per_second / 1e9, 1),
                    "share_permille": other.share_permille,
                    "slowdown": round(slowdown(one, other), 3),
                }
            )
    for slots in options.slots:
        found_slower = [row["slowdown"] for row in rows if row["slots"] == slots]
        rows.append({"slots": slots, "median_slowdown": round(median(found_slower), 3)})
    return report("slots", rows, [], as_json=options.json)


if __name__ == "__main__":
    leave(main())
