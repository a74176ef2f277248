"""Times `status --json` and `peers --json` against an idle node, as whole processes.

They are interleaved with `python -c pass`, to separate our share of the time from the interpreter's.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _figures import Goal, arguments, leave, report

GOAL_SECONDS = 0.5


def seconds(command: list[str]) -> float:
    """Time one whole process."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> int:
    """Start a node, time the commands, and report."""
    flags = arguments(__doc__ or "")
    rounds = 9 if flags.quick else 31
    with tempfile.TemporaryDirectory() as folder:
        node = [sys.executable, "-m", "node", "--data-dir", folder, "--listen", "127.0.0.1:0", "--no-lan"]
        process = subprocess.Popen(node, stdout=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 30
            while not (Path(folder) / "control.sock").exists() and time.monotonic() < until:
                time.sleep(0.05)
            client = [sys.executable, "-m", "node"]
            cases = {
                "python -c pass": [sys.executable, "-c", "pass"],
                "status --json": [*client, "status", "--json", "--data-dir", folder],
                "peers --json": [*client, "peers", "--json", "--data-dir", folder],
            }
            times: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(rounds):
                for name, command in cases.items():
                    times[name].append(seconds(command))
        finally:
            process.terminate()
            process.wait(20)
    rows = [
        {
            "case": name,
            "median_seconds": round(statistics.median(values), 4),
            "min_seconds": round(min(values), 4),
            "max_seconds": round(max(values), 4),
        }
        for name, values in times.items()
    ]
    goals = [
        Goal(f"{name}, median seconds", statistics.median(times[name]), "<=", GOAL_SECONDS)
        for name in ("status --json", "peers --json")
    ]
    return report("client", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
