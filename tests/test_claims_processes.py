"""Commands print true claims about a real node: two processes, queried with a user's commands."""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from node.demo.processes import SwarmProcesses
from node.errors import EXIT_DONE
from node.main import run

NAMES = "ab"
pause = time.sleep
"""Seconds allowed for real processes to expire a record."""
Command = Callable[..., str]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwarmProcesses]:
    """Yield two nodes, of which the second joined through the first."""
    processes = SwarmProcesses(tmp_path_factory.mktemp("claims"), "claims", time.sleep, calibrate=False)
    try:
        processes.launch(NAMES)
        first = processes.start("a", None)
        processes.start("b", first.address)
        yield processes
    finally:
        processes.close()


@pytest.fixture
def typed(swarm: SwarmProcesses, capfd: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command about a node and returns its output."""

    def command(name: str, *words: str, code: int = EXIT_DONE) -> str:
        capfd.readouterr()
        found = run([*words, "--data-dir", str(swarm.nodes[name].data_dir)])
        told = capfd.readouterr()
        assert found == code, told
        return told.out

    return command


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds
        pause(0.05)


def test_a_machine_that_accepts_no_runs_reports_that_it_serves_no_others(typed: Command) -> None:
    assert "serves" not in typed("b", "status")
    reason = "accept_runs = never"
    assert f"does not serve others now: {reason}" in typed("b", "config", "set", "accept_runs", "never")
    assert f"does not serve others now: {reason}" in typed("b", "config", "set", "upload", "100Mbit/s")
    assert f"nobody else: {reason}" in typed("b", "status")
    assert "this machine serves others" in typed("b", "config", "set", "accept_runs", "swarm")
    listed = typed("b", "config", "set", "accept_runs", "listed")
    assert "no peers are listed" in listed
    assert "this machine serves others" in typed("b", "config", "set", "accept_runs", "swarm")
    assert "serves" not in typed("b", "status")


def test_values_expire_and_an_author_keeps_several_under_a_key(typed: Command) -> None:
    assert "for 1.0 s" in typed("a", "dht", "put", "brief", "rain", "--ttl", "1s")
    assert typed("b", "dht", "get", "brief") == "rain\n"
    typed("a", "dht", "put", "losses", "gone", "--subkey", "third", "--ttl", "1s")
    typed("a", "dht", "put", "losses", "2.5", "--subkey", "first")
    typed("a", "dht", "put", "losses", "x" * 2_000, "--subkey", "second")
    typed("b", "dht", "put", "losses", "plain")
    pause(2.1)  # a record's expiry is in whole seconds
    typed("b", "dht", "get", "brief", code=1)
    typed("b", "dht", "get", "losses", "--subkey", "third", code=1)
    assert typed("b", "dht", "get", "losses", "--subkey", "first") == "2.5\n"
    assert typed("b", "dht", "get", "losses", "--subkey", "second") == "x" * 2_000 + "\n"
    assert typed("a", "dht", "get", "losses") == "plain\n"


def test_nodes_are_found_by_their_measured_speed(typed: Command) -> None:
    def found(*words: str) -> int:
        return len(json.loads(typed("a", "dht", "find", "--json", *words))["nodes"])

    eventually(lambda: found() == 1, 30.0)
    assert found("--speed", "1MFLOPS") == 1
    assert found("--speed", "900000GFLOPS") == 0
