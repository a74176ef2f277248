"""Replaying the records of real processes, one of which is killed, gives the same events: for exact runs,
local runs and optimizer scripts.

Run by `make soak`, or with PEERLOOM_REPLAYS=20: five processes train for minutes. `test_replay` does the same
in virtual time.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from node.demo.processes import SwarmProcesses
from sim.replay.player import play
from tests.source import ROOT

pytest.importorskip("sklearn")
TIMES = int(os.environ.get("PEERLOOM_REPLAYS", "0"))
pytestmark = pytest.mark.skipif(not TIMES, reason="PEERLOOM_REPLAYS=20")
NAMES = "abcde"
RUNS = {
    "exact": 'model = "simple-cnn"\n[train]\nsteps = 60\n',
    "local": 'model = "simple-cnn"\n[train]\nmode = "local"\nsteps = 300\nbatch = 32\n',
}
"""All other settings have their default values."""
KILLED_AFTER = 12
"""Number of steps that the requester must report."""
SCRIPT = """
import sys, time, torch, node

torch.set_num_threads(1)
torch.manual_seed(1)
folder, name, *join = sys.argv[1:]
model = torch.nn.Linear(8, 1)
with node.sync(join=join, listen=["127.0.0.1:0"], lan=False, data_dir=f"{folder}/{name}", name=name,
               record=f"{folder}/{name}.record") as me:
    print("at", me.addresses[0], flush=True)
    while len(me.members()) < 4:
        time.sleep(0.1)
    optimizer = me.optimizer(torch.optim.SGD(model.parameters(), 0.01), run_id="lines", local_steps=5)
    while optimizer.stats.global_step < 120:
        x = torch.randn(16, 8)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", optimizer.stats.global_step, flush=True)
        time.sleep(0.05)
"""


def replays(folder: Path, killed: str) -> None:
    """Play each record `TIMES` times. Also change one byte of a record, which must be detected and
    located."""
    for name in NAMES:
        path = folder / f"{name}.record"
        for _ in range(TIMES):
            played = play(path)
            assert (played.diverged, played.damage) == ("", ""), name
            assert played.learnt > 0
            assert bool(played.over) == (name != killed)
    data = bytearray((folder / "a.record").read_bytes())
    at = len(data) // 2
    data[at] ^= 0x11
    (folder / "changed").write_bytes(data)
    damage = play(folder / "changed").damage
    assert f"byte {at} is 0x{data[at]:02x} and was 0x{data[at] ^ 0x11:02x}" in damage


@contextmanager
def watched(file: Path, data_dir: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run `peerloom train FILE --json`, and stop it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "node", "train", str(file), "--data-dir", str(data_dir), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(out: IO[str] | None) -> Iterator[str]:
    assert out is not None
    for line in out:  # noqa: UP028 - delegation would close the file together with this generator
        yield line


@pytest.mark.parametrize("kind", sorted(RUNS))
def test_records_of_a_run_with_a_killed_node_replay(kind: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUNS[kind])
    swarm = SwarmProcesses(tmp_path, "records", time.sleep, calibrate=False)
    killed, counts, outcome = "", 0, ""
    try:
        swarm.launch(NAMES)
        join: str | None = None
        for name in NAMES:
            node = swarm.start(name, join, ["--record", str(tmp_path / f"{name}.record")])
            join = join or node.address
        with watched(tmp_path / "run.toml", swarm.nodes["a"].data_dir) as process:
            holders: list[str] = list(NAMES)
            for line in lines(process.stdout):
                event: dict[str, Any] = json.loads(line)
                if event.get("kind") == "RunPlanned":
                    held = {peer for stage in event["stages"] for peer in stage}
                    holders = [name for name, node in swarm.nodes.items() if node.peer in held]
                counts += event.get("kind") == "StepCommitted"
                if counts == KILLED_AFTER and not killed:
                    killed = next(name for name in reversed(holders) if name != "a")
                    swarm.kill(killed)
                outcome = event.get("outcome", outcome)
            assert process.wait() == 0
        assert outcome == "done"
    finally:
        swarm.close()
    assert killed
    replays(tmp_path, killed)


def test_records_of_optimizer_scripts_with_a_killed_one_replay(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    processes: dict[str, subprocess.Popen[str]] = {}
    join: list[str] = []
    try:
        for name in NAMES:
            processes[name] = subprocess.Popen(
                [sys.executable, str(tmp_path / "script.py"), str(tmp_path), name, *join],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PEERLOOM_WEB": "off"},
            )
            found = next(filter(None, (re.search(r"at (\S+)", x) for x in lines(processes[name].stdout))))
            join = join or [found[1]]
        for line in lines(processes["e"].stdout):
            if line.startswith("step 40"):
                processes["e"].send_signal(signal.SIGKILL)
                break
        for name, process in processes.items():
            process.communicate(timeout=240)
            assert process.returncode == (-signal.SIGKILL if name == "e" else 0)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    replays(tmp_path, "e")
