"""Ten peers average repeatedly in virtual time, while one of them dies or returns every half to two seconds.

The test follows the stress test of PCCL (Keiblinger et al. 2025), which fails if no reduction succeeds for a
while. Here the peer that writes the roster is killed too. `PEERLOOM_CHURN_SECONDS` lengthens the test.
"""

import os

import numpy as np

from gossip.averaging.outcome import Averaged
from tests.gossip.averaging.network import Rounds, vectors_of

SECONDS = float(os.environ.get("PEERLOOM_CHURN_SECONDS", "60"))
COUNT, ITEMS, STALL_SECONDS_MAX, LINGER_SECONDS = 10, 9_000, 30.0, 0.2


def test_averaging_continues_while_peers_die_and_return() -> None:
    world = Rounds(vectors_of(range(COUNT), ITEMS), COUNT, rate=5e6, latency_seconds=0.02)
    rng = world.rng
    newest = 7
    kill_at = 1.0
    succeeded_at = dict.fromkeys(range(COUNT), 0.0)
    digests: dict[bytes, bytes] = {}
    successes = kills = 0
    alive = set(range(COUNT))

    def churn() -> None:
        nonlocal newest, kill_at, successes, kills
        for number in sorted(alive):
            core = world.attempts[number]
            if isinstance(core.result, Averaged) and core.attempt is not None and number not in seen:
                seen.add(number)
                assert digests.setdefault(core.attempt.id, core.result.digest) == core.result.digest
                assert np.isfinite(core.result.vector).all()
                succeeded_at[number] = world.now
                successes += 1
            stalls.append(world.now - succeeded_at[number])
            assert stalls[-1] < STALL_SECONDS_MAX
            is_over = core.result is not None and (
                core.is_closed or world.now - ended.setdefault(number, world.now) > LINGER_SECONDS
            )
            # Like a node, the peer starts the next round after a completed one. If it got no group, it joins
            # the newest round that it heard of.
            if is_over:
                newest = max(newest, world.rounds[number] + 1)
            if is_over or (core.result is None and core.attempt is None and world.rounds[number] < newest):
                begin(number)
        if world.now >= kill_at:
            kill_at = world.now + rng.uniform(0.5, 2.0)
            number = rng.randrange(COUNT)
            if number in alive and len(alive) > 3:
                kills += 1
                alive.discard(number)
                world.kill(number, noticed_after=rng.choice([0.05, 0.5, 1.5]))
            elif number not in alive:
                alive.add(number)
                world.gone.pop(number, None)
                succeeded_at[number] = world.now
                begin(number)

    def begin(number: int) -> None:
        ended.pop(number, None)
        seen.discard(number)
        world.rounds[number] = newest
        world.present = sorted(alive)
        world.attempts[number] = world.core(number)
        world.send(number, world.attempts[number].start(world.now))

    stalls: list[float] = []
    seen: set[int] = set()
    ended: dict[int, float] = {}
    world.hooks.append(churn)
    world.start()
    world.run(until=SECONDS)
    assert kills >= SECONDS / 8
    assert successes >= SECONDS
