"""Runs the example script in three processes, kills and restarts one of them, and draws their loss curves.

`examples/pytorch_script.py` is started as a person starts it in three terminals. The third process is killed
(SIGKILL) midway, and restarted some seconds later with a different seed: it takes over the state of the
others. The output becomes `docs/pytorch-script.svg`. The loss is that on unseen digits.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from math import log10
from pathlib import Path
from typing import Any

from _figures import Goal, arguments, leave, report

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pytorch-script.svg"
STEPS, STEPS_QUICK = 1_200, 600
PAUSE_SECONDS = 0.08
"""Pause between steps: long enough that a process with torch has started well before the others are done."""
LINES_BEFORE_DEATH, AWAY_SECONDS = 6, 3.0
END_SECONDS_MAX = 200.0
LINE = re.compile(r"step +(\d+)  loss ([\d.]+)  accuracy ([\d.]+)")
NAMES = ("first", "second", "third, killed", "third, started again")
COLOURS = ("#06c", "#0a7", "#c40", "#a6c")
Point = tuple[float, int, float, float]
"""Seconds since the start, step, loss, accuracy."""


class Script:
    """One process of the example, and its output."""

    def __init__(self, folder: Path, name: str, join: str, steps: int, seed: int, begun: float) -> None:
        command = [sys.executable, "-u", "examples/pytorch_script.py", "--no-lan", "--listen", "127.0.0.1:0"]
        command += ["--data-dir", str(folder / name), "--steps", str(steps), "--pause", str(PAUSE_SECONDS)]
        command += ["--seed", str(seed), *(["--join", join] if join else [])]
        self.points: list[Point] = []
        self.address = ""
        self.is_up = threading.Event()
        self._lines: list[str] = []
        self._begun = begun
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if not self.address:
                self.address = line.strip()
                self.is_up.set()
            elif (found := LINE.search(line)) is not None:
                at = time.monotonic() - self._begun
                self.points.append((at, int(found[1]), float(found[2]), float(found[3])))
        self.is_up.set()

    @property
    def step(self) -> int:
        return self.points[-1][1] if self.points else 0

    @property
    def told(self) -> str:
        """Return the process's output, for an error message."""
        return "".join(self._lines[-12:])

    def wait_for(self, lines: int) -> None:
        """Wait until the process has printed this many lines about its training."""
        until = time.monotonic() + END_SECONDS_MAX
        while len(self.points) < lines:
            assert self.process.poll() is None, self.told
            assert time.monotonic() < until, self.told
            time.sleep(0.05)

    def end(self) -> int:
        """Wait for the end of the process; return its exit code."""
        code = self.process.wait(END_SECONDS_MAX)
        self._reader.join(5)
        return code


def play(folder: Path, steps: int) -> list[Script]:
    """Start three processes, kill the third, restart it; return the output of all four."""
    begun = time.monotonic()
    scripts = [Script(folder, "first", "", steps, 1, begun)]
    try:
        assert scripts[0].is_up.wait(60), "the first process did not start"
        address = scripts[0].address
        for number, name in enumerate(("second", "third"), 2):
            scripts.append(Script(folder, name, address, steps, number, begun))
        scripts[2].wait_for(LINES_BEFORE_DEATH)
        scripts[2].process.send_signal(signal.SIGKILL)
        scripts[2].end()
        time.sleep(AWAY_SECONDS)
        scripts.append(Script(folder, "third", address, steps, 4, begun))
        for script in (scripts[0], scripts[1], scripts[3]):
            assert script.end() == 0, script.told
    finally:
        for script in scripts:
            script.process.kill()
            script.process.wait()
    return scripts


def curves(found: dict[str, list[Point]]) -> str:
    """Draw the loss on unseen digits by seconds since the first line, as SVG: one line per process, with a
    logarithmic axis."""
    first = min(point[0] for points in found.values() for point in points)
    last = max(point[0] for points in found.values() for point in points) - first
    low, high = -0.7, 0.5

    def place(seconds: float, loss: float) -> tuple[float, float]:
        height = (log10(max(loss, 1e-9)) - low) / (high - low)
        return 60 + 480 * seconds / last, 290 - 240 * min(max(height, 0.0), 1.0)

    body = ["<text x='60' y='24'>examples/pytorch_script.py in three processes: loss on unseen digits</text>"]
    for loss in (0.2, 0.5, 1.0, 2.0):
        _, y = place(0, loss)
        body.append(f"<line x1='60' y1='{y:.1f}' x2='540' y2='{y:.1f}' stroke='#ddd'/>")
        body.append(f"<text x='54' y='{y + 4:.1f}' text-anchor='end'>{loss:g}</text>")
    for second in range(0, int(last) + 1, 10):
        x, _ = place(second, 1)
        body.append(f"<text x='{x:.1f}' y='308' text-anchor='middle'>{second} s</text>")
    for number, ((name, points), colour) in enumerate(zip(found.items(), COLOURS, strict=True)):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(at - first, loss) for at, _, loss, _ in points))
        body.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2'/>")
        x, y = place(points[-1][0] - first, points[-1][2])
        if "killed" in name:
            body.append(f"<line x1='{x:.1f}' y1='{y - 18:.1f}' x2='{x:.1f}' y2='{y:.1f}' stroke='{colour}'/>")
            body.append(f"<text x='{x + 4:.1f}' y='{y - 12:.1f}' fill='{colour}'>killed</text>")
        y = 60 + 20 * number
        body.append(f"<line x1='560' y1='{y}' x2='580' y2='{y}' stroke='{colour}' stroke-width='3'/>")
        body.append(f"<text x='586' y='{y + 4}'>{name}</text>")
    head = "<svg xmlns='http://www.w3.org/2000/svg' width='740' height='320'"
    return (
        f"{head} font-family='sans-serif' font-size='11'><rect width='100%' height='100%' fill='white'/>"
        + ("".join(body) + "</svg>\n")
    )


def main() -> int:
    flags = arguments("Three training scripts, one of which is killed and restarted.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scripts = play(Path(folder), STEPS_QUICK if flags.quick else STEPS)
    found = {name: script.points for name, script in zip(NAMES, scripts, strict=True)}
    rows: list[dict[str, Any]] = [
        {
            "script": name,
            "first step told": points[0][1],
            "loss then": points[0][2],
            "last step": points[-1][1],
            "loss": points[-1][2],
            "accuracy": points[-1][3],
        }
        for name, points in found.items()
    ]
    if not flags.quick:
        PICTURE.write_text(curves(found))
    fresh, again = found["first"][0], found["third, started again"][0]
    goals = [
        Goal("first step after the restart minus the step of its death", again[1] - scripts[2].step, ">=", 1),
        Goal("first loss after the restart / that of a fresh process", again[2] / fresh[2], "<=", 0.5),
        Goal(
            "final accuracy of the worst process",
            min(row["accuracy"] for row in rows if row is not rows[2]),
            ">=",
            0.88,
        ),
    ]
    return report("scripts", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
