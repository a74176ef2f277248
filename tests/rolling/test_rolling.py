"""Nodes of the previous version and of this one in one swarm: they join, train, serve, and are upgraded one
by one.

The previous version is the archive in this folder, run by this interpreter with the packages that this tree
needs. The short form, in which both versions see each other, is part of every test run; PEERLOOM_ROLLING=1
plays the rest.
"""

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from crypto.contact import parse_address
from crypto.encoding import encode
from gossip.member import Profile
from gossip.messages import alive_body
from node.cli.client import NodeRefused, ask
from node.demo.processes import SwarmProcesses
from tests.rolling.schemas import ARCHIVE
from tests.serving_swarm import Ground, Question, until
from tests.source import ROOT
from tests.stack import simple_cnn

full = pytest.mark.skipif("PEERLOOM_ROLLING" not in os.environ, reason="minutes: PEERLOOM_ROLLING=1")
SECONDS_MAX = 120.0
STEPS = 100_000
"""More steps than are made. The number is part of the manifest, from which the random numbers of dropout are
seeded."""
FURTHER_STEPS = 30
"""Number of steps between the replacements of two nodes."""
RUN = """
model = "model.peerloom"
[train]
steps = {steps}
batch = 32
microbatch = 4
seed = 5
optimizer = "sgd"
learning_rate = 0.01
[plan]
stages = 1
replicas = 2
trainers = 2
"""
READ = """
import sys
from crypto.encoding import decode
from crypto.contact import parse_addresses
from gossip.messages import Body
body = decode(sys.stdin.buffer.read(), Body, bytes_max=1000)
print(*parse_addresses(body.addresses, bytes(32)))
"""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the packages of the previous version into a folder of their own."""
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Versions:
    """Nodes of either version, each of which may come back on its folder under a different version."""

    def __init__(self, folder: Path, previous: Path) -> None:
        self.folder = folder
        self.swarm = SwarmProcesses(folder, "rolling", time.sleep, calibrate=False)
        self.sources = {"old": previous, "new": ROOT}

    def launch(self, version: str, *names: str) -> None:
        self.swarm.launch(names, {"PYTHONPATH": str(self.sources[version])})

    def start(self, name: str, through: str = "") -> None:
        self.swarm.start(name, self.swarm.nodes[through].address if through else None)

    def meet(self, *names: str) -> None:
        until(
            lambda: all(self.swarm.status(name)["members_alive"] == len(names) - 1 for name in names),
            SECONDS_MAX,
            f"{names} do not all see each other",
        )

    def roll(self, name: str, through: str) -> None:
        """Let a node leave, and come back under the newer version."""
        self.swarm.leave(name)
        self.launch("new", name)
        self.start(name, through)

    def train(self, version: str, name: str, steps: int) -> "subprocess.Popen[bytes]":
        """Start a run with the command of a version, on a node."""
        (self.folder / "model.peerloom").write_bytes(simple_cnn().data)
        file = self.folder / "RUN.toml"
        file.write_text(RUN.format(steps=steps))
        command = [
            sys.executable,
            "-P",
            "-m",
            "node",
            "train",
            str(file),
            "--data-dir",
            str(self.folder / name),
        ]
        with (self.folder / f"train-{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*command, "--out", str(self.folder / f"{name}.safetensors"), "--wait", "60s"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(self.sources[version])},
            )

    def said(self, name: str) -> str:
        return (self.folder / f"train-{name}.log").read_text()

    def run(self, name: str) -> dict[str, Any]:
        """Return the newest run that a node knows; empty if it knows none."""
        runs: list[dict[str, Any]] = self.swarm.status(name)["runs"]
        return runs[-1] if runs else {}


@pytest.fixture
def versions(tmp_path: Path, previous: Path) -> Iterator[Versions]:
    found = Versions(tmp_path, previous)
    try:
        yield found
    finally:
        found.swarm.close()


def test_a_node_of_the_previous_version_joins_and_both_see_each_other(versions: Versions) -> None:
    versions.launch("new", "a")
    versions.launch("old", "b")
    versions.start("a")
    versions.start("b", through="a")
    versions.meet("a", "b")
    for name, other in ("ab", "ba"):
        (row,) = ask(versions.folder / name, "peers")["peers"]
        assert (row["name"], row["status"]) == (other, "alive")


def test_the_previous_version_lists_a_member_that_only_relays_reach(previous: Path) -> None:
    """The previous version knows no circuits (addresses through relays). So it lists the member with its
    other addresses, and blames nobody."""
    relay = "12D3KooWDWtcniAMuGbcgPhdXwQgXjftDbGe35c1hkwHJw7AXAgv"
    texts = ("/ip4/10.0.0.7/tcp/9747", f"/ip4/10.0.0.9/tcp/9747/p2p/{relay}/p2p-circuit")
    profile = Profile("x", tuple(map(parse_address, texts)))
    read = subprocess.run(
        [sys.executable, "-P", "-c", READ],
        input=encode(alive_body(profile, 1)),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(previous)},
        timeout=SECONDS_MAX,
    )
    assert read.stdout.decode().startswith(texts[0]), read.stderr.decode()


@full
def test_runs_requested_by_either_version_train_on_nodes_of_both(versions: Versions) -> None:
    versions.launch("new", "a", "c")
    versions.launch("old", "b")
    versions.start("a")
    versions.start("b", through="a")
    versions.start("c", through="b")
    versions.meet("a", "b", "c")
    losses = []
    for version, name in (("new", "a"), ("old", "b")):
        assert versions.train(version, name, 6).wait(SECONDS_MAX) == 0, versions.said(name)
        run = versions.run(name)
        assert (run["status"], run["step"], run["steps_lost"]) == ("done", 6, 0)
        losses.append(run["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9), (
        "the sums differ by more than their order of addition explains"
    )


class Losses:
    """The loss of every step of a run, as reported by its members while it goes on: each member remembers
    only some steps."""

    def __init__(self, versions: Versions, run: str) -> None:
        self._versions, self._run = versions, run
        self.rows: dict[int, float] = {}

    def look(self, name: str) -> int:
        """Take in the steps that a node knows; return the newest, 0 if it knows none."""
        try:
            document = ask(self._versions.folder / name, "runs.metrics", {"run": self._run})
        except NodeRefused:  # the node has no part in the run
            return 0
        rows = {row["step"]: row["loss"] for row in document["rows"] if "loss" in row}
        for step, loss in rows.items():
            assert self.rows.setdefault(step, loss) == loss, f"nodes report different losses of step {step}"
        return max(rows, default=0)

    def look_at(self, names: Iterable[str]) -> int:
        """Take in the steps that several nodes know."""
        return max(map(self.look, names))

    def go_on(self, names: Sequence[str], since: int) -> None:
        """Wait until this many further steps are made."""
        until(
            lambda: self.look_at(names) >= since + FURTHER_STEPS,
            SECONDS_MAX,
            f"no step was made after {since}: {self._versions.said('a')}",
        )


@full
def test_nodes_are_upgraded_one_by_one_while_a_run_goes_on(versions: Versions) -> None:
    names = ("a", "b", "c", "d")
    versions.launch("old", *names)
    versions.start("a")
    for name in names[1:]:
        versions.start(name, through="a")
    versions.meet(*names)
    command = versions.train("old", "a", STEPS)
    try:
        until(lambda: versions.run("a").get("status") == "running", SECONDS_MAX, versions.said("a"))
        run = versions.run("a")["run"]
        losses = Losses(versions, run)
        losses.go_on(names, 0)
        for name, other in (("d", "a"), ("b", "a"), ("c", "b"), ("a", "b")):
            before = losses.look_at(names)
            versions.roll(name, through=other)
            versions.meet(*names)
            assert_answers(versions, name, other)
            losses.go_on(names, before)
            until(
                lambda other=other: versions.run(other)["status"] == "running",  # type: ignore[misc]  # of now
                SECONDS_MAX,
                f"the run is not complete again: {versions.run(other)}",
            )
            told = versions.run(other)
            sys.stdout.write(f"{name} rolled at step {before}: {told['steps_lost']} lost\n")
            assert told["steps_lost"] == 0
        # The new node ends the run that the requester asked for under the previous version.
        assert ask(versions.folder / "a", "runs.stop", {"run": run})["status"] == "stopped"
        last = losses.look_at(names)
    finally:
        command.kill()
        command.wait()
    missing = set(range(1, last + 1)) - set(losses.rows)
    assert not missing, f"no node reported these steps: {sorted(missing)}"
    # The same run again, undisturbed, with all nodes on the new version.
    command = versions.train("new", "b", STEPS)
    try:
        until(lambda: versions.run("b").get("run", run) != run, SECONDS_MAX, versions.said("b"))
        again = Losses(versions, versions.run("b")["run"])
        until(lambda: again.look_at(names) >= last, SECONDS_MAX, versions.said("b"))
        ask(versions.folder / "b", "runs.stop", {"run": versions.run("b")["run"]})
    finally:
        command.kill()
        command.wait()
    differences = [abs(loss - again.rows[step]) for step, loss in losses.rows.items() if step <= last]
    sys.stdout.write(f"{last} steps, largest difference of a loss {max(differences):.3g}\n")
    assert max(differences) <= 1e-9


def assert_answers(versions: Versions, new: str, other: str) -> None:
    """Assert that each of two nodes finds a value that the other keeps."""
    for writer, reader in ((new, other), (other, new)):
        kept = {"key": f"by {writer} for {reader}", "value": writer.encode().hex()}
        ask(versions.folder / writer, "dht.put", kept, seconds=SECONDS_MAX)
        asked = {"key": kept["key"], "publisher": versions.swarm.nodes[writer].peer}
        found = ask(versions.folder / reader, "dht.get", asked, seconds=SECONDS_MAX)
        assert found["value"] == kept["value"]


class MixedGround(Ground):
    """A service whose nodes have different versions."""

    def __init__(self, folder: Path, versions: dict[str, Path]) -> None:
        super().__init__(folder, dict.fromkeys(versions, (1, 1)))
        self.versions = versions

    def _launch(self, name: str) -> None:
        self.swarm.launch([name], {"PEERLOOM_SLOTS": "1", "PYTHONPATH": str(self.versions[name])})


@full
@pytest.mark.parametrize("door", ["old", "new"])
def test_a_service_answers_with_stages_on_nodes_of_both_versions(
    door: str, tmp_path: Path, previous: Path
) -> None:
    sources = {"old": previous, "new": ROOT}
    other = "new" if door == "old" else "old"
    ground = MixedGround(tmp_path, {"a": sources[door], "b": sources[other]})
    try:
        ground.start()
        ground.serve("words", "a")
        until(lambda: ground.is_whole("words"))
        assert sorted(name for stage in ground.holders("words") for name in stage) == ["a", "b"]
        answers = []
        # if both were of this version, the second session would reuse what the first has read
        for _ in range(2):
            question = Question("words", 3, 0.0, 20)
            went = question.ask(ground.door, question.expected.append)
            assert (len(question.expected), went["moves"]) == (20, 0)
            answers.append(question.expected)
        assert answers[0] == answers[1]
    finally:
        ground.close()
