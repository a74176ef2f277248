"""A requester dies while it hands out its first plan: members that have started bring the plan to the others.

Whole nodes in virtual time. `tests.test_kills` kills real processes at that point.
"""

import pytest
import trio

from crypto.identity import PeerId
from node.events import RunEnded
from node.protocols import runs as wire
from tests.asking import Ask, asking_through
from tests.stack import Swarm, manifest, prepare, simulate, swarm

STEPS = 6


@pytest.mark.parametrize("told", [0, 1])
def test_a_requester_that_dies_early_leaves_no_waiting_run(told: int) -> None:
    groups, began = list[Swarm](), list[PeerId]()

    async def die_after(me: PeerId, peer: PeerId, request: wire.Request, ask: Ask) -> wire.Reply:
        if isinstance(request, wire.Start) and groups[0].name_of(me) == "a":
            began.append(peer)
            if len(began) > told:
                await trio.sleep(1)
                groups[0].kill("a")
                await trio.sleep_forever()
        return await ask()

    async def scenario() -> None:
        parts = asking_through(die_after)
        async with swarm("abc", parts=parts) as group, trio.open_nursery() as nursery:
            groups.append(group)
            a = group.nodes["a"]
            a.limit(accept_runs="never")  # a requests the run, the two others compute
            await trio.sleep(5)
            run = prepare(a, manifest(steps=STEPS, stages=1, replicas=2, trainers=2, test_samples=16))
            nursery.start_soon(a.runs.submit, run)
            with trio.fail_after(60):
                while not group.scopes["a"].cancel_called:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            others = [group.nodes[name] for name in "bc"]
            with trio.fail_after(60):
                while any(node.runs.members or not node.runs.has_slot for node in others):  # noqa: ASYNC110
                    await trio.sleep(0.1)
            ends = [
                [event.outcome for event in group.events[name] if isinstance(event, RunEnded)]
                for name in "bc"
            ]
            assert ends == [["done"] * told] * 2
            nursery.cancel_scope.cancel()

    simulate(scenario)
