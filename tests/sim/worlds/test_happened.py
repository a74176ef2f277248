"""What nodes say of a run, in the words of the simulator."""

from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from crypto.identity import PeerId
from node.events import RunPlanned, StepCommitted
from partition.plan.plan import plan_hash
from partition.steps.messages import StageCommit, StepCommit
from sim import happenings
from sim.scenario import Training
from sim.worlds.happened import RunWords
from sim.worlds.node_life import NodeLife
from tests.node.saved import saved, signer


def test_a_step_said_when_the_next_plan_is_in_force_is_a_step_of_its_own_plan() -> None:
    made = saved(stages=1)
    run, plan = made.run, made.plan
    after = replace(plan, height=plan.height + 1, parent=plan_hash(plan))
    member = SimpleNamespace(plan=plan)
    life = NodeLife(0, 0, 0.0, signer())
    life.node = cast("Any", SimpleNamespace(runs=SimpleNamespace(members={run.id: member})))
    words = RunWords()
    words.made(Training(), run)

    def planned() -> happenings.PlanAdopted:
        event = RunPlanned(
            at=0.0,
            run=run.text,
            plan="",
            height=member.plan.height,
            trainer=life.peer,
            planner=life.peer,
            layers=(),
            stages=(),
        )
        return cast("happenings.PlanAdopted", words.of_node(life, event))

    planned()
    row = StageCommit(0, plan.stages[0].replicas[0], (8, 9))
    words.sent(StepCommit(plan=plan_hash(plan), step=4, attempt=0, replicas=(row,)))
    member.plan = after
    assert planned().parent == plan_hash(plan)
    step = StepCommitted(
        at=1.0, run=run.text, step=4, loss=0.5, samples=2, seconds=0.1, replicas=1, height=plan.height
    )
    counted = (((PeerId(row.replica), (8, 9)),),)
    assert words.of_node(life, step) == happenings.StepCommitted(
        run.id, plan_hash(plan), plan.height, 4, counted, 0.5
    )
