"""A member of a run sends useless payloads, rejects valid ones, or hangs.

Whole nodes in virtual time: only the faulty member is excluded, and the result is exact. Verdicts are in
`tests.partition.test_disputes`, messages of strangers in `tests.test_hostile_frames`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import pytest
import trio

from crypto.encoding import decode, encode
from crypto.identity import SIGNATURE_BYTES, PeerId
from crypto.noise import Data
from gossip.allreduce import Part
from gossip.messages import DeadBody, Gossip, SuspectBody, sign_body
from gossip.swim import PROTOCOL
from node.errors import PayloadRefused
from node.events import Event, ReplicaDropped, StepCommitted
from node.pipeline.links import Links
from node.pipeline.replica import ReplicaShell
from node.pipeline.stage_reduction import StageReduction
from node.runtime import Node
from node.seams import Parts
from node.services.metadata import encode_metadata
from partition import stage as api
from partition.steps.frames import HEADER_BYTES_MAX, Frame
from tests.stack import Swarm, assert_equal, manifest, reference, simulate, swarm, train, weights
from tests.test_hostile_frames import in_force, outcome, refusals, the_run

Adversary = Callable[[set[PeerId]], Parts]
"""Return replacement classes for nodes, by which a node misbehaves from the time when it is added to the
set."""


def spoil(chosen: set[PeerId], times: int = 1_000) -> Parts:
    """Make this many payloads that leave a chosen node mismatch their digests."""
    left = times

    class SpoilingLinks(Links):
        def send(self, peer: PeerId, message: bytes, *payload: Data) -> None:
            nonlocal left
            if payload and left and self._network.peer in chosen:
                left -= 1
                payload = (bytes(len(b"".join(payload))),)
            super().send(peer, message, *payload)

    return {Links: SpoilingLinks}


def spoil_unsigned(chosen: set[PeerId]) -> Parts:
    """Make one payload that leaves a chosen node mismatch its digest, without a signature."""
    left = 1

    class SpoilingLinks(Links):
        def send(self, peer: PeerId, message: bytes, *payload: Data) -> None:
            nonlocal left
            if payload and left and self._network.peer in chosen and peer != self._network.peer:
                left -= 1
                frame: Frame = decode(message, Frame, bytes_max=2 * HEADER_BYTES_MAX)
                unsigned = msgspec.structs.replace(frame.header, signature=bytes(SIGNATURE_BYTES))
                message, payload = encode(Frame(unsigned)), (bytes(len(b"".join(payload))),)
            super().send(peer, message, *payload)

    return {Links: SpoilingLinks}


def accuse(chosen: set[PeerId]) -> Parts:
    """Make the stage of a chosen node reject everything."""

    class AccusingReplica(ReplicaShell):
        async def _call(self, request: api.Request) -> object:
            if self.core.me in chosen and isinstance(request, api.Forward) and request.sign > 0:
                raise PayloadRefused("I say so", "input")
            return await super()._call(request)

    return {ReplicaShell: AccusingReplica}


def holder(group: Swarm, stage: int, replica: int) -> Node:
    plan = in_force(group.nodes["e"], the_run(group.nodes["e"]))
    peer = plan.stages[stage].replicas[replica]
    return next(node for node in group.nodes.values() if node.peer == peer)


def disturbed(
    stage: int,
    replica: int,
    adversary: Adversary,
    look: Callable[[Swarm], None] = lambda _: None,
) -> list[str]:
    """Return the members that an exact run of five steps loses when one of them misbehaves after the second
    step.
    """
    lost: list[str] = []

    async def scenario() -> None:
        chosen: set[PeerId] = set()
        async with swarm("abcde", parts=adversary(chosen)) as group:
            bad: list[Node] = []

            async def watch(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1:
                    bad.append(holder(group, stage, replica))
                    chosen.add(bad[0].peer)

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
def test_only_the_sender_of_useless_payloads_is_excluded(stage: int) -> None:
    assert disturbed(stage, 1, spoil) == ["the bad one"]


def test_a_member_that_rejects_everything_excludes_no_other() -> None:
    assert disturbed(1, 0, accuse) == ["the bad one"]


def test_a_useless_unsigned_frame_excludes_no_member() -> None:
    counts: list[int] = []
    lost = disturbed(
        0,
        1,
        spoil_unsigned,
        lambda group: counts.extend(refusals(node) for node in group.nodes.values()),
    )
    assert lost == []
    assert sorted(counts) == [0, 0, 0, 0, 1]


def hang(chosen: set[PeerId]) -> Parts:
    """Let the stage of a chosen node complete no step."""

    class HangingReplica(ReplicaShell):
        async def _call(self, request: api.Request) -> object:
            if self.core.me in chosen and isinstance(request, api.Apply):
                await trio.sleep_forever()
            return await super()._call(request)

    return {ReplicaShell: HangingReplica}


def withhold(chosen: set[PeerId]) -> Parts:
    """Make a chosen node contribute nothing to any sum."""

    class WithholdingReduction(StageReduction):
        def _send_parts(self, sends: list[tuple[PeerId, Part]]) -> None:
            if self._me not in chosen:
                super()._send_parts(sends)

    return {StageReduction: WithholdingReduction}


@pytest.mark.parametrize("adversary", [hang, withhold])
def test_a_member_that_stalls_a_step_is_excluded(adversary: Adversary) -> None:
    assert disturbed(1, 1, adversary) == ["the bad one"]


def test_a_single_bit_error_excludes_no_member() -> None:
    assert disturbed(0, 0, partial(spoil, times=1)) == []


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

            # The node would take a stage on request, but there is no request.
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
