"""A stage on a machine whose owner computes too: its own choice of threads compared with the best fixed
setting.

The stage is a whole small GPT with forward, backward and an optimizer's step. It runs in processes that are
set up like a stage's (`node.stages.sandbox.environment`, niceness and all), with the stage's executor. One
process chooses its threads as the node's stages do (`node.stages.threads`). The others have a fixed number of
threads that wait for each other asleep (passive) or spinning (active). All load in parallel; then they take
turns, and the others pause between two steps. At first no other process, then one, then two others compute
all the time at niceness 0. Step times count from one second after the beginning of a turn; a turn with fewer
than two steps counts with its whole time.

The niceness stays that of a stage, because the owner's work comes first by promise, not by a setting to tune.
The figure with niceness 0 is shown for comparison.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

from node.stages.sandbox import NICE, environment

ROOT = Path(__file__).parents[1]
SHARE_GOAL = 0.85
TURN_SECONDS, TURN_SECONDS_QUICK = 8.0, 3.0
SETTLING_SECONDS = 1.0
START_SECONDS_MAX, STEP_SECONDS_MAX = 120.0, 30.0
BUSY = (0, 1, 2)
LAYERS, HEADS, WIDTH, WINDOW, VOCABULARY = 4, 4, 64, 64, 128
BATCH, MICROBATCH = 32, 8
BURN = "while True: pass"
WARM_STEPS = 3


@dataclass(frozen=True)
class Setting:
    """The settings of a stage's process; with 0 threads, the stage chooses their number itself."""

    name: str
    threads: int
    policy: str = "PASSIVE"
    niceness: int = NICE

    def command(self) -> list[str]:
        """Return the command of the process: this file, run as a stage."""
        return [sys.executable, __file__, "--stage", str(self.threads), str(self.niceness)]

    def environment(self) -> dict[str, str]:
        """Return a stage's environment, except for the wait policy."""
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
    """Run `count` processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Computer:
    """A stage's process that computes in its turns."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._process = subprocess.Popen(
            setting.command(), env=setting.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._lines = b""
        self._out = self._process.stdout.fileno()

    def wait(self) -> None:
        """Wait until the process has loaded everything and computed a few steps."""
        self._until(b"ready", START_SECONDS_MAX)

    def turn(self, seconds: float) -> float:
        """Let the process compute for this long; return the steps per second."""
        begun = time.monotonic()
        self._say(b"go\n")
        ended: list[float] = []
        while (left := begun + seconds - time.monotonic()) > 0:
            ended += [float(line) for line in self._read(left)]
        self._say(b"stop\n")
        self._until(b"stopped", STEP_SECONDS_MAX)
        ended = [at for at in ended if at > begun + SETTLING_SECONDS]
        if len(ended) < 2:
            return len(ended) / (seconds - SETTLING_SECONDS)
        return (len(ended) - 1) / (ended[-1] - ended[0])

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _say(self, word: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word)
        self._process.stdin.flush()

    def _until(self, word: bytes, seconds: float) -> None:
        until = time.monotonic() + seconds
        while word not in self._read(until - time.monotonic()):
            if time.monotonic() > until:
                raise RuntimeError(f"{self.setting.name}: not {word.decode()} within {seconds:g} s")

    def _read(self, seconds: float) -> list[bytes]:
        """Return the complete lines that arrive within this many seconds."""
        if not select.select([self._out], [], [], max(0.0, seconds))[0]:
            return []
        data = os.read(self._out, 1 << 16)
        if not data:
            raise RuntimeError(f"{self.setting.name}: the process ended")
        *lines, self._lines = (self._lines + data).split(b"\n")
        return lines


def stage(threads: int, niceness: int) -> None:
    """Run as a stage's process: compute steps and print when each was done, until ended."""
    import numpy as np
    import torch

    from node.stages.threads import ThreadChooser, adaptive, candidates
    from partition.capture import capture
    from partition.capture.models.gpt import GPT, GPTConfiguration, next_token_loss
    from partition.codecs.codec import pack, typed
    from partition.execute import StageExecutor, prepare_process, set_threads
    from partition.execute.admit import admit
    from partition.model.cut import cut
    from partition.stage import Apply, Forward, OptimizerSettings, Reply, Request, StageSpecification
    from partition.stage_layout import arena_bytes
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
        if step < WARM_STEPS:
            continue
        if step > WARM_STEPS:
            print(time.monotonic(), flush=True)
        # Not through `sys.stdin`, which may have buffered a line that `select` would not see.
        if step == WARM_STEPS or select.select([0], [], [], 0)[0]:
            print("ready" if step == WARM_STEPS else "stopped", flush=True)
            if step > WARM_STEPS:
                os.read(0, 16)
            if not os.read(0, 16):
                return


def main() -> int:
    flags = arguments(__doc__ or "")
    seconds = TURN_SECONDS_QUICK if flags.quick else TURN_SECONDS
    settings = [CHOSEN, *FIXED[:2]] if flags.quick else [CHOSEN, *FIXED, POLITE_NOT]
    rates: dict[str, list[float]] = {setting.name: [] for setting in settings}
    with ExitStack() as stack:
        computers = [Computer(setting) for setting in settings]
        for computer in computers:
            stack.callback(computer.close)
        for computer in computers:
            computer.wait()
        for count in BUSY:
            with busy(count):
                for computer in computers:
                    rates[computer.setting.name].append(computer.turn(seconds))
    rows: list[dict[str, Any]] = [
        {"setting": name}
        | {f"steps a second, {count} busy": round(rate, 2) for count, rate in zip(BUSY, values, strict=True)}
        for name, values in rates.items()
    ]
    fixed = [rates[setting.name] for setting in FIXED if setting.name in rates]
    goals = []
    for place, count in enumerate(BUSY):
        best = max(values[place] for values in fixed)
        share = rates[CHOSEN.name][place] / max(best, 1e-9)
        goals.append(
            Goal(
                f"{count} other busy processes, steps relative to the best fixed setting",
                share,
                ">=",
                SHARE_GOAL,
            )
        )
    return report("busy", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stage"]:
        stage(int(sys.argv[2]), int(sys.argv[3]))
    else:
        leave(main())
