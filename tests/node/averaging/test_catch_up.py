"""How fast a late peer gets the state of a run, from one peer and from four, over capped uploads."""

import os
from collections.abc import Awaitable, Callable
from random import Random

import numpy as np
import trio

from crypto.identity import Identity, PeerId
from node.averaging.snapshot import Snapshot, make_snapshot
from node.averaging.transfer import StateServer, fetch_state
from sim.executor import SimExecutor
from sim.network.links import Links
from sim.network.model import Access, NetworkModel
from sim.seams import SimNetworkFabric
from sim.worlds.scheduling import run_virtually

PARAMETERS = int(os.environ.get("PEERLOOM_CATCH_UP_PARAMETERS", "4_000_000"))
FULL_PARAMETERS, FULL_MBIT = 50_000_000, 50.0
UPLOAD_MBIT = FULL_MBIT * PARAMETERS / FULL_PARAMETERS
"""So a smaller state takes as long as the full one does over 50 Mbit/s."""
RUN, SIGNATURE = bytes(32), bytes([1]) * 32


async def seconds_from(donors: int, snapshot: Snapshot) -> float:
    """Virtual seconds until the state is here."""
    model = NetworkModel(access=(Access(share=1.0, up_mbit_per_second=UPLOAD_MBIT),))
    fabric = SimNetworkFabric(Links(model, 1))
    networks = [fabric.attach(Identity(bytes([number + 1]) * 32).peer) for number in range(donors + 1)]

    async def snap(peer: PeerId, run: bytes, signature: bytes, step: int) -> Snapshot:
        assert peer == networks[0].peer
        assert (run, signature, step) == (RUN, SIGNATURE, 0)
        return snapshot

    for network in networks[1:]:
        StateServer(network, snap, lambda run, digest: snapshot)
    async with trio.open_nursery() as nursery:
        for network in networks:
            await nursery.start(network.run)
        for network in networks[1:]:
            networks[0].learn(network.peer, network.addresses)
        begun = trio.current_time()
        found = await fetch_state(
            networks[0],
            SimExecutor(lambda request: 0.0),
            [network.peer for network in networks[1:]],
            RUN,
            SIGNATURE,
            0,
            bytes_max=8 * PARAMETERS,
            refuse=lambda peer, error: None,
        )
        seconds = trio.current_time() - begun
        nursery.cancel_scope.cancel()
    assert np.array_equal(found.data, snapshot.data)
    return seconds


def test_four_peers_hand_a_state_over_three_times_as_fast_as_one() -> None:
    vector = np.frombuffer(Random(1).randbytes(4 * PARAMETERS), np.uint8)
    snapshot = make_snapshot(1, 1, bytes(32), {"parameters": ("float32", (PARAMETERS,), vector)})
    found: dict[int, float] = {}

    def play(donors: int) -> Callable[[], Awaitable[None]]:
        async def main() -> None:
            found[donors] = await seconds_from(donors, snapshot)

        return main

    for donors in (1, 4):
        run_virtually(play(donors))
    megabit = 32 * PARAMETERS / 1e6
    assert megabit / found[1] < 1.05 * UPLOAD_MBIT, "the cap holds"
    assert found[1] / found[4] >= 3.0, found


def test_a_state_of_a_step_that_cannot_be_is_refused_and_an_unlikely_one_comes_last() -> None:
    likely, unlikely, impossible = (_snapshot(step) for step in (5, 900, 5_000))

    async def play() -> None:
        assert (await _fetched([likely, unlikely, impossible])) == (5, 1)
        assert (await _fetched([unlikely, impossible])) == (900, 1)

    run_virtually(play)


def _snapshot(step: int) -> Snapshot:
    return make_snapshot(step, 1, RUN, {"v": ("float32", (4,), np.zeros(16, np.uint8))})


async def _fetched(snapshots: list[Snapshot]) -> tuple[int, int]:
    """The step that is chosen of those offered, at most 1,000 and likely not above 10; how many refused."""
    fabric = SimNetworkFabric(Links(NetworkModel(), 1))
    networks = [
        fabric.attach(Identity(bytes([number + 1]) * 32).peer) for number in range(len(snapshots) + 1)
    ]
    refused: list[PeerId] = []
    for network, snapshot in zip(networks[1:], snapshots, strict=True):

        async def snap(*_: object, snapshot: Snapshot = snapshot) -> Snapshot:
            return snapshot

        StateServer(network, snap, lambda run, digest, snapshot=snapshot: snapshot)  # type: ignore[misc]  # bound now
    async with trio.open_nursery() as nursery:
        for network in networks:
            await nursery.start(network.run)
        for network in networks[1:]:
            networks[0].learn(network.peer, network.addresses)
        found = await fetch_state(
            networks[0],
            SimExecutor(lambda request: 0.0),
            [network.peer for network in networks[1:]],
            RUN,
            SIGNATURE,
            0,
            bytes_max=1 << 20,
            refuse=lambda peer, error: refused.append(peer),
            step_max=1_000,
            step_likely=10,
        )
        nursery.cancel_scope.cancel()
    return found.table.step, len(refused)
