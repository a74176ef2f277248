"""Translation of a node's reports on a run into the simulator's events."""

from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from crypto.identity import PeerId
from node.events import RunPlanned, StepCommitted
from partition.plan.plan import plan_hash
from partition.steps.messages import Reduced, StageCommit, StepCommit
from sim import events
from sim.scenario import TrainingScenario
from sim.worlds.node_life import NodeLife
from sim.worlds.run_events import RunWords
from tests.node.saved import saved, signer


class Talk:
    """A node that holds the only stage of a run under the plan `plan`, and can adopt the next plan."""

    def __init__(self) -> None:
        made = saved(stages=1)
        self.life = NodeLife(0, 0, 0.0, signer())
        self.run, self.specification = made.run, made.specifications[0]
        self.plan = replace(made.plan, stages=(replace(made.plan.stages[0], replicas=(self.life.peer,)),))
        self.row = StageCommit(0, self.life.peer, (8, 9))
        self._member = SimpleNamespace(plan=self.plan)
        runs = SimpleNamespace(members={made.run.id: self._member})
        self.life.node = cast("Any", SimpleNamespace(runs=runs))
        self.words = RunWords()
        self.words.made(TrainingScenario(), made.run)
        self.planned()

    def planned(self) -> events.PlanAdopted:
        event = RunPlanned(
            at=0.0,
            run=self.run.text,
            plan="",
            height=self._member.plan.height,
            trainer=self.life.peer,
            planner=self.life.peer,
            layers=(),
            stages=(),
        )
        return cast("events.PlanAdopted", self.words.of_node(self.life, event))

    def adopt_next(self) -> None:
        self._member.plan = replace(self.plan, height=self.plan.height + 1, parent=plan_hash(self.plan))
        assert self.planned().parent == plan_hash(self.plan)


def test_a_late_step_report_counts_for_the_plan_of_the_step() -> None:
    talk = Talk()
    plan, row = talk.plan, talk.row
    talk.words.sent(talk.life, StepCommit(plan=plan_hash(plan), step=4, attempt=0, replicas=(row,)))
    talk.adopt_next()
    step = StepCommitted(
        at=1.0, run=talk.run.text, step=4, loss=0.5, samples=2, seconds=0.1, replicas=1, height=plan.height
    )
    counted = (((PeerId(row.replica), (8, 9)),),)
    assert talk.words.of_node(talk.life, step) == events.StepCommitted(
        talk.run.id, plan_hash(plan), plan.height, 4, counted, 0.5
    )


def test_a_step_applied_late_counts_under_the_plan_of_its_sum() -> None:
    talk = Talk()
    talk.words.sent(talk.life, Reduced(plan=plan_hash(talk.plan), step=4, attempt=0, digest=bytes(32)))
    talk.adopt_next()
    # If the step is applied twice, a checker must see both reports.
    for _ in range(2):
        said = talk.words.of_stage(talk.life, talk.specification, 4, (8, 9))
        assert said == events.SamplesCounted(talk.run.id, plan_hash(talk.plan), 4, 0, (8, 9))


def test_a_step_that_is_applied_without_a_sum_is_reported() -> None:
    talk = Talk()
    said = talk.words.of_stage(talk.life, talk.specification, 4, (8, 9))
    assert said == events.SamplesCounted(talk.run.id, plan_hash(talk.plan), 4, 0, (8, 9))
