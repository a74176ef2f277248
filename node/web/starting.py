"""Starts a run from the page, as the command `train` would.

Capturing a model needs torch, which this process never loads, so a separate process does that. The request
has the text of a RUN.toml, whose model is built in or a captured file. A user's own code (`PATH.py:FUNCTION`,
for the model or the data) is accepted only on the command line, because access to the page must not allow
anybody to choose code that runs.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from node.api.preparing import prepared_run
from node.api.task_defaults import read_run
from node.control import CommandHandler
from node.errors import PeerloomError, UsageError
from node.protocols.run_file import RunFile

START_SECONDS_MAX = 300.0
"""Time limit for capturing and placing. Use the command for a run that has to wait longer for peers."""
TEXT_LENGTH_MAX = 32_000
NAME = "RUN.toml"


class Starter:
    """Starts runs on this node, one after another. `train` is the node's handler of that command."""

    def __init__(self, train: Callable[[], CommandHandler]) -> None:
        self._train = train
        self._is_busy = False

    async def start(self, text: str) -> dict[str, str]:
        """Start the run described by the text of a RUN.toml; return its id. Raises PeerloomError."""
        if len(text) > TEXT_LENGTH_MAX:
            raise UsageError(f"the run has {len(text)} characters; at most {TEXT_LENGTH_MAX} are allowed")
        run_file, _ = read_run(text, Path("/"), NAME)
        if ".py" in run_file.model or ".py" in run_file.source:
            raise UsageError(
                "the page starts only built-in and captured models on data in files. "
                "For your own code use `peerloom train`"
            )
        if self._is_busy:
            raise PeerloomError("a different run is being started")
        self._is_busy = True
        try:
            return await self._start(run_file)
        finally:
            self._is_busy = False

    async def _start(self, run_file: RunFile) -> dict[str, str]:
        with (
            trio.move_on_after(START_SECONDS_MAX),
            # Use an empty folder: the page gives files by their full paths.
            tempfile.TemporaryDirectory(prefix="peerloom-start-") as folder,
        ):
            async with prepared_run(run_file, Path(folder) / NAME, NAME) as made:
                request = {**msgspec.to_builtins(made), "follow": False}
                document: Any = await self._train()(request, _ignore)
            return {"run": str(document["run"]), "status": str(document["status"])}
        raise PeerloomError(f"the run was not placed within {START_SECONDS_MAX:.0f} s")


async def _ignore(_: object) -> None:
    return
