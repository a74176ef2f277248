"""An unexpected failure is contained: it is counted and logged, and the node continues."""

import logging
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import trio

from crypto.identity import PeerId
from node.containment import (
    LOG_NAME,
    LOGGED_MAX,
    contain,
    describe,
    failures,
    keep_running,
    log,
    note,
    place_of,
    strictness,
    write_log,
)
from node.documents import rfc3339
from node.errors import StreamClosed
from node.events import CheckpointFailed, Event, RunChanged, RunEnded, StepCommitted
from node.pipeline.links import Links
from node.pipeline.replica import ReplicaShell
from node.protocols.manifest import Run
from node.runs.member import RunMember
from node.runs.progress import ProgressReports
from node.runtime import Node
from node.seams import Stream
from sim.storage import MemoryStorage
from tests.node.behaviour.worlds import World, on_both_networks, running, until
from tests.stack import Swarm, manifest, prepare, simulate, swarm, train

TALK = "/peerloom/talk/1"


@pytest.fixture(autouse=True)
def _contained(_bugs_come_out: None) -> Iterator[None]:
    """Contain failures as in production, and reset their counters afterwards."""
    failures.clear()
    with strictness(is_strict=False):
        yield
    failures.clear()


def lose() -> None:
    raise KeyError("lost")


class Records(logging.Handler):
    """A log handler that keeps the records."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@pytest.fixture
def records() -> Iterator[Records]:
    """Collect the log records of this test alone, because handlers of earlier tests may write to files that
    no longer exist.
    """
    handler, before = Records(), log.handlers
    log.handlers = [handler]
    yield handler
    log.handlers = before


def test_an_unexpected_exception_is_counted_and_logged_with_its_traceback(records: Records) -> None:
    with contain("somewhere") as part:
        lose()
    assert isinstance(part.error, KeyError)
    assert failures == {"somewhere": 1}
    (record,) = records.found
    assert record.name == "peerloom"
    assert record.exc_info is not None
    assert "somewhere" in record.getMessage()


def test_a_failure_that_repeats_endlessly_does_not_fill_the_log(records: Records) -> None:
    for _ in range(1_000):
        note(ValueError("again"), "somewhere")
    assert failures["somewhere"] == 1_000
    assert len(records.found) == LOGGED_MAX + 2


def test_strict_mode_raises_an_exception_unchanged() -> None:
    with strictness(is_strict=True), pytest.raises(KeyError), contain("somewhere"):
        lose()
    assert not failures


async def test_cancellation_passes_through_together_with_a_failure() -> None:
    async def fail() -> None:
        lose()

    async def clean_up() -> None:
        try:
            await trio.sleep_forever()
        finally:
            scope.cancel()

    with trio.CancelScope() as scope:
        with contain("somewhere") as part:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(clean_up)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(fail)
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert part.error is not None
    assert describe(part.error) == "KeyError: 'lost'"


def test_keyboard_interrupt_is_never_contained() -> None:
    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(KeyboardInterrupt), contain("somewhere"):
        fail(KeyboardInterrupt())
    with pytest.raises(BaseExceptionGroup) as group, contain("somewhere"):
        fail(BaseExceptionGroup("both", [KeyboardInterrupt(), KeyError("lost")]))
    assert group.value.subgroup(KeyError) is None
    assert failures == {"somewhere": 1}


def test_the_log_gets_the_traceback_and_the_screen_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers, propagate = log.handlers, log.propagate
    try:
        write_log(tmp_path)
        note(KeyError("a\x1b[2Jb"), "somewhere")
        for handler in log.handlers:
            handler.flush()
    finally:
        for handler in log.handlers:
            handler.close()
        log.handlers, log.propagate = handlers, propagate
    assert "KeyError" in (tmp_path / LOG_NAME).read_text()
    assert stat.S_IMODE((tmp_path / LOG_NAME).stat().st_mode) == 0o600
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(tmp_path / LOG_NAME) in said
    assert "\x1b" not in said


def test_a_failure_is_attributed_to_its_function() -> None:
    from functools import partial

    assert place_of(partial(partial(ProgressReports.show), 1)) == "ProgressReports.show"


@on_both_networks
async def test_a_failing_handler_resets_only_its_own_stream(world: World) -> None:
    async def buggy(stream: Stream) -> None:
        if await stream.receive() == b"fail":
            raise KeyError(stream.protocol)
        await stream.send(b"fine")

    alice, bob = world.network("a"), world.network("b")
    bob.handle(TALK, buggy)
    async with running(alice, bob):
        other = await alice.open(bob.peer, TALK)
        stream = await alice.open(bob.peer, TALK)
        await stream.send(b"fail")
        with pytest.raises(StreamClosed) as closed:
            await stream.receive()
        assert type(closed.value) is StreamClosed, "the failed stream was closed in order instead of reset"
        await until(lambda: bob.counters["streams_failed"] == 1)
        await other.send(b"work")
        assert await other.receive() == b"fine"
    assert failures == {f"stream {TALK}": 1}


class FailingCore:
    """A SWIM core that fails on every message and wake-up while it `is_broken`."""

    def __init__(self, node: Node, *, at: Literal["receive", "wake"]) -> None:
        driver = node.membership._driver
        self.is_broken = True
        self.failed = 0
        self._core, self._at = driver.core, at
        self.events = driver.core.events
        driver.core = self

    @property
    def deadline(self) -> float:
        return self._core.deadline

    def receive(self, now: float, sender: PeerId, message: Any) -> list[tuple[PeerId, Any]]:
        self._fail("receive")
        return self._core.receive(now, sender, message)

    def wake(self, now: float) -> list[tuple[PeerId, Any]]:
        self._fail("wake")
        return self._core.wake(now)

    def _fail(self, at: str) -> None:
        if self.is_broken and at == self._at:
            self.failed += 1
            raise AssertionError("what cannot be")


def test_a_core_that_fails_on_one_message_handles_the_next() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            a, b = group.nodes["a"], group.nodes["b"]
            core = FailingCore(a, at="receive")
            await trio.sleep(1)
            core.is_broken = False
            await trio.sleep(20)
            assert core.failed == a.counters["internal_errors"] > 0
            assert b.peer in a.membership.live
            assert a.peer in b.membership.live

    simulate(scenario)


def test_a_core_whose_deadline_fails_does_not_cause_a_busy_loop() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            core = FailingCore(group.nodes["a"], at="wake")
            await trio.sleep(10)
            assert 1 <= core.failed <= 11

    simulate(scenario)


def test_a_failing_screen_does_not_affect_protocols() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            for node in group.nodes.values():
                node.journal.report = _unprintable
            _, events = await train(group, "a", manifest(stages=1, replicas=1, steps=2))
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done"
            assert group.nodes["a"].counters["internal_errors"] > 0

    simulate(scenario)


def _unprintable(event: Event) -> None:
    "日本".encode("latin-1")


async def submit_and_step(node: Node, run: Run) -> None:
    """Submit a run, and wait until it has made a step."""
    with node.watch() as events:
        await node.runs.submit(run)
        async for event in events:
            if isinstance(event, StepCommitted):
                return


@pytest.mark.parametrize("victim", ["committer", "replica"])
def test_a_run_task_that_fails_ends_its_run_and_frees_the_slot(victim: str) -> None:
    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            node = group.nodes["a"]
            run = prepare(node, manifest(stages=1, replicas=2, steps=20))
            await submit_and_step(node, run)
            plan = node.runs.members[run.id].plan
            assert plan is not None
            names = [group.name_of(PeerId(peer)) for peer in plan.stages[0].replicas]
            name = "a" if victim == "committer" else next(name for name in names if name != "a")
            hurt = group.nodes[name]

            async def fail() -> None:
                raise AssertionError("what cannot be")

            hurt.runs.start_task(fail, of=run)
            with trio.fail_after(120):
                while run.id in hurt.runs.members:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            (ended,) = (event for event in group.events[name] if isinstance(event, RunEnded))
            assert ended.outcome == "failed"
            assert "AssertionError: what cannot be" in ended.detail
            assert hurt.runs.has_slot
            await trio.sleep(60)
            others = [other for other in group.nodes if other != name]
            for other in others:
                ends = [event for event in group.events[other] if isinstance(event, RunEnded)]
                assert [end.outcome for end in ends] == (["failed"] if victim == "committer" else ["done"])
            _, seen = await train(group, "a", manifest(stages=1, replicas=1, steps=2, seed=8))
            assert isinstance(seen[-1], RunEnded)
            assert seen[-1].outcome == "done"

    simulate(scenario)


def test_a_failing_cleanup_still_frees_the_run() -> None:
    class FailingReplica(ReplicaShell):
        async def aclose(self) -> None:
            await super().aclose()
            raise AssertionError("what cannot be")

    async def scenario() -> None:
        async with swarm("a", preset="lan", parts={ReplicaShell: FailingReplica}) as group:
            node = group.nodes["a"]
            run = prepare(node, manifest(stages=1, replicas=1, steps=20))
            await submit_and_step(node, run)
            member = node.runs.members[run.id]
            node.runs.start_task(member.end, "failed", "because", "", of=run)
            await trio.sleep(5)
            assert not node.runs.members
            assert node.runs.has_slot
            assert [event.outcome for event in group.events["a"] if isinstance(event, RunEnded)] == ["failed"]

    simulate(scenario)


def test_a_failed_part_of_the_node_restarts_after_growing_pauses() -> None:
    begun: list[float] = []

    async def fail() -> None:
        begun.append(trio.current_time())
        if len(begun) < 9:
            lose()

    async def scenario() -> None:
        start = trio.current_time()
        await keep_running("somewhere", fail)
        assert [round(at - start) for at in begun] == [0, 1, 3, 7, 15, 31, 63, 123, 183]

    simulate(scenario)


class FillingStorage(MemoryStorage):
    """A disk that becomes full."""

    is_full = False

    def write(self, name: str, data: bytes) -> None:
        self._check()
        super().write(name, data)

    def write_soon(self, name: str, data: bytes | memoryview) -> None:
        self._check()
        super().write_soon(name, data)

    def copy_in(self, name: str, path: Path) -> None:
        self._check()
        super().copy_in(name, path)

    def _check(self) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")


def test_a_full_disk_prevents_neither_operation_nor_a_clean_exit() -> None:
    async def scenario() -> None:
        disk = FillingStorage()
        async with swarm("abcd", preset="lan", storages={"a": disk}) as group:
            node = group.nodes["a"]

            disk.is_full = True
            # When a peer dies, the list of remembered peers changes, so the node writes it again.
            group.kill(min("cd", key=lambda name: group.nodes[name].peer))
            await trio.sleep(300)
            run = prepare(group.nodes["b"], manifest(stages=1, replicas=3, steps=2))
            await group.nodes["b"].runs.submit(run)
            reasons = [event.reason for event in group.events["b"] if isinstance(event, RunChanged)]
            assert "reduced to 1 x 2 for want of peers: 1 stage x 3 were asked for" in reasons
            assert node.runs.members == {}
            assert node.runs.has_slot
            with trio.fail_after(120):
                await node.leave()
            await trio.sleep(5)
            assert group.nodes["b"].state.members[node.peer].status == "left"
            assert failures["remembering"] > 1

    simulate(scenario)


def test_a_requesters_full_disk_ends_its_run_with_a_reason() -> None:
    async def scenario() -> None:
        disk = FillingStorage()
        async with swarm("abc", storages={"c": disk}) as group:
            node = group.nodes["c"]

            run = prepare(node, manifest(stages=1, replicas=2, steps=40))
            await submit_and_step(node, run)
            disk.is_full = True
            group.kill("a")  # the next vote must be written to the full disk
            with trio.fail_after(120):
                while run.id in node.runs.members:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            (ended,) = (event for event in group.events["c"] if isinstance(event, RunEnded))
            assert ended.outcome == "failed"
            assert "the disk of this node is full" in ended.detail
            assert node.state.members, "the node stopped"

    simulate(scenario)


def test_a_provider_that_cannot_store_a_checkpoint_reports_it_and_trains_on() -> None:
    async def scenario() -> None:
        disks = {name: FillingStorage() for name in "ab"}
        async with swarm("abc", preset="lan", storages=disks) as group:
            node = group.nodes["c"]
            run = prepare(node, manifest(stages=1, replicas=1, steps=12, save_every=3))

            await node.runs.submit(run)
            (holder,) = (
                name for name in "ab" if group.nodes[name].runs.members[run.id].hosting.core.occupies
            )
            disks[holder].is_full = True
            with trio.fail_after(120):
                while not said(group, holder, CheckpointFailed):  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            disks[holder].is_full = False
            with trio.fail_after(120):
                while run.id in node.runs.members:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            assert said(group, holder, CheckpointFailed)[0].reason == (
                "the disk of this node: No space left on device"
            )
            (ended,) = said(group, "c", RunEnded)
            assert ended.outcome == "done", ended.detail

    simulate(scenario)


def said(group: Swarm, name: str, kind: type[Event]) -> list[Any]:
    return [event for event in group.events[name] if isinstance(event, kind)]


def test_a_link_that_fails_is_opened_again() -> None:
    class FailingLinks(Links):
        left = 2

        async def _keep_open(self, *arguments: Any) -> None:
            self.left -= 1
            if self.left >= 0:
                lose()
            await super()._keep_open(*arguments)

    async def scenario() -> None:
        async with swarm("ab", preset="lan", parts_of={"a": {Links: FailingLinks}}) as group:
            _, events = await train(group, "a", manifest(stages=2, replicas=1, steps=3))
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done"
            assert failures["link"] == 2

    simulate(scenario)


def test_a_failure_while_reporting_the_end_still_frees_the_run() -> None:
    class FailingMember(RunMember):
        async def end(self, *_: Any, **__: Any) -> None:
            raise AssertionError("what cannot be")

    async def scenario() -> None:
        async with swarm("abc", preset="lan", parts_of={"b": {RunMember: FailingMember}}) as group:
            run = prepare(group.nodes["a"], manifest(stages=1, replicas=2, steps=4))
            b = group.nodes["b"]
            with group.nodes["a"].watch() as events:
                await group.nodes["a"].runs.submit(run)
                async for event in events:
                    if isinstance(event, RunEnded):
                        break
            await trio.sleep(30)
            assert b.runs.members == {}
            assert b.runs.has_slot

    simulate(scenario)


def test_times_outside_the_calendar_can_be_shown() -> None:
    assert rfc3339(2**53 / 1000).startswith("9999-12-31")
    assert rfc3339(float("nan"))
    assert rfc3339(-1e300).startswith("1970")
