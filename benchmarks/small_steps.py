"""Steps per second of a small run compared with a plain PyTorch loop: one node, two replicas, and a larger
model.

The plain loop trains the same model with the same settings in this process, with one thread. Its batch is in
as many micro-batches as the run's (`plain`), or in one piece (`whole batch`). Nodes and loop take turns:
while the loop computes, the nodes and their stages are stopped with SIGSTOP, so both see the same machine.
Turns are so short that stopped nodes do not suspect each other when they continue. A node has one core; its
event loop may run on a second core while its stage computes. `node_cpu_milliseconds` and
`stage_cpu_milliseconds` are the processor time per step, summed over all nodes. Checkpoints are on, except in
a case that turns them off to measure their cost.

Not measured here: two machines on a network.
"""

import math
import os
import signal
import statistics
import sys
import time
from bisect import bisect_left, bisect_right
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import survival
import torch
from _figures import Goal, arguments, leave, report
from torch.nn.utils import clip_grad_norm_

from node.cli.signals import Stopped
from node.errors import EXIT_FORCED
from partition.capture.models.gpt import GPT, GPTConfiguration, next_token_loss

PLACE_SECONDS_MAX = 180.0
WARM_STEPS = 12
CALIBRATES_SECONDS, CALIBRATED_SECONDS_MAX = 10.0, 60.0
"""Time after a node's start by which it has begun to calibrate, and the time limit for calibration."""
STILL_SECONDS_MAX = 2.5
"""Maximum time for which all nodes stand still, during the turns of the others. The preset `host` tolerates a
longer pause."""
TURNS, TURNS_QUICK, UNCOUNTED_TURNS = 40, 14, 2
"""The first turns do not count, because they load libraries and the nodes resume from longer pauses."""
RUN_FILE = """\
model = "gpt"
data = "text.txt"

[options]
layers = {layers}
heads = {heads}
width = {width}

[train]
steps = 100000
batch = {batch}
microbatch = {microbatch}
window = {window}
optimizer = "adamw"
learning_rate = 0.003
schedule = "cosine"
warmup_steps = 20
weight_decay = 0.01
clip_norm = 1.0
seed = 1

[plan]
stages = 1
replicas = {replicas}
checkpoint_every = {every}
"""


@dataclass(frozen=True)
class Case:
    """One run. `replicas` is also the number of nodes; `every` is the interval of checkpoints, 0 for none."""

    replicas: int = 1
    layers: int = 4
    heads: int = 4
    width: int = 64
    batch: int = 32
    microbatch: int = 8
    window: int = 64
    every: int = 10

    @property
    def name(self) -> str:
        return f"{self.replicas} of {self.layers} layers, width {self.width}"


LARGER = Case(layers=8, heads=8, width=512, batch=8, microbatch=4)
ONE_GOAL, TWO_GOAL, LARGER_GOAL, CHECKPOINTS_GOAL = 0.9, 1.05, 1.15, 0.02


class PlainLoop:
    """The same training in plain PyTorch, on one thread."""

    def __init__(self, case: Case, text: bytes, *, whole: bool) -> None:
        torch.manual_seed(1)
        self._case = case
        self._size = case.batch if whole else case.microbatch
        self._model = GPT(GPTConfiguration(256, case.window, case.layers, case.heads, case.width))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.003, weight_decay=0.01)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: (1 + math.cos(math.pi * step / 100_000)) / 2
        )
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())

    def step(self) -> float:
        case = self._case
        starts = torch.randint(len(self._tokens) - case.window - 1, (case.batch,)).tolist()
        self._optimizer.zero_grad()
        total = 0.0
        for first in range(0, case.batch, self._size):
            rows = starts[first : first + self._size]
            inputs = torch.stack([self._tokens[at : at + case.window] for at in rows])
            labels = torch.stack([self._tokens[at + 1 : at + 1 + case.window] for at in rows])
            loss, _ = next_token_loss(self._model(inputs), labels)
            torch.autograd.backward(loss / (case.batch * case.window))
            total += loss.item()
        clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._scheduler.step()
        return total

    def run(self, seconds: float) -> tuple[int, float]:
        """Return the number of steps, and their seconds."""
        begun, cpu, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begun < seconds:
            self.step()
            count += 1
        self.cpu_seconds += time.process_time() - cpu
        return count, time.perf_counter() - begun

    cpu_seconds = 0.0


class Machines(survival.Nodes):
    """The nodes of one run, which are stopped during the turns of others."""

    def begin(self, case: Case, folder: Path) -> None:
        """Begin to train; return after some steps."""
        self._groups: list[int] = []
        self._turns: list[tuple[float, float]] = []
        self.refill(case.replicas)
        survival.capture(folder, RUN_FILE.format(**vars(case)))
        watch = survival.Play(self, survival.Shape(0, 1, 1, 0), folder)._submit()
        self._watch = watch
        if not self.hear(lambda: len(watch.events("StepCommitted")) > WARM_STEPS, PLACE_SECONDS_MAX):
            raise survival.Stalled(f"{case.name}: no steps")
        self._groups = [self._processes.nodes[name].process.pid for name in self.living]
        begun = time.monotonic()
        while (lasted := time.monotonic() - begun) < CALIBRATED_SECONDS_MAX:
            if lasted > CALIBRATES_SECONDS and not self._calibrates():
                break
            time.sleep(0.5)

    def stop(self) -> None:
        """Stop the nodes; from now on they run only in their turns."""
        self._signal(signal.SIGSTOP)

    def run(self, seconds: float) -> tuple[int, float]:
        """Let the nodes compute; return for how many seconds. `steps` counts their steps later."""
        before = self._cpu_seconds()
        begun = time.time()
        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        self._signal(signal.SIGSTOP)
        ended = time.time()
        after = self._cpu_seconds()
        self.node_seconds += after[0] - before[0]
        self.stage_seconds += after[1] - before[1]
        self._turns.append((begun, ended))
        return 0, ended - begun

    def steps(self) -> list[int]:
        """Return how many steps were committed in each turn so far."""
        # The last messages are still in the pipes of this process.
        self.hear(lambda: False, 0.5)
        times = sorted(row["at_seconds"] for row in self._watch.events("StepCommitted"))
        return [bisect_right(times, ended) - bisect_left(times, begun) for begun, ended in self._turns]

    node_seconds = stage_seconds = 0.0

    def _calibrates(self) -> bool:
        """Return whether a node is still calibrating, for which it has a process."""
        modules = {"partition.calibrate", "node.calibration.own_work"}
        return any(modules & set(_command(child)) for child in self._children())

    def _children(self) -> list[psutil.Process]:
        return [child for group in self._groups for child in psutil.Process(group).children(recursive=True)]

    def _cpu_seconds(self) -> tuple[float, float]:
        """Return the processor time so far, of the nodes and of their stages."""
        node = stage = 0.0
        for group in self._groups:
            times = psutil.Process(group).cpu_times()
            node += times.user + times.system
        for child in self._children():
            if "node.stages.process" in _command(child):
                times = child.cpu_times()
                stage += times.user + times.system
        return node, stage

    def _signal(self, number: int) -> None:
        for group in self._groups:
            os.killpg(group, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        super().close()

    def count(self, kind: str) -> int:
        """Return how many events of this kind the requester published."""
        return len(self._watch.events(kind))


def _command(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if the process has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def compare(cases: dict[str, Case], turns: int) -> list[dict[str, Any]]:
    """Run plain loops and nodes in turns; return a row for each."""
    first = next(iter(cases.values()))
    text = "".join(f"{n} and {n} are {2 * n}, {n} times {n} is {n * n}.\n" for n in range(600))
    takers: dict[str, Any] = {
        "plain": PlainLoop(first, text.encode(), whole=False),
        "plain, whole batch": PlainLoop(first, text.encode(), whole=True),
    }
    with ExitStack() as stack:
        for name, case in cases.items():
            nodes, folder = stack.enter_context(survival.swarm(Machines))
            (folder / "text.txt").write_text(text)
            nodes.begin(case, folder)
            takers[name] = nodes
        for taker in takers.values():
            if isinstance(taker, Machines):
                taker.stop()
        found: dict[str, list[tuple[int, float]]] = {name: [] for name in takers}
        seconds = STILL_SECONDS_MAX / (len(takers) - 1)
        for turn in range(UNCOUNTED_TURNS + turns):
            for name, taker in takers.items():
                row = taker.run(seconds)
                if turn >= UNCOUNTED_TURNS:
                    found[name].append(row)
                else:
                    taker.cpu_seconds = taker.node_seconds = taker.stage_seconds = 0.0
        for name, taker in takers.items():
            if isinstance(taker, Machines):
                steps = taker.steps()[UNCOUNTED_TURNS:]
                found[name] = [(count, took) for count, (_, took) in zip(steps, found[name], strict=True)]
        return [_row(name, found, takers) for name in takers]


def _row(name: str, found: dict[str, list[tuple[int, float]]], takers: dict[str, Any]) -> dict[str, Any]:
    rates = {key: [count / seconds for count, seconds in rows] for key, rows in found.items()}
    steps = sum(count for count, _ in found[name])
    row: dict[str, Any] = {"case": name, "steps_per_second": round(statistics.fmean(rates[name]), 2)}
    for plain in ("plain", "plain, whole batch"):
        if name != plain:
            # Computed over all turns, because a step that is interrupted by the end of a turn counts in the
            # next turn.
            ratio = statistics.fmean(rates[name]) / statistics.fmean(rates[plain])
            row[f"of_{plain}"] = round(ratio, 3)
    taker = takers[name]
    if isinstance(taker, Machines):
        steps = max(1, steps)
        row["node_cpu_milliseconds"] = round(1e3 * taker.node_seconds / steps, 2)
        row["stage_cpu_milliseconds"] = round(1e3 * taker.stage_seconds / steps, 2)
        row["checkpoints"], row["plans"] = taker.count("CheckpointKept"), taker.count("RunPlanned")
    else:
        row["cpu_milliseconds"] = round(1e3 * taker.cpu_seconds / max(1, steps), 2)
        row["parameters"] = taker.parameters
    return row


def main() -> int:
    """Compare and report."""
    flags = arguments(
        __doc__ or "",
        larger="measure only one node with 25M parameters",
        two="two replicas only",
        one="one node only",
    )
    turns = TURNS_QUICK if flags.quick else TURNS
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    every = not (flags.larger or flags.two or flags.one)
    try:
        if flags.one or every:
            rows += compare({"one node": Case()}, turns)
            goals.append(
                Goal(
                    "one node, steps per second relative to a plain loop",
                    rows[-1]["of_plain"],
                    ">=",
                    ONE_GOAL,
                )
            )
        if flags.two or every:
            with_, without = "two replicas", "two replicas, no checkpoints"
            rows += compare({with_: Case(replicas=2), without: Case(replicas=2, every=0)}, turns)
            rates = {row["case"]: row["steps_per_second"] for row in rows}
            goals.append(
                Goal(
                    "two replicas, steps per second relative to a plain loop",
                    rows[-2]["of_plain"],
                    ">=",
                    TWO_GOAL,
                )
            )
            cost = 1 - rates[with_] / rates[without]
            goals.append(Goal("share of time that checkpoints take", cost, "<=", CHECKPOINTS_GOAL))
        if flags.larger or (every and not flags.quick):
            rows += compare({"one node, 25M": LARGER}, turns)
            goals.append(
                Goal(
                    "one node, 25M, time relative to a plain loop",
                    1 / rows[-1]["of_plain"],
                    "<=",
                    LARGER_GOAL,
                )
            )
    except Stopped:
        return EXIT_FORCED
    return report("small_steps", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
