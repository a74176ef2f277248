"""Two users submit runs to one provider; every node is a real process. A claimed priority takes nothing from
the other user's run.

The test takes most of a minute, so it runs only with PEERLOOM_TURNS_PROCESSES=1, as in `make soak`.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from node.cli.client import ask
from node.demo.processes import SwarmProcesses
from node.main import run as run_command
from node.placement.waiting import LAW
from tests.stack import simple_cnn

pause = time.sleep
"""Waits in real time, because the nodes are processes."""
RUN = """
model = "model.peerloom"
[train]
steps = {steps}
batch = 32
microbatch = 32
[plan]
stages = 1
replicas = 1
priority = {priority}
"""


@pytest.mark.skipif(
    not os.environ.get("PEERLOOM_TURNS_PROCESSES"), reason="a minute: PEERLOOM_TURNS_PROCESSES=1"
)
def test_a_claimed_priority_preempts_only_the_users_own_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = tmp_path / "model.peerloom"
    graph.write_bytes(simple_cnn().data)
    swarm = SwarmProcesses(tmp_path, "turns", time.sleep, preset="local", calibrate=False)
    try:
        swarm.launch("pab")
        first = swarm.start("p", None)
        for name in "ab":
            swarm.start(name, first.address)
            folder = str(swarm.nodes[name].data_dir)
            assert run_command(["config", "set", "accept_runs", "never", "--data-dir", folder]) == 0
        _until(lambda: all(swarm.status(name)["members_alive"] == 2 for name in "ab"))
        honest = _train(swarm, graph, "a", steps=100_000, priority=0)
        _until(lambda: _has(swarm, "a", honest, "StepCommitted"))
        claimed = _train(swarm, graph, "b", steps=3, priority=9)
        _until(lambda: any(LAW in text for text in _reasons(swarm, "b", claimed)))
        capsys.readouterr()
        assert run_command(["runs", "show", claimed, "--data-dir", str(swarm.nodes["b"].data_dir)]) == 0
        assert "priority orders your own runs only" in capsys.readouterr().out
        own = _train(swarm, graph, "a", steps=3, priority=9)
        _until(lambda: _outcome(swarm, "a", own) == "done")
        ended = _events(swarm, "a", own, "RunEnded")[0]["at"]
        steps = _events(swarm, "b", claimed, "StepCommitted")
        assert all(step["at"] > ended for step in steps), (
            "the claimed run got a slot before the other user's own run had ended"
        )
    finally:
        swarm.close()


def _train(swarm: SwarmProcesses, graph: Path, name: str, *, steps: int, priority: int) -> str:
    text = RUN.format(steps=steps, priority=priority)
    arguments: dict[str, Any] = {"text": text, "path": str(graph.parent / "run.toml"), "name": "run.toml"}
    arguments |= {"graph": str(graph), "follow": False, "wait_seconds": 300.0}
    found: dict[str, Any] = ask(swarm.nodes[name].data_dir, "train", arguments, seconds=60.0)
    return str(found["run"])


def _events(swarm: SwarmProcesses, name: str, run: str, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    wanted = {"since": 0.0, "follow": False, "kinds": [kind]}
    ask(swarm.nodes[name].data_dir, "events", wanted, found.append)
    return [event for event in found if event["run"] == run]


def _has(swarm: SwarmProcesses, name: str, run: str, kind: str) -> bool:
    return bool(_events(swarm, name, run, kind))


def _reasons(swarm: SwarmProcesses, name: str, run: str) -> list[str]:
    return [event["reason"] for event in _events(swarm, name, run, "RunChanged")]


def _outcome(swarm: SwarmProcesses, name: str, run: str) -> str:
    return next((event["outcome"] for event in _events(swarm, name, run, "RunEnded")), "")


def _until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        pause(0.1)
