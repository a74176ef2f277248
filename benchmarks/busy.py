"""A stage beside a busy owner: what its own choice of threads reaches of the best fixed setting.

The stage is a whole small GPT with forward, backward and an optimizer's step, in processes that are set up as
a stage's are (`node.stages.sandbox.environment`, niceness and all) and run the stage's executor. One chooses
its threads as the node's do (`node.stages.threads`); the others have a fixed number of threads that wait for
each other asleep (passive) or spinning (active). While each runs, first no, then one, then two other
processes compute all the time at niceness 0. What a step takes counts from a second after each change on.

Niceness stays what a stage has: that the owner's work comes first is a promise, not a setting to tune. What
niceness 0 would give is shown beside it.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

from node.stages.sandbox import NICE, environment

ROOT = Path(__file__).parents[1]
SHARE_GOAL = 0.85
PHASE_SECONDS, PHASE_SECONDS_QUICK = 9.0, 3.4
ROUNDS, ROUNDS_QUICK = 1, 1
SETTLING_SECONDS = 1.0
START_SECONDS_MAX = 60.0
BUSY = (0, 1, 2)
LAYERS, HEADS, WIDTH, WINDOW, VOCABULARY = 4, 4, 64, 64, 128
BATCH, MICROBATCH = 32, 8
BURN = "while True: pass"


@dataclass(frozen=True)
class Setting:
    """How a stage's process computes; 0 threads are chosen by itself."""

    name: str
    threads: int
    policy: str = "PASSIVE"
    niceness: int = NICE

    def command(self) -> list[str]:
        """The process: this file, as a stage."""
        return [sys.executable, __file__, "--stage", str(self.threads), str(self.niceness)]

    def environment(self) -> dict[str, str]:
        """As a stage's, but for the wait policy."""
        threads = self.threads or (os.cpu_count() or 1)
        given = {**os.environ, "OMP_WAIT_POLICY": self.policy}
        return environment(given, scratch="/tmp", path=str(ROOT), threads=threads)


CHOSEN = Setting("chosen by itself", 0)
FIXED = (
    Setting("1 thread", 1),
    Setting("2 threads", 2),
    Setting("2 threads, spinning", 2, "ACTIVE"),
)
POLITE_NOT = Setting("1 thread, niceness 0", 1, niceness=0)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(setting: Setting, seconds: float) -> list[float]:
    """Steps a second with 0, 1 and 2 others, one after another in the life of one process."""
    process = subprocess.Popen(
        setting.command(), env=setting.environment(), stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    found = []
    try:
        begun = time.monotonic()
        if not process.stdout.readline():
            raise RuntimeError(f"{setting.name}: the process ended")
        assert time.monotonic() - begun < START_SECONDS_MAX
        for count in BUSY:
            with busy(count):
                begun = time.monotonic()
                ended, steps = begun, []
                while ended < begun + seconds:
                    line = process.stdout.readline()
                    if not line:
                        raise RuntimeError(f"{setting.name}: the process ended")
                    ended = float(line)
                    if ended > begun + SETTLING_SECONDS:
                        steps.append(ended)
            found.append((len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 else 0.0)
    finally:
        process.kill()
        process.wait()
    return found


def stage(threads: int, niceness: int) -> None:
    """Be a stage's process: compute steps and print when each was done, until the end."""
    import numpy as np
    import torch

    from node.stages.threads import ThreadChooser, adaptive, candidates
    from partition.capture import capture
    from partition.capture.models.gpt import GPT, GPTConfiguration, next_token_loss
    from partition.codec import pack, typed
    from partition.execute import StageExecutor, prepare_process, set_threads
    from partition.execute.admit import admit
    from partition.model.cut import cut
    from partition.stage import (
        Apply,
        Forward,
        OptimizerSettings,
        Reply,
        Request,
        StageSpecification,
        arena_bytes,
    )
    from tests.zoo.equivalence import sizes_of

    os.nice(niceness)
    torch.manual_seed(0)
    model = GPT(GPTConfiguration(VOCABULARY, WINDOW, layers=LAYERS, heads=HEADS, width=WIDTH, dropout=0.0))
    ids = torch.zeros((MICROBATCH, WINDOW), dtype=torch.int64)
    captured = capture(model, (ids,), labels=(ids,), loss=next_token_loss, name="busy")
    sizes = sizes_of(captured.graph, ((ids,), (ids,)))
    (whole,) = cut(captured.graph, captured.hash, ())
    settings = OptimizerSettings(kind="adamw", learning_rate=1e-4)
    specification = StageSpecification(
        b"busy", whole, sizes, microbatches=BATCH // MICROBATCH, optimizer=settings
    )
    most = threads or (os.cpu_count() or 1)
    prepare_process(most)
    admit(specification)
    arenas = {name: memoryview(bytearray(size)) for name, size in arena_bytes(specification).items()}
    handle: Callable[[Request], Reply] = StageExecutor(specification, arenas).handle
    if not threads:
        chooser = ThreadChooser(candidates(most))
        handle = adaptive(handle, chooser, set_threads=set_threads, clock=time.perf_counter_ns)
    draw = np.random.default_rng(0)
    tokens = draw.integers(VOCABULARY, size=(MICROBATCH, WINDOW + 1))
    inputs, labels = (pack([typed(part)], "raw", sizes) for part in (tokens[:, :-1], tokens[:, 1:]))
    step = 0
    while True:
        for number in range(BATCH // MICROBATCH):
            handle(Forward(step, number, True, inputs, labels))
        handle(Apply(step, BATCH))
        step += 1
        if step > 2:
            print(time.monotonic(), flush=True)


def main() -> int:
    flags = arguments(__doc__ or "")
    rounds, seconds = (ROUNDS_QUICK, PHASE_SECONDS_QUICK) if flags.quick else (ROUNDS, PHASE_SECONDS)
    settings = [CHOSEN, *FIXED[:2]] if flags.quick else [CHOSEN, *FIXED, POLITE_NOT]
    found: dict[str, list[list[float]]] = {setting.name: [] for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            found[setting.name].append(measure(setting, seconds))
    rates = {
        name: [statistics.mean(column) for column in zip(*values, strict=True)]
        for name, values in found.items()
    }
    rows: list[dict[str, Any]] = [
        {"setting": name}
        | {f"steps a second, {count} busy": round(rate, 2) for count, rate in zip(BUSY, values, strict=True)}
        for name, values in rates.items()
    ]
    fixed = [rates[setting.name] for setting in FIXED if setting.name in rates]
    goals = []
    for place, count in enumerate(BUSY):
        best = max(values[place] for values in fixed)
        share = rates[CHOSEN.name][place] / best
        goals.append(Goal(f"{count} busy beside it, of the best fixed setting", share, ">=", SHARE_GOAL))
    return report("busy", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stage"]:
        stage(int(sys.argv[2]), int(sys.argv[3]))
    else:
        leave(main())
