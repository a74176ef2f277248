"""A requester that dies while it hands out its first plan: members that have started bring the plan to the
others.

Whole nodes in virtual time. `tests.test_kills` kills real processes at that point.
"""

from typing import Any

import pytest
import trio

from crypto.identity import PeerId
from node.events import RunEnded
from node.protocols import runs as wire
from tests.stack import Swarm, manifest, prepare, simulate, swarm

STEPS = 6


@pytest.mark.parametrize("told", [0, 1])
def test_a_requester_that_dies_early_leaves_no_waiting_run(
    told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with swarm("abc") as group, trio.open_nursery() as nursery:
            a = group.nodes["a"]
            a.limit(accept_runs="never")  # it requests, the two others compute
            await trio.sleep(5)
            run = prepare(a, manifest(steps=STEPS, stages=1, replicas=2, trainers=2, test_samples=16))
            monkeypatch.setattr(a.runs, "ask", dying_after(group, told))
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


def dying_after(group: Swarm, told: int) -> Any:
    """Return a replacement of `ask` that kills `a` after it has sent its plan to this many members."""
    ask, began = group.nodes["a"].runs.ask, list[PeerId]()

    async def dying(peer: PeerId, request: wire.Request, seconds: float) -> wire.Reply:
        if not isinstance(request, wire.Start):
            return await ask(peer, request, seconds)
        began.append(peer)
        if len(began) > told:
            await trio.sleep(1)
            group.kill("a")
            await trio.sleep_forever()
        return await ask(peer, request, seconds)

    return dying
