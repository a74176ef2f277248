"""The example script runs in several processes; one is killed and restarted, and catches up.

It runs in `make soak`, with PEERLOOM_SCRIPTS=3: each process loads torch and scikit-learn, and takes half a
minute.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.source import ROOT

pytest.importorskip("sklearn")
STEPS = 100_000
SCRIPTS = int(os.environ.get("PEERLOOM_SCRIPTS", "0"))


class Script:
    """One process of the example."""

    def __init__(self, folder: Path, name: str, *join: str, steps: int = STEPS) -> None:
        command = [sys.executable, "examples/pytorch_script.py", "--no-lan", "--listen", "127.0.0.1:0"]
        command += ["--data-dir", str(folder / name), "--steps", str(steps), "--pause", "0.02"]
        command += ["--seed", str(ord(name))]
        if join:
            command += ["--join", *join]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.lines: list[str] = []

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def read_until(self, pattern: str) -> re.Match[str]:
        """Return the next line that matches this pattern."""
        for line in self.out:
            self.lines.append(line)
            if (match := re.search(pattern, line)) is not None:
                return match
        raise AssertionError(f"no {pattern} in {''.join(self.lines)}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def ended(script: Script) -> Iterator[Script]:
    """Yield the process, and end it with the test."""
    try:
        yield script
    finally:
        script.process.kill()
        script.process.wait()
        script.out.close()


@pytest.mark.skipif(not SCRIPTS, reason="PEERLOOM_SCRIPTS=3")
def test_scripts_train_together_and_a_killed_one_catches_up(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ended(Script(tmp_path, "a")))
        address = first.read_until(r"(\S+:\d+)")[1]
        names = "bcdefgh"[: SCRIPTS - 1]
        others = [stack.enter_context(ended(Script(tmp_path, name, address))) for name in names]
        last = others.pop()
        last.read_until(r"rounds [1-9]")
        last.kill()
        reached = int(first.read_until(r"step +(\d+)")[1])
        again = stack.enter_context(ended(Script(tmp_path, names[-1], address)))
        found = again.read_until(r"step +(\d+)  loss \S+  accuracy ([\d.]+)")
        assert int(found[1]) > reached, "the script does not start at the others' step"
        assert float(found[2]) > 0.8, "the script does not reach the others' accuracy"
        for script in (first, *others):
            script.read_until(r"rounds [2-9]")
            assert script.process.poll() is None
