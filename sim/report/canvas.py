"""The common layout of all pictures: one page, its time axes, its colours. Needs matplotlib (the extra
`demo`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim.churn.model import ChurnEvent

INK = "#333333"
GREY = "#8a8a8a"
BLUE = "#2b6c99"
PALE = "#a3c4dc"
AMBER = "#d98c2b"
GREEN = "#4f8a5b"
RED = "#b8473d"
VIOLET = "#7a5c99"
SERIES = (BLUE, AMBER, GREEN, VIOLET, RED, GREY)
"""Colours for a series of similar curves, without a contrast of red and green; after the first six it is grey
again."""

_PAGE_INCHES = (9.0, 1.6, 2.5)
"""Width, height outside the panels, and height of a panel of height 1."""
_LEGEND_POINTS = 16
"""Space between the axes and the text above them."""
_LEGEND_COLUMNS_MAX = 6
_MARGIN = 1.08
_BANDS_MAX = 60
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (1200.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


class CanvasPage:
    """Panels of the same width, one below the other. With `seconds`, their x axis is the time of the
    experiment."""

    def __init__(
        self, title: str, about: str, panels: Sequence[float] = (1,), *, seconds: float | None = None
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        width, frame, panel = _PAGE_INCHES
        self.figure = Figure(figsize=(width, frame + panel * sum(panels)), dpi=120, layout="constrained")
        FigureCanvasAgg(self.figure)
        self.panels: list[Any] = list(
            self.figure.subplots(len(panels), 1, sharex=True, height_ratios=panels, squeeze=False)[:, 0]
        )
        self.divisor, unit = _unit(seconds) if seconds is not None else (1.0, "")
        for axes in self.panels:
            axes.grid(visible=True, color="#e4e4e4", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(GREY)
            axes.tick_params(colors=INK, labelsize=9)
        self.panels[0].set_title(
            title, loc="left", fontsize=13, color=INK, fontweight="bold", pad=2.3 * _LEGEND_POINTS
        )
        self.panels[0].annotate(
            about,
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, 1.25 * _LEGEND_POINTS),
            textcoords="offset points",
            fontsize=9.5,
            color=GREY,
        )
        if seconds is not None:
            self.panels[-1].set_xlabel(f"virtual time ({unit})", color=INK)
            self.panels[-1].set_xlim(0, seconds / self.divisor)

    def line(
        self, panel: int, points: Sequence[tuple[float, float]], label: str, colour: str, **style: Any
    ) -> None:
        """Draw a curve through (seconds, value)."""
        times = [time / self.divisor for time, _ in points]
        style = {"linewidth": 1.7, **style}
        self.panels[panel].plot(times, [value for _, value in points], label=label, color=colour, **style)

    def area(self, panel: int, points: Sequence[tuple[float, float]], label: str, colour: str) -> None:
        """Fill the area of a less important quantity in a pale colour."""
        times = [time / self.divisor for time, _ in points]
        heights = [value for _, value in points]
        self.panels[panel].fill_between(times, heights, label=label, color=colour, alpha=0.35, linewidth=0)

    def logarithmic(self, panel: int) -> None:
        """Give a panel a logarithmic y axis, with its numbers written out."""
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes = self.panels[panel]
        axes.set_ylim(auto=True)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())

    def name(self, panel: int, label: str, *, low: float | None = None, high: float | None = None) -> None:
        """Label the y axis and set its range. With `low` alone, the axis ends slightly above all values."""
        axes = self.panels[panel]
        axes.set_ylabel(label, color=INK)
        if low is not None and high is None:
            high = low + _MARGIN * (axes.dataLim.y1 - low) or 1.0
        axes.set_ylim(bottom=low, top=high)

    def whole_numbers(self, panel: int) -> None:
        """Show only whole numbers on the y axis of a panel."""
        from matplotlib.ticker import MaxNLocator

        self.panels[panel].yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))

    def legend(self, panel: int) -> None:
        """Place the legend above the panel at its right, where there are no data."""
        axes = self.panels[panel]
        entries = axes.get_legend_handles_labels()[1]
        if entries:
            axes.legend(
                loc="lower right",
                bbox_to_anchor=(1.0, 1.0),
                ncols=min(_LEGEND_COLUMNS_MAX, len(entries)),
                frameon=False,
                fontsize=9,
                borderaxespad=0.1,
                handlelength=1.6,
                columnspacing=1.4,
            )

    def bands(self, events: Sequence[ChurnEvent], seconds: float) -> None:
        """Shade the time of each disturbance in grey, and write its name at its first occurrence."""
        named = set()
        for event in events:
            for begin in _beginnings(event, seconds):
                end = min(seconds, begin + (event.lasts_seconds or 0.0))
                for axes in self.panels:
                    axes.axvspan(begin / self.divisor, end / self.divisor, color="#000000", alpha=0.06, lw=0)
                    axes.axvline(begin / self.divisor, color=GREY, linewidth=0.8, linestyle=":")
                if event.kind not in named:
                    named.add(event.kind)
                    self._band_name(event.kind, begin)

    def _band_name(self, kind: str, begin: float) -> None:
        axes = self.panels[-1]
        axes.annotate(
            kind,
            (begin / self.divisor, 0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 4),
            textcoords="offset points",
            fontsize=8,
            color=GREY,
        )

    def save(self, path: Path) -> None:
        self.figure.align_ylabels()
        self.figure.savefig(path)


def _unit(seconds: float) -> tuple[float, str]:
    return next((divisor, unit) for least, divisor, unit in _UNITS if seconds >= least)


def _beginnings(event: ChurnEvent, seconds: float) -> list[float]:
    if not event.every_seconds:
        return [event.at_seconds]
    count = int(max(0.0, seconds - event.at_seconds) / event.every_seconds) + 1
    return [event.at_seconds + number * event.every_seconds for number in range(min(count, _BANDS_MAX))]
