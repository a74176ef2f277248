"""The reports of holders of one stage, as the rules of local mode read them.

`gossip.roster.Report` has this shape. Its counts are their author's claims, so they are only compared with a
count that is known here.
"""

from collections.abc import Mapping
from typing import Protocol

from crypto.identity import PeerId


class StepClaim(Protocol):
    """The step that a member claims."""

    def reaches(self, count: int, /) -> bool: ...


class HolderReport(Protocol):
    """One member's report about a stage. `has_state`: others may fetch its parameters. `lineage` is the run's
    id for its members."""

    @property
    def step(self) -> StepClaim: ...
    @property
    def has_state(self) -> bool: ...
    @property
    def lineage(self) -> bytes: ...


Reports = Mapping[PeerId, HolderReport]


def training(reports: Reports) -> list[PeerId]:
    """Return the members that have a state."""
    return [peer for peer, report in reports.items() if report.has_state]


def is_begun(reports: Reports) -> bool:
    """Return whether one of these members has made a step; until then all hold the run's initial
    parameters."""
    return any(report.has_state and report.step.reaches(1) for report in reports.values())


def is_at_end(reports: Reports, step: int, steps: int) -> bool:
    """Return whether the `steps` of a run are done, for a member at `step`: at most holders of a stage, or
    here and at half of all, as one member may claim any step."""
    others = [report.step.reaches(steps) for report in reports.values() if report.has_state]
    count, done = len(others) + 1, sum(others)
    return 2 * done > count or (step >= steps and 2 * (done + 1) >= count)
