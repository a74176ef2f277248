"""Nodes that train a run also serve. Training and serving do not disturb each other, and no node exceeds its
slots."""

import pytest
import trio

from node.errors import RunFailed
from node.events import RunEnded
from node.offering import Offering
from tests.node.serving.scene import ask, manifest, serving
from tests.partition.serve.world import reference as answer_of
from tests.partition.serve.world import wish
from tests.stack import assert_equal, reference, simulate, train, weights
from tests.stack import manifest as run_manifest


def test_a_run_stays_exact_while_its_nodes_answer() -> None:
    answers = 0

    async def main() -> None:
        async with serving("ab", offer=Offering(slots=2)) as (group, service), trio.open_nursery() as nursery:

            async def keep_asking() -> None:
                nonlocal answers
                while True:
                    assert await ask(group.nodes["b"], service, wish(tokens=20)) == answer_of(wish(tokens=20))
                    answers += 1

            nursery.start_soon(keep_asking)
            run, events = await train(group, "a", run_manifest(stages=2, steps=4))
            end = events[-1]
            assert isinstance(end, RunEnded)
            assert end.outcome == "done", end.detail
            assert_equal(weights(group, "a", run), reference(run), "float64")
            nursery.cancel_scope.cancel()

    simulate(main)
    assert answers >= 2


def test_a_node_gives_no_more_slots_than_its_owner_allows() -> None:
    async def main() -> None:
        async with serving("ab", offer=Offering(slots=2)) as (group, _):
            other = await group.nodes["b"].serving.published.begin(
                manifest(name="other"), [group.nodes["b"].peer]
            )
            await group.nodes["b"].serving.published.await_ready(other)
            assert [node.runs.slots.free for node in group.nodes.values()] == [0, 0]
            with pytest.raises(RunFailed, match="nobody takes stage 1"):
                await group.nodes["a"].serving.published.begin(manifest(name="third"))

    simulate(main)
