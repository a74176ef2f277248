"""A line that follows a run with its step, loss, rate and time left, in a terminal or a notebook."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from node.state import RunView

REDRAW_SECONDS = 0.2
BAR_WIDTH = 24
_RECENT_STEPS = 20
"""Number of steps from which the time left is computed. The first step opens stages, and a single step varies
too much."""


class ProgressLine:
    """Writes to `show`, or over the same line of stderr. If stderr is not a terminal, it writes ten lines in
    all."""

    def __init__(self, show: Callable[[str], None] | None, clock: Callable[[], float]) -> None:
        self._write = show
        self._clock = clock
        self._drawn_at = -REDRAW_SECONDS
        self._steps: list[tuple[float, int]] = []
        self._is_line = show is None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._tenth = -1
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._write is None and self._last:
            sys.stderr.write(f"\r{self._last}\n" if self._is_line else f"{self._last}\n")
            sys.stderr.flush()

    def show(self, view: RunView) -> None:
        """Draw the run's present state, at most as often as a person can read."""
        now = self._clock()
        if not self._steps or view.step != self._steps[-1][1]:
            self._steps = [*self._steps, (now, view.step)][-_RECENT_STEPS:]
        self._last = progress_text(view, self._seconds_left(view))
        is_over = view.status in ("done", "failed", "stopped")
        if now - self._drawn_at < REDRAW_SECONDS and not is_over:
            return
        self._drawn_at = now
        if self._write is not None:
            self._write(self._last)
        elif self._is_line:
            sys.stderr.write(f"\r{self._last}")
            sys.stderr.flush()
        elif (tenth := 10 * view.step // max(1, view.steps)) != self._tenth:
            self._tenth = tenth
            sys.stderr.write(f"{self._last}\n")

    def _seconds_left(self, view: RunView) -> float | None:
        (first_at, first), (last_at, last) = self._steps[0], self._steps[-1]
        if last <= first or last_at <= first_at:
            return None
        return max(0, view.steps - last) * (last_at - first_at) / (last - first)


def progress_text(view: RunView, seconds_left: float | None) -> str:
    """Return a run's progress as one line of constant layout."""
    done = min(BAR_WIDTH, BAR_WIDTH * view.step // max(1, view.steps))
    bar = "#" * done + "." * (BAR_WIDTH - done)
    loss = f"  loss {view.losses[-1]:.4f}" if view.losses else ""
    accuracy = f"  accuracy {view.accuracy:.3f}" if view.accuracy is not None else ""
    left = "" if seconds_left is None or view.status != "running" else f"  {_time_text(seconds_left)} left"
    return f"{view.run[:8]} {view.status:<8} {bar} {view.step}/{view.steps}{loss}{accuracy}{left}".ljust(79)


def _time_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
