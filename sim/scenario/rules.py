"""Contradictions in a scenario: rules between its values. Pure, except for reading a trace.

The bounds of a single value are in its type, and those of a single table in the table (`sim.network.model`).
Each fault has the path of the wrong value, from which the error finds its line.
"""

from collections.abc import Iterator
from pathlib import Path

from gossip.messages import MEMBERS_MAX
from node.suggest import did_you_mean
from sim.churn.traces import load_trace
from sim.scenario.model import Scenario

STACK_NODES_MAX = 200
"""Maximum number of whole nodes. A whole node costs some hundred times as much as its cores."""
_SHARES_NOISE = 1e-6

Fault = tuple[tuple[str | int, ...], str]
"""The path of the wrong value, and a description of the fault."""


def faults(scenario: Scenario) -> Iterator[Fault]:
    """Yield every contradiction, in reading order. Raises UsageError if a trace file is itself wrong."""
    yield from _sizes(scenario)
    yield from _churn(scenario)
    yield from _events(scenario)
    yield from _work(scenario)


def _sizes(scenario: Scenario) -> Iterator[Fault]:
    nodes, seconds = scenario.nodes, scenario.seconds
    if scenario.fidelity == "stack" and nodes > STACK_NODES_MAX:
        yield (
            ("nodes",),
            f'nodes = {nodes}: at most {STACK_NODES_MAX} whole nodes. For more, set fidelity = "cores"',
        )
    if scenario.sample_seconds > seconds:
        yield (
            ("sample_seconds",),
            (f"sample_seconds = {scenario.sample_seconds:g}: the scenario ends after {seconds:g}"),
        )
    if scenario.start.spread_seconds > seconds:
        yield (
            ("start", "spread_seconds"),
            f"start.spread_seconds = {scenario.start.spread_seconds:g}: the scenario ends after {seconds:g}",
        )
    if scenario.start.acquainted:
        yield from _acquainted(scenario)
    if scenario.network.has_routers and scenario.fidelity == "stack":
        yield (
            ("network", "access"),
            'router of network.access: routers are simulated only with fidelity = "cores"',
        )
    if scenario.membership.scope == "all" and nodes > MEMBERS_MAX:
        yield (
            ("nodes",),
            f"nodes = {nodes}: a member list holds at most {MEMBERS_MAX}. For more, set membership.scope = "
            '"neighbourhood"',
        )
    joins = any(event.kind == "join" for event in scenario.events)
    if scenario.start.late_share and not joins:
        yield (
            ("start", "late_share"),
            "start.late_share keeps peers back, but no event of kind join starts them",
        )


def _acquainted(scenario: Scenario) -> Iterator[Fault]:
    at = ("start", "acquainted")
    if scenario.fidelity == "stack":
        yield at, 'start.acquainted: whole nodes find each other themselves. Set fidelity = "cores"'
    if scenario.start.spread_seconds:
        yield at, "start.acquainted: all peers start at the same time. Set start.spread_seconds = 0"
    if any(access.nat != "none" or access.router != "none" for access in scenario.network.access):
        yield at, "start.acquainted: peers behind a NAT must find that out first"
    for index, event in enumerate(scenario.events):
        if event.kind in ("freeze", "join") and not event.at_seconds:
            yield (
                ("events", index, "at_seconds"),
                (
                    f"at_seconds = 0 of an event of kind {event.kind}: at that instant the "
                    "peers become acquainted"
                ),
            )


def _churn(scenario: Scenario) -> Iterator[Fault]:
    churn = scenario.churn
    if churn.permanent > scenario.nodes:
        yield (
            ("churn", "permanent"),
            (f"churn.permanent = {churn.permanent}: there are only {scenario.nodes} nodes"),
        )
    given = [name for name in ("sessions", "absences") if getattr(churn, name) is not None]
    if churn.trace:
        for name in (*given, *(["profile"] if churn.profile != "none" else [])):
            yield (
                ("churn", name),
                (f"churn.{name} together with churn.trace: the trace decides which peers come and go"),
            )
        names = load_trace(Path(churn.trace)).names
        room = max(0, scenario.nodes - churn.permanent)
        if len(names) > room:
            yield (
                ("churn", "trace"),
                (
                    f"churn.trace has {len(names)} peers, but of {scenario.nodes} nodes only "
                    f"{room} may come and go"
                ),
            )
    elif churn.profile == "lab" and given:
        yield ("churn", given[0]), f"churn.{given[0]} together with profile lab, which is a timetable"
    elif churn.profile == "none" and len(given) == 1:
        other = "absences" if given == ["sessions"] else "sessions"
        yield (
            ("churn", given[0]),
            f"churn.{given[0]} without {other}. Add [churn.{other}] "
            '(distribution = "forever" for no end) or a profile',
        )
    if churn.wave_depth and (
        churn.trace or churn.profile == "lab" or (churn.profile == "none" and not given)
    ):
        yield ("churn", "wave_depth"), "churn.wave_depth: there are no sessions or absences that could vary"
    if len({version.name for version in churn.versions}) < len(churn.versions):
        yield ("churn", "versions"), "two of churn.versions have the same name"
    if sum(version.share for version in churn.versions) > 1 + _SHARES_NOISE:
        yield ("churn", "versions"), "the shares of churn.versions sum up to more than 1"


def _events(scenario: Scenario) -> Iterator[Fault]:
    regions = [region.name for region in scenario.network.regions]
    versions = [version.name for version in scenario.churn.versions]
    versions += [event.version for event in scenario.events if event.version]
    for index, event in enumerate(scenario.events):
        at = ("events", index)
        if event.at_seconds > scenario.seconds:
            yield (
                (*at, "at_seconds"),
                f"at_seconds = {event.at_seconds:g} of events: the scenario ends after {scenario.seconds:g}",
            )
        for kind, names, known in (
            ("region", event.regions, regions),
            ("version", event.versions, versions),
        ):
            for name in names:
                if name not in known:
                    hint = did_you_mean(name, known) or f"; known: {', '.join(known) or 'none'}"
                    yield (*at, f"{kind}s"), f"no {kind} is called '{name}'{hint}"
        if not event.lasts_seconds and event.kind not in ("crash", "leave", "join", "restart", "reboot"):
            yield (
                (*at, "lasts_seconds"),
                f"lasts_seconds = 0 of an event of kind {event.kind}: such an event has no effect",
            )
        if event.version and event.kind != "restart":
            yield (*at, "version"), f"only an event of kind restart may have a version, not {event.kind}"
        if event.kind == "reboot" and not scenario.network.has_routers:
            yield (*at, "kind"), "no peer is behind a router that an event of kind reboot could affect"
        if event.kind == "join" and not scenario.start.late_share:
            yield (*at, "kind"), "no peer is kept back for an event of kind join. Set start.late_share"


def _work(scenario: Scenario) -> Iterator[Fault]:
    records, checks = scenario.records, scenario.checks
    if records.enabled and records.republish_seconds >= records.lifetime_seconds:
        yield (
            ("records", "republish_seconds"),
            "records.republish_seconds: a record expires before it is stored again",
        )
    for index, run in enumerate(scenario.runs):
        at = ("runs", index)
        if run.members > scenario.nodes:
            yield (*at, "members"), f"members = {run.members} of runs: there are only {scenario.nodes} nodes"
        if run.stages * run.replicas > run.members:
            yield (
                (*at, "replicas"),
                f"{run.stages} stages of {run.replicas} replicas need {run.stages * run.replicas} members, "
                f"but the run has {run.members}",
            )
        if run.trainers > run.members:
            yield (
                (*at, "trainers"),
                (f"trainers = {run.trainers} of runs: the run has only {run.members} members"),
            )
        if run.at_seconds >= scenario.seconds:
            yield (*at, "at_seconds"), f"at_seconds = {run.at_seconds:g} of runs: the scenario ends before"
        if run.accuracy and scenario.fidelity == "cores":
            yield (*at, "accuracy"), 'accuracy of a run: only fidelity = "stack" trains a real model'
    yield from _services(scenario)
    yield from _local_runs(scenario)
    if checks.converge_seconds > scenario.seconds:
        yield (
            ("checks", "converge_seconds"),
            ("checks.converge_seconds: the scenario ends before this time has passed"),
        )
    if checks.found_share and not (records.enabled and records.lookups_per_second):
        yield ("checks", "found_share"), "checks.found_share: there are no lookups. Add [records]"
    first = scenario.start.spread_seconds + records.republish_seconds
    if checks.found_share and first >= scenario.seconds:
        yield (
            ("checks", "found_share"),
            f"checks.found_share counts from {first:g} s, when all have started and republished, "
            "but the scenario ends before",
        )


def _local_runs(scenario: Scenario) -> Iterator[Fault]:
    for index, run in enumerate(scenario.local_runs):
        at = ("local_runs", index)
        if scenario.fidelity == "stack":
            yield at, 'local_runs are simulated only with fidelity = "cores"'
        if run.members > scenario.nodes:
            yield (
                (*at, "members"),
                (f"members = {run.members} of local_runs: there are only {scenario.nodes} nodes"),
            )
        if run.stages > run.members:
            yield (
                (*at, "stages"),
                (f"stages = {run.stages} of local_runs: the run has only {run.members} members"),
            )
        if run.at_seconds >= scenario.seconds:
            yield (
                (*at, "at_seconds"),
                (f"at_seconds = {run.at_seconds:g} of local_runs: the scenario ends before"),
            )


def _services(scenario: Scenario) -> Iterator[Fault]:
    for index, service in enumerate(scenario.services):
        at = ("services", index)
        if scenario.fidelity == "stack":
            yield at, 'services are simulated only with fidelity = "cores"'
        if service.members > scenario.nodes:
            yield (
                (*at, "members"),
                f"members = {service.members} of services: there are only {scenario.nodes} nodes",
            )
        wanted = service.stages * service.replicas
        if wanted > service.members:
            yield (
                (*at, "replicas"),
                f"{service.stages} stages of {service.replicas} replicas need {wanted} members, but the "
                f"service has {service.members}",
            )
        if service.at_seconds >= scenario.seconds:
            yield (
                (*at, "at_seconds"),
                (f"at_seconds = {service.at_seconds:g} of services: the scenario ends before"),
            )
