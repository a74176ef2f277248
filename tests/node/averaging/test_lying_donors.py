"""A late peer quickly fetches the state that honest members hold, although two of five donors lie.

PEERLOOM_MEMBER_SEEDS multiplies the number of seeds.
"""

import os
from random import Random

import numpy as np
import trio

from crypto.identity import Identity, PeerId
from gossip.claims import SLACK_STEPS, ClaimedCount, newcomer_steps
from node.averaging.snapshot import CHUNK_BYTES, Snapshot, check_finite, make_snapshot
from node.averaging.transfer import PROTOCOL, STREAMS, StateServer, fetch_state
from sim.executor import SimExecutor
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimNetworkFabric
from sim.worlds.scheduling import run_virtually
from tests.hostile.donor import LyingDonor

SEEDS = range(80 * int(os.environ.get("PEERLOOM_MEMBER_SEEDS", "1")))
RUN, SIGNATURE = bytes(32), bytes([1]) * 32
HONEST, LIARS = 3, 2
SECONDS_MAX = 120.0
"""Most seconds until the state is accepted. A silent holder costs eight seconds per chunk, and a holder that
offers nothing costs ten."""


def honest_state() -> Snapshot:
    """Return a state of several chunks, after five steps."""
    vector = np.random.default_rng(1).normal(size=2 * CHUNK_BYTES // 4 + 100).astype(np.float32)
    return make_snapshot(5, 1, RUN, {"parameters": ("float32", vector.shape, vector.view(np.uint8))})


async def fetched(seed: int, honest: Snapshot, said: set[str]) -> tuple[Snapshot, float]:
    """Return the state that the newcomer accepts, and the number of seconds until then."""
    rng = Random(seed)
    fabric = SimNetworkFabric(SimLinks(NetworkModel(), seed))
    me, *others = (
        fabric.attach(Identity(bytes([number + 1]) * 32).peer) for number in range(1 + HONEST + LIARS)
    )
    liars = [LyingDonor(rng, honest) for _ in range(LIARS)]
    rng.shuffle(others)

    async def snap(peer: PeerId, run: bytes, signature: bytes, step: int) -> Snapshot | str:
        return honest if honest.table.step >= step else "this peer is not so far"

    for network in others[:HONEST]:
        StateServer(network, snap, lambda peer, run, digest: honest)
    for network, liar in zip(others[HONEST:], liars, strict=True):
        network.handle(PROTOCOL, liar.serve, STREAMS)
    claims = [honest.table.step] * HONEST + [min(liar.claimed_step, 2**52) for liar in liars]
    likely = newcomer_steps([ClaimedCount(each) for each in claims], SLACK_STEPS, are_equal=True)
    async with trio.open_nursery() as nursery:
        for network in (me, *others):
            await nursery.start(network.run)
            me.learn(network.peer, network.addresses)
        with trio.fail_after(SECONDS_MAX):
            found = await fetch_state(
                me,
                SimExecutor(lambda request: 0.0),
                sorted(network.peer for network in others),
                RUN,
                SIGNATURE,
                0,
                bytes_max=1 << 24,
                refuse=lambda peer, error: None,
                likely=likely,
                rng=rng,
            )
        took = trio.current_time()
        nursery.cancel_scope.cancel()
    said.update(*(liar.said for liar in liars))
    return found, took


def test_a_newcomer_takes_the_honest_state_despite_two_liars_of_five() -> None:
    honest, said = honest_state(), set[str]()

    async def play() -> None:
        for seed in SEEDS:
            found, _ = await fetched(seed, honest, said)
            assert found.table.digest == honest.table.digest, f"seed {seed}"
            assert not check_finite(found)

    run_virtually(play)
    assert {"state", "digest", "step", "size", "silence", "end", "nonsense", "number", "cut", "long"} <= said
