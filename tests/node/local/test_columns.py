"""Runs in local mode in several stages. Columns (chains of members that together hold all stages) train, and
the holders of each stage average."""

from typing import Any

import numpy as np
import pytest
import trio
from msgspec.structs import replace

from crypto.facts import IdentitySigner
from crypto.identity import Identity
from node.averaging_events import AveragingEnded
from node.errors import UsageError
from node.events import Event, StepCommitted
from node.local.shard import Shard
from node.local.stages import check_columns, local_plan, stage_ranges
from node.local.trainer import LocalTrainer
from node.placement.admission import Machine, needed_bytes, rejection_reason
from node.protocols.manifest import Run, make_run
from node.seams import Parts
from partition.capture.models.model_spec import capture_built_in
from partition.run.local import head_watch
from partition.run.local_settings import LocalSettings
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.local_runs import local_runs
from tests.node.local.test_runs import SLOW, ends, submit
from tests.stack import Swarm, swarm

LOCAL = LocalSettings(local_steps=3)
STEPS = 24
"""Number of steps of a run in which a member dies after ten steps."""


async def begin(group: Swarm, **changes: Any) -> Run:
    """Request a run in columns."""
    fields: dict[str, Any] = {"stages": 2, "replicas": 2, "steps": STEPS, "local": LOCAL, "save_every": 0}
    return await submit(group, **(fields | changes))


def steps_of(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepCommitted)]


def stages_of(group: Swarm) -> dict[str, int]:
    """Return the stage that each live node holds."""
    found = {}
    for name, node in group.nodes.items():
        for each in local_runs(node).members.values():
            found[name] = each._stage
    return found


async def reached(group: Swarm, step: int) -> None:
    """Wait until the first node has made this many steps."""
    with trio.fail_after(120):
        while True:
            members = list(local_runs(group.nodes["a"]).members.values())
            if not members or members[0].step >= step:
                return
            await trio.sleep(0.2)


async def columns(group: Swarm, count: int, names: str) -> dict[str, str]:
    """Wait for `count` whole columns. Return the holder of the last stage, keyed by the head of its
    column."""
    with trio.fail_after(120):
        while True:
            found = {}
            for name in names:
                for each in local_runs(group.nodes[name]).members.values():
                    if each.crew.column is not None and not each.crew.column.missing and each.has_state:
                        found[name] = group.name_of((each.crew.column.peers or (group.nodes[name].peer,))[-1])
            if len(found) >= count:
                return found
            await trio.sleep(0.2)


def test_two_columns_average_each_stage_and_end_with_one_model() -> None:
    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW, preset="lan") as group:
            run = await begin(group)
            await columns(group, 2, "abcd")
            assert sorted(stages_of(group).values()) == [0, 0, 1, 1]
            found = await ends(group, "abcd", 400.0)
            assert {event.outcome for event in found} == {"done"}
            assert len({event.weights for event in found}) == 1
            assert all(event.is_here for event in found)
            averaged = {
                name: [e for e in group.events[name] if isinstance(e, AveragingEnded) and e.outcome == "ok"]
                for name in "abcd"
            }
            assert all(averaged.values()), "the holders of some stage did not average"
            assert {event.run.count(":") for events in averaged.values() for event in events} == {2}
            result = stack.weights(group, "d", run)
            first = stack.MODELS[run.manifest.graph]
            assert len(result) >= len(first.graph.parameters)

    run_virtually(play)


class _SameDraws(LocalTrainer):
    """A trainer that draws its samples and random operators as if every run had the same id."""

    def __init__(self, run: Run, *arguments: Any, in_flight: int) -> None:
        super().__init__(run, *arguments, in_flight=in_flight)
        self._first = 0
        _, _, batches, _, me = arguments
        self.shard = Shard(bytes(32), run.manifest.seed, batches.train_samples, me)


def test_one_column_trains_like_a_single_process() -> None:
    """The gradient of a step goes through both stages, so the loss falls as with the whole model."""

    async def play(stages: int, names: str, losses: list[float]) -> None:
        async with swarm(names, stage_seconds=SLOW, parts={LocalTrainer: _SameDraws}) as group:
            await begin(group, stages=stages, replicas=1, steps=12)
            await ends(group, names, 400.0)
            losses += [e.loss for e in group.events["a"] if isinstance(e, StepCommitted)]

    one: list[float] = []
    two: list[float] = []
    run_virtually(lambda: play(1, "a", one))
    run_virtually(lambda: play(2, "ab", two))
    assert len(one) == len(two)
    assert np.allclose(one, two, rtol=1e-4), (one, two)


def test_as_many_microbatches_as_stages_are_in_flight() -> None:
    """With eight micro-batches in a step, two equal stages take little more than half the time that they take
    with one micro-batch in flight. The losses are the same.
    """

    async def play(found: dict[str, list[Any]], parts: Parts | None = None) -> None:
        async with swarm("ab", stage_seconds=SLOW, preset="lan", parts=parts) as group:
            await begin(group, replicas=1, steps=6, microbatches=8, microbatch=4)
            await ends(group, "ab", 400.0)
            steps = [e for e in group.events["a"] if isinstance(e, StepCommitted)]
            found["seconds"] = [e.seconds for e in steps]
            found["losses"] = [e.loss for e in steps]

    class OneByOne(LocalTrainer):
        def __init__(self, *arguments: Any, in_flight: int) -> None:
            assert in_flight == 2
            super().__init__(*arguments, in_flight=1)

    one: dict[str, list[Any]] = {}
    two: dict[str, list[Any]] = {}
    run_virtually(lambda: play(two))
    run_virtually(lambda: play(one, {LocalTrainer: OneByOne}))
    assert two["losses"] == one["losses"], "the number of micro-batches in flight changed the losses"
    assert np.median(two["seconds"]) < 0.65 * np.median(one["seconds"]), (one, two)


@pytest.mark.parametrize("dies", ["holder", "head"])
def test_a_death_stops_only_its_own_column(dies: str) -> None:
    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW) as group:
            await begin(group, steps=STEPS)
            whole = await columns(group, 2, "abcd")
            head = next(name for name in whole if name != "a")
            victim = whole[head] if dies == "holder" else head
            left = "".join(name for name in "abcd" if name != victim)
            await reached(group, 10)
            group.kill(victim)
            (end,) = await ends(group, "a", 400.0)
            assert (end.outcome, end.is_here) == ("done", True)
            assert max(steps_of(group.events["a"])) == STEPS - 1
            others = await ends(group, left, 400.0)
            assert {event.weights for event in others} == {end.weights}

    run_virtually(play)


def test_a_head_and_a_holder_left_over_form_a_column() -> None:
    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW) as group:
            await begin(group, steps=200)
            whole = await columns(group, 2, "abcd")
            other = next(name for name in whole if name != "a")
            await reached(group, 10)
            group.kill(whole["a"])  # the holder of a's column
            group.kill(other)  # the head of the other column
            with trio.fail_after(120):
                while await columns(group, 1, "a") != {"a": whole[other]}:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.2)
            before = next(iter(local_runs(group.nodes["a"]).members.values())).step
            assert before < 200
            await reached(group, before + 10)

    run_virtually(play)


def test_a_free_node_becomes_head_of_an_orphaned_holder() -> None:
    """The holder does not know the free node. The free node learns of the holder from the other head."""

    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            await begin(group, steps=400)
            whole = await columns(group, 2, "abcd")
            other = next(name for name in whole if name != "a")
            await reached(group, 10)
            group.kill(other)
            await trio.sleep(5.0)
            await nursery.start(stack._live, group, "e", "a", 1, SLOW)
            assert await columns(group, 2, "ae") == {"a": whole["a"], "e": whole[other]}
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_a_head_that_never_completed_a_column_ends_with_the_others() -> None:
    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW) as group:
            await begin(group, steps=30)
            whole = await columns(group, 1, "a")
            with trio.fail_after(60):
                while list((held := stages_of(group)).values()).count(0) < 2:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            # The node that holds the other stage of the second head's column, or is about to hold it.
            victim = next(name for name in "abcd" if name != whole["a"] and held.get(name, 1))
            group.kill(victim)
            found = await ends(group, "abcd".replace(victim, ""), 400.0)
            assert {event.outcome for event in found} == {"done"}

    run_virtually(play)


def test_a_free_node_replaces_a_dead_holder() -> None:
    async def play() -> None:
        async with swarm("ab", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            await begin(group, replicas=1, steps=30)
            await columns(group, 1, "a")
            await reached(group, 10)
            group.kill("b")
            await nursery.start(stack._live, group, "c", "a", 1, SLOW)
            found = await ends(group, "ac", 400.0)
            assert {event.outcome for event in found} == {"done"}
            assert len({event.weights for event in found}) == 1
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_stages_are_cut_equally_on_all_nodes_with_a_layer_each() -> None:
    node_run = stack.manifest(stages=2, local=LOCAL)
    model = stack.MODELS[node_run.graph]
    ranges = stage_ranges(node_run, model.graph)
    assert ranges[0][0] == 0
    assert ranges[0][1] == ranges[1][0]
    assert ranges[1][1] == len(model.graph.layers)
    assert all(first < last for first, last in ranges)


def test_stages_are_not_cut_where_layers_stay_together() -> None:
    model = stack.MODELS[stack.manifest(stages=2, local=LOCAL).graph]
    count = len(model.graph.layers)

    wanted = stack.manifest(stages=2, local=LOCAL, together=((0, count - 1),))
    assert stage_ranges(wanted, model.graph) == [(0, count - 1), (count - 1, count)]
    whole = stack.manifest(stages=2, local=LOCAL, together=((0, count),))
    with pytest.raises(ValueError, match="stay together"):
        stage_ranges(whole, model.graph)


def test_runs_that_cannot_form_columns_are_refused_at_submission() -> None:
    options = {"layers": 2, "heads": 2, "width": 16}
    tied = stack.known(capture_built_in("gpt", (8,), 32, dtype="float32", options=options))
    wanted = stack.manifest(tied, stages=2, sizes=(8,), local=LOCAL)
    with pytest.raises(UsageError, match=r"RUN.toml: plan.stages 2: .*wte.weight"):
        check_columns(wanted, tied.graph, "RUN.toml")
    check_columns(replace(wanted, stages=1), tied.graph, "RUN.toml")
    check_columns(replace(wanted, local=None), tied.graph, "RUN.toml")  # exact mode sums gradients
    many = stack.manifest(stages=64, local=LOCAL)
    with pytest.raises(UsageError, match="5 layers cannot be cut into 64 stages"):
        check_columns(many, stack.MODELS[many.graph].graph, "RUN.toml")


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that holders wait for a head to two minutes."""
    monkeypatch.setattr(head_watch, "HEADLESS_SECONDS", 120.0)
    monkeypatch.setattr(head_watch, "FOLLOWING_SECONDS", 60.0)


def test_holders_without_a_head_end_the_run_with_a_reason(short_patience: None) -> None:
    """Each head held the only copy of the first stage, so no node can continue."""

    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW) as group:
            await begin(group, steps=400)
            whole = await columns(group, 2, "abcd")
            await reached(group, 10)
            for head in whole:
                group.kill(head)
            holders = "".join(whole.values())
            found = await ends(group, holders, head_watch.HEADLESS_SECONDS + 120.0)
            assert {event.outcome for event in found} == {"failed"}
            assert all("no head has come for stage 2" in event.detail for event in found)
            assert not any(local_runs(group.nodes[name]).members for name in holders), (
                "a holder still has the run in its slot"
            )

    run_virtually(play)


def test_a_requester_that_only_follows_learns_that_no_head_is_left(short_patience: None) -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW) as group:
            group.nodes["a"].limit(accept_runs="never")
            await begin(group, replicas=1, steps=400)
            whole = await columns(group, 1, "bc")
            await trio.sleep(20.0)
            for head in whole:
                group.kill(head)
            (holder,) = whole.values()
            found = await ends(group, "a" + holder, head_watch.HEADLESS_SECONDS + 120.0)
            assert {event.outcome for event in found} == {"failed"}
            assert all("no head has come for stage 2" in event.detail for event in found)

    run_virtually(play)


def test_memory_is_counted_for_all_microbatches_waiting_at_a_stage() -> None:
    """Each stage of a column may hold as many micro-batches as the column has stages. The schedule of a plan
    holds fewer in later stages.
    """
    alone = Identity(bytes(32)).peer
    model = stack.simple_cnn("float32")
    exact = stack.manifest(stages=3, dtype="float32", microbatch=64)
    local = replace(exact, local=LOCAL)
    run = make_run(IdentitySigner(Identity(bytes(32)), "s"), local)
    plan = local_plan(run, model.graph, alone)
    needed = [needed_bytes(local, model.graph, plan, stage) for stage in range(3)]
    scheduled = [needed_bytes(exact, model.graph, plan, stage) for stage in range(3)]
    assert needed[0] == scheduled[0]
    assert needed[1] > scheduled[1]
    assert needed[2] > scheduled[2]
    small = Machine(1, "cpu", scheduled[2])
    assert "of memory needed" in str(rejection_reason(run, model.graph, plan, 2, small))
    assert rejection_reason(run, model.graph, plan, 2, Machine(1, "cpu", needed[2])) is None
