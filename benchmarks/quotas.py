"""Three real nodes with CPU quotas of 1 : 2 : 4: the planned split beside an even one.

The nodes are processes in control groups of their own (cpu.cfs_quota_us or cpu.max), so this needs a machine
where such groups can be made; elsewhere it says so and measures nothing. The even split is what nodes get
that do not calibrate: each claims what its processor does in a moment without a pause. Steps are real
training of a small GPT on text, each stage in a process of its own, over loopback.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

ROOT = Path(__file__).parents[1]
QUOTAS = (0.15, 0.3, 0.6)
"""Cores: 1 : 2 : 4, and together no more than two cores have beside others."""
PERIOD_MICROSECONDS = 100_000
SHARES = 8_192
"""Weight beside the machine's other work, so that a quota is what a node gets and not the most it may get."""
STEPS, STEPS_QUICK = 12, 8
STEPS_IGNORED = 3
"""At the beginning libraries are loaded."""
RUN = """
model = "gpt"
data = "text.txt"
options = {{ layers = 12, width = 128, heads = 4 }}
[train]
steps = {steps}
batch = 32
microbatch = 2
window = 64
[plan]
stages = 3
replicas = 1
checkpoint_every = 0
"""
START_SECONDS_MAX = 240.0
CALIBRATED_SECONDS_MAX = 240.0
SPEEDUP_GOAL = 2.0
THROTTLED = (0.15, 0.3, 0.2)
"""The fastest node gets a third of its time from THROTTLED_AT on."""
THROTTLED_AT, THROTTLED_STEPS = 6, 36
REGAINED_GOAL = 0.9


class Groups:
    """Control groups with quotas, version 1 or 2. Raises OSError where none can be made."""

    def __init__(self) -> None:
        first = Path("/sys/fs/cgroup/cpu")
        self._is_old = (first / "cpu.cfs_quota_us").exists() or (first / "cpu.shares").exists()
        self._base = first if self._is_old else Path("/sys/fs/cgroup")
        self._made: list[Path] = []

    def make(self, name: str, cores: float) -> Path:
        """A group that gets so many cores."""
        folder = self._base / f"peerloom-{os.getpid()}-{name}"
        folder.mkdir()
        self._made.append(folder)
        quota = int(cores * PERIOD_MICROSECONDS)
        if self._is_old:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            (folder / "cpu.shares").write_text(str(SHARES))
        else:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
            (folder / "cpu.weight").write_text("1000")
        return folder

    def change(self, folder: Path, cores: float) -> None:
        """Give a group another quota."""
        quota = int(cores * PERIOD_MICROSECONDS)
        if self._is_old:
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")

    def close(self) -> None:
        """Remove the groups, once their processes have ended."""
        for folder in self._made:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.2)


class Nodes:
    """Three nodes, each in its group."""

    def __init__(
        self, folder: Path, groups: Groups, *, calibrated: bool, quotas: tuple[float, ...] = QUOTAS
    ) -> None:
        self._folder = folder
        self.groups: dict[str, Path] = {}
        self._running: list[subprocess.Popen[bytes]] = []
        self.quotas = dict(zip("abc", quotas, strict=True))
        join: list[str] = []
        for name, cores in self.quotas.items():
            group = self.groups[name] = groups.make(f"{name}-{self._folder.name}", cores)
            environment = {
                **os.environ,
                "PEERLOOM_CALIBRATE": "true" if calibrated else "false",
                "XDG_CACHE_HOME": str(folder / "cache" / name),
                "PYTHONPATH": str(ROOT),
            }
            command = [
                sys.executable, "-m", "node", "--data-dir", str(folder / name), "--listen", "127.0.0.1:0",
                "--no-lan", "--name", name, "--cores", "1", "--memory", "3GB", "--web", "off", *join,
            ]  # fmt: skip
            inside = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            with (folder / f"{name}.log").open("wb") as log:
                self._running.append(
                    subprocess.Popen(
                        ["sh", "-c", inside, "node", *command],
                        env=environment,
                        stdout=log,
                        stderr=log,
                        cwd=ROOT,
                    )
                )
            status = self._wait(name, lambda status: bool(status["addresses"]), START_SECONDS_MAX)
            join = ["--join", status["addresses"][0]]
        self._wait("c", lambda status: status["members_alive"] >= 2, START_SECONDS_MAX)

    def ask(self, name: str, *command: str) -> Any:
        """A client command's document; None where the node does not answer yet."""
        done = subprocess.run(
            [sys.executable, "-m", "node", *command, "--data-dir", str(self._folder / name), "--json"],
            capture_output=True, cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else None

    def _wait(self, name: str, ready: Any, seconds: float) -> Any:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            status = self.ask(name, "status")
            if status is not None and ready(status):
                return status
            time.sleep(1.0)
        raise RuntimeError(f"node {name} is not ready: {(self._folder / f'{name}.log').read_text()[-800:]}")

    def calibrated(self) -> None:
        """Wait until every node has measured itself and told the others."""
        until = time.monotonic() + CALIBRATED_SECONDS_MAX
        waiting = sorted(self.quotas)
        while waiting and time.monotonic() < until:
            waiting = [name for name in waiting if not self._has_measured(name)]
            time.sleep(2.0)
        if waiting:
            raise RuntimeError(f"not calibrated in time: {waiting}")
        time.sleep(5.0)  # for gossip

    def _has_measured(self, name: str) -> bool:
        kept = (self._folder / "cache" / name / "peerloom").glob("*")
        return any(file.suffix == "" and file.is_file() for file in kept)

    def train(
        self, steps: int, on_step: Callable[[int], None] | None = None
    ) -> tuple[list[float], list[dict[str, Any]]]:
        """Train; seconds of each step, and the plan's events. `on_step` hears of steps as they are done."""
        (self._folder / "run.toml").write_text(RUN.format(steps=steps))
        (self._folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2_000)
        errors = self._folder / "train.log"
        with errors.open("wb") as log, subprocess.Popen(
            [sys.executable, "-m", "node", "train", str(self._folder / "run.toml"), "--json",
             "--data-dir", str(self._folder / "c")],
            stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as done:  # fmt: skip
            assert done.stdout is not None
            events = []
            for line in done.stdout:
                events.append(json.loads(line))
                if on_step is not None and "utilisation" in events[-1]:
                    on_step(events[-1]["step"])
        if done.returncode:
            raise RuntimeError(errors.read_text()[-800:])
        steps_done = [event for event in events if "step" in event and "utilisation" in event]
        plans = [event for event in events if "layers" in event and "trainer" in event]
        times = [_instant(event["at"]) for event in steps_done]
        return [after - before for before, after in pairwise(times)], plans

    def close(self) -> None:
        """End the nodes."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            if process.poll() is None:
                process.kill()
                process.wait()


def _instant(at: Any) -> float:
    if isinstance(at, int | float):
        return float(at)
    from datetime import datetime

    return datetime.fromisoformat(str(at)).timestamp()


@contextlib.contextmanager
def nodes(groups: Groups, *, calibrated: bool, quotas: tuple[float, ...] = QUOTAS) -> Iterator[Nodes]:
    """Three nodes for a while."""
    folder = Path(tempfile.mkdtemp(prefix="peerloom-quotas-"))
    made: Nodes | None = None
    try:
        made = Nodes(folder, groups, calibrated=calibrated, quotas=quotas)
        yield made
    finally:
        if made is not None:
            made.close()
        shutil.rmtree(folder, ignore_errors=True)


def measured(groups: Groups, steps: int, *, calibrated: bool) -> dict[str, Any]:
    """A run, and what its steps took."""
    with nodes(groups, calibrated=calibrated) as three:
        if calibrated:
            three.calibrated()
        rates = {
            name: round(three.ask(name, "status")["capacity"]["flops_per_second"] / 1e9, 2)
            for name in three.quotas
        }
        seconds, plans = three.train(steps)
    steady = statistics.median(seconds[STEPS_IGNORED:])
    return {
        "split": "planned" if calibrated else "even claims",
        "GFLOP/s": rates,
        "layers": plans[0]["layers"] if plans else None,
        "seconds a step": round(steady, 3),
        "samples a second": round(32 / steady, 2),
    }


def throttled(groups: Groups) -> tuple[list[dict[str, Any]], Goal]:
    """One node gets slower in mid-run; the same quotas from the beginning are what can be regained."""
    with nodes(groups, calibrated=True) as three:
        three.calibrated()

        def on_step(step: int) -> None:
            if step == THROTTLED_AT:
                for (name, group), cores in zip(three.groups.items(), THROTTLED, strict=True):
                    three.quotas[name] = cores
                    groups.change(group, cores)

        seconds, plans = three.train(THROTTLED_STEPS, on_step)
    with nodes(groups, calibrated=True, quotas=THROTTLED) as three:
        three.calibrated()
        fresh, first = three.train(STEPS)
    before = statistics.median(seconds[STEPS_IGNORED : THROTTLED_AT - 1])
    slow = statistics.median(seconds[THROTTLED_AT + 1 : THROTTLED_AT + 4])
    after, best = statistics.median(seconds[-8:]), statistics.median(fresh[STEPS_IGNORED:])
    layers = [plan["layers"] for plan in plans]
    rows = [
        {"throttled": "before", "seconds a step": round(before, 3), "layers": layers[0]},
        {"throttled": "at once", "seconds a step": round(slow, 3), "layers": layers[0]},
        {"throttled": "after the next plans", "seconds a step": round(after, 3), "layers": layers[-1]},
        {"throttled": "planned anew", "seconds a step": round(best, 3), "layers": first[0]["layers"]},
    ]
    return rows, Goal("regained of a new plan's samples a second", best / after, ">=", REGAINED_GOAL)


def main() -> int:
    options = arguments(
        "Nodes with CPU quotas: the planned split beside an even one.",
        throttle="instead: one node gets a third of its quota in mid-run",
    )
    steps = STEPS_QUICK if options.quick else STEPS
    groups = Groups()
    try:
        try:
            groups.make("trial", 1.0)
        except OSError as error:
            return report(
                "quotas", [{"skipped": f"no control groups here: {error}"}], [], as_json=options.json
            )
        if options.throttle:
            rows, goal = throttled(groups)
            return report("quotas", rows, [goal], as_json=options.json)
        rows = [measured(groups, steps, calibrated=calibrated) for calibrated in (False, True)]
    finally:
        groups.close()
    speedup = rows[1]["samples a second"] / rows[0]["samples a second"]
    goals = [Goal("planned over even split, samples a second", speedup, ">=", SPEEDUP_GOAL)]
    return report("quotas", rows, goals, as_json=options.json)


if __name__ == "__main__":
    leave(main())
