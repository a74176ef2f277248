"""Local mode in real processes: one is killed, one joins late, and the run converges; the same with two
columns of two stages.

The small form of `benchmarks/gossip_digits.py`, which has eight processes. It runs in `make soak`, because on
a busy machine the run may converge before the late process has made a step. `tests.node.local` plays the same
in virtual time.
"""

import os
import time
from pathlib import Path

import pytest
import trio

from crypto.identity import parse_peer
from node import config
from node.demo.processes import SwarmProcesses
from node.runtime import Node
from partition.run.local_settings import LocalSettings
from tests.local_runs import local_runs
from tests.source import ROOT
from tests.stack import manifest, prepare
from tests.test_recut import deep_model

pytest.importorskip("sklearn")

GOES_ON_SECONDS = 10.0
"""Seconds from the death of a machine until the column makes steps without it."""
WIDTH = 256
"""The width of layers whose computation takes longer than the other costs of a micro-batch."""
JOINS_SECONDS_MAX = 120.0
"""Seconds until a joining machine, which must load torch, has a stage; on a busy machine."""


@pytest.mark.skipif("PEERLOOM_PROCESSES" not in os.environ, reason="PEERLOOM_PROCESSES=1")
def test_processes_converge_by_gossip_and_a_late_joiner_contributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gossip_digits

    row = gossip_digits.play(peers=3, killed=1, patience=6)
    assert (row["outcomes"], row["reason"]) == (["done"], [gossip_digits.CONVERGED])
    assert row["late_steps"] > 0
    assert row["accuracy"] > 0.93


@pytest.mark.skipif("PEERLOOM_PROCESSES" not in os.environ, reason="PEERLOOM_PROCESSES=1")
def test_two_columns_of_processes_continue_after_one_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gossip_digits

    row = gossip_digits.play(peers=4, killed=1, patience=gossip_digits.PATIENCE_COLUMNS, stages=2)
    assert (row["outcomes"], row["reason"]) == (["done"], [gossip_digits.CONVERGED])
    assert row["accuracy"] > 0.93


@pytest.mark.skipif("PEERLOOM_PROCESSES" not in os.environ, reason="PEERLOOM_PROCESSES=1")
def test_a_column_of_processes_survives_a_loss_and_uses_newcomers(tmp_path: Path) -> None:
    """Three equal nodes hold a stage each and none is idle, so after a loss the remaining two hold all three
    stages."""
    model = deep_model("float32", WIDTH)
    swarm = SwarmProcesses(tmp_path, "columns", time.sleep, calibrate=False, preset="lan")
    settings = config.Config(
        name="e",
        data_dir=tmp_path / "e",
        swarm=config.SwarmSettings(name="columns", preset="lan"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False),
        resources=config.Resources(calibrate=False, cores=1),
    )
    wanted = manifest(
        model,
        stages=3,
        replicas=1,
        microbatch=16,
        dtype="float32",
        local=LocalSettings(local_steps=5),
        steps=100_000,
        save_every=5,
        test_samples=60,
    )

    async def play() -> None:
        swarm.launch("ab")
        first = await trio.to_thread.run_sync(swarm.start, "a", None)
        await trio.to_thread.run_sync(swarm.start, "b", first.address)
        async with Node(settings, join=[first.address]) as node:
            with trio.fail_after(60):
                while len(node.membership.live) < 3:  # noqa: ASYNC110 - real processes
                    await trio.sleep(0.1)
            await node.runs.submit(prepare(node, wanted), wait_seconds=60.0)
            (member,) = local_runs(node).members.values()

            async def reached(step: int) -> None:
                with trio.fail_after(120):
                    while member.step < step:  # noqa: ASYNC110
                        await trio.sleep(0.05)

            await reached(30)
            column = member.crew.column
            assert column is not None
            killed = column.holder(1)
            swarm.kill(next(name for name, each in swarm.nodes.items() if parse_peer(each.peer) == killed))
            began, before = time.monotonic(), member.step
            await reached(before + 3)
            assert time.monotonic() - began <= GOES_ON_SECONDS
            assert len({node.peer, *column.peers}) == 2
            swarm.launch("c")
            left = next(each for each in swarm.nodes.values() if parse_peer(each.peer) != killed)
            joiner = await trio.to_thread.run_sync(swarm.start, "c", left.address)
            with trio.fail_after(JOINS_SECONDS_MAX):
                while parse_peer(joiner.peer) not in column.peers:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            assert len({node.peer, *column.peers}) == 3
            await reached(member.step + 10)

    try:
        trio.run(play)
    finally:
        swarm.close()
