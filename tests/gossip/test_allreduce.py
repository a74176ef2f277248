"""The all-reduce equals the plain sum in member order, bit for bit, in any order of delivery."""

from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from gossip import allreduce
from gossip.allreduce import PART_BYTES_MAX, AllReduce, Part, Vector
from tests.gossip.swarm import peer_of

KEY = b"plan/step 7/attempt 1"


def members_of(count: int) -> tuple[PeerId, ...]:
    return tuple(peer_of(number) for number in range(count))


def vectors_of(count: int, size: int, dtype: Any, seed: int) -> list[Vector]:
    # Magnitudes are far apart, so a different order of addition gives different bits.
    generator = np.random.default_rng(seed)
    exponents = generator.integers(-12, 12, (count, size))
    return list((generator.standard_normal((count, size)) * 10.0**exponents).astype(dtype))


def deliver(machines: dict[PeerId, AllReduce], rng: Random, repeat: float = 0.0) -> None:
    """Start all members, and deliver messages in any order, some of them twice."""
    waiting: list[tuple[PeerId, PeerId, bytes]] = []
    starts = list(machines)
    while waiting or starts:
        if starts and (not waiting or rng.random() < 0.2):
            receiver = starts.pop(rng.randrange(len(starts)))
            sends = machines[receiver].start()
        else:
            place = rng.randrange(len(waiting))
            sender, receiver, data = waiting[place] if rng.random() < repeat else waiting.pop(place)
            part: Part = decode(data, Part, bytes_max=PART_BYTES_MAX)
            sends = machines[receiver].receive(sender, part)
        waiting += [(receiver, peer, encode(part)) for peer, part in sends]


@settings(max_examples=80)
@given(
    count=st.integers(1, 7),
    size=st.integers(0, 200),
    dtype=st.sampled_from([np.float32, np.float64]),
    chunk_bytes=st.sampled_from([8, 64, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_all_get_the_plain_sum_in_member_order_bit_for_bit(
    count: int, size: int, dtype: Any, chunk_bytes: int, seed: int
) -> None:
    members = members_of(count)
    vectors = vectors_of(count, size, dtype, seed)
    expected = vectors[0].copy()
    for vector in vectors[1:]:
        expected += vector
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allreduce, "CHUNK_BYTES", chunk_bytes)
        machines = {
            member: AllReduce(member, members, KEY, vector)
            for member, vector in zip(members, vectors, strict=True)
        }
        deliver(machines, Random(seed), repeat=0.3)
    for machine in machines.values():
        assert machine.done
        assert machine.missing == ()
        assert machine.total.tobytes() == expected.tobytes()
        assert machine.digest == blake3(expected.tobytes()).digest()


def test_a_vector_of_many_megabytes_is_sent_in_chunks_of_one() -> None:
    members = members_of(2)
    vectors = vectors_of(2, 700_001, np.float64, 1)
    machines = {member: AllReduce(member, members, KEY, vectors[n]) for n, member in enumerate(members)}
    sends = machines[members[0]].start()
    assert [len(part.data) for _, part in sends] == [1 << 20, 1 << 20, 350_001 * 8 - (2 << 20)]
    assert all(len(encode(part)) <= PART_BYTES_MAX for _, part in sends)
    for _, part in sends:
        for peer, reply in machines[members[1]].receive(members[0], part):
            machines[peer].receive(members[1], reply)
    for peer, part in machines[members[1]].start():
        for receiver, reply in machines[peer].receive(members[1], part):
            machines[receiver].receive(peer, reply)
    assert machines[members[0]].total.tobytes() == machines[members[1]].total.tobytes()


def test_a_lone_member_finishes_immediately() -> None:
    machine = AllReduce(peer_of(0), members_of(1), KEY, np.arange(5, dtype=np.float32))
    assert machine.done
    assert machine.start() == []
    assert machine.total.tolist() == [0, 1, 2, 3, 4]


def test_the_vector_may_be_changed_after_the_start() -> None:
    members = members_of(2)
    vector = np.ones(6, np.float32)
    machines = {member: AllReduce(member, members, KEY, vector) for member in members}
    sends = [(member, peer, part) for member in members for peer, part in machines[member].start()]
    vector[:] = 99
    for member, peer, part in sends:
        for receiver, reply in machines[peer].receive(member, part):
            machines[receiver].receive(peer, reply)
    assert machines[members[0]].total.tolist() == [2.0] * 6


def test_nan_and_overflow_cause_no_numpy_warning() -> None:
    members = members_of(3)
    big = np.finfo(np.float32).max
    vectors = [np.array(row, np.float32) for row in ([np.nan, np.inf, big], [1, -np.inf, big], [1, 1, 1])]
    machines = {member: AllReduce(member, members, KEY, vectors[n]) for n, member in enumerate(members)}
    deliver(machines, Random(1))
    totals = [machine.total for machine in machines.values()]
    assert [total.tobytes() for total in totals] == [totals[0].tobytes()] * 3
    assert np.isnan(totals[0][:2]).all()
    assert np.isinf(totals[0][2])


def test_missing_lists_the_members_that_are_awaited() -> None:
    members = members_of(3)
    machines = {member: AllReduce(member, members, KEY, np.ones(9, np.float32)) for member in members}
    first = machines[members[0]]
    assert first.missing == members[1:]
    assert first.unsummed == members[1:]
    before = first.left
    for peer, part in machines[members[1]].start():
        machines[peer].receive(members[1], part)
    assert first.missing == members[1:]
    assert first.unsummed == members[2:]
    assert first.left == before - 1
    for peer, part in machines[members[2]].start():
        for receiver, reply in machines[peer].receive(members[2], part):
            machines[receiver].receive(peer, reply)
    assert first.unsummed == ()
    assert first.missing == members[1:]  # the sums of these members still need our summands
    with pytest.raises(LocalProtocolError):
        _ = first.total


WRONG = [
    {"key": b"another"},
    {"index": 1},
    {"index": 2**30},
    {"phase": "gather"},
    {"phase": "neither"},
    {"offset": 4},
    {"offset": 1 << 20},
    {"data": bytes(8)},
    {"data": bytes(16)},
    {"data": b""},
]


@pytest.mark.parametrize("change", WRONG)
def test_a_part_of_the_wrong_member_step_or_size_is_refused(change: dict[str, Any]) -> None:
    members = members_of(3)
    vector = np.ones(9, np.float32)
    machine = AllReduce(members[0], members, KEY, vector)
    fields: dict[str, Any] = {
        "key": KEY,
        "phase": "scatter",
        "index": 0,
        "offset": 0,
        "data": vector[:3].tobytes(),
    }
    with pytest.raises(RemoteProtocolError):
        machine.receive(members[1], Part(**{**fields, **change}))
    for stranger in (members[0], peer_of(9)):
        with pytest.raises(RemoteProtocolError):
            machine.receive(stranger, Part(**fields))
    assert machine.receive(members[1], Part(**fields)) == []
    assert machine.receive(members[1], Part(**{**fields, "data": bytes(12)})) == []
    [*replies] = machine.receive(members[2], Part(**fields))
    assert {peer for peer, _ in replies} == set(members[1:])
    assert np.frombuffer(replies[0][1].data, np.float32).tolist() == [3, 3, 3]


@given(st.binary(max_size=60))
def test_garbage_is_refused_while_decoding(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        decode(data, Part, bytes_max=PART_BYTES_MAX)


def test_wrong_arguments_are_refused() -> None:
    members, vector = members_of(2), np.ones(4, np.float32)
    with pytest.raises(ValueError, match="members"):
        AllReduce(peer_of(5), members, KEY, vector)
    with pytest.raises(ValueError, match="members"):
        AllReduce(members[0], members + members, KEY, vector)
    with pytest.raises(ValueError, match="float"):
        AllReduce(members[0], members, KEY, np.ones(4, np.int64))
    with pytest.raises(ValueError, match="flat"):
        AllReduce(members[0], members, KEY, vector.reshape(2, 2))
    with pytest.raises(ValueError, match="key"):
        AllReduce(members[0], members, bytes(65), vector)
    machine = AllReduce(members[0], members, KEY, vector)
    machine.start()
    with pytest.raises(LocalProtocolError):
        machine.start()
