"""A data folder that was copied to a second machine: two real nodes with one key, on loopback."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from node.cli.client import ask
from node.config import Config, JoinSettings, Listen, read_listen
from node.doctor.local_checks import Scene, look_here
from node.doctor.steps import Steps
from node.errors import NoNode
from node.storage.folder import FolderStorage
from node.storage.keys import load_keys
from tests.source import ROOT

SECONDS_MAX = 20.0
STOP_SECONDS_MAX = 5.0
"""Maximum seconds from a copy's first answer on its control channel to the end of its process."""
LISTED_SECONDS_MAX = 3.0


class Machine:
    """A process of `python -m node` in a folder of its own."""

    def __init__(self, folder: Path, *join: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "node", "--data-dir", str(folder), "--name", folder.name]
        command += ["--listen", "127.0.0.1:0", "--no-lan", "--web", "off", "--preset", "lan"]
        for address in join:
            command += ["--join", address]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.address: str = self.wait(lambda: self.ask("status"))["addresses"][0]

    def ask(self, command: str) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = ask(self.folder, command)
        except NoNode:
            return None
        return answer

    def wait(self, look: Callable[[], Any], seconds: float = SECONDS_MAX) -> Any:
        """Return the result of `look` as soon as it is true."""
        until = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < until
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"{self.folder.name} ended with {self.process.wait(0.05)}: {self.said()}")
        return found

    def said(self) -> tuple[str, str]:
        return self.process.communicate(timeout=SECONDS_MAX)

    def listed(self) -> list[tuple[str, str, list[str]]]:
        peers = self.ask("peers") or {"peers": []}
        return [(peer["name"], peer["status"], peer["addresses"]) for peer in peers["peers"]]

    def alert(self) -> str:
        status = self.ask("status") or {"alerts": []}
        return next((each["text"] for each in status["alerts"] if each["kind"] == "identity_shared"), "")

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.said()


Begin = Callable[..., Machine]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with ExitStack() as stack:

        def start(name: str, *join: str) -> Machine:
            machine = Machine(tmp_path / name, *join)
            stack.callback(machine.end)
            return machine

        yield start


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Yield the folders `original` and `copy`, with the same keys."""
    load_keys(FolderStorage(tmp_path / "original"), lambda count: bytes(range(count)))
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    return tmp_path


def check_stopped(copy: Machine, original: Machine) -> None:
    """Assert that the copy ended by itself, with the reason."""
    code = copy.process.wait(SECONDS_MAX)
    _, errors = copy.said()
    lines = errors.splitlines()
    assert code == 2
    assert len(lines) == 2
    assert lines[0].startswith("error: another node has this node's identity. It has been running since 20")
    assert copy.address in lines[0]
    assert original.address in lines[0]
    assert f"rm {copy.folder}/identity.key {copy.folder}/static.key" in lines[1]


@pytest.mark.slow
async def test_copies_stop_one_after_the_other_and_the_original_stays(copied: Path, begin: Begin) -> None:
    third = begin("third")
    original = begin("original", third.address)
    third.wait(lambda: (third.ask("status") or {})["members_alive"])
    copies = []
    for through in (original, third):
        copy = begin("copy", through.address)
        copies.append(copy.address)
        came_up = time.monotonic()
        check_stopped(copy, original)
        assert time.monotonic() - came_up < STOP_SECONDS_MAX
        third.wait(lambda: third.listed() == [("original", "alive", [original.address])], LISTED_SECONDS_MAX)
        assert [(name, status) for name, status, _ in original.listed()] == [("third", "alive")]
    assert copies[0] in original.wait(original.alert), "the alert is raised again at each start of a copy"
    assert original.process.poll() is None
    listen = Listen(addresses=(read_listen("127.0.0.1:0"),))
    steps = Steps(lambda _: None)
    await look_here(
        steps, Scene(Config(data_dir=copied / "original", listen=listen, join=JoinSettings(lan=False)))
    )
    (identity,) = (step for step in steps.all if step.name == "identity")
    assert identity.outcome == "failed"
    assert copies[0] in identity.detail
