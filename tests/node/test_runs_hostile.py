"""Messages that peers outside a run send to the runs service are refused or limited, and never crash a node.

Two whole nodes in simulation: `a` is honest, and `b` sends messages that no correct peer sends. An error that
escapes from `a` would end the simulation. So a scenario that completes shows that `a` survived.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner, Signer
from crypto.identity import Identity, PeerId
from gossip.allreduce import CHUNK_BYTES, KEY_BYTES_MAX, Part
from node.content.graphs import Models
from node.errors import StageFailed, StreamClosed, Unreachable
from node.events import Event, RunAccepted, RunEnded, RunPlanned, StepCommitted
from node.pipeline.codec_choice import LinkCodecs
from node.pipeline.links import Links
from node.pipeline.replica import ReplicaShell
from node.pipeline.spans import Spans
from node.placement.leases import PlacementFailed
from node.protocols import calls
from node.protocols import runs as wire
from node.protocols.manifest import MANIFEST_PURPOSE, Run, check_run, make_run
from node.protocols.notices import NEWS, News, event_of, news_of
from node.runs.inbox import IDLE_SECONDS_MAX
from node.runs.server import RUNS_MAX
from node.runtime import Node
from node.seams import Network, Parts, RealClock, Stage, make_core
from node.state import RUNS_KEPT_MAX, State, apply
from partition.model.graph import Graph
from partition.plan.change import Change, encode_change, successor
from partition.plan.history import extend, first_history
from partition.plan.paxos_messages import LINKS_BYTES_MAX, LINKS_MAX, Decided
from partition.plan.plan import (
    MICROBATCHES_MAX,
    NO_HASH,
    REPLICAS_MAX,
    STAGES_MAX,
    STEPS_MAX,
    Plan,
    StagePlan,
    encode_plan,
    plan_hash,
)
from partition.run.asks import Declined, Done
from partition.run.witnesses import WITNESSED_MAX
from partition.stage import OptimizerSettings
from partition.steps.frame_archive import FrameArchive
from partition.steps.messages import Open, StageCommit, StageRoutes, StepCommit, Sync
from partition.steps.replica import Replica
from sim.executor import SimExecutor
from sim.storage import MemoryStorage
from tests.stack import Swarm, manifest, prepare, simple_cnn, simulate, swarm, train

LAYERS = len(simple_cnn().graph.layers)
ALICE, BOB, CAROL = (Identity(bytes([number]) * 32).peer for number in (1, 2, 3))


def replace(plan: Plan, **changes: Any) -> Plan:
    return msgspec.structs.replace(plan, **changes)


def two_nodes(
    scenario: Callable[[Swarm, Node, Node], Awaitable[None]], parts_of: Mapping[str, Parts] | None = None
) -> None:
    async def main() -> None:
        async with swarm("ab", parts_of=parts_of) as group:
            await scenario(group, group.nodes["a"], group.nodes["b"])

    simulate(main)


def run_of(node: Node, **changes: Any) -> Run:
    return prepare(node, manifest(**changes))


def plan_of(run: Run, holder: PeerId) -> Plan:
    """Return a plan with the whole model on `holder`; the run's requester trains."""
    stage = StagePlan(0, LAYERS, (holder,), (1,))
    roster = tuple(sorted({holder, run.requester}))
    return Plan(run.id, NO_HASH, 0, roster, (run.requester,), run.manifest.microbatches, (stage,))


async def ask(sender: Node, receiver: Node, request: wire.Request) -> wire.Reply:
    return await calls.ask(sender.network, receiver.peer, request, seconds=30)


async def assert_refused(sender: Node, receiver: Node, request: wire.Request) -> None:
    """Check that the request is refused or gets no answer."""
    try:
        reply = await ask(sender, receiver, request)
    except Unreachable:
        return
    assert isinstance(reply, Declined), reply


def start(sender: Node, fact: Fact, plan: Plan) -> wire.Start:
    """Send a plan with the history that a requester makes for its first plan."""
    return wire.Start(fact, encode_plan(plan), first_history(sender.signer, plan))


async def lease(sender: Node, receiver: Node, run: Run, plan: Plan) -> wire.Reply:
    return await ask(sender, receiver, wire.LeaseRequest(run.fact, encode_plan(plan), 0))


def test_a_node_is_witness_of_a_limited_number_of_runs() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        runs = [run_of(b, seed=number) for number in range(4 + WITNESSED_MAX)]
        plans = [replace(plan_of(run, b.peer), roster=tuple(sorted([a.peer, b.peer]))) for run in runs]
        for part in (slice(0, 4), slice(4, None)):
            rows = list(zip(runs[part], plans[part], strict=True))
            for run, plan in rows:
                reply = await ask(b, a, wire.LeaseRequest(run.fact, encode_plan(plan), None))
                assert isinstance(reply, wire.Leased)
            replies = [await ask(b, a, start(b, run.fact, plan)) for run, plan in rows]
        assert [isinstance(reply, Done) for reply in replies] == [True] * 4 + [False] * 4
        assert sum(member.is_witness for member in a.runs.members.values()) == WITNESSED_MAX

    two_nodes(scenario)


@pytest.mark.parametrize(
    "changes",
    [
        {"graph": "0" * 64},
        {"sizes": (3,)},
        {"metrics": ("right",)},
        {"microbatch": 65_536},
    ],
    ids=str,
)
def test_providers_decline_a_manifest_that_does_not_fit_its_model(
    changes: dict[str, Any],
) -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        run = run_of(b, **changes)
        plan = plan_of(run, a.peer)
        await assert_refused(b, a, wire.LeaseRequest(run.fact, encode_plan(plan), 0))
        await assert_refused(b, a, start(b, run.fact, plan))

    two_nodes(scenario)


@pytest.mark.parametrize("name", ["0123456789abcdef\n", "../../node.lock", "", "0123456789ABCDEF"], ids=repr)
def test_weights_with_an_invalid_name_are_refused(name: str) -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        await assert_refused(b, a, wire.FetchWeights(name))
        assert a.counters["protocol_errors"] == 1

    two_nodes(scenario)


def test_a_manifest_of_an_unknown_version_is_refused_with_its_number() -> None:
    signer = IdentitySigner(Identity(bytes(32)), "any")
    version, *rest = msgspec.to_builtins(manifest())
    for fields, said in ((rest, "version 1;"), ([version + 1, *rest], f"version {version + 1};")):
        with pytest.raises(RemoteProtocolError, match=said):
            check_run(signer, signer.sign(MANIFEST_PURPOSE, encode(fields)))


def test_a_manifest_with_invalid_names_is_refused() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        wrong: list[dict[str, Any]] = [{"model": "\x1b[2J"}, {"data": "../../etc"}, {"graph": "../x"}]
        for changes in wrong:
            fact = b.signer.sign("run-manifest", encode(manifest(**changes)))
            plan = plan_of(run_of(b), a.peer)
            await assert_refused(b, a, wire.LeaseRequest(fact, encode_plan(plan), 0))
            await assert_refused(b, a, start(b, fact, plan))

    two_nodes(scenario)


def test_a_lease_needs_its_requester_and_a_fitting_plan() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        run = run_of(b)
        good = plan_of(run, a.peer)
        for bad in (
            replace(good, trainers=(a.peer,)),
            replace(good, roster=(a.peer,), trainers=(a.peer,)),
            replace(good, microbatches=4_096),
            replace(good, stages=(StagePlan(0, 2**62, (a.peer,), (1,)),)),
        ):
            await assert_refused(b, a, wire.LeaseRequest(run.fact, encode_plan(bad), 0))
        huge = run_of(b, microbatch=4_096, microbatches=64, pipeline="gpipe")
        reply = await lease(b, a, huge, plan_of(huge, a.peer))
        assert isinstance(reply, Declined)
        assert "memory" in reply.reason
        assert isinstance(await lease(b, a, run, good), wire.Leased)

    two_nodes(scenario)


def test_an_unfenced_node_accepts_only_its_own_stages() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        a.provider.unfenced = ("files: no landlock",)
        run = run_of(b)
        reply = await lease(b, a, run, plan_of(run, a.peer))
        assert isinstance(reply, Declined)
        assert "cannot fence them in: files: no landlock" in reply.reason
        own = run_of(a)
        request = wire.LeaseRequest(own.fact, encode_plan(plan_of(own, a.peer)), 0)
        assert isinstance(await a.runs.ask(a.peer, request, 30.0), wire.Leased)

    two_nodes(scenario)


def test_a_lease_released_while_its_model_arrives_is_not_granted() -> None:
    class SlowModels(Models):
        async def get(self, name: bytes, holders: Sequence[PeerId]) -> Graph:
            await trio.sleep(5)
            return await super().get(name, holders)

    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        run = run_of(b)
        plan = plan_of(run, a.peer)
        replies: list[wire.Reply] = []

        async def want() -> None:
            replies.append(await lease(b, a, run, plan))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(want)
            await trio.sleep(1)
            await ask(b, a, wire.Release(run.id, plan_hash(plan)))
        assert replies == [Declined("busy")]
        assert a.runs.has_slot

    two_nodes(scenario, {"a": {Models: SlowModels}})


def test_only_the_requester_of_a_lease_releases_it() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            a, b, c = (group.nodes[name] for name in "abc")
            run, other = run_of(b), run_of(c)
            plan = plan_of(run, a.peer)
            assert isinstance(await lease(b, a, run, plan), wire.Leased)
            await ask(c, a, wire.Release(run.id, plan_hash(plan)))
            declined = await lease(c, a, other, plan_of(other, a.peer))
            assert isinstance(declined, Declined)
            assert declined.reason == "busy"
            await ask(b, a, wire.Release(run.id, plan_hash(plan)))
            assert isinstance(await lease(c, a, other, plan_of(other, a.peer)), wire.Leased)

    simulate(scenario)


def test_a_renewed_lease_lasts_its_own_time_and_no_longer() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        run = run_of(b)
        plan = plan_of(run, a.peer)
        await lease(b, a, run, plan)
        await trio.sleep(150)
        await ask(b, a, wire.Release(run.id, plan_hash(plan)))
        assert isinstance(await lease(b, a, run, plan), wire.Leased)
        await trio.sleep(150)
        assert not a.runs.has_slot, "the renewed lease ended with the first lease's time"
        await trio.sleep(150)
        assert a.runs.has_slot

    two_nodes(scenario)


def test_a_lease_is_freed_after_its_requester_dies() -> None:
    async def scenario(group: Swarm, a: Node, b: Node) -> None:
        run = run_of(b)
        await lease(b, a, run, plan_of(run, a.peer))
        group.kill("b")
        await trio.sleep(30)
        assert a.runs.has_slot

    two_nodes(scenario)


def test_a_node_joins_no_run_without_its_own_consent() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        for number in range(RUNS_MAX + 2):
            run = make_run(b.signer, manifest(seed=number))
            roster = tuple(sorted((a.peer, b.peer)))
            plan = replace(plan_of(run, b.peer), roster=roster, trainers=(b.peer, a.peer))
            await assert_refused(b, a, start(b, run.fact, plan))
        assert a.runs.known() == []

    two_nodes(scenario)


def test_a_chain_of_plans_must_start_at_the_first_height() -> None:
    """If a chain started at the greatest height, no plan could follow it after a death."""

    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        run = run_of(b)
        plan = replace(plan_of(run, a.peer), height=2**32 - 1)
        await assert_refused(b, a, wire.LeaseRequest(run.fact, encode_plan(plan), 0))
        await assert_refused(b, a, start(b, run.fact, plan))

    two_nodes(scenario)


def test_a_member_accepts_only_a_successor_of_its_plan_in_force() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            a, b, c = (group.nodes[name] for name in "abc")
            run = run_of(b)
            plan = plan_of(run, a.peer)
            await lease(b, a, run, plan)
            assert await ask(b, a, start(b, run.fact, plan)) == Done()
            change = Change(admitted=(c.peer,), trainers=(c.peer,))
            taken, first = successor(plan, change), first_history(b.signer, plan)
            history = extend(b.signer, first, plan_hash(plan), [encode_change(change)])
            history = extend(c.signer, history, plan_hash(taken), [])
            await ask(c, a, wire.Start(run.fact, encode_plan(taken), history))
            cut = (StagePlan(0, 2, (b.peer,), (1,)), StagePlan(2, LAYERS, (a.peer,), (1,)))
            moved = replace(plan, parent=plan_hash(plan), height=1, stages=cut)
            await assert_refused(b, a, start(b, run.fact, moved))
            await trio.sleep(1)
            assert a.runs.members[run.id].plan == plan, "a plan that the chain did not decide is in force"
            await assert_refused(c, a, wire.ExportStage(plan_hash(plan)))
            state = wire.FetchState(plan_hash(plan), 0, "parameters", 0, 64)
            await assert_refused(c, a, state)
            await assert_refused(b, a, state)
            await assert_refused(c, a, wire.End(plan_hash(plan), "failed", "", ""))
            assert a.runs.known() == [run.text]

    simulate(scenario)


def test_a_finished_run_is_not_started_again() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        run = run_of(b)
        plan = plan_of(run, a.peer)
        await lease(b, a, run, plan)
        await ask(b, a, start(b, run.fact, plan))
        assert await ask(b, a, wire.End(plan_hash(plan), "failed", "enough", "")) == Done()
        await assert_refused(b, a, wire.LeaseRequest(run.fact, encode_plan(plan), 0))
        await assert_refused(b, a, start(b, run.fact, plan))
        assert a.runs.known() == []
        assert a.runs.has_slot

    two_nodes(scenario)


def test_a_trainer_refuses_a_manifest_that_does_not_fit_the_data() -> None:
    """If a manifest asks for more held-out samples than exist, the missing ones would be an empty tensor,
    which cannot be sent."""

    async def scenario(group: Swarm, a: Node, b: Node) -> None:
        with pytest.raises(PlacementFailed, match="does not fit"):
            await a.runs.submit(run_of(a, test_samples=1_000_000, stages=1, replicas=1))
        with pytest.raises(PlacementFailed, match="no peer delivers the run's data"):
            await a.runs.submit(run_of(a, data="0" * 64, stages=1, replicas=1))
        assert a.runs.known() == b.runs.known() == []
        assert a.runs.has_slot
        assert b.runs.has_slot
        assert isinstance(group.events["a"][-1], RunEnded)

    two_nodes(scenario)


def test_a_run_that_could_not_be_placed_is_forgotten() -> None:
    async def scenario(group: Swarm, a: Node, b: Node) -> None:
        for asking, holder in ((a, b), (b, a)):
            other = run_of(asking, seed=9)
            await lease(asking, holder, other, plan_of(other, holder.peer))
        with pytest.raises(PlacementFailed):
            await a.runs.submit(run_of(a, stages=9, replicas=9))
        assert a.runs.known() == []
        group.kill("b")
        with pytest.raises(PlacementFailed):
            await a.runs.submit(run_of(a, seed=1))
        assert a.runs.known() == []
        ends = [event for event in group.events["a"] if isinstance(event, RunEnded)]
        assert [event.outcome for event in ends] == ["failed", "failed"]

    two_nodes(scenario)


def test_a_machine_that_cannot_start_processes_is_left_out_of_plans() -> None:
    class FullExecutor(SimExecutor):
        async def open_stage(self, specification: bytes) -> Stage:
            raise OSError(12, "Cannot allocate memory")

    async def scenario() -> None:
        async with swarm("abcd", executors={"b": FullExecutor()}) as group:
            node = group.nodes["a"]
            _, events = await train(group, "a", manifest(stages=1, replicas=2, steps=1))
            lost = [event for event in events if isinstance(event, RunPlanned)][-1]
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            assert node.runs.known() == []
            assert group.nodes["b"].peer not in lost.stages[0]
            assert group.nodes["b"].runs.has_slot

    simulate(scenario)


@pytest.mark.parametrize(
    "changes", [{"bubble": float("nan")}, {"loss": float("inf")}, {"step": 2**60}, {"samples": -1}]
)
def test_a_notice_with_impossible_values_is_refused(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "at": 1.0,
        "run": "0" * 16,
        "step": 1,
        "loss": 1.0,
        "samples": 1,
        "seconds": 1.0,
        "replicas": 1,
    }
    good, bad = (encode(news_of(StepCommitted(**(fields | each)))) for each in ({}, changes))
    assert event_of(decode(good, News, bytes_max=1_000), at=1.0, run="0" * 16) == StepCommitted(**fields)
    with pytest.raises(RemoteProtocolError):
        decode(bad, News, bytes_max=1_000)


@pytest.mark.parametrize(("event", "news"), NEWS.items(), ids=lambda kind: kind.__name__)
def test_a_notice_has_every_field_of_its_event(event: type[Event], news: type[msgspec.Struct]) -> None:
    assert {*event.__struct_fields__} - {"at", "run"} == {*news.__struct_fields__}


def one_stage(*replicas: PeerId) -> Plan:
    stage = StagePlan(0, LAYERS, replicas, (1,) * len(replicas))
    return Plan(bytes(32), NO_HASH, 0, tuple(sorted((*replicas, CAROL))), (CAROL,), 4, (stage,))


def test_a_commit_that_names_outsiders_or_duplicates_is_refused() -> None:
    plan = one_stage(ALICE, BOB)
    replica = Replica(ALICE, plan)
    hash_ = plan_hash(plan)
    replica.receive(0, CAROL, Sync(plan=hash_))
    replica.events.clear()
    mine = StageCommit(0, ALICE, ())
    for others in ((CAROL,), (BOB, BOB), tuple(bytes([number]) * 32 for number in range(200))):
        rows = (mine, *(StageCommit(0, peer, ()) for peer in others))
        with pytest.raises(RemoteProtocolError):
            replica.receive(0, CAROL, StepCommit(plan=hash_, step=0, attempt=0, replicas=rows))
    assert replica.events == []


class BrokenStage:
    """A stage whose process has ended."""

    async def call(self, request: object) -> object:
        raise StageFailed(f"no process for a {type(request).__name__}")

    def vector(self, name: str) -> memoryview:
        raise StageFailed(name)

    async def aclose(self) -> None:
        return


def test_the_longest_messages_of_a_run_fit_the_pipeline() -> None:
    numbers = tuple(range(2**63 - MICROBATCHES_MAX, 2**63))
    routes = StageRoutes(bytes(MICROBATCHES_MAX), numbers)
    rows = [StageCommit(stage, ALICE, numbers) for stage in range(STAGES_MAX)]
    rows += [StageCommit(63, BOB, ())] * (STAGES_MAX * REPLICAS_MAX - STAGES_MAX)
    for message in (
        Open(
            plan=NO_HASH,
            step=STEPS_MAX,
            attempt=2**62,
            train=True,
            first=2**62,
            stages=(routes,) * STAGES_MAX,
        ),
        StepCommit(plan=NO_HASH, step=STEPS_MAX, attempt=2**62, replicas=tuple(rows)),
        Decided(run=NO_HASH, parent=NO_HASH, links=(bytes(LINKS_BYTES_MAX // LINKS_MAX),) * LINKS_MAX),
        wire.GroupPart(Part(bytes(KEY_BYTES_MAX), "scatter", 2**39, 2**39, bytes(CHUNK_BYTES))),
    ):
        decode(encode(message), wire.PipelineMessage, bytes_max=wire.PIPELINE_BYTES_MAX)


async def test_tasks_that_wait_for_a_broken_stages_parameters_get_an_error() -> None:
    specification = cast(
        "Any", SimpleNamespace(dtype="float32", optimizer=OptimizerSettings(), graph=_StageGraph())
    )
    seams = SimpleNamespace(clock=RealClock(), storage=MemoryStorage(), executor=SimExecutor())
    seams.core, seams.part = make_core, lambda usual: usual
    shell = ReplicaShell(
        cast("Signer", _Signer()),
        one_stage(ALICE),
        specification,
        (),
        BrokenStage(),
        cast("Any", seams),
        lambda *_: None,
        refuse=lambda *_: None,
        step=0,
        in_flight_max=1,
        schedule="1f1b",
        codecs=LinkCodecs("exact", lambda _: None, SimExecutor()),
        save=cast("Any", None),
        restore=cast("Any", None),
        archive=FrameArchive(),
        spans=Spans(),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shell.run)
        with trio.fail_after(30):
            for _ in range(2):
                with pytest.raises(StageFailed):
                    await shell.export()


class _StageGraph:
    def entry(self, name: str) -> Any:
        return SimpleNamespace(name=name, backward_outputs=())


class _Signer:
    peer = ALICE


class SlowNetwork:
    """A network whose streams accept nothing until `flows` is set; it counts the streams that were opened."""

    peer = BOB
    has_better_path = False

    def __init__(self) -> None:
        self.flows = trio.Event()
        self.sent: list[bytes] = []
        self.opened = 0

    async def open(self, peer: PeerId, protocol: str, *others: str) -> "SlowNetwork":
        del peer, protocol
        self.opened += 1
        return self

    async def send(self, message: bytes) -> None:
        await self.flows.wait()
        self.sent.append(message)

    async def receive(self) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def aclose(self) -> None:
        return


async def test_a_link_that_overflows_restarts_and_reports_it() -> None:
    """If a message were discarded silently, the receiver would wait for ever."""
    network, again = SlowNetwork(), trio.Event()
    stuck: list[PeerId] = []

    async def deliver(peer: PeerId, data: bytes) -> None:
        del peer, data

    links = Links(
        cast("Network", network),
        "/x/1",
        RealClock(),
        deliver=deliver,
        on_reconnected=lambda _: again.set(),
        on_stuck=stuck.append,
        queue_bytes_max=10,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(links.run)
        links.send(ALICE, b"first")
        await trio.testing.wait_all_tasks_blocked()
        links.send(ALICE, b"too much")
        assert stuck == [ALICE]
        network.flows.set()
        with trio.fail_after(30):
            await again.wait()
        links.send(ALICE, b"second")
        await trio.testing.wait_all_tasks_blocked()
        assert network.sent == [b"second"]
        nursery.cancel_scope.cancel()


def test_finished_runs_do_not_accumulate_in_the_state() -> None:
    state = State()
    for number in range(RUNS_KEPT_MAX + 10):
        run = f"{number:016x}"
        accepted = RunAccepted(at=1.0, run=run, model="m", data="d", steps=1, requester=ALICE)
        state = apply(apply(state, accepted), RunEnded(at=2.0, run=run, outcome="failed", detail=""))
    assert len(state.runs) == RUNS_KEPT_MAX
    assert f"{RUNS_KEPT_MAX + 9:016x}" in state.runs


def test_a_silent_stream_of_an_unknown_peer_is_closed_eventually() -> None:
    async def scenario(group: Swarm, honest: Node, stranger: Node) -> None:
        stream = await stranger.network.open(honest.peer, wire.PIPELINE_PROTOCOL)
        with trio.fail_after(2 * IDLE_SECONDS_MAX), pytest.raises(StreamClosed):
            await stream.receive()

    two_nodes(scenario)
