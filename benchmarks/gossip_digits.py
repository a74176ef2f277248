"""Train, gossip, repeat: peers in separate processes train digits on shards, and average in pairs.

There are eight nodes (each with a sandboxed stage process), no plan and no committer. Two are killed with
SIGKILL, one joins while they train, and the run ends by convergence detection. A node that was never in the
run then fetches the model from the late joiner alone. Accuracy is that of torch's own module with the fetched
file, on all held-out samples. `--quick` uses four nodes, one of which is killed. With `--columns` four nodes
hold two stages, so there are two columns; one node is killed, and the late joiner takes over its stage.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import trio
from _figures import Goal, arguments, leave, report

from crypto.contact import parse_address
from crypto.identity import parse_peer
from node import config
from node.checkpoints.weights import fetch_weights, weights_name
from node.cli.client import ask
from node.content.datasets import load_digits
from node.demo.processes import SwarmProcesses
from node.errors import NoNode
from node.runtime import Node
from partition.capture.models.simple_cnn import SimpleCNN

RUN_FILE = """
model = "simple-cnn"
data = "digits"

[train]
steps = {steps}
batch = 16
microbatch = 16
optimizer = "adam"
learning_rate = {rate}
mode = "local"
local_steps = 10
strategy = "gossip"
patience = {patience}
improvement = 0.001

[plan]
stages = {stages}
replicas = {replicas}
"""
SWARM = "gossip-digits"
STEPS = 20_000
"""Maximum number of steps, far more than it takes to converge."""
RATE, RATE_COLUMNS = 0.002, 0.0002
"""Learning rates. A column makes 80 steps a second; at the higher rate it would converge before the late node
takes part."""
PATIENCE_COLUMNS = 30
END_SECONDS_MAX = 480.0
ACCURACY_GOAL = 0.95
POLL_SECONDS = 0.3


class Play:
    """One run, from the first process to the fetched model."""

    def __init__(self, folder: Path, peers: int, killed: int, patience: int, stages: int = 1) -> None:
        self.names = [f"n{number}" for number in range(peers)]
        self.victims = self.names[-killed:]
        self.late = "late"
        self.patience = patience
        self.stages = stages
        self.folder = folder
        self.swarm = SwarmProcesses(folder, SWARM, time.sleep)

    def start(self) -> str:
        """Start the nodes and submit the run on the first one; return the run's id."""
        self.swarm.launch([*self.names, self.late])
        first = self.swarm.start(self.names[0], None)
        for name in self.names[1:]:
            self.swarm.start(name, first.address)
        while self.swarm.status(self.names[0])["members_alive"] < len(self.names) - 1:
            time.sleep(POLL_SECONDS)
        run_file = self.folder / "RUN.toml"
        run_file.write_text(
            RUN_FILE.format(
                steps=STEPS,
                rate=RATE if self.stages == 1 else RATE_COLUMNS,
                patience=self.patience,
                stages=self.stages,
                replicas=(len(self.names) + 1) // self.stages,
            )
        )
        command = [sys.executable, "-m", "node", "train", str(run_file), "--detach", "--json"]
        command += ["--data-dir", str(first.data_dir)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(done.stdout)["run"])

    def look(self, name: str, run: str) -> dict[str, Any]:
        """Return the run as a node shows it; empty if the node does not show it."""
        try:
            document = ask(self.swarm.nodes[name].data_dir, "status")
        except NoNode:
            return {}
        return next((row for row in document["runs"] if row["run"] == run), {})

    def wait(self, name: str, run: str, step: int) -> None:
        """Wait until a node has made this local step, or the run is over."""
        until = time.monotonic() + END_SECONDS_MAX
        while (row := self.look(name, run)).get("step", 0) < step and not row.get("weights"):
            assert time.monotonic() < until, f"{name} is at step {row.get('step')}"
            self.swarm.check()
            time.sleep(POLL_SECONDS)

    def play(self) -> dict[str, Any]:
        """Play the whole run; return the figures."""
        run = self.start()
        begun = time.monotonic()
        self.wait(self.names[0], run, 20)
        self.swarm.start(self.late, self.swarm.nodes[self.names[0]].address)
        for number, victim in enumerate(self.victims):
            self.wait(self.names[0], run, 40 * (number + 1))
            self.swarm.kill(victim)
        survivors = [name for name in (*self.names, self.late) if name not in self.victims]
        until = time.monotonic() + END_SECONDS_MAX
        rows: dict[str, dict[str, Any]] = {}
        while len(rows) < len(survivors):
            assert time.monotonic() < until, f"only {', '.join(rows)} ended"
            self.swarm.check()
            for name in survivors:
                row = self.look(name, run)
                if row.get("status") in ("done", "failed"):
                    rows[name] = row
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - begun
        (digest,) = {row["weights"] for row in rows.values()}
        holder = self.swarm.nodes[self.late]
        file = trio.run(self._fetch, run, digest, holder.address, holder.peer)
        return {
            "peers": len(self.names) + 1,
            "killed": len(self.victims),
            "outcomes": sorted({row["status"] for row in rows.values()}),
            "reason": sorted({row["detail"] for row in rows.values()}),
            "steps": rows[self.names[0]]["step"],
            "late_steps": rows[self.late]["step"],
            "seconds": round(seconds, 1),
            "accuracy": accuracy(file),
        }

    async def _fetch(self, run: str, digest: str, address: str, peer: str) -> bytes:
        """Fetch the model with a node that was never in the run, from this peer alone."""
        settings = config.Config(
            name="outsider",
            data_dir=self.folder / "outsider",
            observer=True,
            swarm=config.SwarmSettings(name=SWARM, preset="local"),
            listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
            join=config.JoinSettings(lan=False, seeds=(parse_address(address),)),
        )
        async with Node(settings) as node:
            await node.wait_for_members(1)
            storage = node.seams.storage
            name = weights_name(run)
            with trio.fail_after(60):
                await fetch_weights(node.seams, run, [parse_peer(peer)], digest, lambda: storage.draft(name))
            data = storage.read(name)
        assert data is not None, "it was fetched"
        return data


def accuracy(file: bytes) -> float:
    """Return the share of held-out digits that torch's module classifies correctly with the weights in
    `file`."""
    torch.set_num_threads(1)
    model = SimpleCNN((1, 8, 8), 10)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in safetensors.numpy.load(file).items()}
    model.load_state_dict(tensors)
    model.eval()
    data = load_digits()
    with torch.no_grad():
        found = model(torch.from_numpy(np.asarray(data.test["x"], np.float32))).argmax(1).numpy()
    return float((found == np.asarray(data.test["y"])).mean())


def play(peers: int, killed: int, patience: int, stages: int = 1) -> dict[str, Any]:
    """Play a run in a temporary folder, and leave no process behind."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        played = Play(Path(folder), peers, killed, patience, stages)
        try:
            return played.play()
        finally:
            played.swarm.close()


def main() -> int:
    options = arguments(__doc__ or "", columns="two columns of two stages")
    peers, killed, patience = (4, 1, 6) if options.quick or options.columns else (8, 2, 8)
    if options.columns:
        patience = PATIENCE_COLUMNS
    row = play(peers, killed, patience, stages=2 if options.columns else 1)
    goals = [
        Goal("accuracy of the model from the late joiner", row["accuracy"], ">=", ACCURACY_GOAL),
        Goal("the run ended by convergence at all members", float(row["reason"] == [CONVERGED]), ">=", 1),
    ]
    return report("gossip_digits", [row], goals, as_json=options.json)


CONVERGED = "its evaluations stopped improving"

if __name__ == "__main__":
    leave(main())
