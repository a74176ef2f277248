"""The step machines receive messages that no correct peer sends."""

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import NO_HASH
from partition.steps.committer import Committer, StepApplied
from partition.steps.feeder import Feeder, FeedReady
from partition.steps.frames import FrameHeader
from partition.steps.messages import (
    EVALUATIONS_IN_FLIGHT_MAX,
    Applied,
    Apply,
    Counted,
    Evaluated,
    Failed,
    Fill,
    Open,
    Progress,
    Reduced,
    Save,
    StageCommit,
    StageRoutes,
    StepCommit,
    StepMessage,
    Sync,
    Synced,
    Work,
)
from partition.steps.replica import (
    ApplyReady,
    BackwardReady,
    FillReady,
    ForgetReady,
    ForwardReady,
    ReduceReady,
    Replica,
    SaveReady,
    StepDiscarded,
    SubtractReady,
)
from partition.steps.routes import attempts
from tests.partition.fake_stage import payload, peer
from tests.partition.small_plan import (
    FIRST,
    LAST,
    MIDDLES,
    PLAN,
    PLAN_HASH,
    SECOND,
    SENT,
    START,
    TRAINER,
    commit,
    frame,
    opening,
    synced,
)
from tests.partition.steps_machine import Settings, opened
from tests.partition.steps_world import World

HERE = MIDDLES[0]
STRANGER = peer("stranger")
PEERS = [TRAINER, SECOND, FIRST, *MIDDLES, LAST, STRANGER]
counts = st.one_of(st.integers(0, 5), st.integers(START, START + 3), st.just(2**63 - 1))
hashes = st.sampled_from([PLAN_HASH, PLAN_HASH, PLAN_HASH, NO_HASH])
floats = st.floats()
peers = st.sampled_from(PEERS)
norms = st.one_of(st.none(), floats)
numbers = st.lists(counts, max_size=4).map(tuple)
applies = st.builds(
    Apply,
    plan=hashes,
    step=counts,
    attempt=counts,
    samples=st.integers(1, 2**40 - 1),
    squared_norm=norms,
)
routes = st.builds(StageRoutes, st.binary(min_size=1, max_size=3), numbers)
openings = st.builds(
    Open,
    plan=hashes,
    step=counts,
    attempt=counts,
    train=st.booleans(),
    first=counts,
    stages=st.lists(routes, min_size=1, max_size=4).map(tuple),
)
likely_openings = st.builds(
    opening,
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    step=st.integers(0, 1),
    attempt=st.integers(0, 3),
    train=st.booleans(),
)
likely_commits = st.builds(
    commit,
    st.sampled_from([(), (0,), (0, 1), (7,)]),
    st.sampled_from([(), (1,), (0, 1)]),
    attempt=st.integers(0, 3),
)
commits = st.builds(
    StepCommit,
    plan=hashes,
    step=counts,
    attempt=counts,
    replicas=st.lists(st.builds(StageCommit, st.integers(0, 3), peers, numbers), max_size=5).map(tuple),
)
frames = st.builds(
    lambda header, author: opened(author, header),
    st.builds(
        FrameHeader,
        hashes,
        counts,
        counts,
        counts,
        st.integers(0, 3),
        st.sampled_from(["input", "labels", "gradient"]),
        st.booleans(),
        st.just((1,)),
        st.just(()),
        st.just("raw"),
        st.just(bytes(32)),
    ),
    peers,
)
fills = st.builds(
    Fill,
    plan=hashes,
    step=counts,
    digest=hashes,
    sources=st.lists(peers, min_size=1, max_size=2).map(tuple),
    applied=st.one_of(st.none(), applies),
)
losses = st.lists(floats, max_size=2).map(tuple)
messages = st.one_of(
    applies,
    commits,
    likely_commits,
    openings,
    likely_openings,
    fills,
    frames,
    st.builds(Sync, plan=hashes),
    st.builds(Save, plan=hashes, step=counts),
    st.builds(
        Synced,
        plan=hashes,
        step=st.one_of(st.none(), counts),
        counted=numbers,
        samples=numbers,
        losses=losses,
        begun=numbers,
        reduced=st.one_of(st.none(), counts),
        applied=st.one_of(st.none(), applies),
        digest=hashes,
    ),
    st.builds(Progress, plan=hashes, step=counts, microbatch=counts, stage=st.integers(0, 3)),
    st.builds(
        Counted,
        plan=hashes,
        step=counts,
        microbatch=counts,
        stage=st.integers(0, 3),
        samples=counts,
        loss=floats,
    ),
    st.builds(Evaluated, plan=hashes, microbatch=counts, samples=counts, loss=floats, metrics=losses),
    st.builds(Reduced, plan=hashes, step=counts, attempt=counts, digest=hashes, squared_norm=norms),
    st.builds(Applied, plan=hashes, step=counts, digest=hashes),
    st.builds(Failed, plan=hashes, reason=st.text(max_size=20)),
    st.just(payload(b"not a message at all")),
)
arrivals = st.lists(st.tuples(peers, messages), max_size=30)


def perform(replica: Replica) -> None:
    """Perform the core's requests immediately."""
    while (work := replica.next(0.0)) is not None:
        match work:
            case ForwardReady():
                output, gradient = (None, SENT) if replica.is_last else (SENT, None)
                replica.forwarded(work, output=output, gradient=gradient, samples=1, loss=1.0, metrics=(1.0,))
            case BackwardReady():
                replica.backwarded(work, gradient=SENT)
            case SubtractReady():
                replica.removed(work)
            case ForgetReady():
                replica.forgotten(work)
            case ReduceReady():
                replica.reduced(work, bytes(32))
            case ApplyReady():
                replica.applied(work, bytes(32), Work())
            case SaveReady():
                replica.saved(work)
            case StepDiscarded():
                replica.discarded(work)
            case FillReady():
                replica.filled(work, bytes(32))


@given(st.sampled_from([FIRST, HERE, LAST]), arrivals, st.booleans())
@settings(max_examples=3 * settings().max_examples)
def test_hostile_messages_to_a_replica_raise_only_protocol_errors(
    me: PeerId, arrivals: list[tuple[PeerId, Any]], is_new: bool
) -> None:
    replica = Replica(me, PLAN, step=None if is_new else 0)
    for sender, message in [(TRAINER, Sync(plan=PLAN_HASH)), *arrivals]:
        try:
            replica.receive(0.0, sender, message)
        except RemoteProtocolError:
            continue
        perform(replica)
    for name in PEERS:
        replica.reconnected(name)
    assert len(replica._order.microbatches) <= PLAN.microbatches
    assert len(replica._held_out.microbatches) <= EVALUATIONS_IN_FLIGHT_MAX


@given(arrivals, st.booleans(), st.integers(0, 2))
@settings(max_examples=3 * settings().max_examples)
def test_hostile_messages_to_a_committer_raise_only_protocol_errors(
    arrivals: list[tuple[PeerId, Any]], is_synced: bool, steps: int
) -> None:
    committer = Committer(TRAINER, PLAN, steps=steps, evaluations=3, metrics=1)
    committer.start(0.0)
    everybody = [(name, synced(0)) for name in (FIRST, *MIDDLES, LAST)] if is_synced else []
    for now, (sender, message) in enumerate([*everybody, *arrivals]):
        with suppress(RemoteProtocolError):
            committer.receive(float(now), sender, message)
        committer.wake(float(now))
    for name in PEERS:
        committer.reconnected(name)
        committer.suspect(99.0, name)
    assert not any(isinstance(event, StepApplied) and event.samples < 1 for event in committer.events)


@given(st.lists(st.tuples(peers, st.one_of(openings, likely_openings)), max_size=20))
@settings(max_examples=2 * settings().max_examples)
def test_a_feeder_feeds_only_the_first_and_last_stage(
    arrivals: list[tuple[PeerId, Open]],
) -> None:
    feeder = Feeder(SECOND, PLAN)
    for sender, message in arrivals:
        with suppress(RemoteProtocolError):
            feeder.receive(0.0, sender, message)
    for event in feeder.events:
        if isinstance(event, FeedReady):
            assert event.input_to in (None, FIRST)
            assert event.labels_to in (None, LAST)


# One error at a time


def waiting(me: PeerId = HERE) -> Replica:
    replica = Replica(me, PLAN)
    replica.receive(0.0, TRAINER, Sync(plan=PLAN_HASH))
    replica.receive(0.0, TRAINER, opening((0, 0)))
    return replica


@pytest.mark.parametrize(
    ("me", "sender", "wrong"),
    [
        (HERE, FIRST, {"stage": 0}),
        (HERE, FIRST, {"stage": 2}),
        (HERE, FIRST, {"step": 1}),
        (HERE, FIRST, {"microbatch": 2}),
        (HERE, FIRST, {"attempt": attempts(PLAN).stop}),
        (HERE, FIRST, {"direction": "gradient"}),
        (HERE, FIRST, {"direction": "labels"}),
        (HERE, LAST, {}),
        (HERE, TRAINER, {}),
        (HERE, MIDDLES[1], {}),
        (HERE, STRANGER, {}),
        (HERE, LAST, {"direction": "gradient", "train": False}),
        (HERE, MIDDLES[1], {"direction": "gradient"}),
        (FIRST, HERE, {"stage": 0}),
        (FIRST, TRAINER, {"stage": 0, "direction": "labels"}),
        (FIRST, STRANGER, {"stage": 0}),
        (LAST, HERE, {"stage": 2, "direction": "labels"}),
        (LAST, TRAINER, {"stage": 2}),
        (LAST, TRAINER, {"stage": 2, "direction": "gradient"}),
    ],
)
def test_a_frame_with_one_error_is_refused(me: PeerId, sender: PeerId, wrong: dict[str, Any]) -> None:
    right = {"microbatch": 0, "direction": "input", **wrong}
    with pytest.raises(RemoteProtocolError, match="a frame"):
        waiting(me).receive(0.0, sender, frame(sender, **right))


@pytest.mark.parametrize(
    ("me", "sender", "right"),
    [
        (HERE, FIRST, {}),
        (HERE, LAST, {"direction": "gradient"}),
        (HERE, FIRST, {"train": False, "microbatch": 90}),
        (HERE, FIRST, {"attempt": 0}),
        (HERE, FIRST, {"attempt": START + 9}),
        (FIRST, SECOND, {"stage": 0}),
        (LAST, SECOND, {"stage": 2, "direction": "labels"}),
        (LAST, MIDDLES[1], {"stage": 2}),
    ],
)
def test_a_frame_of_any_possible_owner_is_accepted(me: PeerId, sender: PeerId, right: dict[str, Any]) -> None:
    replica = waiting(me)
    replica.receive(0.0, sender, frame(sender, **{"microbatch": 0, **right}))
    assert replica._order.microbatches or replica._held_out.microbatches


def test_frames_of_other_plans_or_past_steps_leave_no_trace() -> None:
    replica = waiting()
    replica.receive(0.0, FIRST, frame(FIRST, 0, plan=NO_HASH))
    assert replica._order.microbatches == {}
    later = Replica(HERE, PLAN, step=3)
    later.receive(0.0, FIRST, frame(FIRST, 0))
    assert later._order.microbatches == {}


@pytest.mark.parametrize(
    "message",
    [
        opening(),
        commit((0,), (1,)),
        Sync(plan=PLAN_HASH),
        Save(plan=PLAN_HASH, step=0),
        Apply(plan=PLAN_HASH, step=0, attempt=START, samples=1),
        Fill(plan=PLAN_HASH, step=0, digest=NO_HASH, sources=(MIDDLES[1],)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_only_the_committer_defines_the_steps(message: Any) -> None:
    for sender in (SECOND, FIRST, HERE, LAST, STRANGER):
        with pytest.raises(RemoteProtocolError, match="not the committer"):
            waiting().receive(0.0, sender, message)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (opening((0, 2)), "to a replica that does not exist"),
        (opening(step=1), "has not reached"),
        (replace(opening(), first=1), "exactly the micro-batches of its step"),
        (opening(counted=((5,), (), ())), "not in it"),
        (replace(opening(), stages=opening().stages[:2]), "does not belong to its plan"),
        (replace(opening(), attempt=0), "does not belong to its plan"),
        (
            opening((0,) * (EVALUATIONS_IN_FLIGHT_MAX + 1), train=False),
            "held-out micro-batches, which are too many",
        ),
        (commit((0,), ()), "leaves out a micro-batch"),
        (commit((0, 1), (1,)), "counts one twice"),
        (commit((0,), (1,), step=1), "has not reached"),
        (replace(commit((0,), (1,)), attempt=7), "has not reached"),
        (replace(commit((0,), (1,)), replicas=commit((0,), (1,)).replicas[:3]), "leaves one out"),
        (Apply(plan=PLAN_HASH, step=0, attempt=START, samples=1), "before the totals"),
        (Counted(plan=PLAN_HASH, step=0, microbatch=0, stage=0, samples=0, loss=0.0), "not for a replica"),
    ],
)
def test_a_committers_inconsistent_messages_are_refused(message: Any, reason: str) -> None:
    replica = Replica(HERE, PLAN)
    replica.receive(0.0, TRAINER, Sync(plan=PLAN_HASH))
    with pytest.raises(RemoteProtocolError, match=reason):
        replica.receive(0.0, TRAINER, message)


@pytest.mark.parametrize(
    ("sender", "message", "reason"),
    [
        (STRANGER, synced(0), "without a stage"),
        (TRAINER, synced(0), "without a stage"),
        (FIRST, opening(), "not for a committer"),
        (FIRST, synced(3, attempt=7, counted=(1,), samples=(0,), losses=(0.0,)), "outside of the open step"),
        (
            FIRST,
            synced(0, counted=(1, 1), samples=(0, 0), losses=(0.0, 0.0)),
            "outside of the open step, or twice",
        ),
        (
            FIRST,
            synced(0, counted=(1,), begun=(1,), samples=(0,), losses=(0.0,)),
            "outside of the open step, or twice",
        ),
        (FIRST, synced(0, counted=(1,)), "without their losses"),
        (LAST, synced(0, counted=(1,), samples=(2**40,), losses=(0.0,)), "impossible number of samples"),
        (FIRST, replace(synced(3), step=4), "do not follow from its latest Apply"),
    ],
)
def test_a_replicas_inconsistent_messages_are_refused(sender: PeerId, message: Any, reason: str) -> None:
    committer = Committer(TRAINER, PLAN, steps=5, evaluations=1)
    committer.start(0.0)
    with pytest.raises(RemoteProtocolError, match=reason):
        committer.receive(0.0, sender, message)


@pytest.mark.parametrize(
    ("sender", "message", "reason"),
    [
        (
            FIRST,
            Counted(plan=PLAN_HASH, step=0, microbatch=2, stage=0, samples=0, loss=0.0),
            "not in the step",
        ),
        (LAST, Counted(plan=PLAN_HASH, step=0, microbatch=1, stage=2, samples=2**40, loss=0.0), "impossible"),
        (LAST, Progress(plan=PLAN_HASH, step=0, microbatch=1, stage=2), "progress in the last stage"),
        (FIRST, Progress(plan=PLAN_HASH, step=0, microbatch=1, stage=1), "does not hold"),
    ],
)
def test_a_replica_that_counts_impossible_work_is_refused(sender: PeerId, message: Any, reason: str) -> None:
    committer = Committer(TRAINER, PLAN, steps=5, evaluations=1)
    committer.start(0.0)
    for name in (FIRST, *MIDDLES, LAST):
        committer.receive(0.0, name, synced(0))
    with pytest.raises(RemoteProtocolError, match=reason):
        committer.receive(0.0, sender, message)


def messages_of(world: World, rng: Random) -> Iterator[StepMessage]:
    """Yield messages that a peer outside the run might send, under the run's own plan hash."""
    machine = world.machines[world.plan.committer]
    assert machine.committer is not None
    while True:
        name, step = machine.committer.plan_hash, machine.committer.step
        yield rng.choice(
            [
                Sync(plan=name),
                Apply(plan=name, step=step, attempt=0, samples=1),
                StepCommit(plan=name, step=step, attempt=0, replicas=()),
                Failed(plan=name, reason="I am not of this run"),
                Applied(plan=name, step=step, digest=bytes(32)),
            ]
        )


def test_a_peer_outside_the_run_changes_nothing() -> None:
    for seed in range(40):
        world = World(Random(seed), [2, 2], microbatches=2, settings=Settings(steps=2, evaluations=1))
        rng = Random(seed)
        says = messages_of(world, rng)
        committer = world.machines[world.plan.committer].committer
        nodes = [machine for machine in world.machines.values() if machine.replica is not None]
        while world.outcome is None:
            if world.pool:
                world.step()
            replica = rng.choice(nodes).replica
            assert committer is not None
            assert replica is not None
            for core in (committer, replica):
                with pytest.raises(RemoteProtocolError):
                    core.receive(world.now, STRANGER, next(says))
            header = replace(frame(FIRST, 0).header, plan=replica.plan_hash, step=replica.step or 0)
            with suppress(RemoteProtocolError):
                assert replica.receive(world.now, STRANGER, opened(STRANGER, header)) == []
        assert world.outcome == "done"
