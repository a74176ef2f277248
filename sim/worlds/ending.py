"""How a run in a world of cores ends: what its stages hold is compared with the truth."""

from collections.abc import Callable
from typing import Any, Protocol

from crypto.identity import PeerId
from partition.plan.plan import Plan, plan_hash
from partition.run.completion import COLLECT_SECONDS_MAX
from sim.observers import Broken
from sim.worlds.integer_stage import IntegerState, units_of
from sim.worlds.run_context import Setting
from sim.worlds.run_messages import ExportStage, Question
from sim.worlds.streams import Answer


class Committing(Protocol):
    """The member that commits."""

    @property
    def now(self) -> float: ...
    @property
    def plan(self) -> Plan | None: ...
    def finished(self, reason: str | None) -> None: ...
    def ask(self, peer: PeerId, question: Question, seconds: float, done: Answer) -> None: ...
    def later(self, seconds: float, action: Callable[[], None]) -> None: ...


def collect(setting: Setting, member: Committing, plan: Plan) -> None:
    """As the committer: have each stage's state, and end the run. Raises Broken where one is not exact."""
    found: dict[int, IntegerState] = {}
    until = member.now + COLLECT_SECONDS_MAX

    def next_stage() -> None:
        missing = [number for number in range(len(plan.stages)) if number not in found]
        if member.plan != plan:
            return
        if not missing:
            _check(setting, plan, found)
            member.finished(None)
            return
        fetch(missing[0], [PeerId(peer) for peer in plan.stages[missing[0]].replicas])

    def fetch(stage: int, left: list[PeerId]) -> None:
        def take(state: Any) -> None:
            if isinstance(state, IntegerState):
                found[stage] = state
                next_stage()
            else:
                fetch(stage, left)

        if left:
            member.ask(left.pop(0), ExportStage(plan_hash(plan)), setting.settings.end_seconds_max, take)
            return
        if member.now >= until:
            member.finished(f"nobody handed over stage {stage + 1}")
        else:
            # If a new plan was the reason, all this begins again under it.
            member.later(setting.settings.retry_seconds, next_stage)

    next_stage()


def _check(setting: Setting, plan: Plan, found: dict[int, IntegerState]) -> None:
    for stage, state in sorted(found.items()):
        units = units_of(plan, stage, setting.training.stages)
        if state != setting.truth.state(setting.training.steps, units):
            raise Broken(
                "sums",
                f"run {setting.number} ends with other sums than the undisturbed run in stage"
                f" {stage + 1} of {len(plan.stages)}",
            )
