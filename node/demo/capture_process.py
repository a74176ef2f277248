"""The demo's model, captured in a separate process while the nodes start.

Only the demo starts this process; `peerloom train` captures in its own process. The demo itself never loads
torch, so that Ctrl-C stops it immediately.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from node.errors import PeerloomError, RunFailed

CAPTURE_SECONDS_MAX = 120.0
"""Time limit for importing torch and tracing a small model. It takes some seconds, or half a minute on a busy
machine."""


class Capturing:
    """The capture process. Call `start`, then `wait`, and always `close`."""

    def __init__(self, run_file: Path, graph: Path) -> None:
        self.graph = graph
        self._run_file = run_file
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process in the background."""
        self._process = subprocess.Popen(  # noqa: S603 - our own program and arguments
            [sys.executable, "-P", "-m", __name__, str(self._run_file), str(self.graph)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, _paths()))},
            start_new_session=True,
            text=True,
        )

    def wait(self, pause: Callable[[], None]) -> dict[str, str]:
        """Wait for the process; return the arguments about the run that the node needs. Raises RunFailed, or
        what `pause` raises."""
        assert self._process is not None, "the process was not started"
        until = time.monotonic() + CAPTURE_SECONDS_MAX
        while self._process.poll() is None:
            pause()
            if time.monotonic() > until:
                raise RunFailed(f"the model was not captured within {CAPTURE_SECONDS_MAX:.0f} s")
        if self._process.returncode:
            assert self._process.stderr is not None
            said = self._process.stderr.read().strip().splitlines() or ["nothing was said"]
            raise RunFailed(f"the model could not be captured: {said[-1]}")
        return {
            "text": self._run_file.read_text(),
            "path": str(self._run_file.absolute()),
            "name": str(self._run_file),
            "graph": str(self.graph.absolute()),
        }

    def close(self) -> None:
        """End the process if it still runs. Raises nothing. May be called more than once, and from a signal
        handler."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)


def _paths() -> tuple[str | None, ...]:
    return str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")


def main(run_file: str, graph: str) -> None:
    """Capture the model that `run_file` names into the file `graph`."""
    from node import toml
    from node.cli.capture import capture_to
    from node.protocols.run_file import RunFile

    path = Path(run_file)
    try:
        capture_to(Path(graph), toml.load(path, RunFile), path, run_file)
    except PeerloomError as error:
        sys.exit(error.what)


if __name__ == "__main__":
    main(*sys.argv[1:])
