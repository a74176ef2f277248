"""Two real nodes and one key: one node publishes settings, and the other applies them immediately and after a
restart."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.cli.client import ask
from node.demo.processes import SwarmProcesses
from tests.installed import environment
from tests.serving_swarm import until

SETTINGS = 'version = {version}\nname = "fleet"\n[offer]\nhours = "{hours}"\nslots = 2\n'


pytestmark = pytest.mark.skipif(
    "PEERLOOM_PROCESSES" not in os.environ, reason="starts two nodes twice: set PEERLOOM_PROCESSES=1"
)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[SwarmProcesses]:
    found = SwarmProcesses(tmp_path, "fleet", time.sleep, calibrate=False)
    try:
        yield found
    finally:
        found.close()


def typed(folder: Path, *words: str) -> str:
    """Run a command against node `a` and return its output."""
    ended = subprocess.run(
        [sys.executable, "-m", "node", *words, "--data-dir", str(folder / "a"), "--json"],
        capture_output=True,
        text=True,
        env=environment(folder),
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_nodes_apply_the_settings_of_the_key_that_they_follow(tmp_path: Path, swarm: SwarmProcesses) -> None:
    swarm.launch("a")
    key = swarm.start("a", None).peer
    swarm.launch("b", {"PEERLOOM_FOLLOW": key, "PEERLOOM_FOLLOW_ALLOW": "hours"})
    swarm.start("b", swarm.nodes["a"].address)
    assert ask(tmp_path / "b", "status")["follow"]["version"] is None

    def publish(version: int, hours: str) -> None:
        (tmp_path / "fleet.toml").write_text(SETTINGS.format(version=version, hours=hours))
        typed(tmp_path, "config", "sign", str(tmp_path / "fleet.toml"), "--swarm", "fleet")
        told = json.loads(typed(tmp_path, "config", "publish", str(tmp_path / "fleet.toml.signed")))
        assert (told["key"], told["version"]) == (key, version)

    def followed(version: int) -> dict[str, object]:
        until(lambda: ask(tmp_path / "b", "status")["follow"]["version"] == version, 60.0)
        found: dict[str, object] = ask(tmp_path / "b", "status")["follow"]
        return found

    publish(3, "00:00-00:01")
    told = followed(3)
    assert (told["name"], told["settings"]) == ("fleet", ["hours = 00:00-00:01"])
    assert told["skipped"] == ["slots (not allowed here)"]
    assert ask(tmp_path / "b", "status")["offer"]["reason"], "the node still serves runs outside its hours"
    # The settings survive a restart, even without any other node.
    swarm.leave("b")
    swarm.leave("a")
    swarm.launch("b", {"PEERLOOM_FOLLOW": key, "PEERLOOM_FOLLOW_ALLOW": "hours"})
    swarm.start("b", None)
    again = followed(3)
    assert (again["since"], again["settings"]) == (told["since"], told["settings"])
    # The publisher's node restarts and stores the settings again. Then a node that was away reads them.
    swarm.launch("a")
    swarm.start("a", swarm.nodes["b"].address)
    publish(4, "always")
    assert followed(4)["settings"] == ["hours = always"]
