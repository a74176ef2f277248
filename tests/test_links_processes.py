"""Links are measured between real nodes, and `node plan` over them shows what was measured."""

import os
import time
from pathlib import Path

import pytest

from node.cli.client import ask
from node.cli.demo.processes import SwarmProcesses
from node.planning.peers import live_peers

NAMES = "abc"
KNOWN_SECONDS = 45.0
"""From the end of the last calibration, on a machine that may be busy; docs/plan.md says what to expect."""
CALIBRATED_SECONDS_MAX = 300.0


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
        until = time.monotonic() + CALIBRATED_SECONDS_MAX
        while len(ask(folder, "measurements")["calibrations"]) < len(NAMES):
            assert time.monotonic() < until, "not calibrated"
            time.sleep(1.0)
        until = time.monotonic() + KNOWN_SECONDS
        while len(ask(folder, "measurements")["links"]) < len(NAMES) * (len(NAMES) - 1):
            assert time.monotonic() < until, "links are not known"
            time.sleep(1.0)
        peers = live_peers(ask(folder, "status"), ask(folder, "peers"), ask(folder, "measurements"))
        assert peers.is_measured
        assert len(peers.links) == len(NAMES) * (len(NAMES) - 1)
        assert all(link.bytes_per_second > 1_000_000 for _, _, link in peers.links)
    finally:
        swarm.close()
