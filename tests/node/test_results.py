"""A node's records of a finished run: the result, which is irreplaceable, and the outcome."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from blake3 import blake3

from crypto.identity import PeerId
from node.checkpoints.weights import weights_name
from node.commands import Commands
from node.events import RunAccepted, RunEnded
from node.protocols import runs as wire
from node.protocols.manifest import Run
from node.result_events import RESULTS_SHOWN_MAX
from node.runs.archive import OTHERS_MAX, OWN_MAX, Archive, EndedRun, ended_name
from node.runtime import Node
from node.storage.blobs import GUEST_BYTES_MAX
from partition.plan.change import Change, encode_change, successor
from partition.plan.history import History, extend, first_history
from partition.plan.plan import Plan, encode_plan, plan_hash
from partition.run.asks import Done
from sim.storage import MemoryStorage
from tests.node.test_runs_hostile import ask, assert_refused, lease, plan_of, start
from tests.stack import STAGE_SECONDS, Swarm, _live, manifest, prepare, simulate, swarm, train

EVIL = b"weights that nobody trained"


def small(**changes: Any) -> Any:
    """Return the manifest of a run with very little arithmetic."""
    return manifest(**({"steps": 1, "microbatch": 8, "microbatches": 2, "test_samples": 16} | changes))


async def restart(group: Swarm, name: str, through: str, nursery: trio.Nursery) -> Node:
    """Restart a machine that was switched off for a while and kept its disk."""
    group.kill(name)
    await trio.sleep(30)
    await nursery.start(_live, group, name, through, 1, STAGE_SECONDS, group.storages[name])
    await trio.sleep(10)
    return group.nodes[name]


def after_a_run(check: Callable[[Swarm, Run, trio.Nursery], Awaitable[None]]) -> None:
    """Run `check` after a run that `c` requested has ended."""

    async def scenario() -> None:
        async with swarm("abc") as group, trio.open_nursery() as nursery:
            run, events = await train(group, "c", small(stages=1, replicas=1))
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            await trio.sleep(1)
            await check(group, run, nursery)
            nursery.cancel_scope.cancel()

    simulate(scenario)


def usurp(run: Run, liar: Node, base: Plan, author: Node) -> tuple[Plan, History]:
    """Return a plan that no committee has decided, in which the liar trains and commits. `author` has signed
    the supposed first plan, the liar the rest.
    """
    change = Change(admitted=() if liar.peer in base.roster else (liar.peer,), trainers=(liar.peer,))
    history = first_history(author.signer, base)
    history = extend(liar.signer, history, plan_hash(base), [encode_change(change)])
    return successor(base, change), history


def test_results_cannot_be_replaced_after_their_owner_restarts() -> None:
    async def check(group: Swarm, run: Run, nursery: trio.Nursery) -> None:
        before = group.storages["c"].read(weights_name(run.text))
        victim, liar = await restart(group, "c", "a", nursery), group.nodes["a"]
        plan, history = usurp(run, liar, plan_of(run, liar.peer), victim)
        liar.seams.storage.write(weights_name(run.text), EVIL)
        await assert_refused(liar, victim, wire.Start(run.fact, encode_plan(plan), history))
        end = wire.End(plan_hash(plan), "done", "", blake3(EVIL).hexdigest())
        await assert_refused(liar, victim, end)
        assert before
        assert group.storages["c"].read(weights_name(run.text)) == before

    after_a_run(check)


@pytest.mark.parametrize("author", ["the requester", "the liar"])
def test_a_requester_refuses_a_plan_invented_by_a_decliner(author: str) -> None:
    """The decliner was asked for a lease, so it knows the manifest and a plan. It has no part in the run."""

    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            victim, liar, other = (group.nodes[name] for name in "cab")
            run = prepare(victim, small())
            first = plan_of(run, other.peer)
            # This is either the requester's first plan in force, or the plan that includes the liar.
            base = first if author == "the requester" else plan_of(run, liar.peer)
            plan, history = usurp(run, liar, base, victim if author == "the requester" else liar)
            await assert_refused(liar, victim, wire.Start(run.fact, encode_plan(plan), history))
            assert victim.runs.known() == []
            plan, history = usurp(run, other, first, victim)
            assert await ask(other, victim, wire.Start(run.fact, encode_plan(plan), history)) == Done()

    simulate(scenario)


def test_a_result_without_an_outcome_record_means_a_finished_run() -> None:
    """A crash between the two writes leaves this state."""

    async def check(group: Swarm, run: Run, nursery: trio.Nursery) -> None:
        group.storages["c"].delete(ended_name(run.text))
        victim = await restart(group, "c", "a", nursery)
        assert victim.runs.is_over(run.id)

    after_a_run(check)


def test_a_finished_run_is_listed_and_fetched_after_a_restart(tmp_path: Path) -> None:
    async def check(group: Swarm, run: Run, nursery: trio.Nursery) -> None:
        before = group.nodes["c"].state.runs[run.text]
        group.events["c"].clear()
        node = await restart(group, "c", "a", nursery)
        after = node.state.runs[run.text]
        assert (after.status, after.step, after.weights) == ("done", 1, before.weights)
        assert (after.model, after.requester, after.accuracy) == (
            before.model,
            before.requester,
            before.accuracy,
        )
        assert (before.result, after.result) == ("here", "here")
        assert not any(isinstance(event, RunAccepted) for event in group.events["c"])
        out = tmp_path / "model.safetensors"
        fetch = Commands(node).handlers["runs.fetch"]
        await fetch({"run": run.text[:6], "out": str(out)}, ignore)
        assert out.read_bytes() == group.storages["c"].read(weights_name(run.text))

    after_a_run(check)


def test_a_result_larger_than_its_model_is_not_fetched() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            victim, liar = group.nodes["a"], group.nodes["b"]
            run = prepare(liar, small())
            plan = plan_of(run, victim.peer)
            await lease(liar, victim, run, plan)
            assert await ask(liar, victim, start(liar, run.fact, plan)) == Done()
            huge = bytes(16 << 20)
            liar.seams.storage.write(weights_name(run.text), huge)
            end = wire.End(plan_hash(plan), "done", "", blake3(huge).hexdigest())
            assert await ask(liar, victim, end) == Done()
            assert victim.seams.storage.read(weights_name(run.text)) is None
            (over,) = [event for event in group.events["a"] if isinstance(event, RunEnded)]
            assert "16777216 bytes were offered, but at most" in over.detail
            assert not any(run.text in label for label in victim.runs.guests.labels)

    simulate(scenario)


def test_results_of_other_peers_runs_are_evicted_by_newer_ones() -> None:
    async def check(group: Swarm, run: Run, _: trio.Nursery) -> None:
        holder = next(node for node in group.nodes.values() if run.text in node.runs.guests.labels)
        assert holder is not group.nodes["c"]
        assert run.text not in group.nodes["c"].runs.guests.labels
        size = len(holder.seams.storage.read(weights_name(run.text)) or b"")
        guests = holder.runs.guests
        assert guests.bytes_here >= size > 0
        others = holder.checkpoints.store.blobs.guest_bytes + guests.bytes_here - size
        guests.admit("0" * 16, [], GUEST_BYTES_MAX - others)
        assert holder.seams.storage.read(weights_name(run.text)) is None
        holder.runs.note_guests()
        assert holder.state.runs[run.text].result == "elsewhere"
        assert holder.runs.is_over(run.id)

    after_a_run(check)


async def ignore(_: object) -> None:
    """Discard a progress report."""


def record(number: int, requester: bytes) -> EndedRun:
    return EndedRun(
        run=blake3(number.to_bytes(4)).digest(),
        requester=requester,
        model="m",
        data="digits",
        steps=1,
        outcome="failed",
        detail="",
        weights="",
        ended_milliseconds=number,
    )


def test_records_of_other_peers_runs_never_evict_own_ones() -> None:
    storage, me, other = MemoryStorage(), bytes(32), bytes([1]) * 32
    archive = Archive(storage, me)
    ours, oldest, newest = (record(*row) for row in ((0, me), (1, other), (OTHERS_MAX + 1, other)))
    archive.add(ours)
    for number in range(1, OTHERS_MAX + 2):
        archive.add(record(number, other))
    archive.save()
    for known in (archive, Archive(storage, me)):
        known.load()
        assert known.is_over(ours.run)
        assert known.is_over(newest.run)
        assert not known.is_over(oldest.run)
        assert len(known.records) == 1 + OTHERS_MAX
    assert OTHERS_MAX < OWN_MAX


def test_differing_results_of_a_run_are_remembered_at_any_time() -> None:
    storage, me = MemoryStorage(), bytes(32)
    archive, ended = Archive(storage, me), record(1, me)
    early, late = PeerId(bytes([2]) * 32), PeerId(bytes([3]) * 32)
    archive.differ(ended.text, early, "ab" * 32)
    archive.add(ended)
    archive.differ(ended.text, late, "cd" * 32)
    archive.save()
    again = Archive(storage, me)
    again.load()
    assert again.records[0].others == ((early, "ab" * 32), (late, "cd" * 32))


def test_the_number_of_differing_results_is_limited() -> None:
    archive, ended = Archive(MemoryStorage(), bytes(32)), record(1, bytes(32))
    archive.add(ended)
    shown = [archive.differ(ended.text, PeerId(bytes([n]) * 32), f"{n:064x}") for n in range(1, 20)]
    assert shown == [True] * RESULTS_SHOWN_MAX + [False] * (19 - RESULTS_SHOWN_MAX)
    assert len(archive.records[0].others) == RESULTS_SHOWN_MAX
    assert not archive.differ(ended.text, PeerId(bytes([1]) * 32), "ef" * 32), (
        "a later claim of the same member did not replace its earlier one"
    )
