"""The plot of a demo: loss and seconds of every step, with the kill marked. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path


def draw(
    path: Path,
    *,
    losses: Sequence[float],
    seconds: Sequence[float],
    killed_after: int,
    victim: str,
    title: str,
) -> None:
    """Write a PNG. `killed_after` is the number of steps done before node `victim` was killed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, pace = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(losses) + 1)
    loss.plot(steps, losses, color="tab:blue", linewidth=1.5, label="loss of the step")
    loss.set_yscale("log")
    loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    loss.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    loss.yaxis.set_minor_formatter(NullFormatter())
    loss.set_ylabel("loss (mean cross entropy per sample, nats)")
    loss.set_title(title)
    pace.bar(steps, seconds, width=1.0, color="tab:gray")
    pace.set_ylabel("time of the step (s)")
    pace.set_xlabel("step")
    for axes in (loss, pace):
        axes.axvline(killed_after + 0.5, color="tab:red", linestyle="--", linewidth=1.5)
        axes.grid(visible=True, alpha=0.3)
        axes.set_xlim(0, len(losses) + 1)
    loss.annotate(
        f" node {victim} killed (SIGKILL) after step {killed_after}",
        (killed_after + 0.5, 0.97),
        xycoords=("data", "axes fraction"),
        color="tab:red",
        verticalalignment="top",
    )
    figure.savefig(path)
