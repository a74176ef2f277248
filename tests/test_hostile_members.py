"""A member of a run that sends useless payloads, rejects valid ones, or hangs.

Whole nodes in virtual time: only the faulty member is excluded, and the result is exact. Verdicts are in
`tests.partition.test_disputes`, messages of strangers in `tests.test_hostile_frames`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import trio

from crypto.encoding import decode, encode
from crypto.identity import SIGNATURE_BYTES
from gossip.messages import DeadBody, Gossip, SuspectBody, sign_body
from gossip.swim import PROTOCOL
from node.errors import PayloadRefused
from node.events import Event, ReplicaDropped, StepCommitted
from node.runtime import Node
from node.services.metadata import encode_metadata
from partition import stage as api
from partition.steps.frames import HEADER_BYTES_MAX, Frame
from tests.stack import Swarm, assert_equal, manifest, reference, simulate, swarm, train, weights
from tests.test_hostile_frames import in_force, outcome, refusals, the_run


def spoil(node: Node, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Make the next payloads that leave this node mismatch their digests."""
    left = times

    def send(peer: Any, message: bytes, *payload: Any, _send: Any = node.runs.links.send) -> None:
        nonlocal left
        if payload and left:
            left -= 1
            payload = (bytes(len(b"".join(payload))),)
        _send(peer, message, *payload)

    monkeypatch.setattr(node.runs.links, "send", send)


def spoil_unsigned(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next payload that leaves this node mismatch its digest, without a signature."""
    left = 1

    def send(peer: Any, message: bytes, *payload: Any, _send: Any = node.runs.links.send) -> None:
        nonlocal left
        if payload and left and peer != node.peer:
            left -= 1
            frame: Frame = decode(message, Frame, bytes_max=2 * HEADER_BYTES_MAX)
            message = encode(Frame(msgspec.structs.replace(frame.header, signature=bytes(SIGNATURE_BYTES))))
            payload = (bytes(len(b"".join(payload))),)
        _send(peer, message, *payload)

    monkeypatch.setattr(node.runs.links, "send", send)


def accuse(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stage of this node reject everything from now on."""
    (member,) = node.runs.members.values()
    replica = member.hosting.replica
    assert replica is not None
    call = replica._stage.call

    async def lie(request: object) -> object:
        if isinstance(request, api.Forward) and request.sign > 0:
            raise PayloadRefused("I say so", "input")
        return await call(request)

    monkeypatch.setattr(replica._stage, "call", lie)


def holder(group: Swarm, stage: int, replica: int) -> Node:
    plan = in_force(group.nodes["e"], the_run(group.nodes["e"]))
    peer = plan.stages[stage].replicas[replica]
    return next(node for node in group.nodes.values() if node.peer == peer)


def disturbed(
    stage: int,
    replica: int,
    disturb: Callable[[Node], None],
    look: Callable[[Swarm], None] = lambda _: None,
) -> list[str]:
    """Return the members that an exact run of five steps loses when one of them fails after the
    second step.
    """
    lost: list[str] = []

    async def scenario() -> None:
        async with swarm("abcde") as group:
            bad: list[Node] = []

            async def watch(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1:
                    bad.append(holder(group, stage, replica))
                    disturb(bad[0])

            run, events = await train(group, "e", manifest(), watch)
            outcome(events)
            look(group)
            assert [event.step for event in events if isinstance(event, StepCommitted)] == [0, 1, 2, 3, 4]
            assert_equal(weights(group, "e", run), reference(run), "float64")
            for event in events:
                if isinstance(event, ReplicaDropped):
                    lost.append("the bad one" if event.peer == bad[0].peer else group.name_of(event.peer))

    simulate(scenario)
    return lost


@pytest.mark.parametrize("stage", [0, 1])
def test_only_the_sender_of_useless_payloads_is_excluded(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disturbed(stage, 1, lambda node: spoil(node, monkeypatch, 1_000)) == ["the bad one"]


def test_a_member_that_rejects_everything_excludes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert disturbed(1, 0, lambda node: accuse(node, monkeypatch)) == ["the bad one"]


def test_a_useless_unsigned_frame_excludes_no_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    lost = disturbed(
        0,
        1,
        lambda node: spoil_unsigned(node, monkeypatch),
        lambda group: counts.extend(refusals(node) for node in group.nodes.values()),
    )
    assert lost == []
    assert sorted(counts) == [0, 0, 0, 0, 1]


def hang(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stage of this node complete no step from now on."""
    (member,) = node.runs.members.values()
    replica = member.hosting.replica
    assert replica is not None
    call = replica._stage.call

    async def wait(request: object) -> object:
        if isinstance(request, api.Apply):
            await trio.sleep_forever()
        return await call(request)

    monkeypatch.setattr(replica._stage, "call", wait)


def withhold(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this node contribute nothing to any sum from now on."""
    (member,) = node.runs.members.values()
    assert member.hosting.replica is not None
    monkeypatch.setattr(member.hosting.replica._reduction, "_send_parts", lambda sends: None)


@pytest.mark.parametrize("disturb", [hang, withhold])
def test_a_member_that_stalls_a_step_is_excluded(disturb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disturbed(1, 1, lambda node: disturb(node, monkeypatch)) == ["the bad one"]


def test_a_single_bit_error_excludes_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    assert disturbed(0, 0, lambda node: spoil(node, monkeypatch, 1)) == []


def test_a_member_that_calls_the_replicas_of_others_dead_stops_no_run() -> None:
    lost: list[str] = []

    async def scenario() -> None:
        async with swarm("abcdef") as group:
            liar = group.nodes["f"]

            async def lie(events: int) -> None:
                """Report to all that all others are dead, in their present incarnations."""
                for _ in range(events):
                    for member in liar.membership.members:
                        if member.peer == liar.peer:
                            continue
                        facts = tuple(
                            sign_body(liar.signer, kind(member.peer, member.incarnation, 0))
                            for kind in (SuspectBody, DeadBody)
                        )
                        for node in group.nodes.values():
                            if node is not liar:
                                liar.network.send(node.peer, PROTOCOL, encode(Gossip(facts)))
                    await trio.sleep(0.05)

            async def watch(event: Event) -> None:
                if isinstance(event, StepCommitted):
                    await lie(10)
                if isinstance(event, ReplicaDropped):
                    lost.append(group.name_of(event.peer))

            # It would take a stage on request, but there is no request.
            liar.membership.update(
                replace(liar.machine.profile(), metadata=encode_metadata(liar.capacity, accepts_runs=False))
            )
            await trio.sleep(2)
            run, events = await train(group, "e", manifest(), watch)
            outcome(events)
            assert [event.step for event in events if isinstance(event, StepCommitted)] == [0, 1, 2, 3, 4]
            assert_equal(weights(group, "e", run), reference(run), "float64")

    simulate(scenario)
    assert lost == []
