"""The reports of the holders of one stage, as the rules of local mode read them.

`gossip.roster.Report` has this shape. Its counts are claims of its author, so they are only compared with a
count that is known here.
"""

from collections.abc import Mapping
from typing import Protocol

from crypto.identity import PeerId


class StepClaim(Protocol):
    """The step that a member claims."""

    def reaches(self, count: int, /) -> bool: ...


class HolderReport(Protocol):
    """One member's report about a stage. `has_state`: others may fetch its parameters. `lineage` identifies
    the history of its parameters; for members of a run it is the run's id."""

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
    """Return whether one of these members has made a step. Until then, all hold the run's initial
    parameters."""
    return any(report.has_state and report.step.reaches(1) for report in reports.values())


def is_at_end(reports: Reports, step: int, steps: int) -> bool:
    """Return whether the `steps` of a run are done, for a member at `step`. They are if more than half of the
    holders of a stage claim so, or if this member is done and so are at least half of all holders: a single
    member may claim any step."""
    others = [report.step.reaches(steps) for report in reports.values() if report.has_state]
    count, done = len(others) + 1, sum(others)
    return 2 * done > count or (step >= steps and 2 * (done + 1) >= count)
