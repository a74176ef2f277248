"""A member signs two results of one round. Real nodes receive proof of the lie and exclude the member from
the run.
"""

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner, Signer
from crypto.identity import Identity, PeerId
from gossip.averaging import attempt as attempts
from gossip.averaging.attempt import Attempt
from gossip.averaging.codecs import view_of
from gossip.averaging.evidence import PROTOCOL, Evidence, liar_of
from gossip.averaging.group import NONCE_BYTES, GroupMember
from gossip.averaging.messages import SEAL_PURPOSE, Chunk, Holding, Seal, SealBody, root_of
from gossip.averaging.proof_table import ProofTable
from node.averaging_events import LiarProved
from node.errors import Unreachable
from node.protocols.calls import conversation
from node.runtime import Node
from node.seams import Parts
from tests.gossip.averaging.network import group_of
from tests.node.averaging.test_average import average_all, nodes, settings

ITEMS = 4 * 4_096
ROOM = 16


class TwoFaced(Attempt):
    """A member that sends `victim` a reduced part different from the part sent to the others, signed with its
    own seal."""

    victim: Any = None

    def _changed(self, sends: attempts.Sends) -> attempts.Sends:
        return [(peer, self._lie(message) if peer == self.victim else message) for peer, message in sends]

    def _lie(self, message: Any) -> Any:
        lies = view_of(np.full(ITEMS // 4, 9.0, np.float32))
        match message:
            case Chunk(phase="gather"):
                return msgspec.structs.replace(message, data=lies, checksum=blake3(lies).digest())
            case Seal(fact=fact) if fact.author == self._signer.peer:
                body: SealBody = decode(fact.body, SealBody, bytes_max=10_000)
                other = msgspec.structs.replace(body, root=root_of([blake3(lies).digest()]))
                return Seal(message.attempt, self._signer.sign(SEAL_PURPOSE, encode(other)))
            case Holding():
                return Holding(message.attempt, bytes(32))
        return message

    def pull(self, *arguments: Any) -> attempts.Sends:
        return self._changed(super().pull(*arguments))

    def receive(self, *arguments: Any) -> attempts.Sends:
        return self._changed(super().receive(*arguments))

    def wake(self, *arguments: Any) -> attempts.Sends:
        return self._changed(super().wake(*arguments))


@pytest.mark.slow
async def test_a_member_that_sealed_twice_stays_out_after_flood_and_restart(tmp_path: Path) -> None:
    given = [{"w": np.full(ITEMS, float(number), np.float32)} for number in range(4)]
    lies: dict[PeerId, PeerId] = {}

    def make(signer: Signer, *arguments: Any, **options: Any) -> Attempt:
        if signer.peer not in lies:
            return Attempt(signer, *arguments, **options)
        attempt = TwoFaced(signer, *arguments, **options)
        attempt.victim = lies[signer.peer]
        return attempt

    parts: Parts = {ProofTable: partial(ProofTable, kept_max=ROOM), Attempt: make}
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(nodes(tmp_path, 4, parts))
        liar, victim = found[0], found[1]
        lies[liar.peer] = victim.peer
        told = [stack.enter_context(node.watch()) for node in found[1:]]
        results = await average_all(found, given, peers=3)
        honest = results[1:]
        vectors = {each.tensors["w"].tobytes() for each in honest if each.is_averaged}
        assert len(vectors) <= 1, "the honest members hold different bytes"
        with trio.fail_after(20):
            for events in told:
                while not isinstance(event := await events.receive(), LiarProved):
                    pass
                assert (event.peer, event.said) == (liar.peer, SEAL_PURPOSE)
        lies.clear()
        again = await average_all(found[1:], given[1:], peers=2)
        assert [each.error for each in again] == [""] * 3
        assert len(again[0].shares) == 3, "the liar took part in the round"
        key = victim.averaging.runs[0].key
        await flood(found[2], victim, key)
        assert victim.averaging.proofs.is_out(key, liar.peer)
    async with Node(settings(tmp_path, "n1")) as back:
        assert back.peer == victim.peer
        assert back.averaging.proofs.is_out(key, liar.peer)


async def flood(teller: Node, victim: Node, run: bytes) -> None:
    """Send `victim` more proofs than it has room for, each against a fresh key and signed by that key."""
    with victim.watch() as told, trio.fail_after(60):
        for number in range(ROOM + 1):
            signer = IdentitySigner(Identity(bytes([number]) * 32), "averaging")
            await tell(teller, victim.peer, sealed_twice(run, signer))
            while not isinstance(event := await told.receive(), LiarProved):
                pass
            assert event.peer == signer.peer


async def tell(teller: Node, peer: PeerId, evidence: Evidence) -> None:
    """Send a proof to a peer, and try again while earlier streams are still open."""
    while True:
        try:
            async with conversation(teller.network, peer, PROTOCOL, seconds=20.0) as stream:
                await stream.send(encode(evidence))
                return
        except Unreachable:
            await trio.sleep(0.02)


def sealed_twice(run: bytes, liar: Signer) -> Evidence:
    """Return two seals of one invented attempt of the run, both signed by this key. Any peer can produce such
    evidence against itself."""
    members = sorted((liar.peer, PeerId(bytes(32))))
    named = group_of(tuple(GroupMember(peer, bytes(NONCE_BYTES), 1) for peer in members), ITEMS)
    group = msgspec.structs.replace(named, name=run)
    first, second = (encode(SealBody(group.id, bytes(32), bytes([number] * 32))) for number in (1, 2))
    return Evidence(group, "averaging-seal", liar.sign(SEAL_PURPOSE, first), liar.sign(SEAL_PURPOSE, second))


def test_evidence_needs_two_signed_statements_of_one_attempt() -> None:
    from tests.gossip.averaging.network import group_of, members_of
    from tests.gossip.swarm import HashSigner, peer_of

    group = group_of(members_of(3), ITEMS)
    liar = HashSigner(peer_of(0))

    def seal(number: int, attempt: bytes = group.id, signer: HashSigner = liar) -> Fact:
        body = encode(SealBody(attempt, bytes(32), bytes([number] * 32)))
        return signer.sign(SEAL_PURPOSE, body)

    evidence = Evidence(group, "averaging-seal", seal(1), seal(2))
    assert liar_of(evidence, HashSigner(peer_of(2))) == peer_of(0)
    for wrong in (
        replace_second(evidence, seal(1)),
        replace_second(evidence, seal(2, bytes(32))),
        replace_second(evidence, seal(2, signer=HashSigner(peer_of(1)))),
        replace_second(evidence, Fact(peer_of(0), seal(2).body, bytes(64))),
        msgspec.structs.replace(evidence, purpose="averaging-have"),
        Evidence(group, "averaging-seal", *(seal(n, signer=HashSigner(peer_of(9))) for n in (1, 2))),
    ):
        with pytest.raises(RemoteProtocolError):
            liar_of(wrong, HashSigner(peer_of(2)))


def replace_second(evidence: Evidence, second: Fact) -> Evidence:
    return msgspec.structs.replace(evidence, second=second)
