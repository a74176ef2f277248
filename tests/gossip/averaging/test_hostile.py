"""A member that lies costs at most an attempt, and its messages raise only RemoteProtocolError."""

from contextlib import suppress
from random import Random

import msgspec
import numpy as np
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from gossip.averaging.codecs import view_of
from gossip.averaging.messages import (
    COMMITMENT_PURPOSE,
    MESSAGE_BYTES_MAX,
    Chunk,
    ChunkRequest,
    Commitment,
    CommitmentBody,
    Message,
)
from gossip.averaging.outcome import Averaged
from gossip.averaging.questions import ANSWER_SECONDS_MIN
from gossip.averaging.robust.reduction import Vector
from tests.gossip.averaging.network import Averaging, Rounds, group_of, mean_of, members_of, vectors_of
from tests.gossip.swarm import HashSigner, peer_of

ITEMS = 4 * 4_096


def check(world: Averaging, vectors: dict[int, Vector]) -> None:
    results = [result for number, result in world.successes.items() if number != 0]
    for result in results:
        assert result.vector.tobytes() == results[0].vector.tobytes()
        shares = {world.numbers[peer]: share for peer, share in result.shares.items()}
        assert np.abs(result.vector - mean_of(vectors, shares)).max() < 1e-6


def test_a_sender_that_commits_to_other_values_than_it_sends_is_excluded() -> None:
    vectors = vectors_of(range(4), ITEMS)
    world = Averaging(group_of(members_of(4), ITEMS), vectors)
    lie = view_of(np.full(4_096, 9.0, np.float32))

    def tamper(sender: int, receiver: int, message: Message) -> Message:
        if sender == 0 and isinstance(message, Chunk) and message.phase == "scatter" and receiver == 1:
            return msgspec.structs.replace(message, data=lie, checksum=blake3(lie).digest())
        return message

    world.tamper = tamper
    world.start()
    world.run()
    assert set(world.successes) == {0, 1, 2, 3}
    assert set(world.successes[1].shares) == {peer_of(1), peer_of(2), peer_of(3)}
    assert world.attempts[1].excluded == (peer_of(0),)
    check(world, vectors)


def test_two_commitments_of_one_member_are_kept_as_proof() -> None:
    vectors = vectors_of(range(3), ITEMS)
    world = Averaging(group_of(members_of(3), ITEMS), vectors)

    def tamper(sender: int, receiver: int, message: Message) -> Message:
        if sender == 0 and receiver == 1 and isinstance(message, Commitment):
            body: CommitmentBody = decode(message.fact.body, CommitmentBody, bytes_max=10_000)
            lie = encode(msgspec.structs.replace(body, weight=7.0))
            return Commitment(message.attempt, HashSigner(peer_of(0)).sign(COMMITMENT_PURPOSE, lie))
        return message

    world.tamper = tamper
    world.start()
    world.run()
    # Owner 1 holds the vector under a different weight than the others do, so no mean includes it.
    assert all(peer_of(0) not in result.shares for result in world.successes.values())
    check(world, vectors)
    true = world.attempts[0]._statements.facts[COMMITMENT_PURPOSE, 0]
    victim = Averaging(group_of(members_of(3), ITEMS), vectors)
    victim.start()
    body: CommitmentBody = decode(true.body, CommitmentBody, bytes_max=10_000)
    other = HashSigner(peer_of(0)).sign(COMMITMENT_PURPOSE, encode(msgspec.structs.replace(body, weight=3.0)))
    victim.attempts[1].receive(0.0, peer_of(0), Commitment(victim.attempts[1].id, true))
    victim.attempts[1].receive(0.0, peer_of(0), Commitment(victim.attempts[1].id, other))
    (proof,) = victim.attempts[1].equivocations
    assert (proof.author, proof.first, proof.second) == (peer_of(0), true, other)


def test_answers_and_relayed_chunks_are_bounded() -> None:
    vectors = vectors_of(range(3), ITEMS)
    world = Averaging(group_of(members_of(3), ITEMS), vectors)
    world.start()
    world.run(until=0.5)
    holder = world.attempts[1]
    assert isinstance(holder.result, Averaged)
    facts = chunks = 0
    for number in range(1_000):
        now = 0.5 + number * ANSWER_SECONDS_MIN / 100
        facts += len(holder.receive(now, peer_of(0), ChunkRequest(holder.id, 1, (0,))))
        while peer_of(0) in holder.ready:
            chunks += len(holder.pull(now, peer_of(0)))
    assert facts <= 6 * 12
    assert chunks <= 4 * 3


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9))
def test_mutated_messages_raise_nothing_but_protocol_errors(seed: int) -> None:
    rng = Random(seed)
    vectors = vectors_of(range(4), ITEMS, seed)
    world = Averaging(
        group_of(members_of(4), ITEMS, codec=rng.choice(["float32", "int8"])), vectors, seed=seed
    )

    def tamper(sender: int, _receiver: int, message: Message) -> Message:
        if sender != 0 or rng.random() < 0.5:
            return message
        return mutated(message, rng)

    world.tamper = tamper
    world.start()
    world.run()
    honest = [result for number, result in world.successes.items() if number != 0]
    assert len({result.vector.tobytes() for result in honest}) <= 1
    assert all(result is not None for number, result in world.results.items() if number != 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_a_hostile_peer_cannot_break_a_round(seed: int) -> None:
    rng = Random(seed)
    world = Rounds(vectors_of(range(4), ITEMS, seed), 4, seed=seed)

    def tamper(sender: int, _receiver: int, message: Message) -> Message:
        return mutated(message, rng) if sender == 0 and rng.random() < 0.5 else message

    world.tamper = tamper
    world.start()
    world.run(until=120.0)
    assert all(result is not None for number, result in world.results.items() if number != 0)
    by_attempt: dict[bytes, bytes] = {}
    for number, result in world.successes.items():
        attempt = world.attempts[number].attempt
        if number != 0 and attempt is not None:
            assert by_attempt.setdefault(attempt.id, result.digest) == result.digest


def mutated(message: Message, rng: Random) -> Message:
    """Return another valid message of the same type, with one field of the message or of a nested struct
    changed."""
    data = bytearray(encode(message))
    for _ in range(20):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        with suppress(RemoteProtocolError):
            found: Message = decode(bytes(changed), Message, bytes_max=MESSAGE_BYTES_MAX)
            return found
    return message
