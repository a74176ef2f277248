"""What a scenario says that cannot all be true: rules between its values. Pure, but for a look at a trace.

What one value alone may be is said by its type in `sim.scenario`. Each fault has the path of the value that
is to blame, for the line in the file.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from node.nearest import did_you_mean
from sim.churn.model import Event, Version
from sim.churn.traces import load_trace
from sim.network.model import Access, Region

if TYPE_CHECKING:
    from sim.scenario import Scenario

STACK_NODES_MAX = 200
"""Whole nodes cost some hundred times what their cores cost."""
_SUM_SLACK = 1e-6

Fault = tuple[tuple[str | int, ...], str]
"""Where, and what is wrong."""


def faults(scenario: "Scenario") -> Iterator[Fault]:
    """Every contradiction, in reading order. Raises UsageError for a trace file that is wrong itself."""
    yield from _sizes(scenario)
    yield from _network(scenario)
    yield from _churn(scenario)
    yield from _events(scenario)
    yield from _partitions(scenario)
    yield from _work(scenario)


def _sizes(scenario: "Scenario") -> Iterator[Fault]:
    nodes, seconds = scenario.nodes, scenario.seconds
    if scenario.fidelity == "stack" and nodes > STACK_NODES_MAX:
        yield (
            ("nodes",),
            f'nodes = {nodes}: whole nodes are at most {STACK_NODES_MAX}; more take fidelity = "cores"',
        )
    if scenario.sample_seconds > seconds:
        yield ("sample_seconds",), f"sample_seconds = {scenario.sample_seconds:g}: it ends after {seconds:g}"
    if scenario.start.spread_seconds > seconds:
        yield (
            ("start", "spread_seconds"),
            f"start.spread_seconds = {scenario.start.spread_seconds:g}: it ends after {seconds:g}",
        )
    joins = any(event.kind == "join" for event in scenario.events)
    if scenario.start.late_share and not joins:
        yield (
            ("start", "late_share"),
            "start.late_share keeps peers back, and no event of kind join starts them",
        )


def _network(scenario: "Scenario") -> Iterator[Fault]:
    network = scenario.network
    if network.nearest_seconds > network.farthest_seconds:
        yield ("network", "nearest_seconds"), "network.nearest_seconds is above farthest_seconds"
    regions = network.regions
    yield from _distinct(regions, ("network", "regions"))
    if regions:
        yield from _sum_of_shares(regions, ("network", "regions"), exact=True)
    yield from _sum_of_shares(network.access, ("network", "access"))
    for index, region in enumerate(regions):
        if region.inside_seconds[0] > region.inside_seconds[1]:
            path = ("network", "regions", index, "inside_seconds")
            yield (
                path,
                f"inside_seconds of region '{region.name}': the first is the least, the second the most",
            )
    rows = network.between_seconds
    if (rows or len(regions) > 1) and not (
        len(rows) == len(regions) and all(len(row) == len(regions) for row in rows)
    ):
        shape = f"{len(rows)} rows of {', '.join(sorted({str(len(row)) for row in rows})) or '0'}"
        yield (
            ("network", "between_seconds"),
            f"network.between_seconds has {shape}: want {len(regions)} rows of {len(regions)}, one a region",
        )


def _sum_of_shares(
    rows: Sequence[Region | Access | Version], path: tuple[str, ...], *, exact: bool = False
) -> Iterator[Fault]:
    total = math.fsum(row.share for row in rows)
    if total > 1 + _SUM_SLACK or (exact and total < 1 - _SUM_SLACK):
        want = "want 1" if exact else "want at most 1"
        yield path, f"the shares of {'.'.join(path)} make {total:g}: {want}"


def _distinct(rows: Sequence[Region | Version], path: tuple[str, ...]) -> Iterator[Fault]:
    names = [row.name for row in rows]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield (*path, index, "name"), f"two {path[-1]} are called '{name}'"


def _churn(scenario: "Scenario") -> Iterator[Fault]:
    churn = scenario.churn
    if churn.permanent > scenario.nodes:
        yield ("churn", "permanent"), f"churn.permanent = {churn.permanent}: there are {scenario.nodes} nodes"
    given = [name for name in ("sessions", "absences") if getattr(churn, name) is not None]
    if churn.trace:
        for name in (*given, *(["profile"] if churn.profile != "none" else [])):
            yield ("churn", name), f"churn.{name} beside churn.trace: the trace says who comes and goes"
        names = load_trace(Path(churn.trace)).names
        room = max(0, scenario.nodes - churn.permanent)
        if len(names) > room:
            yield (
                ("churn", "trace"),
                f"churn.trace has {len(names)} peers; of {scenario.nodes} nodes {room} may come and go",
            )
    elif churn.profile == "lab" and given:
        yield ("churn", given[0]), f"churn.{given[0]} beside profile lab, which is a timetable"
    elif churn.profile == "none" and len(given) == 1:
        other = "absences" if given == ["sessions"] else "sessions"
        yield (
            ("churn", given[0]),
            f"churn.{given[0]} without {other}: add [churn.{other}] "
            '(distribution = "forever" for no end) or a profile',
        )
    if churn.wave_depth and (
        churn.trace or churn.profile == "lab" or (churn.profile == "none" and not given)
    ):
        yield ("churn", "wave_depth"), "churn.wave_depth: there are no sessions or absences to make waves of"
    yield from _distinct(churn.versions, ("churn", "versions"))
    yield from _sum_of_shares(churn.versions, ("churn", "versions"))


def _events(scenario: "Scenario") -> Iterator[Fault]:
    regions = [region.name for region in scenario.network.regions]
    versions = [version.name for version in scenario.churn.versions]
    versions += [event.version for event in scenario.events if event.version]
    for index, event in enumerate(scenario.events):
        at = ("events", index)
        if event.at_seconds > scenario.seconds:
            yield (
                (*at, "at_seconds"),
                f"at_seconds = {event.at_seconds:g} of events: it all ends after {scenario.seconds:g}",
            )
        for kind, names, known in (
            ("region", event.regions, regions),
            ("version", event.versions, versions),
        ):
            for name in names:
                if name not in known:
                    hint = did_you_mean(name, known) or f"; known: {', '.join(known) or 'none'}"
                    yield (*at, f"{kind}s"), f"no {kind} is called '{name}'{hint}"
        if not event.lasts_seconds and event.kind not in ("crash", "leave", "join", "restart"):
            yield (
                (*at, "lasts_seconds"),
                f"lasts_seconds = 0 of an event of kind {event.kind}: nothing happens",
            )
        if event.version and event.kind != "restart":
            yield (*at, "version"), f"only a restart brings a version, not an event of kind {event.kind}"
        if event.kind == "join" and not scenario.start.late_share:
            yield (*at, "kind"), "nobody is kept back for an event of kind join: set start.late_share"


def _partitions(scenario: "Scenario") -> Iterator[Fault]:
    """A network is split in one way at a time."""
    cuts = [(index, event) for index, event in enumerate(scenario.events) if event.kind == "partition"]
    for place, (index, event) in enumerate(cuts):
        if event.every_seconds and event.every_seconds < event.lasts_seconds:
            yield ("events", index, "every_seconds"), "a partition begins again before it is over"
        for _, other in cuts[:place]:
            if _overlap(event, other, scenario.seconds):
                yield (
                    ("events", index, "at_seconds"),
                    "a partition begins while another lasts: the network is split in one way at a time",
                )


def _overlap(one: Event, other: Event, seconds: float) -> bool:
    spans = sorted(
        (begin, begin + event.lasts_seconds)
        for event in (one, other)
        for begin in _beginnings(event, seconds)
    )
    return any(following[0] < span[1] for span, following in pairwise(spans))


def _beginnings(event: Event, seconds: float) -> list[float]:
    if not event.every_seconds:
        return [event.at_seconds]
    count = max(0, math.ceil((seconds - event.at_seconds) / event.every_seconds))
    return [event.at_seconds + number * event.every_seconds for number in range(count)]


def _work(scenario: "Scenario") -> Iterator[Fault]:
    records, checks = scenario.records, scenario.checks
    if records.enabled and records.republish_seconds >= records.lifetime_seconds:
        yield (
            ("records", "republish_seconds"),
            "records.republish_seconds: a record is over before it is stored again",
        )
    for index, run in enumerate(scenario.runs):
        at = ("runs", index)
        if run.members > scenario.nodes:
            yield (*at, "members"), f"members = {run.members} of runs: there are {scenario.nodes} nodes"
        if run.stages * run.replicas > run.members:
            yield (
                (*at, "replicas"),
                f"{run.stages} stages of {run.replicas} replicas take {run.stages * run.replicas} members, "
                f"the run has {run.members}",
            )
        if run.trainers > run.members:
            yield (*at, "trainers"), f"trainers = {run.trainers} of runs: the run has {run.members} members"
        if run.at_seconds >= scenario.seconds:
            yield (*at, "at_seconds"), f"at_seconds = {run.at_seconds:g} of runs: it all ends before"
        if run.accuracy and scenario.fidelity == "cores":
            yield (*at, "accuracy"), 'accuracy of a run of sums: only fidelity = "stack" trains a model'
    if checks.converge_seconds > scenario.seconds:
        yield ("checks", "converge_seconds"), "checks.converge_seconds: it all ends before anything is due"
    if checks.found_share and not (records.enabled and records.lookups_per_second):
        yield ("checks", "found_share"), "checks.found_share: nothing is looked for, see [records]"
