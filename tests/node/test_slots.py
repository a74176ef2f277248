"""Several stages run simultaneously on one node: each has its own slot, and no slot is promised twice."""

from collections.abc import Callable, Sequence

import pytest
import trio

from crypto.identity import Identity, PeerId
from node.offering import Offering
from node.placement.admission import Machine
from node.placement.leases import PlacementFailed
from node.placement.slots import LeaseSlots, share
from node.protocols.manifest import Run
from node.protocols.runs import WithdrawRun
from node.runtime import Node
from node.seams import Seams
from partition.run.asks import Declined, Done
from partition.run.settings import RunSettings
from partition.run.slots import ORPHAN_SECONDS, Promise
from sim.storage import MemoryStorage
from tests.stack import Swarm, assert_equal, manifest, prepare, reference, simulate, swarm, weights
from tests.test_runs_end import all_ended

PLANNER = Identity(bytes(32)).peer
OTHER = Identity(bytes([1]) * 32).peer


def promised(run: int, planner: PeerId = PLANNER, *, plan: int = 0, height: int = 0) -> Promise:
    return Promise(run_id(run), bytes([plan]) * 32, 0, planner, trio.current_time() + 240, height)


def run_id(number: int) -> bytes:
    return bytes([number]) * 32


def with_slots(count: int, hosted: Sequence[bytes] = (), storage: MemoryStorage | None = None) -> LeaseSlots:
    seams = Seams.__new__(Seams)  # LeaseSlots uses only three of the seams
    for name, seam in (
        ("clock", _Clock()),
        ("executor", _Threads()),
        ("storage", storage or MemoryStorage()),
    ):
        object.__setattr__(seams, name, seam)
    return LeaseSlots(seams, count, lambda: hosted)


class _Clock:
    @staticmethod
    def wall() -> float:
        return trio.current_time()

    monotonic = wall


class _Threads:
    @staticmethod
    async def run(work: Callable[[], object]) -> object:
        await trio.sleep(0.01)
        return work()


def test_slots_are_promised_until_full_and_one_for_each_run() -> None:
    async def scenario() -> None:
        disk = MemoryStorage()
        slots = with_slots(2, storage=disk)
        await slots.promise(promised(1, height=1))
        assert slots.free == 1
        assert not slots.is_free_for(run_id(1)), "a run could get a second slot on one node"
        assert slots.is_free_for(run_id(2))
        await slots.promise(promised(2, OTHER))
        assert (slots.free, slots.is_free_for(run_id(3))) == (0, False)
        assert with_slots(2, storage=disk).free == 0, "a promise was lost in the restart"
        slots.note(slots.core.release(bytes(32), OTHER))
        assert slots.free == 1, "another peer's promise was released, or the holder's own was not"
        slots.release_all(PLANNER)
        assert with_slots(2, storage=disk).free == 2
        await slots.promise(promised(4))
        await trio.sleep(241)
        assert slots.free == 2, "a slot is still promised although no holder has come"

    simulate(scenario)


def test_a_promise_for_a_first_plan_briefly_outlives_its_requester() -> None:
    """Other members may already have started; they bring the plan."""

    async def scenario() -> None:
        slots = with_slots(1)
        await slots.promise(promised(1))
        slots.release_all(PLANNER)
        assert slots.core.holds(slots.now, run_id(1), bytes(32), 0)
        await trio.sleep(ORPHAN_SECONDS / 2)
        slots.release_all(PLANNER)
        assert slots.free == 0
        await trio.sleep(ORPHAN_SECONDS / 2 + 1)
        assert slots.free == 1

    simulate(scenario)


def test_a_hosted_slot_covers_promises_for_its_run() -> None:
    async def scenario() -> None:
        slots = with_slots(2, hosted=[run_id(1)])
        await slots.promise(promised(1))
        assert slots.free == 1

    simulate(scenario)


def test_concurrent_promises_are_all_on_the_disk() -> None:
    async def scenario() -> None:
        disk = MemoryStorage()
        slots = with_slots(3, storage=disk)
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(slots.promise, promised(number))
        assert with_slots(3, storage=disk).free == 0

    simulate(scenario)


def test_a_plan_that_can_no_longer_be_decided_holds_no_slot() -> None:
    async def scenario() -> None:
        disk = MemoryStorage()
        slots, run = with_slots(1, storage=disk), run_id(1)

        def supersede(run: bytes, planner: PeerId, height: int) -> list[bytes]:
            gone = slots.core.supersede(run, planner, height)
            slots.note(bool(gone))
            return [promise.plan for promise in gone]

        await slots.promise(promised(1, plan=1, height=3))
        assert supersede(run_id(2), PLANNER, 9) == [], "another run's plan superseded this promise"
        assert supersede(run, OTHER, 3) == [], (
            "a promise was superseded although both plans may still be decided"
        )
        assert slots.free == 0
        assert supersede(run, OTHER, 4) == [bytes([1]) * 32]
        assert slots.is_free_for(run)
        await slots.promise(promised(1, OTHER, plan=2, height=4))
        assert supersede(run, OTHER, 4) == [bytes([2]) * 32], (
            "the planner's earlier promise was not replaced by its new one"
        )
        assert with_slots(1, storage=disk).free == 1, (
            "a superseded promise was still on the disk after a restart"
        )

    simulate(scenario)


def test_each_slot_has_an_equal_share_of_the_machine() -> None:
    assert share(Machine(8, "cpu", 12), 3) == Machine(2, "cpu", 4)
    assert share(Machine(1, "cpu", 12), 2).threads == 1


def only(group: Swarm, *providers: str) -> None:
    for name, node in group.nodes.items():
        if name not in providers:
            node.limit(accept_runs="never")


def asked(node: Node, number: int) -> Run:
    return prepare(node, manifest(stages=1, replicas=1, microbatches=2, created_milliseconds=number))


def test_a_node_with_two_slots_declines_a_third_run() -> None:
    async def scenario() -> None:
        async with swarm("abc", offer=Offering(slots=2)) as group:
            only(group, "c")
            await trio.sleep(5)
            a, b, c = (group.nodes[name] for name in "abc")
            runs = [asked(a, 1), asked(b, 2)]
            await a.runs.submit(runs[0])
            await b.runs.submit(runs[1])
            assert sorted(c.runs.members) == sorted(run.id for run in runs)
            assert (c.runs.slots.free, c.runs.has_slot) == (0, False)
            with pytest.raises(PlacementFailed, match="busy"):
                await a.runs.submit(asked(a, 3))
            await all_ended(group)
            assert c.runs.slots.free == 2
            for name, run in zip("ab", runs, strict=True):
                assert_equal(weights(group, name, run), reference(run), "float64")

    simulate(scenario)


@pytest.mark.parametrize("is_queued", [True, False], ids=["queued", "restarted"])
@pytest.mark.parametrize("wait_seconds", [0, 60])
def test_requesters_learn_how_long_an_orphaned_slot_is_held(wait_seconds: int, is_queued: bool) -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            only(group, "c")
            await trio.sleep(5)
            a, c = group.nodes["a"], group.nodes["c"]
            held = asked(a, 9)
            promise = Promise(
                held.id, bytes(32), 0, PLANNER, c.runs.slots.now + RunSettings().silence_seconds_max, 0
            )
            await c.runs.slots.promise(promise)
            if is_queued:
                c.runs.queue.begin(held, None)
            assert c.runs.slots.lapsing() == {}, (
                "a slot is reported to lapse although its run may begin and last for any time"
            )
            c.runs.slots.release_all(PLANNER)
            run, begun = asked(a, 1), trio.current_time()
            if not wait_seconds:
                with pytest.raises(
                    PlacementFailed, match=r"busy; slots may be free in about 10 s \(train --w"
                ):
                    await a.runs.submit(run)
                return
            await a.runs.submit(run, wait_seconds=wait_seconds)
            assert trio.current_time() - begun <= ORPHAN_SECONDS + 5
            await all_ended(group)
            assert a.state.runs[run.text].status == "done"
            said = [getattr(event, "reason", "") for _, event in a.history.after(0)]
            assert any("it may begin in about 10 s" in reason for reason in said), said

    simulate(scenario)


@pytest.mark.parametrize(("providers", "winners"), [("c", 1), ("cd", 2)])
def test_only_one_of_two_racing_requesters_gets_the_provider(providers: str, winners: int) -> None:
    """The other requester is refused, and uses a different provider if there is one."""

    async def scenario() -> None:
        async with swarm("abcd", preset="lan") as group:
            only(group, *providers)
            await trio.sleep(5)
            failures: list[str] = []

            async def submit(name: str, number: int) -> None:
                node = group.nodes[name]
                try:
                    await node.runs.submit(asked(node, number))
                except PlacementFailed as error:
                    failures.append(str(error))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(submit, "a", 1)
                nursery.start_soon(submit, "b", 2)
            assert {group.nodes[name].runs.slots.free for name in providers} == {0}
            assert len(failures) == 2 - winners
            assert all("busy" in failure for failure in failures)

    simulate(scenario)


def waits(provider: Node, requester: Node, run: Run) -> str:
    """Return a provider's answer to a request for a slot."""
    found = provider.runs.queue.ask(requester.peer, run, None)
    assert isinstance(found, Declined)
    return found.reason


@pytest.mark.parametrize("ending", ["gives up", "is stopped", "dies"])
def test_a_finished_request_leaves_the_queue(ending: str) -> None:
    async def scenario() -> None:
        async with swarm("abcd") as group:
            only(group, "c")
            await trio.sleep(5)
            a, b, c, d = (group.nodes[name] for name in "abcd")
            held = prepare(a, manifest(stages=1, replicas=1, steps=20_000, microbatches=2))
            await a.runs.submit(held)
            first, second = asked(b, 1), asked(d, 2)
            failures: list[PlacementFailed] = []

            async def submit() -> None:
                try:
                    await b.runs.submit(first, wait_seconds=0 if ending == "gives up" else 600)
                except PlacementFailed as error:
                    failures.append(error)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(submit)
                await trio.sleep(10)
                if ending != "gives up":
                    assert waits(c, d, second) == "busy: 1 wait before it"
                if ending == "is stopped":
                    await b.runs.stopping.stop(first.text)
                elif ending == "dies":
                    group.kill("b")
                    nursery.cancel_scope.cancel()
                await trio.sleep(30 if ending == "dies" else 5)
                assert waits(c, d, second) == "busy"
            assert len(failures) == (ending != "dies")

    simulate(scenario)


def test_no_peer_withdraws_another_peers_request() -> None:
    async def scenario() -> None:
        async with swarm("abcd") as group:
            only(group, "c")
            await trio.sleep(5)
            a, b, c, d = (group.nodes[name] for name in "abcd")
            await a.runs.submit(prepare(a, manifest(stages=1, replicas=1, steps=20_000, microbatches=2)))
            first, second = asked(b, 1), asked(d, 2)
            assert waits(c, b, first) == "busy"
            assert await d.runs.ask(c.peer, WithdrawRun(first.id), 5.0) == Done()
            assert waits(c, d, second) == "busy: 1 wait before it"
            assert await b.runs.ask(c.peer, WithdrawRun(first.id), 5.0) == Done()
            assert waits(c, d, second) == "busy"

    simulate(scenario)


def test_a_higher_priority_preempts_only_runs_of_the_same_requester() -> None:
    """There is one provider with one slot. The served run cannot be handed over, so it waits at its
    checkpoint."""

    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            only(group, "c")
            await trio.sleep(5)
            a, b, c = (group.nodes[name] for name in "abc")
            long = prepare(a, manifest(stages=1, replicas=1, steps=400, microbatches=2, save_every=5))
            await a.runs.submit(long)
            await trio.sleep(5)
            claimed = asked(b, 2)
            b.runs.revising.ask_for(claimed, priority=9, deadline_minutes=1)
            with pytest.raises(PlacementFailed, match=r"busy; slots may be free in about \d+ (s|min)"):
                await b.runs.submit(claimed, wait_seconds=20)
            assert c.runs.slots.taken() == {long.id}, "another requester's run took the slot"
            urgent = prepare(
                a, manifest(stages=1, replicas=1, steps=3, microbatches=2, created_milliseconds=9)
            )
            a.runs.revising.ask_for(urgent, priority=8, deadline_minutes=0)
            await a.runs.submit(urgent, wait_seconds=60)
            assert urgent.id in c.runs.slots.taken()
            assert long.id not in c.runs.slots.taken()
            await a.runs.stopping.stop(long.text)
            await all_ended(group)
            assert a.state.runs[urgent.text].status == "done"

    simulate(scenario)
