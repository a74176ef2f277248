"""The lines of text about an experiment, computed from its summary, which may be a stored one."""

from collections.abc import Mapping
from typing import Any

from node.cli.render import bytes_text, seconds_text

Figures = Mapping[str, Any]
_LABEL_WIDTH = 12
_SHOWN_SHARE_MIN = 0.005


def summary_lines(summary: Figures) -> list[str]:
    """Return one line per subject. A subject without events has no line."""
    head = (
        f"{summary['scenario']}  {summary['nodes']} nodes, {seconds_text(round(summary['virtual_seconds']))} "
        f"in {seconds_text(summary['wall_seconds'])} ({_times(summary['times_real_time'])} real time), "
        f"seed {summary['seed']}"
    )
    lines = [head if summary["complete"] else head + "; stopped before its end"]
    lines += _labelled("population", _population(summary["population"]))
    lines += _labelled("views", _views(summary["membership"]))
    lines += _labelled("crashes", _crashes(summary["membership"]))
    lines += _labelled("mistakes", _mistakes(summary["membership"]))
    lines += _labelled("lookups", _lookups(summary["dht"]))
    lines += _labelled("stores", _stores(summary["dht"]))
    lines += _labelled("traffic", _traffic(summary["traffic"]))
    for run in summary["runs"]:
        lines += _labelled(f"run {run['run']}"[: _LABEL_WIDTH - 1], _run(run))
    for service in summary["services"]:
        lines += _labelled(f"service {service['service']}"[: _LABEL_WIDTH - 1], _service(service))
    lines += _labelled("digest", f"{summary['digest']} of {summary['events']:,} events")
    return lines


def _labelled(label: str, text: str) -> list[str]:
    return [f"  {label:<{_LABEL_WIDTH}} {text}"] if text else []


def _times(rate: float | None) -> str:
    if rate is None:
        return "?"
    return f"{rate:.0f}x" if rate >= 10 else f"{rate:.2g}x"


def _population(figures: Figures) -> str:
    if figures["mean"] is None:
        return ""
    span = "" if figures["min"] == figures["max"] else f", {figures['min']} to {figures['max']}"
    changes = [
        counted(figures[what], name, plural)
        for what, name, plural in (
            ("restarts", "restart", "restarts"),
            ("crashes", "crash", "crashes"),
            ("leaves", "left", "left"),
        )
        if figures[what]
    ]
    return f"{figures['mean']:.1f} on average{span}" + (f"; {', '.join(changes)}" if changes else "")


def _views(figures: Figures) -> str:
    if figures["entries_right_share_mean"] is None:
        return ""
    return (
        f"{percent(figures['entries_right_share_mean'])} of entries right on average once settled, "
        f"{percent(figures['entries_right_share_min'])} at worst, "
        f"{percent(figures['entries_right_share_end'])} at the end"
    )


def _crashes(figures: Figures) -> str:
    parts = []
    for what, verb in (
        ("suspected", "suspected"),
        ("dead", "declared dead"),
        ("known_to_all", "known to all"),
    ):
        count = figures[f"{what}_crashes"]
        if count:
            parts.append(f"{count} {verb} in {span(figures[f'{what}_seconds'])}")
    return ", ".join(parts)


def _mistakes(figures: Figures) -> str:
    suspicions, deaths = figures["false_suspicions"], figures["false_deaths"]
    excused = figures["excused_suspicions"] + figures["excused_deaths"]
    told = f"{counted(suspicions, 'false suspicion')}, {counted(deaths, 'false death')}"
    return told + (f"; {excused} more about peers that were frozen, cut off or just back" if excused else "")


def _lookups(figures: Figures) -> str:
    if not figures["lookups"]:
        return ""
    share, rounds = figures["lookups_found_share"], figures["lookup_rounds_mean"]
    found = "no record existed to be found"
    if share is not None:
        found = f"{percent(share)} of the {figures['lookups_expected']} for an existing record found it"
    return f"{figures['lookups']}: {found}, in {span(figures['lookup_seconds'])}, {rounds:.1f} rounds"


def _stores(figures: Figures) -> str:
    if not figures["stores"]:
        return ""
    return (
        f"{figures['stores']}: each on {figures['store_copies_mean']:.1f} peers, "
        f"in {span(figures['store_seconds'])}"
    )


def _traffic(figures: Figures) -> str:
    for kind in ("bytes", "messages"):
        rate = figures.get(f"sent_{kind}_per_node_second")
        if rate is not None:
            sent = figures[f"sent_{kind}"]
            total = max(1, sum(sent.values()))
            most = sorted(sent.items(), key=lambda item: -item[1])
            shown = [(name, count / total) for name, count in most if count / total >= _SHOWN_SHARE_MIN]
            shares = ", ".join(f"{name} {percent(share)}" for name, share in shown)
            amount = f"{bytes_text(rate)}/s" if kind == "bytes" else f"{rate:.1f} messages/s"
            return f"{amount} sent per node: {shares}"
    return ""


def _run(figures: Figures) -> str:
    parts = [counted(figures["steps"], "step")]
    if figures["steps_again"]:
        parts.append(f"{figures['steps_again']} of them twice")
    if figures["loss"] is not None:
        parts.append(f"loss {figures['loss']:.4g}")
    if figures["microbatches_per_second"] is not None:
        parts.append(f"{figures['microbatches_per_second']:.1f} micro-batches/s")
    if figures["stalls"]:
        stalled = seconds_text(figures["stalled_seconds"])
        parts.append(f"{counted(figures['stalls'], 'stall')} of {stalled} in all")
    parts.append(counted(figures["plans"], "plan"))
    if figures["outcomes"]:
        parts.append(", ".join(f"{outcome} say {count}" for outcome, count in figures["outcomes"].items()))
    return ", ".join(parts)


def _service(figures: Figures) -> str:
    parts = [counted(figures["answers"], "answer"), counted(figures["tokens"], "token")]
    parts.append(", ".join(f"{outcome} {count}" for outcome, count in figures["outcomes"].items()))
    firsts = {"p50": figures["first_seconds_p50"], "p95": figures["first_seconds_p95"]}
    parts.append(f"the first token after {span(firsts)}")
    if figures["moved"]:
        pauses = {"p50": figures["pause_seconds_p50"], "p95": figures["pause_seconds_p95"]}
        parts.append(f"{figures['moved']} moved to another route and paused for {span(pauses)}")
    return ", ".join(parts)


def span(figures: Figures) -> str:
    """Return `1.2 s (p95 4.0 s)`: the median and the 95th percentile."""
    if figures["p50"] is None:
        return "?"
    return f"{seconds_text(figures['p50'])} (p95 {seconds_text(figures['p95'])})"


def percent(share: float) -> str:
    """Return a percentage with up to two decimals, as many as needed to distinguish it from 100 %."""
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    for digits in (0, 1, 2):
        text = f"{100 * share:.{digits}f}"
        if float(text) < 100:
            return text + " %"
    return "99.99 %"


def counted(count: int, name: str, plural: str = "") -> str:
    """Return a count with its noun: `1 step`, `2 steps`."""
    return f"{count} {name if count == 1 else plural or name + 's'}"
