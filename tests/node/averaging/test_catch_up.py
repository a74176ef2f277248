"""How fast a late peer fetches the state of a run over capped uploads, from one peer and from four."""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import numpy as np
import pytest
import trio

from crypto.identity import Identity, PeerId
from gossip.claims import LikelySteps
from node.averaging.snapshot import (
    CHUNK_BYTES,
    ITEM_BYTES,
    Array,
    Kind,
    Snapshot,
    make_snapshot,
    numbers_of,
)
from node.averaging.transfer import StateServer, fetch_state
from node.errors import Unreachable
from sim.executor import SimExecutor
from sim.network.links import SimLinks
from sim.network.model import Access, NetworkModel
from sim.seams import SimNetworkFabric
from sim.worlds.scheduling import run_virtually

PARAMETERS = int(os.environ.get("PEERLOOM_CATCH_UP_PARAMETERS", "4_000_000"))
FULL_PARAMETERS, FULL_MBIT = 50_000_000, 50.0
UPLOAD_MBIT = FULL_MBIT * PARAMETERS / FULL_PARAMETERS
"""Upload rate at which the small state of this test takes as long as a full-size state over 50 Mbit/s."""
RUN, SIGNATURE = bytes(32), bytes([1]) * 32


async def seconds_from(donors: int, snapshot: Snapshot) -> float:
    """Return the virtual seconds until the whole state has arrived."""
    model = NetworkModel(access=(Access(share=1.0, up_mbit_per_second=UPLOAD_MBIT),))
    fabric = SimNetworkFabric(SimLinks(model, 1))
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


def test_four_peers_deliver_a_state_three_times_as_fast_as_one() -> None:
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
    assert megabit / found[1] < 1.05 * UPLOAD_MBIT, "the upload was faster than its cap"
    assert found[1] / found[4] >= 3.0, found


def test_states_of_impossible_or_unlikely_steps_are_rejected() -> None:
    likely, unlikely, impossible = (_snapshot(step) for step in (5, 900, 5_000))

    async def play() -> None:
        assert (await _fetched([likely, unlikely, impossible])) == (5, 1)
        assert (await _fetched([unlikely, impossible])) == (None, 1)

    run_virtually(play)


def test_a_state_of_several_holders_is_preferred_to_a_newer_single_one() -> None:
    def play(*steps: int, holders_min: int) -> tuple[int | None, int]:
        found: list[tuple[int | None, int]] = []

        async def main() -> None:
            found.append(await _fetched([_snapshot(step) for step in steps], holders_min))

        run_virtually(main)
        return found[0]

    assert play(5, 5, 9, holders_min=1) == (5, 0)
    assert play(5, 5, 9, holders_min=2) == (5, 0)
    assert play(5, 9, holders_min=2) == (None, 0)


def test_an_outlier_among_three_states_is_rejected() -> None:
    """Each state is larger than the sample that is compared. The forged state claims the newest step."""
    honest = [_drifted(1), _drifted(2)]
    lie = make_snapshot(10, 1, RUN, {"parameters": _of(np.ones(PARAMETERS, np.float32))})
    likely = LikelySteps(0, 10, is_nearest=True)

    async def play() -> None:
        for seed in range(2):  # the forged state has the newest step, so it comes first in any order
            for order in ([*honest, lie], [lie, *honest]):
                assert await _fetched(order, likely=likely, seed=seed) == (5, 0)
        assert (await _fetched([honest[0], lie], likely=likely))[0] in (5, 10), (
            "two differing states did not leave the choice open"
        )

    run_virtually(play)


def test_a_state_whose_sample_does_not_arrive_is_rejected() -> None:
    likely = LikelySteps(0, 10, is_nearest=True)
    honest = [_drifted(seed) for seed in (1, 2, 3)]

    async def play() -> None:
        silent = make_snapshot(9, 1, RUN, {"parameters": _of(np.ones(PARAMETERS, np.float32))})
        assert await _fetched([silent, *honest], likely=likely, kept=honest) == (5, 0)

    run_virtually(play)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_are_read_from_chunks_whose_edges_cut_values(dtype: Kind) -> None:
    """An odd number of bytes comes first, so that some values of each type cross the edge of a chunk."""
    count = 3 * CHUNK_BYTES // ITEM_BYTES[dtype]
    values = np.random.default_rng(1).integers(-64, 64, count).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    data = (bits if dtype == "bfloat16" else values.astype(dtype)).view(np.uint8)
    flags = ("uint8", (3,), np.ones(3, np.uint8))
    whole = make_snapshot(1, 1, RUN, {"count/f": flags, "tensor/w": (dtype, (count,), data)})
    found = numbers_of(whole.table, {n: np.frombuffer(whole.chunk(n), np.uint8) for n in (0, 2)})
    first = (CHUNK_BYTES - 3) // ITEM_BYTES[dtype]
    third = -(-(2 * CHUNK_BYTES - 3) // ITEM_BYTES[dtype])
    end = (3 * CHUNK_BYTES - 3) // ITEM_BYTES[dtype]
    assert found["count"].tolist() == [1.0] * 3
    assert np.array_equal(found["tensor"], [*values[:first], *values[third:end]])


def _drifted(seed: int) -> Snapshot:
    """Return a state of a member that has trained alone. It differs slightly from the other states and is
    larger than the sample.
    """
    common = np.random.default_rng(0).normal(size=PARAMETERS).astype(np.float32)
    own = np.random.default_rng(seed).normal(size=PARAMETERS).astype(np.float32)
    return make_snapshot(5, 1, RUN, {"parameters": _of(common + 0.1 * own)})


def _of(vector: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> tuple[str, tuple[int, ...], Array]:
    return "float32", (vector.size,), vector.view(np.uint8)


def _snapshot(step: int) -> Snapshot:
    return make_snapshot(step, 1, RUN, {"v": ("float32", (4,), np.full(16, step % 256, np.uint8))})


async def _fetched(
    snapshots: list[Snapshot],
    holders_min: int = 1,
    *,
    likely: LikelySteps | None = None,
    seed: int = 1,
    kept: list[Snapshot] | None = None,
) -> tuple[int | None, int]:
    """Return the step chosen among the offers and the number of refused peers. The step is None if no offer
    is acceptable: a step may be at most 1,000, and up to 10 is plausible. `kept` are the states whose chunks
    can be fetched; None stands for all states.
    """
    fabric = SimNetworkFabric(SimLinks(NetworkModel(), 1))
    networks = [
        fabric.attach(Identity(bytes([number + 1]) * 32).peer) for number in range(len(snapshots) + 1)
    ]
    refused: list[PeerId] = []
    for network, snapshot in zip(networks[1:], snapshots, strict=True):

        async def snap(*_: object, snapshot: Snapshot = snapshot) -> Snapshot:
            return snapshot

        held = snapshot if kept is None or snapshot in kept else None
        StateServer(network, snap, lambda peer, run, digest, held=held: held)  # type: ignore[misc]  # bound now
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
                bytes_max=8 * PARAMETERS,
                refuse=lambda peer, error: refused.append(peer),
                step_max=1_000,
                likely=likely or LikelySteps(0, 10, holders_min, holders_min),
                rng=Random(seed),
            )
            step = found.table.step
        nursery.cancel_scope.cancel()
    return step, len(refused)
