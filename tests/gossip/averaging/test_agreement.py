"""Success means that all members hold the same bytes. An owner that signs two different results is proved to
lie."""

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.identity import PeerId
from gossip.averaging.attempt import Attempt
from gossip.averaging.codecs import view_of
from gossip.averaging.messages import (
    HAVE_PURPOSE,
    SEAL_PURPOSE,
    Chunk,
    Have,
    HaveBody,
    Holding,
    Message,
    Seal,
    SealBody,
    root_of,
)
from gossip.averaging.outcome import Averaged, NotAveraged, Reason
from tests.gossip.averaging.network import PATIENCE, Averaging, group_of, members_of, vectors_of
from tests.gossip.swarm import HashSigner, peer_of

ITEMS = 4 * 4_096
LIAR = 0
LIE = view_of(np.full(ITEMS // 4, 9.0, np.float32))


def world_of(count: int = 4, **network: object) -> Averaging:
    return Averaging(group_of(members_of(count), ITEMS), vectors_of(range(count), ITEMS), **network)  # type: ignore[arg-type]  # its options


def seals_twice(sender: int, receiver: int, message: Message) -> Message:
    """Send member 1 a reduced part that differs from the others', under a separate seal."""
    if sender != LIAR or receiver != 1:
        return message
    match message:
        case Chunk(phase="gather"):
            return msgspec.structs.replace(message, data=LIE, checksum=blake3(LIE).digest())
        case Seal(fact=fact) if fact.author == peer_of(LIAR):
            body: SealBody = decode(fact.body, SealBody, bytes_max=10_000)
            lie = msgspec.structs.replace(body, root=root_of([blake3(LIE).digest()]))
            return Seal(message.attempt, HashSigner(peer_of(LIAR)).sign(SEAL_PURPOSE, encode(lie)))
        case Holding():
            return Holding(message.attempt, bytes(32))
    return message


def claims_two_sets(sender: int, receiver: int, message: Message) -> Message:
    """Tell member 1 that the liar did not get member 3's part."""
    if (
        sender == LIAR
        and receiver == 1
        and isinstance(message, Have)
        and message.fact.author == peer_of(LIAR)
    ):
        body: HaveBody = decode(message.fact.body, HaveBody, bytes_max=10_000)
        lie = HaveBody(body.attempt, tuple(held for held in body.held if held.place != 3))
        return Have(message.attempt, HashSigner(peer_of(LIAR)).sign(HAVE_PURPOSE, encode(lie)))
    return message


@pytest.mark.parametrize("seed", range(8))
def test_if_an_owner_seals_two_results_nobody_succeeds_with_different_bytes(seed: int) -> None:
    world = world_of(seed=seed)
    world.tamper = seals_twice
    world.start()
    world.run()
    honest = [world.results[number] for number in range(1, 4)]
    assert len({each.vector.tobytes() for each in honest if isinstance(each, Averaged)}) <= 1
    assert honest[0] == NotAveraged(Reason.CONTRADICTED, (peer_of(LIAR),))
    for number in range(1, 4):
        (proof,) = world.attempts[number].equivocations
        assert (proof.author, proof.purpose) == (peer_of(LIAR), SEAL_PURPOSE)
        assert proof.first.body != proof.second.body
    assert not any("differ" in reason for _, reason in world.refusals), (
        "a member that forwards a proof was blamed"
    )


def test_two_different_have_messages_of_an_owner_prove_its_lie() -> None:
    world = world_of()
    world.tamper = claims_two_sets
    world.start()
    world.run()
    honest = [world.results[number] for number in range(1, 4)]
    assert len({each.vector.tobytes() for each in honest if isinstance(each, Averaged)}) <= 1
    assert honest[0] == NotAveraged(Reason.CONTRADICTED, (peer_of(LIAR),))
    assert [(each.purpose, each.author) for each in world.attempts[1].equivocations] == [
        (HAVE_PURPOSE, peer_of(LIAR))
    ]


@pytest.mark.parametrize("says", ["nothing", "something else"])
def test_a_claim_without_proof_delays_others_and_changes_no_result(says: str) -> None:
    world = world_of()

    def tamper(sender: int, _receiver: int, message: Message) -> Message:
        if sender == LIAR and isinstance(message, Holding):
            return Holding(bytes(32) if says == "nothing" else message.attempt, bytes(32))
        return message

    world.tamper = tamper
    world.start()
    over: dict[int, float] = {}
    world.hooks.append(lambda: over.update({n: over.get(n, world.now) for n in world.successes}))
    world.run()
    assert set(world.successes) == {0, 1, 2, 3}
    assert len({each.digest for each in world.successes.values()}) == 1
    assert max(over.values()) < 0.5 + PATIENCE.agree_seconds
    assert all(world.attempts[number].undeclared == (peer_of(LIAR),) for number in range(1, 4))


def test_members_that_were_silent_in_the_previous_attempt_are_not_awaited() -> None:
    def seconds(*silent: int) -> float:
        world = world_of()
        for number, member in enumerate(world.group.members):
            signer = HashSigner(PeerId(member.peer))
            vector = vectors_of(range(4), ITEMS)[number]
            others = [peer_of(other) for other in silent]
            made = Attempt(signer, world.group, vector, 1.0, 0.0, PATIENCE, silent=others)
            world.attempts[number] = made
        world.tamper = lambda sender, _, message: (
            Holding(bytes(32), bytes(32)) if sender == LIAR and isinstance(message, Holding) else message
        )
        world.start()
        over: dict[int, float] = {}
        world.hooks.append(lambda: over.update({n: over.get(n, world.now) for n in world.successes}))
        world.run()
        return max(over[number] for number in range(1, 4))

    assert seconds(LIAR) < seconds() - 0.5 * PATIENCE.agree_seconds
