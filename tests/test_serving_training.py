"""Real nodes train a run while they serve. The run ends with the weights of an undisturbed run, each answer
equals the undisturbed one, and no node has more stages than slots. The newest checkpoint of a run is served
during the run.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from node.cli.client import ask
from partition.capture.models.gpt import GPT, GPTConfiguration
from tests.kills import Command
from tests.serving_swarm import SECONDS_MAX, Ground, Streams, until
from tests.source import ROOT
from tests.stack import assert_equal, simple_cnn

STEPS = 6
STREAMS = 4
TOKENS = 40
SLOTS = 2


def train(ground: Ground, folder: Path, streams: Streams | None) -> dict[str, np.ndarray]:
    """Return the weights of a run on both nodes."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "model.peerloom").write_bytes(simple_cnn().data)
    command = Command(folder, ground.door, steps=STEPS, replicas=2, more="")
    try:
        while command.process.poll() is None:
            for name in ground.names:
                assert len(ground.processes(name)) <= SLOTS + 1, "one spare process may be waiting"
            if streams is not None:
                streams.flow()
            else:
                command.process.wait()
        assert command.end() == 0, command.errors
    finally:
        command.close()
    return dict(load_file(command.out))


@pytest.mark.slow
def test_a_run_stays_exact_while_its_nodes_answer_requests(tmp_path: Path) -> None:
    ground = Ground(tmp_path / "nodes", dict.fromkeys("ab", (SLOTS, 1)))
    (tmp_path / "nodes").mkdir()
    try:
        ground.start()
        alone = train(ground, tmp_path / "alone", None)
        ground.serve("words", "a")
        streams = Streams(ground.door, ("words",), STREAMS, TOKENS)
        streams.begin()
        beside = train(ground, tmp_path / "beside", streams)
        streams.stop()
        assert streams.answers
        assert_equal(beside, alone, "float64")
    finally:
        ground.close()


LIVE_RUN = """
model = "gpt"
data = "text.txt"
[options]
layers = 2
heads = 2
width = 16
[train]
steps = {steps}
batch = 4
microbatch = 4
window = 32
seed = 1
[plan]
stages = 1
checkpoint_every = 100000
"""


def likeliest(weights: Path, ids: list[int], count: int) -> list[int]:
    """Return the continuation of these tokens by the run's own model."""
    model = GPT(GPTConfiguration(256, 32, 2, 2, 16))
    model.load_state_dict(load_tensors(weights), strict=False)
    found = list(ids)
    with torch.no_grad():
        for _ in range(count):
            found.append(int(model.eval()(torch.tensor([found]))[0, -1].argmax()))
    return found[len(ids) :]


class Door:
    """Return a function that runs a user's commands at the first node."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        self.ground = ground
        self.folder = folder

    def peerloom(self, *words: str) -> Any:
        line = [sys.executable, "-m", "node", *words, "--json", "--data-dir", str(self.ground.door)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, timeout=SECONDS_MAX, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def train(self, steps: int, out: Path) -> subprocess.Popen[bytes]:
        file = self.folder / f"RUN-{steps}.toml"
        file.write_text(LIVE_RUN.format(steps=steps))
        line = ["train", str(file), "--out", str(out), "--data-dir", str(self.ground.door), "--wait", "60s"]
        return subprocess.Popen(
            [sys.executable, "-m", "node", *line],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def known(self, run: str = "") -> dict[str, Any]:
        rows = ask(self.ground.door, "status", seconds=SECONDS_MAX)["runs"]
        return next((row for row in rows if row["run"] == run or not run), {})

    def newest(self, run: str) -> int:
        """Return the step of the newest complete checkpoint of a run here; -1 if there is none."""
        rows = ask(self.ground.door, "checkpoint.list", seconds=SECONDS_MAX)["checkpoints"]
        whole = [row for row in rows if row["run"] == run and len(row["stages_here"]) == row["stages"]]
        return max((row["step"] for row in whole), default=-1)

    def serve_newest(self, run: str) -> tuple[int, Path]:
        """Serve the newest checkpoint, and compare an answer with the model's own; return the checkpoint's
        step and weights.
        """
        before = self.newest(run)
        self.peerloom("checkpoint", "save", run)
        until(lambda: self.newest(run) > before, what="no checkpoint was made")
        told = self.peerloom("serve", run[:8])
        step: int = told["step"]
        assert (told["run"], step) == (run, self.newest(run))
        weights = self.folder / f"{step}.safetensors"
        self.peerloom("checkpoint", "export", run, "--out", str(weights), "--step", str(step))
        ids, said = list(b"All that is"), list[int]()

        def on_event(event: dict[str, Any]) -> None:
            if "piece" in event:
                said.append(event["piece"])

        asked = {"service": told["service"], "question": {"prompt": ids, "tokens_max": 12}}
        ask(self.folder / "b", "generate", asked, on_event, seconds=SECONDS_MAX)
        assert said == likeliest(weights, ids, 12)
        for name in self.ground.names:
            assert len(self.ground.processes(name)) <= SLOTS + 1, "one spare process may be waiting"
        self.peerloom("services", "--stop", told["service"])
        return step, weights


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_is_served_during_the_run(tmp_path: Path) -> None:
    ground = Ground(tmp_path, dict.fromkeys("ab", (SLOTS, 1)))
    (tmp_path / "text.txt").write_text("All that is gold does not glitter. " * 400)
    door = Door(ground, tmp_path)
    commands: list[subprocess.Popen[bytes]] = []
    try:
        ground.start()
        commands.append(door.train(100_000, tmp_path / "out.safetensors"))
        until(lambda: (door.known().get("step") or 0) >= 2, what="no step was made")
        run = door.known()["run"]
        first, _ = door.serve_newest(run)
        step, weights = door.serve_newest(run)  # the same command serves a later checkpoint
        assert first < step
        assert commands[0].poll() is None
        assert door.known(run)["step"] > step, "the run continues"
        # A run without any requests at the same time has the same weights after the same number of steps.
        door.peerloom("runs", "stop", run)
        commands.append(door.train(step, tmp_path / "alone.safetensors"))
        assert commands[1].wait(2 * SECONDS_MAX) == 0
        assert_equal(dict(load_file(weights)), dict(load_file(tmp_path / "alone.safetensors")), "float64")
        print(f"\ncheckpoints of steps {first} and {step} were served")  # noqa: T201 - what the soak is run for
    finally:
        for command in commands:
            command.kill()
            command.wait()
        ground.close()
