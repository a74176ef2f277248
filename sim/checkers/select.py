"""Selects the invariants for a scenario, and passes each event only to the checkers that handle it."""

from collections.abc import Sequence
from typing import Any

from sim.checkers.answers import AnswersAreRight
from sim.checkers.averages import AveragesAgree
from sim.checkers.checker import Checker, Handler
from sim.checkers.limits import WithinLimits
from sim.checkers.membership import DeathsAreRefuted, NoFalseDeaths, ViewsConverge
from sim.checkers.plans import OnePlanAHeight, PlansFollow, SomeBranchGoesOn
from sim.checkers.records import RecordsAreFound, RecordsAreGenuine
from sim.checkers.steps import GoodbyesLoseNothing, SamplesOnce, SumsAgree
from sim.observers import Observation, Watcher, World
from sim.scenario import Scenario


class Checkers:
    """Several checkers as one `sim.observers.Watcher`. A world of thousands of peers publishes millions of
    events, and most of them concern no checker."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        self.checkers = tuple(checkers)
        self._handlers: dict[type[Any], list[Handler]] = {}
        for checker in self.checkers:
            for kind, handler in checker.handlers.items():
                self._handlers.setdefault(kind, []).append(handler)

    def see(self, observed: Observation, world: World) -> None:
        for handler in self._handlers.get(type(observed.event), ()):
            handler(observed, world)

    def sample(self, world: World) -> None:
        for checker in self.checkers:
            checker.sample(world)

    def end(self, world: World) -> None:
        for checker in self.checkers:
            checker.end(world)


def checkers_for(scenario: Scenario) -> tuple[Watcher, ...]:
    """Return new checkers for all invariants that must hold in this scenario. They keep the state of one
    experiment."""
    checks = scenario.checks
    found: list[Checker] = [WithinLimits(), DeathsAreRefuted(scenario), RecordsAreGenuine(), AveragesAgree()]
    if checks.converge_seconds:
        found.append(ViewsConverge(scenario))
    if checks.false_deaths:
        found.append(NoFalseDeaths(scenario))
    if checks.found_share:
        found.append(RecordsAreFound(scenario))
    if scenario.services:
        found.append(AnswersAreRight())
    if scenario.runs:
        found += [PlansFollow(), SomeBranchGoesOn(), SamplesOnce(), SumsAgree()]
        if all(run.on_lost_quorum != "fork" for run in scenario.runs):
            found.append(OnePlanAHeight())
        if _only_goodbyes(scenario):
            found.append(GoodbyesLoseNothing())
    return (Checkers(found),)


def _only_goodbyes(scenario: Scenario) -> bool:
    """Return whether peers only leave with a goodbye, and the remaining ones always have room for all
    stages."""
    going = sum(round(event.share * scenario.nodes) for event in scenario.events)
    has_room = all(run.members - going >= run.stages * run.replicas for run in scenario.runs)
    churn, events = scenario.churn, scenario.events
    stays = churn.profile == "none" and churn.sessions is None and not churn.trace
    return stays and has_room and bool(events) and all(event.kind == "leave" for event in events)
