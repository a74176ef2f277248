"""A peer outside of a run sends messages to the run's training members: they are only refused and counted.

Whole nodes. In virtual time the stranger (the peer outside) is a member of the swarm without a part in the
run. Over real sockets it is a bare transport with an identity, which sends each message many times. It knows
the run and its plan. Members of a run are trusted to compute honestly (docs/failures.md);
`tests.test_hostile_members` covers useless payloads. Hostile requests are in `tests.node.test_runs_hostile`,
messages against the bare step machines in `tests.partition.test_steps_hostile`.
"""

import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import trio
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.facts import IdentitySigner, Signer
from crypto.identity import Identity
from gossip.allreduce import Part
from node import config
from node.checkpoints.weights import weights_name
from node.events import Event, RunEnded, RunPlanned, StepCommitted, StrangerRefused
from node.journal import REFUSALS_SHOWN
from node.protocols import runs as wire
from node.protocols.manifest import Run
from node.protocols.notices import Notice, news_of
from node.runs.inbox import EARLY_BYTES_MAX
from node.runtime import Node
from node.seams import Network
from node.services.capacity import Capacity
from partition import stage as api
from partition.codecs.codec import (
    CODECS,
    DIMENSIONS_MAX,
    SIDE_MAX,
    Payload,
    TensorHeader,
    pack,
    typed,
    unpack,
)
from partition.model.graph import ITEM_BYTES
from partition.plan.paxos_messages import (
    Accept,
    Accepted,
    AgreementMessage,
    Ballot,
    ChainHead,
    Decided,
    Prepare,
    Promised,
)
from partition.plan.plan import Plan, plan_hash
from partition.run.dispatch import EARLY_MAX
from partition.run.messages import Absent, Checkpointed, Leaving
from partition.steps import messages as said
from partition.steps.frames import FRAME_PURPOSE, Frame, FrameHeader, open_frame
from partition.steps.routes import attempts
from sim.executor import SimExecutor
from tests.node.nets import make_network, running, until
from tests.stack import (
    STAGE_SECONDS,
    Swarm,
    _live,
    assert_equal,
    manifest,
    prepare,
    reference,
    simulate,
    swarm,
    train,
    weights,
)

Sent = tuple[bytes, memoryview]
"""A message on the wire, and its payload."""

PAYLOAD = pack([typed(np.ones((4, 1, 8, 8)))], "zstd", (4,))
"""The trainer's payload: four digits."""
STAGES = 2
PASS_SECONDS = 0.02
"""Seconds of a stage's pass over real sockets: long enough that a flood ends well before the run does."""
FLOOD_ROUNDS, BOMBS = 3, 8
KEPT_BYTES_MAX = 4 << 20
"""The most memory that may remain after a flood: that of the run itself, and of queued messages."""


@dataclass(frozen=True)
class Lies:
    """Messages of a stranger that knows the plan in force."""

    signer: Signer
    run: Run
    plan: Plan
    step: int

    @property
    def name(self) -> bytes:
        return plan_hash(self.plan)

    @property
    def microbatch(self) -> int:
        """Return the last micro-batch of the open step."""
        return (self.step + 1) * self.plan.microbatches - 1

    def header(self, payload: Payload = PAYLOAD, **changes: Any) -> FrameHeader:
        fields: dict[str, Any] = {
            "plan": self.name,
            "step": self.step,
            "attempt": attempts(self.plan).start,
            "microbatch": self.microbatch,
            "stage": 0,
            "direction": "input",
            "train": True,
            "sizes": payload.sizes,
            "tensors": payload.tensors,
            "codec": payload.codec,
            "digest": payload.digest,
        }
        return FrameHeader(**(fields | changes))

    def frame(self, payload: Payload = PAYLOAD, **changes: Any) -> Sent:
        """Return a frame signed by the stranger itself."""
        body = encode(self.header(payload, **changes))
        return encode(Frame(self.signer.sign(FRAME_PURPOSE, body))), payload.data

    def frames(self) -> Iterator[Sent]:
        """Yield frames, each with one fault in addition to the wrong sender."""
        for direction, stage in (("input", 0), ("input", 1), ("gradient", 0), ("labels", STAGES - 1)):
            yield self.frame(direction=direction, stage=stage)
            yield self.frame(direction=direction, stage=stage, train=False)
        yield self.frame(pack([typed(np.ones((4, 3, 8, 8)))], "zstd", (4,)))
        yield self.frame(pack([typed(np.ones((4, 1, 8, 8), np.int64))], "raw", (4,)))
        yield self.frame(pack([typed(np.full((4, 1, 8, 8), np.nan))], "raw", (4,)))
        yield self.frame(sizes=(SIDE_MAX,))
        yield self.frame(tensors=(TensorHeader("float64", (SIDE_MAX,) * DIMENSIONS_MAX),))
        yield self.frame(tensors=PAYLOAD.tensors * 64)
        yield self.frame(codec="raw")
        yield self.frame(digest=bytes(32))
        yield self.frame(attempt=attempts(self.plan).stop)
        yield self.frame(attempt=attempts(self.plan).stop - 1)
        yield self.frame(microbatch=2**62)
        yield self.frame(step=2**62)
        yield self.frame(stage=63)
        yield encode(Frame(self.signer.sign("contact", encode(self.header())))), PAYLOAD.data
        fact = self.signer.sign(FRAME_PURPOSE, encode(self.header()))
        for changes in (
            {"signature": bytes(64)},
            {"author": self.plan.committer},
            {"author": bytes(32)},
            {"body": fact.body[:-1]},
            {"body": bytes(100_000)},
        ):
            yield encode(Frame(msgspec.structs.replace(fact, **changes))), PAYLOAD.data
        yield encode(Frame(fact)), memoryview(b"")

    def step_messages(self) -> Iterator[Sent]:
        """Yield messages that only the committer and replicas may send."""
        plan, step, attempt = self.name, self.step, attempts(self.plan).start
        me, number = self.signer.peer, self.microbatch
        owners = said.StageRoutes(bytes(self.plan.microbatches))
        rows = tuple(
            said.StageCommit(stage, peer, ())
            for stage, row in enumerate(self.plan.stages)
            for peer in row.replicas
        )
        apply = said.Apply(plan=plan, step=step, attempt=attempt, samples=1)
        for message in (
            said.Sync(plan=plan),
            said.Open(
                plan=plan,
                step=step,
                attempt=attempt + 1,
                train=True,
                first=step * self.plan.microbatches,
                stages=(owners,) * STAGES,
            ),
            said.StepCommit(plan=plan, step=step, attempt=attempt, replicas=rows),
            apply,
            said.Fill(plan=plan, step=step, digest=bytes(32), sources=(me,)),
            said.Save(plan=plan, step=step),
            said.Synced(plan=plan, step=step + 1, applied=apply),
            said.Progress(plan=plan, step=step, microbatch=number, stage=0),
            said.Counted(plan=plan, step=step, microbatch=number, stage=1, samples=4, loss=0.0),
            said.Evaluated(plan=plan, step=step, microbatch=0, samples=4, loss=0.0, metrics=(4.0,)),
            said.Reduced(plan=plan, step=step, attempt=attempt, digest=bytes(32)),
            said.Applied(plan=plan, step=step, digest=bytes(32)),
            said.BadFrame(
                plan=plan, frame=self.signer.sign(FRAME_PURPOSE, encode(self.header())), reason="I say so"
            ),
            said.Failed(plan=plan, reason="I say so"),
        ):
            yield encode(message), memoryview(b"")

    def run_messages(self) -> Iterator[Sent]:
        """Yield messages between members that are not part of the steps."""
        plan = self.name
        committed = StepCommitted(
            at=0.0, run=self.run.text, step=self.step, loss=0.0, samples=1, seconds=1.0, replicas=1
        )
        replicas = self.plan.stages[0].replicas
        for message in (
            Notice(plan, news_of(committed)),
            Absent(plan, (replicas[0],), "I say so"),
            Checkpointed(plan, self.step, bytes(32)),
            Leaving(plan),
            Leaving(plan, at_once=True),
            wire.GroupPart(Part(plan + bytes(20), "scatter", 0, 0, bytes(8))),
            wire.GroupPart(Part(plan, "gather", 2**39, 2**39, bytes(1 << 20))),
        ):
            yield encode(message), memoryview(b"")

    def votes(self) -> Iterator[Sent]:
        """Yield votes on the next plan."""
        ballot = Ballot(2**24, self.signer.peer)
        names: dict[str, Any] = {"run": self.run.id, "parent": self.name}
        votes: Sequence[AgreementMessage] = (
            Prepare(**names, ballot=ballot),
            Promised(**names, ballot=ballot),
            Accept(**names, ballot=ballot, value=b"x"),
            Accepted(**names, ballot=ballot),
            Decided(**names, links=(b"x",)),
            Decided(**names, links=(bytes(60_000),) * 4, whole=True),
            Decided(**names, links=(bytes(60_000),) * 64),
            ChainHead(**names, height=2**31, step=2**40, samples=2**60),
        )
        for message in votes:
            yield encode(message), memoryview(b"")

    def garbage(self) -> Iterator[Sent]:
        """Yield bytes that are not messages."""
        good, payload = self.frame()
        for data in (b"", b"\xc1", good[:-1], good + b"\0", b"\x91" * 10_000, encode({"type": "sync"})):
            yield data, memoryview(b"")
        yield encode(said.Sync(plan=self.name)), payload

    def refused(self) -> list[Sent]:
        """Return all messages of which each member must refuse every one."""
        kinds = (self.frames(), self.step_messages(), self.run_messages(), self.votes(), self.garbage())
        return [sent for kind in kinds for sent in kind]

    def ignored(self) -> list[Sent]:
        """Return messages of plans that no member follows. Such plans may have ended, or may come, so the
        messages are not counted.
        """
        other = bytes(31) + b"\1"
        opening = said.Open(
            plan=other,
            step=0,
            attempt=0,
            train=True,
            first=0,
            stages=(said.StageRoutes(bytes(4_096), tuple(range(4_096))),) * 64,
        )
        return [
            self.frame(plan=other),
            (encode(said.Sync(plan=other)), memoryview(b"")),
            (encode(opening), memoryview(b"")),
            (encode(said.Failed(plan=other, reason="")), memoryview(b"")),
            (encode(ChainHead(run=other, parent=other, height=0)), memoryview(b"")),
        ]


async def say(network: Network, victim: Node, messages: Sequence[Sent]) -> None:
    """Send all messages on one stream, in order."""
    stream = await network.open(victim.peer, wire.PIPELINE_PROTOCOL)
    try:
        for message, payload in messages:
            await stream.send(message, *([payload] if payload else []))
    finally:
        await stream.aclose()


def refusals(node: Node) -> int:
    return node.counters.get("protocol_errors", 0)


@contextmanager
def traced(*, peak: bool = False) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of bytes allocated since the beginning that are still held, or
    their peak."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[peak]
    finally:
        tracemalloc.stop()


def in_force(node: Node, run: Run) -> Plan:
    plan = node.runs.members[run.id].plan
    assert plan is not None
    return plan


def outcome(events: Sequence[Event]) -> RunEnded:
    end = events[-1]
    assert isinstance(end, RunEnded)
    assert end.outcome == "done", end.detail
    return end


def assert_nothing_is_left(node: Node) -> None:
    """Assert that nothing remains of a finished run, or of a stranger's messages about it."""
    early = node.runs.inbox.dispatch.early
    assert not node.runs.members
    assert not node.runs.inbox.dispatch.plans
    assert len(early) <= EARLY_MAX
    assert all(len(data) <= EARLY_BYTES_MAX for _, _, data in early)


# --- a member of the swarm, in virtual time --------------------------------------------------------


def recorded(group: Swarm, monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """Record every frame between members from now on, as sent."""
    kept: list[Sent] = []
    for node in group.nodes.values():

        def send(peer: Any, message: bytes, *payload: Any, _send: Any = node.runs.links.send) -> None:
            if payload:
                kept.append((bytes(message), memoryview(b"".join(payload))))
            _send(peer, message, *payload)

        monkeypatch.setattr(node.runs.links, "send", send)
    return kept


def stranger_in(group: Swarm, plan: Plan) -> Node:
    """Return the node that the plan does not use."""
    (outside,) = [node for node in group.nodes.values() if node.peer not in plan.roster]
    return outside


def the_run(node: Node) -> Run:
    (member,) = node.runs.members.values()
    return member.run


def test_strangers_messages_in_a_step_are_refused_and_change_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoken = 0
    counts: list[int] = []

    async def scenario() -> None:
        async with swarm("abcdef") as group:
            nodes = group.nodes
            frames = recorded(group, monkeypatch)

            async def speak(event: Event) -> None:
                nonlocal spoken
                if not isinstance(event, StepCommitted) or event.step not in (0, 2):
                    return
                run = the_run(nodes["e"])
                plan = in_force(nodes["e"], run)
                outside = stranger_in(group, plan)
                await trio.sleep(0.3 * event.seconds)
                lies = Lies(outside.signer, run, plan, event.step + 1)
                refused = [*lies.refused(), *frames[-20:]]
                spoken += len(refused)
                for victim in nodes.values():
                    if victim is not outside:
                        await say(outside.network, victim, [*refused, *lies.ignored()])

            run, events = await train(group, "e", manifest(), speak)
            outcome(events)
            assert [e.step for e in events if isinstance(e, StepCommitted)] == [0, 1, 2, 3, 4]
            for name, node in nodes.items():
                counts.append(refusals(node))
                assert_nothing_is_left(node)
                shown = [e for e in group.events[name] if isinstance(e, StrangerRefused)]
                assert len(shown) == (counts[-1] >= REFUSALS_SHOWN[0])
            assert_equal(weights(group, "e", run), reference(run), "float64")

    simulate(scenario)
    assert spoken >= REFUSALS_SHOWN[0]
    assert sorted(counts) == [0, *[spoken] * 5], (
        "a stranger's message was not counted, or a member's message was"
    )


def test_strangers_do_not_affect_a_member_without_a_role() -> None:
    """The requester died and came back, so it is on the roster but has no role."""
    counted: list[int] = []
    spoken: list[Sent] = []

    async def scenario() -> None:
        async with swarm("abcdef", stage_seconds=0.2) as group, trio.open_nursery() as nursery:
            nodes = group.nodes

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 0:
                    group.kill("e")
                elif isinstance(event, RunPlanned) and event.height == 1:
                    await nursery.start(_live, group, "e", "a", 1, STAGE_SECONDS, group.storages["e"])
                elif isinstance(event, StepCommitted) and event.step > 0 and not spoken:
                    run, back = the_run(nodes["a"]), nodes["e"]
                    plan, members = in_force(nodes["a"], run), list(back.runs.members.values())
                    if back.peer not in plan.roster or [member.plan for member in members] != [plan]:
                        return  # it does not know yet that it is a member again
                    assert plan.committer != back.peer
                    assert plan.stage_of(back.peer) is None
                    outside = stranger_in(group, plan)
                    spoken.extend(Lies(outside.signer, run, plan, event.step + 1).refused())
                    before = refusals(back)
                    await say(outside.network, back, spoken)
                    await trio.sleep(1)
                    counted.append(refusals(back) - before)

            # The requester may be readmitted once before it has left the run, and again after half a minute.
            wanted = manifest(steps=60, microbatches=2, test_samples=16)
            run, events = await train(group, "e", wanted, disturb, watcher="a")
            outcome(events)
            assert_equal(weights(group, "a", run), reference(run), "float64")
            nursery.cancel_scope.cancel()

    simulate(scenario)
    assert counted == [len(spoken)]
    assert spoken


# --- a bare transport, over real sockets -----------------------------------------------------------


def _pass_seconds(request: object) -> float:
    return PASS_SECONDS if isinstance(request, api.Forward | api.Backward) else 0.0


@asynccontextmanager
async def real_nodes(folder: Path, names: str) -> AsyncIterator[list[Node]]:
    """Nodes on loopback that all know each other; their stages compute in this process."""
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for name in names:
            settings = config.Config(
                name=name,
                data_dir=folder / name,
                swarm=config.SwarmSettings(preset="lan"),
                listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
                join=config.JoinSettings(lan=False),
                resources=config.Resources(calibrate=False),
            )
            node = Node(
                settings,
                join=[nodes[0].network.addresses[0].short] if nodes else [],
                executor=SimExecutor(_pass_seconds),
                capacity=Capacity("cpu", 1, 8 << 30, 16 << 30, 5e9, ""),
            )
            nodes.append(await stack.enter_async_context(node))
        await until(lambda: all(len(node.membership.live) == len(names) for node in nodes))
        yield nodes


async def flood(network: Network, victim: Node, lies: Lies) -> int:
    """Send all messages many times, including long ones; return the number that must be refused."""
    refused = lies.refused()
    long = [*lies.ignored(), *[bomb(lies, number) for number in range(BOMBS)]]
    for _ in range(FLOOD_ROUNDS):
        await say(network, victim, [*refused, *long])
    return FLOOD_ROUNDS * len(refused)


def bomb(lies: Lies, number: int) -> Sent:
    """Return a commit of a plan that may be decided soon; decoded, it takes a hundred times its length."""
    plan = number.to_bytes(32, "big")
    row = said.StageCommit(0, lies.signer.peer, (1,) * 4_096)
    return encode(said.StepCommit(plan=plan, step=0, attempt=0, replicas=(row,) * 64)), memoryview(b"")


async def test_a_flood_over_real_sockets_leaves_nothing_and_changes_no_result(tmp_path: Path) -> None:
    wanted = manifest(replicas=1, steps=30, microbatches=2, test_samples=16)
    stranger = make_network("s", swarm="default")
    signer = IdentitySigner(Identity(b"s" * 32), "default")
    async with real_nodes(tmp_path, "abc") as nodes, running(stranger):
        for node in nodes:
            stranger.learn(node.peer, node.network.addresses)
        requester = nodes[-1]
        run = prepare(requester, wanted)
        spoken = 0

        def is_heard() -> bool:
            return all(refusals(node) >= spoken for node in nodes)

        with requester.watch() as events:
            await requester.runs.submit(run)
            async for event in events:
                if isinstance(event, StepCommitted) and event.step == 2:
                    lies = Lies(signer, run, in_force(requester, run), event.step + 1)
                    with traced() as kept:
                        for node in nodes:
                            spoken = await flood(stranger, node, lies)
                        await until(is_heard)
                        assert kept() <= KEPT_BYTES_MAX
                    assert requester.runs.members, "the run has not continued meanwhile"
                if isinstance(event, RunEnded):
                    outcome([event])
                    break
        assert [refusals(node) for node in nodes] == [spoken] * len(nodes)
        for node in nodes:
            assert_nothing_is_left(node)
            data = node.seams.storage.read(weights_name(run.text))
            assert data is not None
            assert_equal(safetensors.numpy.load(data), reference(run), "float64")


# --- the header of a frame -------------------------------------------------------------------------

ALICE, BOB = (IdentitySigner(Identity(bytes([number]) * 32), "test") for number in (1, 2))
ROOM_BYTES = 1 << 16
"""The receiver's limit on these frames."""
ALLOCATED_BYTES_MAX = 1 << 20
"""Less than one side of SIDE_MAX would take, but with room for the cost of decoding."""

sides = st.one_of(st.integers(1, 9), st.sampled_from([2**16, 2**20, SIDE_MAX]))
tensor_headers = st.builds(
    TensorHeader,
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(sides, max_size=DIMENSIONS_MAX).map(tuple),
)
counts = st.one_of(st.integers(0, 9), st.just(2**63 - 1))
headers = st.builds(
    FrameHeader,
    plan=st.binary(min_size=32, max_size=32),
    step=counts,
    attempt=counts,
    microbatch=counts,
    stage=st.integers(0, 63),
    direction=st.sampled_from(["input", "labels", "gradient"]),
    train=st.booleans(),
    sizes=st.lists(sides, max_size=8).map(tuple),
    tensors=st.lists(tensor_headers, max_size=64).map(tuple),
    codec=st.sampled_from(CODECS),
    digest=st.binary(min_size=32, max_size=32),
)


@given(headers, st.binary(max_size=200), st.booleans())
def test_no_memory_is_allocated_for_the_sizes_that_a_header_claims(
    header: FrameHeader, data: bytes, has_digest: bool
) -> None:
    if has_digest:
        header = msgspec.structs.replace(header, digest=blake3(data).digest())
    frame = Frame(ALICE.sign(FRAME_PURPOSE, encode(header)))
    with traced(peak=True) as allocated:
        with suppress(RemoteProtocolError):
            opened = open_frame(ALICE.peer, frame, memoryview(data))
            assert opened.header == header
            unpack(opened.payload, bytes_max=ROOM_BYTES)
        assert allocated() <= ALLOCATED_BYTES_MAX


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.binary(max_size=40),
        st.text(max_size=9),
    ),
    lambda inner: st.lists(inner, max_size=4),
)


@given(headers, st.sampled_from(FrameHeader.__struct_fields__), values)
def test_a_changed_header_is_refused_or_decoded_exactly(header: FrameHeader, field: str, value: Any) -> None:
    row = msgspec.msgpack.decode(encode(header))
    row[FrameHeader.__struct_fields__.index(field)] = value
    body = encode(row)
    with suppress(RemoteProtocolError):
        opened = open_frame(ALICE.peer, Frame(ALICE.sign(FRAME_PURPOSE, body)), memoryview(b""))
        assert encode(opened.header) == body
