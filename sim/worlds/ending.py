"""The result of a run in a world of cores: the states of its stages are compared with those of an undisturbed
run."""

from partition.plan.plan import Plan
from sim.observers import Broken
from sim.worlds.integer_stage import IntegerState, units_of
from sim.worlds.run_context import Setting


class SimResult:
    """The stages that replicas have handed over to a committer under one plan."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._plan: Plan | None = None
        self._found: dict[int, IntegerState] = {}

    def take(self, plan: Plan, stage: int, state: IntegerState) -> None:
        """Add a stage that a replica handed over under this plan."""
        if plan != self._plan:
            self._plan, self._found = plan, {}
        self._found[stage] = state

    def check(self, plan: Plan) -> None:
        """Compare all stages with the undisturbed run. Raises Broken if one differs."""
        setting = self._setting
        for stage in range(len(plan.stages)):
            units = units_of(plan, stage, setting.training.stages)
            if self._found[stage] != setting.truth.state(setting.training.steps, units):
                raise Broken(
                    "sums",
                    f"run {setting.number} ends with different sums from the undisturbed run in stage"
                    f" {stage + 1} of {len(plan.stages)}",
                )
