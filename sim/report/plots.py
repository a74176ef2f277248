"""The pictures of an experiment, as PNG files. Needs matplotlib (the extra `demo`).

Each picture is computed from the rows. A picture without rows is not drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sim.measures.rows import Row, quantile
from sim.measures.traffic import KINDS
from sim.report.canvas import AMBER, BLUE, GREEN, GREY, PALE, RED, SERIES, CanvasPage
from sim.scenario import Scenario

Points = list[tuple[float, float]]
_LOG_FROM = 30.0
"""A latency or loss axis is logarithmic if the largest value is more than this many times the usual one."""
_TAIL_QUANTILE = 0.99
_BINS_MAX = 150
"""Maximum number of points of a curve: more cannot be distinguished by eye."""


class PlottedResult(Protocol):
    """The part of an experiment's result that is shown in the pictures."""

    @property
    def scenario(self) -> Scenario: ...
    @property
    def seed(self) -> int: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def metrics(self) -> Sequence[Row]: ...
    @property
    def summary(self) -> Mapping[str, Any]: ...
    def values(self, metric: str, label: str = "") -> list[tuple[float, float]]:
        """Return the (time, value) pairs of one metric."""


def draw_all(folder: Path, result: PlottedResult) -> list[str]:
    """Draw all pictures that have data into `folder`; return the names of the files."""
    drawn = []
    for name, picture in PICTURES.items():
        page = picture(result)
        (folder / name).unlink(missing_ok=True)
        if page is not None:
            page.save(folder / name)
            drawn.append(name)
    return drawn


def population(result: PlottedResult) -> CanvasPage | None:
    total = result.values("population_peers")
    if not total:
        return None
    page = _page(result, "Peers that are up")
    regions = _labels(result, "population_peers")
    for place, region in enumerate(regions):
        colour = SERIES[(place + 1) % len(SERIES)]
        page.line(0, result.values("population_peers", region), region, colour, linewidth=1.2)
    page.line(0, total, "all" if regions else "", BLUE, linewidth=2.0)
    page.name(0, "peers", low=0, high=1.05 * max(value for _, value in total) + 1)
    page.whole_numbers(0)
    page.legend(0)
    return page


def views(result: PlottedResult) -> CanvasPage | None:
    entries = _percent(result.values("entries_right_share"))
    if not entries:
        return None
    page = _page(result, "Are the member lists right?", (1.3, 1))
    lowest, middle = _binned(result, entries)
    page.area(0, _binned(result, _percent(result.values("views_right_share")))[1], "lists wholly right", PALE)
    page.line(0, lowest, "minimum of right entries", BLUE, linewidth=0.9, alpha=0.5)
    page.line(0, middle, "on average", BLUE)
    page.name(0, "share (%)", low=-2, high=103)
    page.legend(0)
    for metric, label, colour in (
        ("entries_missing_share", "up, but not listed", AMBER),
        ("entries_stale_share", "listed, but gone", RED),
    ):
        page.line(1, _binned(result, _percent(result.values(metric)))[1], label, colour)
    shown = _settled(result, "entries_missing_share") + _settled(result, "entries_stale_share")
    page.name(1, "entries (%)", low=0, high=max(1.0, 110 * max(shown, default=0.0)))
    page.legend(1)
    return page


def detection(result: PlottedResult) -> CanvasPage | None:
    curves = (
        ("crash_suspected_seconds", "first suspected", PALE),
        ("crash_dead_seconds", "first declared dead", BLUE),
        ("crash_known_to_all_seconds", "known to all", GREEN),
    )
    crashes = result.summary["population"]["crashes"]
    about = f"{_about(result)}; {crashes} crash{'es' if crashes != 1 else ''}"
    page = CanvasPage("How soon a crash is noticed", about)
    longest = 0.0
    for metric, label, colour in curves:
        seconds = sorted(row.value for row in result.metrics if row.metric == metric)
        if not seconds:
            continue
        longest = max(longest, seconds[-1])
        # The curve rises by one step per crash, from none to all crashes that were noticed in this way.
        shares = [100 * place / len(seconds) for place in range(len(seconds) + 1)]
        page.panels[0].step(
            [0.0, *seconds],
            shares,
            where="post",
            color=colour,
            linewidth=1.9,
            label=f"{label} ({len(seconds)})",
        )
        middle = quantile(seconds, 0.5)
        page.panels[0].plot([middle], [50], marker="o", color=colour, markersize=5)
    if not longest:
        return None
    page.panels[0].set_xlabel("seconds since the crash (dots: the median)")
    page.panels[0].set_xlim(0, 1.03 * longest)
    page.name(0, "share of the crashes noticed (%)", low=0, high=103)
    page.legend(0)
    return page


def lookups(result: PlottedResult) -> CanvasPage | None:
    if not result.values("lookups"):
        return None
    page = _page(result, "Does the DHT find existing records?", (1, 1, 1))
    page.line(0, _percent(result.values("lookups_found_share")), "", GREEN, marker=".", markersize=5)
    page.name(0, "found (%)", low=_floor(result.values("lookups_found_share")), high=101)
    for panel, metric, usual, name in (
        (1, "lookup_seconds", "p50", "median"),
        (2, "lookup_rounds", "mean", "mean"),
    ):
        page.line(panel, result.values(metric, "p95"), "p95", AMBER)
        page.line(panel, result.values(metric, usual), name, BLUE)
        page.name(panel, "a lookup takes (s)" if panel == 1 else "rounds", low=0)
        page.legend(panel)
    page.whole_numbers(2)
    seconds = sorted(value for _, value in result.values("lookup_seconds", "p95"))
    if quantile(seconds, 1.0) > _LOG_FROM * quantile(seconds, 0.5) > 0:
        page.logarithmic(1)
    return page


def traffic(result: PlottedResult) -> CanvasPage | None:
    for kind in KINDS:
        metric = f"sent_{kind}_per_node_second"
        protocols = sorted(_labels(result, metric), key=lambda name: -_sum(result.values(metric, name)))
        if protocols:
            break
    else:
        return None
    page = _page(result, "What a node sends")
    scale, unit = (1000.0, "kB") if kind == "bytes" else (1.0, kind)
    shown = [_on_windows(result, metric, name, scale) for name in protocols[: len(SERIES)]]
    times = [time / page.divisor for time, _ in shown[0]]
    page.panels[0].stackplot(
        times,
        [[value for _, value in points] for points in shown],
        labels=protocols[: len(SERIES)],
        colors=SERIES,
        alpha=0.85,
        step="pre",
        linewidth=0,
    )
    totals = sorted(sum(values) for values in zip(*([v for _, v in points] for points in shown), strict=True))
    page.name(0, f"{unit} per node and second", low=0, high=1.1 * quantile(totals, 1.0) or 1.0)
    page.legend(0)
    return page


def training(result: PlottedResult) -> CanvasPage | None:
    runs = _labels(result, "step_committed")
    if not runs:
        return None
    losses = [point for run in runs for point in result.values("step_loss", run)]
    with_loss = len({value for _, value in losses}) > 1
    page = _page(result, "Training", (1.2, 1) if with_loss else (1,))
    for place, run in enumerate(runs):
        colour = SERIES[place % len(SERIES)]
        if with_loss:
            page.line(0, result.values("step_loss", run), f"run {run}", colour)
        steps = [(time, step + 1) for time, step in result.values("step_committed", run)]
        page.line(-1, steps, "" if with_loss else f"run {run}", colour, drawstyle="steps-post")
        for number, (time, height) in enumerate(result.values("plan_height", run)):
            for axes in page.panels:
                axes.axvline(time / page.divisor, color=GREY, linewidth=1.0, linestyle="--")
            page.panels[0].annotate(
                f"plan {height:.0f}" if number < _PLANS_NAMED_MAX else "",
                (time / page.divisor, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -11),
                textcoords="offset points",
                fontsize=8,
                color=GREY,
            )
    if with_loss:
        page.name(0, "loss of the step")
        least, most = min(value for _, value in losses), max(value for _, value in losses)
        if 0 < least * _LOG_FROM < most:
            page.logarithmic(0)
    page.name(-1, "steps committed", low=0)
    page.legend(0)
    return page


_PLANS_NAMED_MAX = 8

PICTURES: dict[str, Callable[[PlottedResult], CanvasPage | None]] = {
    "population.png": population,
    "views.png": views,
    "detection.png": detection,
    "dht.png": lookups,
    "traffic.png": traffic,
    "training.png": training,
}


def _page(result: PlottedResult, title: str, panels: Sequence[float] = (1.4,)) -> CanvasPage:
    page = CanvasPage(title, _about(result), panels, seconds=result.scenario.seconds)
    page.bands(result.scenario.events, result.scenario.seconds)
    return page


def _about(result: PlottedResult) -> str:
    about = f"scenario {result.scenario.name}, {result.scenario.nodes} nodes, seed {result.seed}"
    return about + ("" if not result.stopped else ", stopped before its end")


def _labels(result: PlottedResult, metric: str) -> list[str]:
    """Return all labels except the empty one, in the order of their first rows."""
    return list(dict.fromkeys(row.label for row in result.metrics if row.metric == metric and row.label))


def _percent(points: Points) -> Points:
    return [(time, 100 * value) for time, value in points]


def _binned(result: PlottedResult, points: Points) -> tuple[Points, Points]:
    """Return the minimum and the mean of each of up to `_BINS_MAX` equal intervals of time."""
    width = result.scenario.seconds / _BINS_MAX
    bins: dict[int, Points] = {}
    for time, value in points:
        bins.setdefault(int(time / width), []).append((time, value))
    least = [(bin_[-1][0], min(value for _, value in bin_)) for bin_ in bins.values()]
    return least, [(bin_[-1][0], _sum(bin_) / len(bin_)) for bin_ in bins.values()]


def _settled(result: PlottedResult, metric: str) -> list[float]:
    """Return the values after the start, during which all peers still look for each other, without isolated
    peaks."""
    begin = result.scenario.start.spread_seconds
    values = sorted(value for time, value in result.values(metric) if time >= begin)
    return [quantile(values, _TAIL_QUANTILE)] if values else []


def _floor(points: Points) -> float:
    """Return the lower end of an axis of percentages: 90 or 50 if all values lie above it, so that
    differences are visible."""
    least = 100 * min((value for _, value in points), default=0.0)
    return next(floor for floor in (90.0, 50.0, 0.0) if least >= floor)


def _on_windows(result: PlottedResult, metric: str, label: str, scale: float) -> Points:
    """Return a value for every window of the metric; 0 if a protocol sent nothing in it."""
    times = dict.fromkeys(row.time_seconds for row in result.metrics if row.metric == metric)
    values = dict(result.values(metric, label))
    # Each window is labelled with its end; the first one begins with the experiment.
    return [(0.0, 0.0), *((time, values.get(time, 0.0) / scale) for time in times)]


def _sum(points: Points) -> float:
    return sum(value for _, value in points)
