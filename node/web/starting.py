"""Starting a run from the page: the command `train` in a process of its own, as a person would type it.

Capturing a model needs torch, which this process never loads. What comes over HTTP is the text of a RUN.toml;
a model in it is a built-in one or a captured file. A person's own code (`PATH.py:FUNCTION`, for the model or
the data) is for the command line alone: whoever can write to the page must not name code that runs.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import trio

from node import toml
from node.errors import PeerloomError, UsageError
from node.invocation import KEEPS_SPANS
from node.library.preparing import error_lines
from node.protocols.manifest import RunFile, check_run_file

START_SECONDS_MAX = 300.0
"""How long capturing and placing may take; a run that waits for peers longer is begun by the command."""
TEXT_LENGTH_MAX = 32_000
NAME = "RUN.toml"


class Starter:
    """Starts runs on the node with this data folder, one after another."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._is_busy = False

    async def start(self, text: str) -> dict[str, str]:
        """Start the run that the text of a RUN.toml says; its id. Raises PeerloomError."""
        if len(text) > TEXT_LENGTH_MAX:
            raise UsageError(f"a run of {len(text)} letters, at most {TEXT_LENGTH_MAX}")
        run_file = toml.parse(text, RunFile, name=NAME).value
        check_run_file(run_file, NAME)
        if ".py" in run_file.model or ".py" in run_file.source:
            raise UsageError(
                "the page starts built-in and captured models on data in files; "
                "your own code: `peerloom train`"
            )
        if self._is_busy:
            raise PeerloomError("another run is being started")
        self._is_busy = True
        try:
            return await self._train(text)
        finally:
            self._is_busy = False

    async def _train(self, text: str) -> dict[str, str]:
        with tempfile.TemporaryDirectory(prefix="peerloom-start-") as folder:
            path = Path(folder) / NAME
            path.write_text(text, encoding="utf-8")
            words = ["train", str(path), "--detach", "--json", "--data-dir", str(self._data_dir)]
            with trio.move_on_after(START_SECONDS_MAX):
                done = await trio.run_process(
                    [sys.executable, "-P", "-m", "node", *words],
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                    env={**os.environ, KEEPS_SPANS: "1"},
                )
                return _told(done.returncode, done.stdout, done.stderr)
        raise PeerloomError(f"the run was not placed within {START_SECONDS_MAX:.0f} s")


def _told(code: int, out: bytes, errors: bytes) -> dict[str, str]:
    if code:
        lines = error_lines(errors.decode(errors="replace"))
        raise PeerloomError(" ".join(lines)[:500] or f"it ended with status {code}")
    document = json.loads(out.decode().strip().splitlines()[-1])
    return {"run": str(document["run"]), "status": str(document["status"])}
