"""Two machines train together, their cable is cut, each trains on alone, and one branch is kept.

Real nodes run on machines of their own, and are started and asked as a person does it. This takes three
minutes.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from partition.plan.quorum import FORK_SECONDS
from tests.lab.network import FULL, Host, laboratory, python
from tests.lab.nodes import PORT, LabNode, swarm, wait_until

STEPS = 4_000
DEATH_SECONDS_MAX = 60.0
FOUND_SECONDS_MAX = 150.0
RUN = f"""
model = "simple-cnn"
data = "digits"
[train]
steps = {STEPS}
batch = 16
microbatch = 8
[plan]
stages = 2
replicas = 1
checkpoint_every = 5
on_lost_quorum = "fork"
"""


def run_of(node: LabNode) -> dict[str, Any]:
    """Return the only run that a node knows."""
    runs = node.status["runs"]
    return dict(runs[-1]) if runs else {}


def step(node: LabNode) -> int:
    return int(run_of(node).get("step") or 0)


@pytest.mark.skipif(not FULL, reason="three minutes: PEERLOOM_LAB=full")
def test_two_disconnected_machines_train_on_alone_and_one_branch_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "RUN.toml"
    file.write_text(RUN)
    with laboratory((Host("a", "eth0"), Host("b", "eth0"))) as lab, swarm(lab, tmp_path) as nodes:
        a, b = nodes["a"], nodes["b"]
        nodes.start("a", PRESET="local")
        b.start("--join", f"{a.machine.hosts[4]}:{PORT}", PRESET="local")
        b.ready()
        nodes.converge(FOUND_SECONDS_MAX)
        command = [python(), "-m", "node", "train", str(file), "--data-dir", str(a.data_dir)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as watching:
            wait_until(lambda: step(a) > 20 and step(b) > 20, FOUND_SECONDS_MAX, lambda: a.said + b.said)
            b.machine.run("ip link set eth0 down")

            def alone() -> bool:
                return all("alone since step" in node.said for node in (a, b))

            wait_until(alone, FORK_SECONDS + DEATH_SECONDS_MAX, lambda: a.said + b.said)
            wait_until(lambda: step(a) > 30 and step(b) > 30, DEATH_SECONDS_MAX, lambda: a.said + b.said)
            lab_heals(b)
            wait_until(lambda: merged(a, b), FOUND_SECONDS_MAX, lambda: a.said + b.said)
            watching.kill()
        said = [node.said for node in (a, b)]
        (loser,) = (text for text in said if "steps that were committed here are discarded" in text)
        (winner,) = (text for text in said if is_kept(text))
        assert loser != winner


def lab_heals(node: LabNode) -> None:
    node.machine.run("ip link set eth0 up")


def is_kept(text: str) -> bool:
    return "gave way: about" in text or "back together with" in text


def merged(a: LabNode, b: LabNode) -> bool:
    """Return whether both nodes report what became of the branches."""
    said = [node.said for node in (a, b)]
    is_given_up = any("steps that were committed here are discarded" in text for text in said)
    return is_given_up and any(map(is_kept, said))
