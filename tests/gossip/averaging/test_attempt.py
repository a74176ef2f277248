"""One attempt gives the exact mean without failures. With failures, all members that succeed hold the same
bytes."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.averaging.codecs import CHUNK_ITEMS
from gossip.averaging.group import owners_of
from gossip.averaging.messages import Message
from gossip.averaging.outcome import Averaged, NotAveraged, Patience, Reason
from gossip.averaging.robust.reduction import Vector
from tests.gossip.averaging.network import Averaging, group_of, mean_of, members_of, vectors_of
from tests.gossip.swarm import peer_of


def by_number(world: Averaging, result: Averaged) -> dict[int, float]:
    return {world.numbers[peer]: share for peer, share in result.shares.items()}


def check(world: Averaging, vectors: dict[int, Vector], tolerance: float = 1e-6) -> None:
    """Assert that all members that succeed hold identical bytes, which are the mean of the stated set of
    members."""
    results = list(world.successes.values())
    for result in results:
        assert result.vector.tobytes() == results[0].vector.tobytes()
        assert result.digest == results[0].digest
        assert result.shares == results[0].shares
        assert sum(result.shares.values()) == pytest.approx(1.0)
        assert len(result.shares) >= 2
        expected = mean_of(vectors, by_number(world, result))
        assert np.abs(result.vector - expected).max() <= tolerance


@pytest.mark.parametrize("send_only", [0, 1, 2])
@pytest.mark.parametrize("without_tensors", [0, 1, 2])
def test_four_peers_average_exactly_while_other_groups_average_too(
    send_only: int, without_tensors: int
) -> None:
    members = members_of(4, send_only, without_tensors)
    vectors = vectors_of(range(4 + send_only), 100_003)
    world = Averaging(group_of(members, 100_003), vectors)
    world.start()
    world.run()
    assert len(world.successes) == len(members)
    assert len(world.successes[0].shares) == 4 + send_only
    check(world, vectors)


@pytest.mark.parametrize("mode", ["butterfly", "exchange"])
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_every_codec_gives_identical_bytes_near_the_mean(mode: str, codec: str) -> None:
    items = 2 * CHUNK_ITEMS + 12_345
    vectors = vectors_of(range(3), items)
    world = Averaging(group_of(members_of(3), items, codec=codec, mode=mode), vectors)
    world.start()
    world.run()
    assert len(world.successes) == 3
    tolerance = {"float32": 1e-6, "bfloat16": 0.04, "float16": 0.005, "int8": 0.06, "int4": 1.2}[codec]
    check(world, vectors, tolerance)


def test_weights_and_float64_are_respected() -> None:
    vectors = vectors_of(range(3), 5_000, dtype="float64")
    group = group_of(members_of(3), 5_000, codec="float64", dtype="float64")
    world = Averaging(group, vectors, {0: 1.0, 1: 2.0, 2: 5.0})
    world.start()
    world.run()
    assert by_number(world, world.successes[1]) == {0: 0.125, 1: 0.25, 2: 0.625}
    check(world, vectors, 1e-12)


def test_a_group_of_two_is_pairwise_gossip() -> None:
    vectors = vectors_of(range(2), 10)
    world = Averaging(group_of(members_of(2), 10), vectors)
    world.start()
    world.run()
    assert len(world.successes) == 2
    check(world, vectors, 1e-7)


def before(world: Averaging, number: int) -> bool:
    return True


def sending(world: Averaging, number: int) -> bool:
    return world.attempts[number].sent_bytes > 0


def reducing(world: Averaging, number: int) -> bool:
    return bool(world.attempts[number].excluded) or world.attempts[number]._gather.commit != b""


@pytest.mark.parametrize("moment", [before, sending, reducing])
@pytest.mark.parametrize("way", ["killed", "killed unnoticed", "cancelled", "slow"])
@pytest.mark.parametrize("seed", [1, 2])
def test_two_of_five_fail_and_no_result_is_wrong(
    moment: Callable[[Averaging, int], bool], way: str, seed: int
) -> None:
    items = 3 * CHUNK_ITEMS
    vectors = vectors_of(range(5), items, seed)
    world = Averaging(group_of(members_of(5), items), vectors, seed=seed, rate=20e6)
    failed: list[int] = []

    def fail() -> None:
        for number in (1, 3):
            if number not in failed and moment(world, number):
                failed.append(number)
                if way.startswith("killed"):
                    world.kill(number, noticed_after=None if "unnoticed" in way else 0.1)
                elif way == "cancelled":
                    world.send(number, world.attempts[number].cancel(world.now))
                else:
                    world.rates[number] = 20e3

    world.hooks.append(fail)
    world.start()
    world.run()
    assert sorted(failed) == [1, 3]
    check(world, vectors)
    for number, result in world.results.items():
        if number not in world.gone:
            assert result is not None, f"{number} waits forever"
            if isinstance(result, NotAveraged):
                blamed = {*result.suspects, *result.withdrew}
                assert number in failed or blamed & {peer_of(1), peer_of(3)}


@pytest.mark.parametrize("way", ["killed", "slow"])
def test_a_failed_peer_that_only_sends_does_not_fail_the_attempt(way: str) -> None:
    items = 3 * CHUNK_ITEMS
    vectors = vectors_of(range(5), items)
    world = Averaging(group_of(members_of(3, send_only=2), items), vectors, rate=20e6)

    def fail() -> None:
        for number in (3, 4):
            if world.attempts[number].sent_bytes > 0 and number not in world.gone:
                if way == "killed":
                    world.kill(number, noticed_after=0.1)
                world.rates[number] = 20e3

    world.hooks.append(fail)
    world.start()
    world.run()
    assert {0, 1, 2} <= set(world.successes)
    assert set(by_number(world, world.successes[0])) == {0, 1, 2}
    assert set(world.attempts[0].excluded) == {peer_of(3), peer_of(4)}
    check(world, vectors)


def test_a_member_that_misses_a_part_gets_it_from_any_holder() -> None:
    items = 4 * CHUNK_ITEMS
    vectors = vectors_of(range(4), items)
    world = Averaging(group_of(members_of(4), items), vectors)
    lost: list[int] = []

    def tamper(sender: int, receiver: int, message: Message) -> Message:
        # Owner 2's reduced part never reaches member 3, and owner 2 dies after the others have it.
        if sender == 2 and receiver == 3 and world.attempts[2]._gather.commit:
            return msgspec.structs.replace(message, attempt=bytes(32))
        return message

    def kill() -> None:
        if not lost and all(isinstance(world.attempts[n].result, Averaged) for n in (0, 1)):
            lost.append(2)
            world.kill(2, noticed_after=0.05)

    world.tamper = tamper
    world.hooks.append(kill)
    world.start()
    world.run()
    assert set(world.successes) == {0, 1, 3}
    check(world, vectors)


def test_the_sizes_of_parts_follow_the_members_bandwidth() -> None:
    items = 4_096 * 100
    group = group_of(members_of(3, rates=[1_000_000, 2_000_000, 4_000_000]), items)
    sizes = [owner.end - owner.begin for owner in owners_of(group)]
    assert sum(sizes) == items
    assert sizes == sorted(sizes)


def test_too_few_tensors_are_a_failure_with_a_reason() -> None:
    vectors = vectors_of(range(3), 10)
    world = Averaging(group_of(members_of(1, send_only=2), 10), vectors)
    world.start([0])
    world.run()
    result = world.results[0]
    assert isinstance(result, NotAveraged)
    assert result.reason is Reason.TOO_FEW


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 6), st.integers(0, 2), st.integers(0, 2))
def test_no_sequence_of_losses_delays_and_deaths_gives_two_results(
    seed: int, full: int, send_only: int, without_tensors: int
) -> None:
    members = members_of(full, send_only, without_tensors)
    items = 9_000
    vectors = vectors_of(range(full + send_only), items, seed)
    patience = Patience(2.0, 0.5, 2.0, 0.6, 0.1, 2.0)
    world = Averaging(group_of(members, items), vectors, seed=seed, patience=patience)
    rng = world.rng
    world.loss = rng.choice([0.0, 0.02, 0.1])
    world.latency_seconds = rng.choice([0.001, 0.05, 0.3])
    deaths = {rng.randrange(len(members)): rng.uniform(0, 2) for _ in range(rng.randrange(3))}

    def die() -> None:
        for number, at in deaths.items():
            if world.now >= at and number not in world.gone:
                world.kill(number, noticed_after=rng.choice([None, 0.05, 0.5]))

    world.hooks.append(die)
    starts = list(range(len(members)))
    rng.shuffle(starts)
    world.start(starts)
    world.run()
    check(world, vectors)
    for number, result in world.results.items():
        assert result is not None or number in world.gone
    if world.loss == 0 and not deaths and world.latency_seconds < 0.3:
        assert len(world.successes) == len(members)
