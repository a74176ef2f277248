"""How fast a late peer gets the state of a run, from one peer and from four, over capped uploads."""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import numpy as np
import trio

from crypto.identity import Identity, PeerId
from gossip.claims import LikelySteps
from node.averaging.snapshot import Snapshot, make_snapshot
from node.averaging.transfer import StateServer, fetch_state
from node.errors import Unreachable
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
        StateServer(network, snap, lambda peer, run, digest: snapshot)
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
            rng=Random(1),
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


def test_a_state_of_an_impossible_step_is_refused_and_an_unlikely_one_not_taken() -> None:
    likely, unlikely, impossible = (_snapshot(step) for step in (5, 900, 5_000))

    async def play() -> None:
        assert (await _fetched([likely, unlikely, impossible])) == (5, 1)
        assert (await _fetched([unlikely, impossible])) == (None, 1)

    run_virtually(play)


def test_a_state_of_more_holders_comes_before_a_newer_one_of_a_single_peer() -> None:
    def play(*steps: int, holders_min: int) -> tuple[int | None, int]:
        found: list[tuple[int | None, int]] = []

        async def main() -> None:
            found.append(await _fetched([_snapshot(step) for step in steps], holders_min))

        run_virtually(main)
        return found[0]

    assert play(5, 5, 9, holders_min=1) == (5, 0)
    assert play(5, 5, 9, holders_min=2) == (5, 0)
    assert play(5, 9, holders_min=2) == (None, 0)


def _snapshot(step: int) -> Snapshot:
    return make_snapshot(step, 1, RUN, {"v": ("float32", (4,), np.full(16, step % 256, np.uint8))})


async def _fetched(snapshots: list[Snapshot], holders_min: int = 1) -> tuple[int | None, int]:
    """The step that is chosen of those offered, at most 1,000 and likely not above 10, None where none is;
    how many refused."""
    fabric = SimNetworkFabric(Links(NetworkModel(), 1))
    networks = [
        fabric.attach(Identity(bytes([number + 1]) * 32).peer) for number in range(len(snapshots) + 1)
    ]
    refused: list[PeerId] = []
    for network, snapshot in zip(networks[1:], snapshots, strict=True):

        async def snap(*_: object, snapshot: Snapshot = snapshot) -> Snapshot:
            return snapshot

        StateServer(network, snap, lambda peer, run, digest, snapshot=snapshot: snapshot)  # type: ignore[misc]  # bound now
    async with trio.open_nursery() as nursery:
        for network in networks:
            await nursery.start(network.run)
        for network in networks[1:]:
            networks[0].learn(network.peer, network.addresses)
        step: int | None = None
        with suppress(Unreachable):
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
                likely=LikelySteps(0, 10, holders_min, holders_min),
                rng=Random(1),
            )
            step = found.table.step
        nursery.cancel_scope.cancel()
    return step, len(refused)
