"""The progress of an experiment: one live line on a terminal, an occasional plain line elsewhere."""

import os
import time
from typing import Any, TextIO

from node.cli.render import seconds_text, show
from sim.progress import ExperimentProgress

LIVE_SECONDS = 0.2
PLAIN_SECONDS = 10.0
_BAR_WIDTH = 24


class ProgressScreen:
    """The progress display. Call `update` often (it draws when due), and `close` at the end."""

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream = stream
        self._title = title
        self._drawn_at = time.monotonic()
        self._live: Any = None
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            from rich.console import Console
            from rich.live import Live

            console = Console(file=stream, highlight=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()

    def update(self, progress: ExperimentProgress) -> None:
        now = time.monotonic()
        if now - self._drawn_at < (LIVE_SECONDS if self._live is not None else PLAIN_SECONDS):
            return
        self._drawn_at = now
        if self._live is None:
            show([progress_line(self._title, progress)], self._stream)
            return
        from rich.text import Text

        text = f"{progress_bar(progress)} {progress_line(self._title, progress)}"
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def progress_line(title: str, progress: ExperimentProgress) -> str:
    """Return a line such as `churn  120 of 600 s  197 up  84x real time  6 s left`."""
    parts = [
        title,
        f"{progress.virtual_seconds:.0f} of {progress.scenario_seconds:.0f} s",
        f"{progress.population} up",
        f"{progress.rate:.3g}x real time",
    ]
    if progress.left_seconds is not None:
        parts.append(f"{seconds_text(round(progress.left_seconds))} left")
    return "  ".join(parts)


def progress_bar(progress: ExperimentProgress) -> str:
    filled = round(_BAR_WIDTH * min(1.0, progress.virtual_seconds / progress.scenario_seconds))
    return "#" * filled + "." * (_BAR_WIDTH - filled)
