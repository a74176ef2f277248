"""A user's view when the owner of a real node returns, and when a learning rate makes a run diverge.

`tests.node.test_permission` and `tests.test_runs_end` test both in virtual time; here real processes, their
slots and their stages are used.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from node.cli.client import ask
from tests.kills import Playground, playground
from tests.source import ROOT
from tests.stack import Model, simple_cnn

pytestmark = pytest.mark.skipif(
    os.environ.get("PEERLOOM_KILLS") != "full", reason="a minute a case: PEERLOOM_KILLS=full"
)
BACK_SECONDS_MAX = 10.0
STEPS = 40
DIVERGES = """optimizer = "sgd"
learning_rate = 10.0
weight_decay = 1.0
"""
"""A learning rate with which each step multiplies the parameters by nine."""


@pytest.fixture
def captured() -> Model:
    """Start the nodes before the test's time limit begins, because this loads torch."""
    return simple_cnn()


def another_hour() -> str:
    """Return hours of the day that exclude the present time."""
    begins = (time.localtime().tm_hour + 2) % 24
    return f"{begins:02}:00-{(begins + 1) % 24:02}:00"


def set_rule(ground: Playground, node: str, name: str, value: str) -> None:
    ask(ground.swarm.nodes[node].data_dir, "config.set", {"name": name, "value": value})


@pytest.mark.parametrize("replicas", [1, 2], ids=["the last replica", "one of two"])
def test_a_returning_owner_frees_the_machine_and_the_run_ends(
    replicas: int, tmp_path: Path, captured: Model
) -> None:
    with playground(tmp_path, captured.data) as ground:
        set_rule(ground, "a", "accept_runs", "never")  # the node requests the run, the two others compute
        command = ground.train(steps=STEPS, replicas=replicas)
        command.until(lambda command: (command.last("StepCommitted") or {"step": 0})["step"] >= 2)
        plan = command.last("RunPlanned")
        assert plan is not None
        host = ground.name_of(plan["stages"][0][0])
        began = time.monotonic()
        set_rule(ground, host, "hours", another_hour())
        ground._wait(lambda: not ground.stages(host), "its stage stays")
        took = time.monotonic() - began
        print(f"given back after {took:.2f} s")  # noqa: T201 - what the soak is run for
        assert took < BACK_SECONDS_MAX
        command.until(lambda command: command.last("RunEnded") is not None)
        assert command.end() == 0, command.errors
        resumed = [event for event in command.events if event["kind"] == "RunResumed"]
        assert not any(event["lost_steps"] for event in resumed)
        steps = [event["step"] for event in command.events if event["kind"] == "StepCommitted"]
        assert steps == list(range(STEPS)), "a step was not reported exactly once"
        assert set(ground.settle()) == {"done"}


def test_divergence_is_reported_and_keeps_the_last_good_checkpoint(tmp_path: Path, captured: Model) -> None:
    with playground(tmp_path, captured.data) as ground:
        command = ground.train(steps=200, more=DIVERGES)
        assert command.end() != 0
        said = " ".join(command.errors)
        assert re.search(r"step \d+: in stage 1 .*; a lower train.learning_rate", said), said
        kept = re.search(r"the checkpoint of step (\d+) is kept: \S+ -m node checkpoint export (\w+)", said)
        assert kept, said
        assert set(ground.settle()) == {"failed"}
        out = tmp_path / "kept.safetensors"
        where = ["--data-dir", str(ground.swarm.nodes["a"].data_dir)]
        export = ["checkpoint", "export", kept[2], "--out", str(out), *where]
        assert subprocess.run([sys.executable, "-m", "node", *export], cwd=ROOT).returncode == 0
        tensors = safetensors.numpy.load_file(out)
        assert tensors
        assert all(np.isfinite(tensor).all() for tensor in tensors.values())
        ground.assert_clean()
