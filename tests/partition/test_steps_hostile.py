"""The step machines under messages that no correct peer sends."""

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
from partition.steps.frames import FrameHeader
from partition.steps.messages import (
    Applied,
    Apply,
    Counted,
    Drop,
    Evaluated,
    Failed,
    Reduced,
    StageCommit,
    StepCommit,
    StepMessage,
    Sync,
    Synced,
)
from partition.steps.replica import ApplyReady, ForwardReady, ReduceReady, Replica
from partition.steps.trainer import StepApplied, Trainer
from tests.partition.fake_stage import payload, peer
from tests.partition.small_plan import FIRST, LAST, MIDDLES, PLAN, PLAN_HASH, SENT, TRAINER, frame, synced
from tests.partition.steps_world import World, opened

PEERS = [TRAINER, FIRST, *MIDDLES, LAST, peer("stranger")]
counts = st.one_of(st.integers(0, 5), st.just(2**63 - 1))
hashes = st.sampled_from([PLAN_HASH, PLAN_HASH, PLAN_HASH, bytes(32)])
floats = st.floats()
peers = st.sampled_from(PEERS)
lists_of_peers = st.lists(peers, max_size=4).map(tuple)
norms = st.one_of(st.none(), floats)
numbers = st.lists(floats, max_size=2).map(tuple)
applies = st.builds(
    Apply,
    plan=hashes,
    step=counts,
    attempt=counts,
    samples=st.integers(1, 2**40 - 1),
    squared_norm=norms,
)
commits = st.builds(
    StepCommit,
    plan=hashes,
    step=counts,
    attempt=counts,
    replicas=st.lists(
        st.builds(StageCommit, st.integers(0, 3), peers, st.lists(counts, max_size=3).map(tuple)), max_size=5
    ).map(tuple),
)
frames = st.builds(
    lambda header, author: opened(author, header),
    st.builds(
        FrameHeader,
        hashes,
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
messages = st.one_of(
    applies,
    commits,
    frames,
    st.builds(Sync, plan=hashes, dropped=lists_of_peers),
    st.builds(Drop, plan=hashes, step=counts, dropped=lists_of_peers),
    st.builds(
        Synced,
        plan=hashes,
        step=counts,
        reduced=st.one_of(st.none(), counts),
        applied=st.one_of(st.none(), applies),
    ),
    st.builds(
        Counted,
        plan=hashes,
        step=counts,
        microbatch=counts,
        stage=st.integers(0, 3),
        samples=counts,
        loss=floats,
    ),
    st.builds(Evaluated, plan=hashes, microbatch=counts, samples=counts, loss=floats, metrics=numbers),
    st.builds(Reduced, plan=hashes, step=counts, attempt=counts, digest=hashes, squared_norm=norms),
    st.builds(Applied, plan=hashes, step=counts, digest=hashes),
    st.builds(Failed, plan=hashes, reason=st.text(max_size=20)),
    st.just(payload(b"not a message at all")),
)
arrivals = st.lists(st.tuples(peers, messages), max_size=30)


def perform(replica: Replica) -> None:
    """Do at once what the core asks for."""
    while replica.events:
        match replica.events.pop(0):
            case ForwardReady() as work:
                output, gradient = (None, SENT) if replica.is_last else (SENT, None)
                replica.forwarded(work, output=output, gradient=gradient, samples=1, loss=1.0, metrics=(1.0,))
            case ReduceReady() as work:
                replica.reduced(work, bytes(32))
            case ApplyReady() as work:
                replica.applied(work, bytes(32))


@given(st.sampled_from([FIRST, MIDDLES[0], LAST]), arrivals)
@settings(max_examples=300)
def test_whatever_a_replica_is_sent_ends_in_nothing_worse_than_a_remote_protocol_error(
    me: PeerId, arrivals: list[tuple[PeerId, Any]]
) -> None:
    replica = Replica(me, PLAN)
    for sender, message in [(TRAINER, Sync(plan=PLAN_HASH)), *arrivals]:
        try:
            replica.receive(0.0, sender, message)
        except RemoteProtocolError:
            continue
        perform(replica)
    for name in PEERS:
        replica.reconnected(name)


@given(arrivals, st.booleans(), st.integers(0, 2))
@settings(max_examples=300)
def test_whatever_a_trainer_is_sent_ends_in_nothing_worse_than_a_remote_protocol_error(
    arrivals: list[tuple[PeerId, Any]], is_synced: bool, steps: int
) -> None:
    trainer = Trainer(TRAINER, PLAN, steps=steps, evaluations=3, metrics=1)
    trainer.start(0.0)
    everybody = [(name, synced(0)) for name in (FIRST, *MIDDLES, LAST)] if is_synced else []
    for sender, message in [*everybody, *arrivals]:
        try:
            trainer.receive(0.0, sender, message)
        except RemoteProtocolError:
            continue
    for name in PEERS:
        trainer.reconnected(name)
        trainer.drop(0.0, name)
    assert not any(isinstance(event, StepApplied) and event.samples < 1 for event in trainer.events)


def messages_of(world: World, rng: Random) -> Iterator[StepMessage]:
    """What somebody without a part in the run might say, under the run's own plan hash."""
    name = world.trainer.plan_hash
    while True:
        yield rng.choice(
            [
                Sync(plan=name),
                Drop(plan=name, step=world.trainer.step, dropped=(rng.choice(list(world.nodes)),)),
                Apply(plan=name, step=world.trainer.step, attempt=0, samples=1),
                StepCommit(plan=name, step=world.trainer.step, attempt=0, replicas=()),
                Failed(plan=name, reason="I am not of this run"),
                Applied(plan=name, step=world.trainer.step, digest=bytes(32)),
            ]
        )


def test_a_stranger_changes_nothing() -> None:
    for seed in range(40):
        world = World(Random(seed), [2, 2], microbatches=2, steps=2, evaluations=1)
        rng = Random(seed)
        says = messages_of(world, rng)
        while world.outcome is None:
            action, *arguments = world.rng.choice(world.actions())
            action(*arguments)
            node = rng.choice(list(world.nodes.values()))
            for core in (world.trainer, node.replica):
                with pytest.raises(RemoteProtocolError):
                    core.receive(0.0, peer("stranger"), next(says))
            header = replace(frame(FIRST, 0).header, plan=world.trainer.plan_hash, step=node.replica.step)
            with suppress(RemoteProtocolError):
                assert node.replica.receive(0.0, peer("stranger"), opened(peer("stranger"), header)) == []
        assert world.outcome == "done"
