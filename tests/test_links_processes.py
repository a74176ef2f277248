"""Links between real nodes are measured, and `node plan` uses and shows the measurements."""

import os
import time
from pathlib import Path
from threading import Event

import pytest

from node.cli.client import ask
from node.demo.processes import SwarmProcesses
from node.planning.peers import live_peers

NAMES = "abc"
KNOWN_SECONDS = 45.0
"""Seconds allowed from the end of the last calibration, on a busy machine; docs/plan.md says what to
expect."""
CALIBRATED_SECONDS_MAX = 300.0


def known(swarm: SwarmProcesses, folder: Path, what: str, count: int, seconds: float) -> None:
    """Wait until a node knows this many measurements."""
    until, look = time.monotonic() + seconds, Event()
    while len(ask(folder, "measurements")[what]) < count:
        swarm.check()
        assert time.monotonic() < until, f"{what} are not known"
        look.wait(0.5)


@pytest.mark.skipif("PEERLOOM_PROCESSES" not in os.environ, reason="PEERLOOM_PROCESSES=1")
def test_a_plan_over_real_nodes_has_measured_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    swarm = SwarmProcesses(tmp_path, "links", time.sleep)
    try:
        swarm.launch(NAMES)
        first = swarm.start(NAMES[0], None)
        for name in NAMES[1:]:
            swarm.start(name, first.address)
        folder = first.data_dir
        known(swarm, folder, "calibrations", len(NAMES), CALIBRATED_SECONDS_MAX)
        known(swarm, folder, "links", len(NAMES) * (len(NAMES) - 1), KNOWN_SECONDS)
        peers = live_peers(ask(folder, "status"), ask(folder, "peers"), ask(folder, "measurements"))
        assert peers.is_measured
        assert len(peers.links) == len(NAMES) * (len(NAMES) - 1)
        assert all(link.bytes_per_second > 1_000_000 for _, _, link in peers.links)
    finally:
        swarm.close()
