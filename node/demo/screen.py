"""The six lines of a demo. On a terminal they are redrawn in place; otherwise each is printed once when it is
complete."""

import os
from typing import Any, TextIO

from node.cli.render import WIDTH, folded, show

LINES = 6
_LABEL_WIDTH = 38
_BAR_WIDTH = 9
_REFRESHES_PER_SECOND = 8


class DemoScreen:
    """The lines by `number` (from 1), each with a label and a text that grows. Call `close` at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._footer = ""
        self._lines: dict[int, str] = {}
        self._live: Any = None
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=stream, highlight=False),
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()

    def link(self, address: str) -> None:
        """Show the link to the page below the six lines while these change."""
        self._footer = f"    watch: {address}"
        self._refresh()
        if self._live is None:
            show([self._footer], self._stream)

    def update(self, number: int, label: str, text: str) -> None:
        """Show a line's present state; on a terminal only."""
        self._lines[number] = line_text(number, label, text)
        self._refresh()

    def finish(self, number: int, label: str, text: str) -> None:
        """Show a line in its final state."""
        self.update(number, label, text)
        if self._live is None:
            show(folded(self._lines[number], WIDTH), self._stream)

    def also(self, label: str, text: str) -> None:
        """Print an extra line among the six. On a terminal it is left out, because the six lines change in
        place."""
        if self._live is None:
            show(folded(f"    {label:<{_LABEL_WIDTH}}{text}", WIDTH), self._stream)

    def close(self) -> None:
        """Leave the lines on the screen as they are now. May be called more than once."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            show([self._lines[number] for number in sorted(self._lines)], self._stream)

    def _refresh(self) -> None:
        if self._live is not None:
            from rich.text import Text

            lines = [self._lines[number] for number in sorted(self._lines)]
            lines += [self._footer] if self._footer else []
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))


def line_text(number: int, label: str, text: str) -> str:
    """Return a line such as `3/6 training on digits loss 2.31 ######### 0.18`."""
    return f"{number}/{LINES} {label:<{_LABEL_WIDTH}}{text}".rstrip()


def loss_text(first: float, last: float, *, done: int, steps: int) -> str:
    """Return `loss 2.31 ####..... 0.74`. The bar shows the share of steps that are done."""
    filled = _BAR_WIDTH * done // max(1, steps)
    digits = 2 if last >= 0.1 else 3
    return f"loss {first:.2f} {'#' * filled}{'.' * (_BAR_WIDTH - filled)} {last:.{digits}f}"


def pace_text(done: int, steps: int, seconds: float) -> str:
    """Return `step 66 of 165, 9.1/s, 11 s left`, given `done` steps in `seconds`."""
    rate = done / seconds if seconds > 0 else 0.0
    left = f", {(steps - done) / rate:.0f} s left" if rate else ""
    return f"step {done} of {steps}, {rate:.1f}/s{left}"
