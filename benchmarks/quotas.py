"""Measures the planned split on three nodes with CPU quotas in the ratio 1:2:4, and compares it with an even
split and with the planner's own prediction.

The nodes are processes in their own control groups (cpu.cfs_quota_us or cpu.max), so this needs a machine
that allows such groups; on others it prints a message and measures nothing. Uncalibrated nodes get an even
split, because each advertises its processor's burst speed, ignoring the quota. Steps are real training of a
small GPT on text, each stage in a separate process, over loopback. With `--link` the link between the two
fastest nodes carries 20 Mbit/s each way, shaped in the nodes' own streams.
"""

import argparse
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

import psutil
from _figures import Goal, arguments, leave, report

from crypto.identity import parse_peer
from node.cli import client
from partition.plan.rates import decode_calibration

ROOT = Path(__file__).parents[1]
QUOTAS = (0.15, 0.3, 0.6)
"""CPU cores per node, 1:2:4. Their sum leaves a two-core machine some CPU time for other work."""
PERIOD_MICROSECONDS = 100_000
SHARES = 8_192
"""The CPU weight: high, so that each node really gets its quota even if the machine is busy."""
STEPS, STEPS_QUICK = 12, 8
STEPS_IGNORED = 3
"""Number of steps at the start that do not count, because they load libraries."""
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
"""The quotas from step THROTTLED_AT on: the fastest node has only a third of its quota."""
THROTTLED_AT, THROTTLED_STEPS = 6, 36
REGAINED_GOAL = 0.9
PREDICTED_GOAL = 0.9
SLOW_LINK_BYTES = 2_500_000
LINKS_SECONDS_MAX = 180.0
MODEL = (
    "gpt",
    "--sample",
    "64",
    "--classes",
    "256",
    "--set",
    "layers=12",
    "--set",
    "width=128",
    "--set",
    "heads=4",
)
"""The run's model, as arguments of `node plan`."""
PLAN = ("--batch", "32", "--microbatch", "2", "--stages", "3", "--replicas", "1")


class Groups:
    """Control groups with quotas, version 1 or 2. Raises OSError if they cannot be made."""

    def __init__(self) -> None:
        first = Path("/sys/fs/cgroup/cpu")
        self._is_old = (first / "cpu.cfs_quota_us").exists() or (first / "cpu.shares").exists()
        self._base = first if self._is_old else Path("/sys/fs/cgroup")
        self._made: list[Path] = []

    def make(self, name: str, cores: float) -> Path:
        """Make a group with this many cores."""
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
        """Change a group's quota."""
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
    """Three nodes, each in its own group."""

    def __init__(
        self,
        folder: Path,
        groups: Groups,
        *,
        calibrated: bool,
        quotas: tuple[float, ...] = QUOTAS,
        shaped: bool = False,
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
                "PEERLOOM_SHAPED": str(folder / f"shaped-{name}.json"),
            }
            program = [str(ROOT / "benchmarks" / "_shaped_node.py")] if shaped else ["-m", "node"]
            command = [
                sys.executable, *program, "--data-dir", str(folder / name), "--listen", "127.0.0.1:0",
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
        if shaped:
            ids = {name: parse_peer(self.ask(name, "status")["peer"]).hex() for name in "bc"}
            for name, other in (("b", "c"), ("c", "b")):
                (folder / f"shaped-{name}.json").write_text(json.dumps({ids[other]: SLOW_LINK_BYTES}))

    def ask(self, name: str, *command: str) -> Any:
        """Return the output of a client command as a document; None if the node does not answer yet."""
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
        """Wait until every node has calibrated and the others know the result."""
        until = time.monotonic() + CALIBRATED_SECONDS_MAX
        waiting = sorted(self.quotas)
        while waiting and time.monotonic() < until:
            waiting = [name for name in waiting if not self._has_measured(name)]
            time.sleep(2.0)
        if waiting:
            raise RuntimeError(f"not calibrated in time: {waiting}")
        time.sleep(5.0)  # time for gossip

    def linked(self) -> dict[str, float]:
        """Wait until the requester knows all links; return Mbit/s by names."""
        until = time.monotonic() + LINKS_SECONDS_MAX
        names = {self.ask(name, "status")["peer"]: name for name in self.quotas}
        while time.monotonic() < until:
            rows = self.command("c", "measurements")["links"]
            # Some of these links may still be estimates; it takes several gossip rounds until every node's
            # own measurements have arrived.
            time.sleep(5.0)
            if (
                len(rows) == len(names) * (len(names) - 1)
                and time.monotonic() > until - LINKS_SECONDS_MAX + 40
            ):
                break
        return {
            f"{names[row['sender']]}{names[row['receiver']]}": round(row["bytes_per_second"] / 125_000)
            for row in rows
        }

    def command(self, name: str, command: str) -> Any:
        """Return a node's answer to a client's command."""
        return client.ask(self._folder / name, command)

    def predicted(self) -> dict[str, Any]:
        """Return the prediction of `node plan` for the run on the present nodes."""
        file = self._folder / "model.peerloom"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-m", "node", "model", "capture", *MODEL, "--no-proof", "--out", str(file)],
            capture_output=True, cwd=ROOT, check=True, env=environment,
        )  # fmt: skip
        found = self.ask("c", "plan", str(file), *PLAN)
        assert found is not None, "no plan"
        return dict(found)

    def requesting(self) -> float:
        """Return the additional CPU time per micro-batch, in core milliseconds, that the plan budgets for the
        requester compared with another member."""
        known = self.command("c", "measurements")["calibrations"]
        found = decode_calibration(bytes.fromhex(known[self.ask("c", "status")["peer"]]))
        return round((found.as_requester().node.call - found.node.call) / 1e9, 2)

    def cpu_seconds(self) -> dict[str, tuple[float, float]]:
        """Return the CPU time of each node's own process, and of its stage's process."""
        found = {}
        for name, process in zip(self.quotas, self._running, strict=True):
            node = psutil.Process(process.pid)
            stages = [child for child in node.children(recursive=True) if _is_stage(child)]
            found[name] = _seconds(node), sum(map(_seconds, stages))
        return found

    def _has_measured(self, name: str) -> bool:
        kept = (self._folder / "cache" / name / "peerloom").glob("*")
        return any(file.suffix == "" and file.is_file() for file in kept)

    def train(
        self, steps: int, on_step: Callable[[int], None] | None = None
    ) -> tuple[list[float], list[dict[str, Any]]]:
        """Train; return the seconds of each step, and the events of plans. `on_step` is called with each
        step."""
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


def _held(plan: dict[str, Any], names: dict[str, str]) -> list[list[Any]]:
    """Return, for each stage, its nodes, its first layer, and the end of its layers."""
    stages = zip(plan["stages"], plan["layers"], strict=True)
    return [[*(names.get(peer, peer) for peer in peers), *layers] for peers, layers in stages]


def _is_stage(process: psutil.Process) -> bool:
    try:
        return "node.stages.process" in process.cmdline()
    except psutil.Error:
        return False  # the process has just ended


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _instant(at: Any) -> float:
    if isinstance(at, int | float):
        return float(at)
    from datetime import datetime

    return datetime.fromisoformat(str(at)).timestamp()


@contextlib.contextmanager
def nodes(
    groups: Groups, *, calibrated: bool, quotas: tuple[float, ...] = QUOTAS, shaped: bool = False
) -> Iterator[Nodes]:
    """Yield three nodes."""
    folder = Path(tempfile.mkdtemp(prefix="peerloom-quotas-"))
    made: Nodes | None = None
    try:
        made = Nodes(folder, groups, calibrated=calibrated, quotas=quotas, shaped=shaped)
        yield made
    finally:
        if made is not None:
            made.close()
        shutil.rmtree(folder, ignore_errors=True)


def measured(groups: Groups, steps: int, *, calibrated: bool, shaped: bool = False) -> dict[str, Any]:
    """Measure one run; return its row for the report."""
    with nodes(groups, calibrated=calibrated, shaped=shaped) as three:
        links, predicted, requesting = {}, None, 0.0
        if calibrated:
            three.calibrated()
            links = three.linked()
        rates = {
            name: round(three.ask(name, "status")["capacity"]["flops_per_second"] / 1e9, 2)
            for name in three.quotas
        }
        if calibrated:
            predicted, requesting = three.predicted(), three.requesting()
        marks: list[dict[str, tuple[float, float]]] = []

        def on_step(step: int) -> None:
            if step in (STEPS_IGNORED, steps - 1):
                marks.append(three.cpu_seconds())

        names = {three.ask(name, "status")["peer"]: name for name in three.quotas}
        seconds, plans = three.train(steps, on_step)
    steady = statistics.median(seconds[STEPS_IGNORED:])
    row: dict[str, Any] = {
        "split": "planned" if calibrated else "even (uncalibrated)",
        "GFLOP/s": rates,
        "layers": _held(plans[0], names) if plans else None,
        "seconds per step": round(steady, 3),
        "samples per second": round(32 / steady, 2),
    }
    if len(marks) == 2:
        count = 16 * (steps - 1 - STEPS_IGNORED)
        for place, whose in enumerate(("node process", "stage process")):
            row[f"{whose}: ms per micro-batch"] = {
                name: round(1000 * (marks[1][name][place] - marks[0][name][place]) / count, 2)
                for name in marks[0]
            }
    if predicted is not None:
        row["Mbit/s"] = links
        row["predicted"] = round(predicted["samples_per_second"], 2)
        # Converted to time on a full core, like the two measured rows above.
        row["predicted ms per micro-batch"] = {
            peer: round(1000 * stage["seconds"] * QUOTAS["abc".index(peer)], 2)
            for stage in predicted["stages"]
            for peer in stage["peers"]
        }
        row["predicted ms per micro-batch for feeding and committing"] = requesting
        row["predicted layers"] = [
            [*stage["peers"], stage["first_layer"], stage["last_layer"] + 1] for stage in predicted["stages"]
        ]
    return row


def moved(groups: Groups, *, shaped: bool) -> dict[str, Any]:
    """Measure a run in which one node slows down: step times before, directly after, and after replanning."""
    with nodes(groups, calibrated=True, shaped=shaped) as three:
        three.calibrated()
        if shaped:
            three.linked()

        def on_step(step: int) -> None:
            if step == THROTTLED_AT:
                for (name, group), cores in zip(three.groups.items(), THROTTLED, strict=True):
                    three.quotas[name] = cores
                    groups.change(group, cores)

        names = {three.ask(name, "status")["peer"]: name for name in three.quotas}
        seconds, plans = three.train(THROTTLED_STEPS, on_step)
    held = [_held(plan, names) for plan in plans]
    return {
        "throttled": "in mid-run",
        "seconds per step before": round(statistics.median(seconds[STEPS_IGNORED : THROTTLED_AT - 1]), 3),
        "directly after": round(statistics.median(seconds[THROTTLED_AT + 1 : THROTTLED_AT + 4]), 3),
        "after replanning": round(statistics.median(seconds[-8:]), 3),
        "longest pause": round(max(seconds), 1),
        "layers": held,
        "nodes that keep their stage": sum(
            first[0] == last[0] for first, last in zip(held[0], held[-1], strict=True)
        ),
    }


def anew(groups: Groups, *, shaped: bool) -> dict[str, Any]:
    """Measure a run with the THROTTLED quotas from the start: an upper bound for what replanning can
    recover."""
    with nodes(groups, calibrated=True, quotas=THROTTLED, shaped=shaped) as three:
        three.calibrated()
        if shaped:
            three.linked()
        names = {three.ask(name, "status")["peer"]: name for name in three.quotas}
        seconds, plans = three.train(STEPS)
    return {
        "throttled": "from the beginning",
        "seconds per step": round(statistics.median(seconds[STEPS_IGNORED:]), 3),
        "layers": _held(plans[0], names),
    }


def throttled(groups: Groups, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Slow one node down in mid-run, and compare with a run that had those quotas from the start (the upper
    bound)."""
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    if not options.anew:
        rows.append(moved(groups, shaped=options.link))
        goals.append(Goal("nodes that keep their stage", rows[0]["nodes that keep their stage"], ">=", 3))
    if not options.moved:
        rows.append(anew(groups, shaped=options.link))
    if len(rows) == 2:
        share = rows[1]["seconds per step"] / rows[0]["after replanning"]
        goals.append(
            Goal("throughput after replanning / throughput of a fresh plan", share, ">=", REGAINED_GOAL)
        )
    return rows, goals


def main() -> int:
    options = arguments(
        "Nodes with CPU quotas: the planned split compared with an even one.",
        throttle="instead: one node gets a third of its quota in mid-run",
        link="the link between the two fastest nodes carries 20 Mbit/s",
        planned="measure only the planned split",
        moved="with --throttle: only the run in which a node slows down",
        anew="with --throttle: only the reference run, throttled from the start",
    )
    steps = STEPS_QUICK if options.quick else STEPS
    groups = Groups()
    try:
        try:
            groups.make("trial", 1.0)
        except OSError as error:
            return report(
                "quotas",
                [{"skipped": (f"this machine allows no control groups: {error}")}],
                [],
                as_json=options.json,
            )
        if options.throttle:
            rows, goals = throttled(groups, options)
            return report("quotas", rows, goals, as_json=options.json)
        wanted = (True,) if options.planned else (False, True)
        rows = [measured(groups, steps, calibrated=each, shaped=options.link) for each in wanted]
    finally:
        groups.close()
    planned = rows[-1]
    goals = [
        Goal(
            "samples per second, measured / predicted",
            planned["samples per second"] / planned["predicted"],
            ">=",
            PREDICTED_GOAL,
        )
    ]
    if len(rows) > 1:
        speedup = planned["samples per second"] / rows[0]["samples per second"]
        goals.append(Goal("samples per second, planned split / even split", speedup, ">=", SPEEDUP_GOAL))
    return report("quotas", rows, goals, as_json=options.json)


if __name__ == "__main__":
    leave(main())
