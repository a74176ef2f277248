"""Peers that want to join an averaging group before they know each other. Virtual time."""

import numpy as np
import trio

from node.averaging.expectations import JOINING_SECONDS
from node.averaging.participation import Participation
from node.averaging.rounds import Round, RoundWish
from sim.worlds.scheduling import run_virtually
from tests.stack import swarm

SIGNATURE = bytes([7]) * 32
WANTED = RoundWish(window_seconds=4.0, patience_seconds=60.0)


def tell_state(run: Participation) -> None:
    run.tell(step=0, samples=0, rounds=0, lineage=bytes(32), has_state=True)


async def hold(
    run: Participation, value: float, wanted: RoundWish, found: dict[str, Round], name: str
) -> None:
    found[name] = await run.average(np.full(8, value), 1.0, wanted)


def test_a_wish_for_a_group_reaches_peers_discovered_later() -> None:
    """All peers start at the same time, so at first no wish has a recipient."""
    found: dict[str, Round] = {}

    async def play() -> None:
        async with swarm("abcd", preset="lan") as group:
            runs = {name: node.averaging.open("early", SIGNATURE) for name, node in group.nodes.items()}
            assert not any(run.roster.reports for run in runs.values())
            begun = trio.current_time()
            async with trio.open_nursery() as nursery:
                for value, (name, run) in enumerate(runs.items()):
                    nursery.start_soon(hold, run, float(value), WANTED, found, name)
            assert trio.current_time() - begun < WANTED.window_seconds + 5.0

    run_virtually(play)
    assert {name: made.error for name, made in found.items()} == dict.fromkeys("abcd", "")
    assert {len(made.shares) for made in found.values()} == {4}, "a group formed before all peers had met"
    assert all(made.vector is not None and np.allclose(made.vector, 1.5) for made in found.values())


def test_a_wish_with_a_round_number_reaches_a_peer_that_joins_later() -> None:
    found: dict[str, Round] = {}
    wanted = RoundWish(round=1, window_seconds=2.0, patience_seconds=60.0)

    async def play() -> None:
        async with swarm("ab", preset="lan") as group:
            first = group.nodes["a"].averaging.open("early", SIGNATURE)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hold, first, 1.0, wanted, found, "a")
                await trio.sleep(10.0)
                second = group.nodes["b"].averaging.open("early", SIGNATURE)
                begun = trio.current_time()
                nursery.start_soon(hold, second, 3.0, wanted, found, "b")
            assert trio.current_time() - begun < 10.0

    run_virtually(play)
    assert {name: made.error for name, made in found.items()} == {"a": "", "b": ""}
    assert all(made.vector is not None and np.allclose(made.vector, 2.0) for made in found.values())


def test_a_first_group_waits_for_a_listed_peer_that_is_joining() -> None:
    """The joining peer first reports that it has no state yet. A moment later it has a state and is ready."""
    found: dict[str, Round] = {}

    async def play() -> None:
        async with swarm("abc", preset="lan") as group:
            runs = {name: node.averaging.open("early", SIGNATURE) for name, node in group.nodes.items()}
            with trio.fail_after(60):
                for run in runs.values():
                    await run.wait_for_peers(2)
            tell_state(runs["a"])
            tell_state(runs["b"])
            await trio.sleep(1.0)
            async with trio.open_nursery() as nursery:
                for name in "ab":
                    nursery.start_soon(hold, runs[name], 1.0, WANTED, found, name)
                await trio.sleep(0.5)
                tell_state(runs["c"])
                nursery.start_soon(hold, runs["c"], 4.0, WANTED, found, "c")

    run_virtually(play)
    assert {name: made.error for name, made in found.items()} == dict.fromkeys("abc", "")
    assert {len(made.shares) for made in found.values()} == {3}


def test_a_slowly_joining_peer_delays_one_round_briefly() -> None:
    found: dict[str, Round] = {}
    seconds: list[float] = []

    async def play() -> None:
        async with swarm("abc", preset="lan") as group:
            runs = {name: node.averaging.open("early", SIGNATURE) for name, node in group.nodes.items()}
            with trio.fail_after(60):
                for run in runs.values():
                    await run.wait_for_peers(2)
            for name in "ab":
                tell_state(runs[name])
            await trio.sleep(1.0)
            for _ in range(3):
                begun = trio.current_time()
                async with trio.open_nursery() as nursery:
                    for name in "ab":
                        nursery.start_soon(hold, runs[name], 1.0, WANTED, found, name)
                seconds.append(trio.current_time() - begun)

    run_virtually(play)
    assert {len(made.shares) for made in found.values()} == {2}
    assert JOINING_SECONDS <= seconds[0] < JOINING_SECONDS + 0.5, seconds
    assert max(seconds[1:]) < 0.5, seconds
