"""Tokens per second of two nodes that train a GPT together, compared with one process and torch.distributed.

Three nodes run in separate processes on 127.0.0.1: one requests the run and feeds it, and two hold a stage
each and compute with one thread. Their rivals take turns with them, with the same model, micro-batches and
optimizer: one process with two threads, as plain torch and as one stage; and the same two stages in two
processes, one thread each, that exchange tensors over gloo in a minimal loop (1F1B). The nodes have the
default preset `lan`. With `local`, which detects a death within a second for demonstrations, the probes of
three nodes alone take 4 % of a core.

The nodes run twice: `fresh`, in their first seconds and uncalibrated, as a user has them; and calibrated.
Both must meet the goals.

The ideal time of a pipeline is the time of its slower stage for a micro-batch, measured while the other stage
computes too, multiplied by the number of micro-batches plus one for each further stage. The remaining time is
the step's end and everything between processes.

`--quick` trains a smaller model for fewer steps. The code is the same, but the goals only detect breakage,
because a step's cost other than arithmetic weighs five times as much there.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

import _rivals
from _figures import Goal, arguments, leave, report
from _rivals import STAGES

from node.cli.capture import capture_to
from node.cli.client import ask, request
from node.content.datasets import TEXT_VALUES
from node.demo.processes import SwarmProcesses
from node.protocols.run_file import RunFile, TrainTable
from partition.capture.models.gpt import GPTConfiguration

FULL: dict[str, int] = {"layers": 8, "heads": 8, "width": 512, "window": 128, "samples": 2}
"""The full model, with 25.4 million parameters; a micro-batch is two lines of 128 bytes."""
QUICK: dict[str, int] = {"layers": 4, "heads": 4, "width": 256, "window": 128, "samples": 2}
MICROBATCHES = 16
UNCOUNTED = 2
"""Number of steps at the start that do not count, while the process warms up."""
FEEDER, HOLDERS = "a", ("b", "c")
TEXT_WINDOWS = 80
GOALS = {"one process": 0.97, "ideal": 0.93, "gloo": 0.95}
QUICK_GOALS = {"one process": 0.6, "ideal": 0.5, "gloo": 0.6}
OTHERS_SHARE_MAX = 0.04
"""Maximum share of one core that other programs may use during a step. With more, both stages wait for the
disturbed one."""
QUIET_STEPS_WANTED = 3
ATTEMPTS_MAX = 2
QUIET_SECONDS_MAX = 120.0
"""How long to wait in total for other programs to leave the machine idle."""
MEETING_SECONDS_MAX = 30.0
CALIBRATING_SECONDS_MAX = 180.0
"""Time limit for calibration. The nodes calibrate one after the other, each for some processor seconds; on a
busy machine this takes minutes."""
_RUN = """\
model = "gpt"
data = "text"

[options]
layers = {layers}
heads = {heads}
width = {width}

[train]
steps = {steps}
batch = {batch}
microbatch = {samples}
window = {window}
optimizer = "adamw"
learning_rate = 0.0003
weight_decay = 0.01

[plan]
stages = {stages}
replicas = 1
"""


@dataclass
class Steps:
    """The seconds of steps, and the share of a core that other programs used during each."""

    seconds: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def quiet(self) -> list[float]:
        """Return the steps during which other programs used little, or all steps if there are none."""
        pairs = zip(self.seconds, self.others, strict=True)
        return [second for second, others in pairs if others <= OTHERS_SHARE_MAX] or self.seconds

    def are_quiet_at(self, number: int) -> bool:
        return self.others[number] <= OTHERS_SHARE_MAX

    @property
    def are_quiet(self) -> bool:
        return sum(others <= OTHERS_SHARE_MAX for others in self.others) >= QUIET_STEPS_WANTED


class Meter:
    """Detects disturbed steps, because a step of two processes waits for the slower one."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._own = psutil.Process()
        self.reset()

    def reset(self) -> None:
        self._at, self._busy, self._mine = time.perf_counter(), _machine_seconds(), self._mine_seconds()

    def read(self, steps: Steps) -> None:
        """Record a step that began at the previous reading."""
        at, busy, mine = self._at, self._busy, self._mine
        now = time.perf_counter()
        self.reset()
        steps.seconds.append(now - at)
        steps.others.append(max(0.0, self._busy - busy - (self._mine - mine)) / (now - at))

    def wait(self) -> None:
        """Wait until other programs leave the machine idle, within the allowed time."""
        looked = Steps()
        while self._patience_seconds > 0 and not (looked.others and looked.are_quiet_at(-1)):
            self.reset()
            time.sleep(1.0)
            self.read(looked)
            self._patience_seconds -= looked.seconds[-1]

    def _mine_seconds(self) -> float:
        return sum(_processor_seconds(each) for each in (self._own, *self._own.children(recursive=True)))


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


@dataclass
class Ran:
    """One run: its counted steps, the processor seconds per step of each process, and the layers of each
    node."""

    steps: Steps = field(default_factory=Steps)
    processor: dict[str, float] = field(default_factory=dict)
    ranges: _rivals.Ranges = ()


class Nodes:
    """Three nodes of one swarm that have no earlier measurements."""

    def __init__(self, folder: Path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(folder)  # without the stored calibrations of other nodes
        self._swarm = SwarmProcesses(folder, "benchmark", time.sleep, preset="lan")
        names = (FEEDER, *HOLDERS)
        try:
            self._swarm.launch(names)
            join = None
            for name in names:
                join = self._swarm.start(name, join).address
            until = time.monotonic() + MEETING_SECONDS_MAX
            while any(self._swarm.status(name)["members_alive"] < len(names) - 1 for name in names):
                assert time.monotonic() < until, "the nodes did not connect"
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def calibrated(self) -> None:
        """Wait until each node's calibration is known to another node."""
        until = time.monotonic() + CALIBRATING_SECONDS_MAX
        while self._calibrated(FEEDER) | self._calibrated(HOLDERS[0]) != {FEEDER, *HOLDERS}:
            assert time.monotonic() < until, "the nodes did not calibrate"
            time.sleep(0.5)

    def _calibrated(self, teller: str) -> set[str]:
        """Return the other nodes that this node knows to be calibrated."""
        peers = ask(self._swarm.nodes[teller].data_dir, "peers")["peers"]
        return {
            row["name"] for row in peers if "calibrated" in (row["standing"] or {}).get("capabilities", ())
        }

    def train(self, run: dict[str, str], steps: int, meter: Meter) -> Ran:
        """Let the feeder request a run, and watch its steps. Raises AssertionError if the run failed."""
        found = Ran()
        before: dict[str, float] = {}
        for reply in request(self._swarm.nodes[FEEDER].data_dir, "train", run):
            event = reply.get("event", {"kind": ""})
            if event["kind"] == "RunPlanned":
                found.ranges = tuple((first, end) for first, end in event["layers"])
                assert all(len(peers) == 1 for peers in event["stages"]), event["stages"]
            elif event["kind"] == "StepCommitted":
                if event["step"] >= UNCOUNTED:
                    meter.read(found.steps)
                if event["step"] == UNCOUNTED - 1:
                    before = self._processor()
                    meter.reset()
                elif event["step"] == steps - 1:
                    after, counted = self._processor(), steps - UNCOUNTED
                    found.processor = {
                        name: (after[name] - before[name]) / counted for name in before if name in after
                    }
            elif event["kind"] == "RunEnded":
                assert event["outcome"] == "done", event["detail"]
        assert len(found.steps.seconds) == steps - UNCOUNTED
        return found

    def _processor(self) -> dict[str, float]:
        """Return the processor seconds so far of every node, and of its stage's process."""
        found = {}
        for name, node in self._swarm.nodes.items():
            process = psutil.Process(node.process.pid)
            found[f"node {name}"] = _processor_seconds(process)
            for child in process.children():
                # includes a spare process that waits for a stage, which does nothing
                key = f"stage of {name}"
                found[key] = found.get(key, 0.0) + _processor_seconds(child)
        return found

    def close(self) -> None:
        self._swarm.close()


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def prepared(folder: Path, shape: dict[str, int], steps: int) -> tuple[_rivals.Task, dict[str, str]]:
    """Return the task for the rivals, and the same task for the node: generated text, RUN.toml, the captured
    graph."""
    window, samples = shape["window"], shape["samples"]
    letters = bytes(range(97, 123)) + b"     \n"
    text = bytes(
        letters[(number * number + number // 7) % len(letters)] for number in range(TEXT_WINDOWS * window + 1)
    )
    (folder / "text").write_bytes(text)
    run_text = _RUN.format(**shape, steps=steps, batch=MICROBATCHES * samples, stages=STAGES)
    path, graph = folder / "RUN.toml", folder / "model.peerloom"
    path.write_text(run_text)
    options: dict[str, Any] = {name: shape[name] for name in ("layers", "heads", "width")}
    table = TrainTable(window=window, optimizer="adamw", learning_rate=0.0003, weight_decay=0.01)
    run_file = RunFile("gpt", "text", options, table)
    capture_to(graph, run_file, path, path.name)
    task = _rivals.Task(
        GPTConfiguration(TEXT_VALUES, window, **options),
        graph.read_bytes(),
        run_file.optimizer,
        samples,
        window,
        MICROBATCHES,
    )
    run = {"text": run_text, "path": str(path), "name": path.name, "graph": str(graph)}
    return task, run


class Contest:
    """The nodes and their rivals, in turns."""

    def __init__(self, folder: Path, shape: dict[str, int], steps: int, *, is_patient: bool = True) -> None:
        self._attempts = ATTEMPTS_MAX if is_patient else 1
        self.task, self._run = prepared(folder, shape, steps + UNCOUNTED)
        self._steps = steps
        self._folder = folder
        self._meter = Meter(QUIET_SECONDS_MAX if is_patient else 0.0)
        self.seconds: dict[str, list[float]] = {}
        self.rows: list[dict[str, Any]] = []
        self._rivals: dict[str, _rivals.Rival] = {}
        self._nodes = Nodes(folder / "nodes")

    def round(self) -> None:
        """Run all contestants once. Disturbed runs are repeated a few times."""
        is_first = not self.rows
        found: dict[str, Steps] = {}
        row: dict[str, Any] = {}
        if is_first:
            found["fresh"] = self._train().steps
            self._nodes.calibrated()
        ran = self._train()
        found["nodes"] = ran.steps
        if not self._rivals:
            self._start(ran.ranges)
        for name in ("eager", "executor", "gloo"):
            found[name] = self._steps_of(name)
        row["layers"] = "+".join(str(end - first) for first, end in ran.ranges)
        for name, steps in found.items():
            self.seconds.setdefault(name, []).extend(steps.quiet)
            row[f"{name}_step_seconds"] = round(statistics.median(steps.quiet), 3)
            row[f"{name}_others"] = round(statistics.median(steps.others), 3)
        ideal = self._ideal()
        self.seconds.setdefault("ideal", []).append(ideal)
        row["ideal_step_seconds"] = round(ideal, 3)
        row |= {f"{name}, processor seconds a step": round(each, 3) for name, each in ran.processor.items()}
        self.rows.append(row)

    def _train(self) -> Ran:
        """Run the nodes; repeat a disturbed run."""
        for _ in range(self._attempts):
            self._meter.wait()
            ran = self._nodes.train(self._run, self._steps + UNCOUNTED, self._meter)
            if ran.steps.are_quiet:
                break
        return ran

    def close(self) -> None:
        for rival in self._rivals.values():
            rival.close()
        self._nodes.close()

    def _start(self, ranges: _rivals.Ranges) -> None:
        store = str(self._folder / "gloo")
        self._rivals["eager"] = _rivals.Rival(_rivals.eager, 1, self.task, 2)
        self._rivals["executor"] = _rivals.Rival(_rivals.executor, 1, self.task, 2)
        self._rivals["gloo"] = _rivals.Rival(_rivals.stage, STAGES, self.task, ranges, store)
        for name, rival in self._rivals.items():
            rival.seconds(name, 1)

    def _steps_of(self, name: str) -> Steps:
        rival = self._rivals[name]
        for _ in range(self._attempts):
            self._meter.wait()
            found = Steps()
            rival.seconds(name, 1)
            self._meter.reset()
            for _ in range(self._steps):
                rival.seconds(name, 1)
                self._meter.read(found)
            if found.are_quiet:
                break
        return found

    def _ideal(self) -> float:
        """Return the ideal seconds of a step, from the time of each stage's micro-batches while the other
        stage computes as well."""
        best = []
        for _ in range(self._attempts):
            self._meter.wait()
            found = Steps()
            self._meter.reset()
            each = self._rivals["gloo"].seconds("alone", MICROBATCHES)
            self._meter.read(found)
            # Only the first half counts, because the faster stage ends first and leaves the other one alone.
            best.append(max(statistics.median(seconds[: MICROBATCHES // 2]) for seconds in each))
            if found.are_quiet_at(0):
                return best[-1] * (MICROBATCHES + STAGES - 1)
        return min(best) * (MICROBATCHES + STAGES - 1)


def main() -> int:
    """Measure in turns, and report the ratios of the medians."""
    flags = arguments(__doc__ or "")
    shape, rounds, steps = (QUICK, 1, 2) if flags.quick else (FULL, 3, 6)
    with tempfile.TemporaryDirectory(prefix="peerloom-pipeline-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "nodes").mkdir()
        contest = Contest(folder, shape, steps, is_patient=not flags.quick)
        try:
            for number in range(rounds):
                print(f"round {number + 1} of {rounds}", file=sys.stderr)
                contest.round()
        finally:
            contest.close()
    middle = {name: statistics.median(seconds) for name, seconds in contest.seconds.items()}
    whole: dict[str, Any] = {
        f"{name}_tokens_per_second": round(contest.task.tokens / each) for name, each in middle.items()
    }
    whole["model"] = f"gpt {json.dumps(shape)}, {MICROBATCHES} micro-batches, float32, adamw" + (
        ", --quick: a smaller model and fewer steps" if flags.quick else ""
    )
    wanted = QUICK_GOALS if flags.quick else GOALS
    goals = []
    for nodes, said in (("nodes", ""), ("fresh", ", fresh nodes")):
        ratios = {name: seconds / middle[nodes] for name, seconds in middle.items()}
        one_process = min(ratios["eager"], ratios["executor"])
        goals += [
            Goal(
                f"tokens/s, relative to the faster single process{said}",
                one_process,
                ">=",
                wanted["one process"],
            ),
            Goal(
                f"tokens/s, relative to the ideal pipeline of its stages{said}",
                ratios["ideal"],
                ">=",
                wanted["ideal"],
            ),
            Goal(
                f"tokens/s, relative to the same stages over gloo{said}", ratios["gloo"], ">=", wanted["gloo"]
            ),
        ]
    return report("pipeline", [*contest.rows, whole], goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
