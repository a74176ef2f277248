"""Plays the commands behind docs/cloudmesh.md on real nodes, and records their output.

`Play` holds the nodes, runs commands, and records input and output under the key of a case, such as "4.11
typical". `tests.cloudmesh_report` lists the functions of the report with their cases, and makes the page from
the cases and the record. `tests.test_cloudmesh` plays, and `tests.test_cloudmesh_page` checks the page.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.demo.processes import SwarmProcesses
from tests.installed import console_script
from tests.installed import environment as environment_of
from tests.source import ROOT

IS_WRITING = os.environ.get("PEERLOOM_DOCS") == "write"
PAGE = ROOT / "docs" / "cloudmesh.md"
COMMAND_SECONDS_MAX = 300.0
LINES_MAX = 6
"""Maximum number of lines of a command's output on the page."""
NAMES = "abc"
"""The initial nodes: a requests runs, b and c provide, and each also has the other role."""
ADDRESS = re.compile(
    r"\b(?!127\.|0\.)\d{1,3}(?:\.\d{1,3}){3}(?=:\d)"
    r"|\[[0-9a-f:]*[0-9a-f]{2}[0-9a-f:]*\](?=:\d)"
)
"""Matches an address of this machine, which does not matter to readers."""


@dataclass
class Play:
    """Nodes whose data is below `folder`, the commands typed at each, and their output."""

    folder: Path
    swarm: SwarmProcesses = field(init=False)
    script: Path = field(init=False)
    pause: Callable[[float], None] = time.sleep
    shown: dict[str, list[str]] = field(default_factory=dict)
    """The lines of the page for each case: the command and the shown part of its output."""
    typed: str = ""
    """The latest command."""
    singles: "list[Single]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.script = console_script(self.folder / "bin")
        self.swarm = SwarmProcesses(self.folder, "cloudmesh", self.pause)

    def start(self) -> None:
        """Start the nodes, and wait until they know each other."""
        self.swarm.launch(NAMES)
        first = self.swarm.start(NAMES[0], None)
        for name in NAMES[1:]:
            self.swarm.start(name, first.address)
        self.wait(lambda: all(self.swarm.status(name)["members_alive"] == len(NAMES) - 1 for name in NAMES))

    def add(self, names: Sequence[str]) -> None:
        """Have more nodes join."""
        self.swarm.launch(names)
        first = self.swarm.nodes[NAMES[0]]
        for name in names:
            self.swarm.start(name, first.address)
        running = [each for each in self.swarm.nodes.values() if each.process.poll() is None]
        self.wait(lambda: self.swarm.status(NAMES[0])["members_alive"] == len(running) - 1)

    def wait(self, ready: Callable[[], bool], seconds: float = COMMAND_SECONDS_MAX) -> None:
        """Wait until a condition holds."""
        until = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < until, "the condition never held"
            self.pause(0.2)

    def begin(self, node: str, *words: str) -> "subprocess.Popen[str]":
        """Type `peerloom WORDS` at a node."""
        return self.begin_at(self.swarm.nodes[node].data_dir, *words)

    def begin_at(self, data_dir: Path | None, *words: str) -> "subprocess.Popen[str]":
        """Type `peerloom WORDS` at the node with this data folder; None: at none."""
        self.typed = "peerloom " + " ".join(words)
        environment = environment_of(self.folder, [self.script.parent], COLUMNS="110")
        return subprocess.Popen(
            ["peerloom", *words, *(() if data_dir is None else ("--data-dir", str(data_dir)))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=self.folder,
        )

    def end(self, process: "subprocess.Popen[str]", *, code: int | None = 0) -> str:
        """Return a command's output once it has ended with exit code `code` (None: any code but 0)."""
        try:
            said, _ = process.communicate(timeout=COMMAND_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            raise AssertionError(f"it did not end: {said[-2000:]}") from None
        is_wanted = process.returncode != 0 if code is None else process.returncode == code
        assert is_wanted, f"{process.args!r}: {process.returncode}\n{said[-2000:]}"
        return said

    def type(self, node: str, *words: str, code: int | None = 0) -> str:
        """Type a command and return its output."""
        return self.end(self.begin(node, *words), code=code)

    def at(self, data_dir: Path, *words: str) -> str:
        """Type a command at the node with this data folder and return its output."""
        return self.end(self.begin_at(data_dir, *words))

    def here(self, *words: str, code: int | None = 0) -> str:
        """Type a command that asks no node and return its output."""
        return self.end(self.begin_at(None, *words), code=code)

    def ask(self, node: str, *words: str) -> dict[str, Any]:
        """Return a command's JSON document."""
        found: dict[str, Any] = json.loads(self.type(node, *words, "--json").splitlines()[-1])
        return found

    def show(self, keys: str, said: str, *wanted: str) -> None:
        """Record the last command and the lines of its output that match one of `wanted` (each must match
        one), or all lines. `keys` are cases, separated by commas."""
        lines = [self._plain(line) for line in said.splitlines() if line.strip()]
        for each in wanted:
            assert any(re.search(each, line) for line in lines), (
                f"{keys}: no line like {each}:\n{said[-3000:]}"
            )
        if wanted:
            lines = [line for line in lines if any(re.search(each, line) for each in wanted)]
        lines = list(dict.fromkeys(lines))  # a node reports the same event for both address families
        for key in keys.split(", "):
            kept = self.shown.setdefault(key, [])
            kept += [line for line in (self._plain(self.typed), *lines[:LINES_MAX]) if line not in kept]

    def _plain(self, line: str) -> str:
        """Return a line without details that differ from play to play."""
        line = line.replace(str(self.folder), "/data").replace(sys.executable, "python")
        return ADDRESS.sub("192.168.1.20", line).rstrip()[:160]

    def write(self, name: str, text: str) -> str:
        """Write a file into the folder where commands are typed."""
        (self.folder / name).write_text(text)
        return name

    def node(
        self,
        *flags: str,
        until: str = "listening",
        data_dir: Path | None = None,
        at_once: Callable[[int], None] = lambda _: None,
    ) -> "Single":
        """Type `peerloom FLAGS` and return once it prints `until`, or has ended. The node is in a swarm of
        its own, and by default its data folder is empty. `at_once` receives its process id."""
        self.typed = "peerloom " + " ".join(flags)
        name = f"single-{len(self.singles)}"
        folder = data_dir or self.folder / name
        hidden = ["--no-lan", "--web", "off", "--swarm", self.folder.name, "--data-dir", str(folder)]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["peerloom", *flags, *hidden],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_of(self.folder, [self.script.parent], COLUMNS="110"),
                cwd=self.folder,
            )
        found = Single(process, Path(log.name), folder)
        self.singles.append(found)
        at_once(process.pid)
        self.wait(lambda: until in found.said or process.poll() is not None)
        return found

    def close(self) -> None:
        for single in self.singles:
            if single.process.poll() is None:
                single.process.terminate()
        for single in self.singles:
            try:
                single.process.wait(COMMAND_SECONDS_MAX)
            finally:
                single.process.kill()
        self.swarm.close()


@dataclass(frozen=True)
class Single:
    """Start a node by its own command line, with its output in a file."""

    process: "subprocess.Popen[bytes]"
    log: Path
    data_dir: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def taken_port() -> Iterator[int]:
    """Yield a port on which another program is already listening."""
    with ExitStack() as stack:
        other = stack.enter_context(socket.socket())
        other.bind(("0.0.0.0", 0))
        other.listen()
        yield other.getsockname()[1]


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        return int(other.getsockname()[1])
