"""A node leaves in order, even while it is still looking for its swarm."""

import subprocess
import sys

import trio
from trio.testing import MockClock

from node.errors import EXIT_UNEXPECTED
from node.events import JoinTried, NodeStopped, StepCommitted
from node.process import END_SECONDS_MAX
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimNetworkFabric
from tests.node.simulated import simulated_node
from tests.stack import manifest, prepare, simulate, swarm


def test_a_node_may_leave_while_its_first_dial_is_in_progress() -> None:
    medium = SimNetworkFabric(SimLinks(NetworkModel(), 1))
    events: list[object] = []

    async def scenario() -> None:
        async with simulated_node(medium, 0, report=events.append) as first:
            there = first.network.addresses[0].short
            async with simulated_node(medium, 1, there, report=events.append):
                pass

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
    assert [event.outcome for event in events if isinstance(event, JoinTried)] == ["ok"]
    assert sum(isinstance(event, NodeStopped) for event in events) == 2


def test_a_node_without_a_successor_leaves_within_a_time_limit() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            run = prepare(group.nodes["a"], manifest(replicas=1, steps=100_000))
            with group.nodes["a"].watch() as events:
                await group.nodes["a"].runs.submit(run)
                async for event in events:
                    if isinstance(event, StepCommitted):
                        break
            for name in "bc":
                group.kill(name)
            await trio.sleep(30)
            node = group.nodes["a"]
            assert node.state.runs[run.text].status == "paused"
            began = trio.current_time()
            await node.leave()
            assert trio.current_time() - began < END_SECONDS_MAX
            assert node.runs.left == {run.text: False}, (
                "the node did not report that nobody took over its part"
            )

    simulate(scenario)


def test_a_node_that_hands_its_part_over_says_so() -> None:
    async def scenario() -> None:
        async with swarm("abcdef", preset="lan") as group:
            run = prepare(group.nodes["a"], manifest(steps=100_000))
            with group.nodes["a"].watch() as events:
                await group.nodes["a"].runs.submit(run)
                async for event in events:
                    if isinstance(event, StepCommitted):
                        break
            plan = group.nodes["a"].state.runs[run.text].plan
            assert plan is not None
            node = group.nodes[group.name_of(plan.stages[0][0])]
            await node.leave()
            assert node.runs.left == {run.text: True}

    simulate(scenario)


def test_a_node_that_said_goodbye_publishes_no_more_records() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            node = group.nodes["a"]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.leave)
                await trio.sleep(0.01)
                node.set("accept_runs", "never")
            await trio.sleep(5)
            assert group.nodes["b"].state.members[node.peer].status == "left"

    simulate(scenario)


def test_a_process_that_cannot_leave_in_order_still_ends() -> None:
    program = (
        "import time; from node import process; process.END_SECONDS_MAX = 0.2\n"
        "with process._forced_end(): time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
    assert done.returncode == EXIT_UNEXPECTED
    assert b"left without finishing" in done.stderr
