"""A requester whose own stage fails follows its run while the others train on."""

from node.errors import StageFailed
from node.local.trainer import LocalTrainer, Stepped
from node.seams import Parts
from sim.worlds.scheduling import run_virtually
from tests.local_runs import local_runs
from tests.node.local.test_runs import SLOW, ends, submit
from tests.stack import swarm

STEPS = 16


class FailingTrainer(LocalTrainer):
    """A trainer whose stage dies after some steps."""

    async def train_step(self) -> Stepped:
        if self.step >= 4:
            raise StageFailed("the process of the stage has ended")
        return await super().train_step()


def test_a_requester_whose_stage_fails_follows_its_run() -> None:
    async def play() -> None:
        parts: dict[str, Parts] = {"a": {LocalTrainer: FailingTrainer}}
        async with swarm("abc", stage_seconds=SLOW, parts_of=parts) as group:
            await submit(group, steps=STEPS)
            (member,) = local_runs(group.nodes["a"]).members.values()
            found = await ends(group, "abc")
            assert {event.outcome for event in found} == {"done"}, [event.detail for event in found]
            assert len({event.weights for event in found}) == 1
            assert not member.crew.is_training, "the requester still trains although its stage has failed"

    run_virtually(play)
