"""A round forms its group without a leader, survives deaths of members, and never falsely reports success."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.identity import PeerId
from gossip.averaging.grid import Grid
from gossip.averaging.group import Terms
from gossip.averaging.outcome import Averaged, NotAveraged, Reason
from tests.gossip.averaging.network import SIGNATURE, PlaySettings, Rounds, mean_of, vectors_of
from tests.gossip.swarm import peer_of

ITEMS = 9_000


def check(world: Rounds) -> None:
    """Assert that within one attempt all members that succeed hold the same bytes, the mean of the stated
    set."""
    by_attempt: dict[bytes, Averaged] = {}
    for number, result in world.successes.items():
        attempt = world.attempts[number].attempt
        assert attempt is not None
        first = by_attempt.setdefault(attempt.id, result)
        assert result.vector.tobytes() == first.vector.tobytes()
        assert result.shares == first.shares
        shares = {world.numbers[peer]: share for peer, share in result.shares.items()}
        assert np.abs(result.vector - mean_of(world.vectors, shares)).max() < 1e-6


def test_peers_that_know_each_other_average_in_the_first_attempt() -> None:
    world = Rounds(vectors_of(range(6), ITEMS), 6)
    world.start()
    world.run()
    assert len(world.successes) == 6
    assert {core.attempt_count for core in world.attempts.values()} == {1}
    assert set(world.successes[0].shares) == {peer_of(number) for number in range(6)}
    check(world)


def test_a_peer_that_expects_nobody_fails_with_the_reason() -> None:
    world = Rounds(vectors_of(range(1), ITEMS), 1)
    world.start()
    world.run()
    assert world.results[0] == NotAveraged(Reason.ALONE)


def test_a_peer_gives_up_in_bounded_time_if_no_partner_appears() -> None:
    world = Rounds(vectors_of(range(2), ITEMS), 2)
    world.kill(1)
    world.start([0])
    world.run(until=3.0)
    assert world.results[0] is None
    assert world.attempts[0].awaited == (peer_of(1),)
    world.run()
    assert world.results[0] == NotAveraged(Reason.ALONE)


def test_peers_with_different_tensors_never_form_a_group() -> None:
    vectors = vectors_of(range(3), ITEMS)
    world = Rounds(vectors, 3)
    world.terms = Terms("butterfly", "float32", b"o" * 32, ITEMS, "float32")
    world.attempts[2] = world.core(2)
    assert world.terms.signature != SIGNATURE
    world.start()
    world.run()
    assert set(world.successes) == {0, 1}
    assert isinstance(world.results[2], NotAveraged)
    check(world)


def test_a_dead_member_fails_only_an_attempt_not_the_round() -> None:
    world = Rounds(vectors_of(range(5), 3 * ITEMS), 5, rate=2e6)

    def die() -> None:
        running = world.attempts[2].attempt
        if running is not None and running.sent_bytes > 0 and 2 not in world.gone:
            world.kill(2, noticed_after=0.05)

    world.hooks.append(die)
    world.start()
    world.run()
    assert set(world.successes) == {0, 1, 3, 4}
    assert {core.attempt_count for n, core in world.attempts.items() if n != 2} == {2}
    check(world)


def test_a_silent_proposer_is_skipped() -> None:
    for dead in range(4):
        world = Rounds(vectors_of(range(4), ITEMS), 4, seed=dead)

        def die(world: Rounds = world, dead: int = dead) -> None:
            # The liar joins, so that all members include it, and then stays silent.
            if world.now > 0.02 and dead not in world.gone:
                world.kill(dead)

        world.hooks.append(die)
        world.latency_seconds = 0.03
        world.start()
        world.run()
        assert len(world.successes) == 3, dead
        check(world)


def test_a_restarted_process_takes_part_in_a_later_attempt() -> None:
    world = Rounds(vectors_of(range(4), 3 * ITEMS), 4, rate=2e6)
    restarted: list[int] = []

    def restart() -> None:
        running = world.attempts[1].attempt
        if not restarted and running is not None and running.sent_bytes > 0:
            restarted.append(1)
            for number, core in world.attempts.items():
                if number != 1:
                    world.send(number, core.lost(world.now, peer_of(1)))
            world.restart(1, world.core(1))

    world.hooks.append(restart)
    world.start()
    world.run()
    assert {0, 2, 3} <= set(world.successes)
    check(world)
    assert all(result is not None for result in world.results.values())


def test_eight_peers_in_groups_of_two_reach_the_mean_by_round_four() -> None:
    vectors = vectors_of(range(8), ITEMS, dtype="float64")
    mean = np.mean(list(vectors.values()), axis=0)
    peers = {peer_of(number): number for number in range(8)}
    grid = Grid(b"run", 0, peers, 2)
    cells = {peer: grid.start(peer) for peer in peers}
    for number in range(4):
        groups: dict[bytes, list[PeerId]] = {}
        for peer in peers:
            groups.setdefault(grid.key(number, cells[peer]), []).append(peer)
        for group in groups.values():
            assert len(group) == 2
            numbers = [peers[peer] for peer in group]
            world = Rounds(vectors, 0, numbers=numbers, dtype="float64")
            world.start()
            world.run()
            vectors |= {each: result.vector for each, result in world.successes.items()}
            assert len(world.successes) == 2
            held = {peer: cells[peer][grid.axis(number)] for peer in group}
            cells.update(grid.moved(number, cells[group[0]], held))
    assert np.std(list(vectors.values()), axis=0).max() < 1e-6
    assert np.abs(np.mean(list(vectors.values()), axis=0) - mean).max() < 1e-12


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 6))
def test_losses_delays_crashes_and_restarts_give_no_false_result(seed: int, count: int) -> None:
    world = Rounds(
        vectors_of(range(count), ITEMS, seed), count, seed=seed, settings=PlaySettings(0.3, 5.0, 4)
    )
    rng = world.rng
    world.loss = rng.choice([0.0, 0.0, 0.02, 0.1])
    world.latency_seconds = rng.choice([0.001, 0.05, 0.2])
    crashes = [(rng.uniform(0, 3), rng.randrange(count), rng.random() < 0.5) for _ in range(rng.randrange(4))]
    kept: list[tuple[bytes, bytes, Any]] = []

    def crash() -> None:
        for each in list(crashes):
            at, number, returns = each
            if world.now < at:
                continue
            crashes.remove(each)
            kept.extend(
                (core.attempt.id, core.result.vector.tobytes(), core.result.shares)
                for core in [world.attempts[number]]
                if core.attempt is not None and isinstance(core.result, Averaged)
            )
            if returns:
                world.restart(number, world.core(number))
            else:
                world.kill(number, noticed_after=rng.choice([None, 0.05, 0.5]))

    world.hooks.append(crash)
    world.start()
    world.run(until=120.0)
    check(world)
    by_id = {
        core.attempt.id: (core.result.vector.tobytes(), core.result.shares)
        for core in world.attempts.values()
        if core.attempt is not None and isinstance(core.result, Averaged)
    }
    for attempt, data, shares in kept:
        assert by_id.setdefault(attempt, (data, shares)) == (data, shares)
    for number, result in world.results.items():
        assert result is not None or number in world.gone, f"{number} waits forever"
